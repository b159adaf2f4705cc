"""Counts of a compiled program from its text (HLO after optimization), loops times their trips."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Container, Iterator

BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s4": 0.5}
BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
# What launches nothing: names of values, and the ends of what other instructions started.
FREE = {"get-tuple-element", "parameter", "bitcast", "tuple", "constant", "after-all", "iota"}
CALLS = {"while", "conditional", "call", "async-start"}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
# Fusions compute of the results of these only what is used.
PASSED_ON = {"bitcast", "reshape", "pad", "convert", "subtract", "exponential", "reduce"}
WRITTEN = {"scatter": -1, "dynamic-update-slice": 1}  # the operand that is
SPARSE = {"gather", "dynamic-slice", "scatter", "dynamic-update-slice"}
LARGE = 2**20  # bytes of a copy that counts as large
NEAR = 2**24  # bytes of an array that may stay in a GPU's L2 cache, 40 to 50 MiB, until it is read
SHAPE = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]*)\](\{[^{}]*\})?")
LINE = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)")
CALLED = re.compile(r"(?:calls|body|to_apply|\w+_computation)=%([\w.\-]+)|branch_\w+=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: its name, the text of its shape, its operation and the rest."""

    name: str
    shape: str
    op: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest[: self.rest.find(")")])

    @property
    def called(self) -> list[str]:
        found = CALLED.findall(self.rest)
        return [
            name for one, some in found for name in [one, *re.findall(r"[\w.\-]+", some)] if name
        ]

    @property
    def path(self) -> str:
        """Return where the Python code made it."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    @property
    def dims(self) -> list[int]:
        return dims(self.shape)

    @property
    def arrays(self) -> list[list[int]]:
        """Return the sizes of each array: TPUs' products also return sums of them."""
        return [dims(found[0]) for found in SHAPE.finditer(self.shape)]


def dims(shape: str) -> list[int]:
    """Return the sizes of the first array in a shape."""
    found = SHAPE.search(shape)
    return [int(x) for x in found[2].split(",") if x] if found else []


def shape_bytes(shape: str) -> float:
    """Return the bytes of all arrays of a shape in main memory: not in a TPU's vector memory."""
    return sum(
        BYTES.get(kind, 1) * math.prod(int(x) for x in sizes.split(",") if x)
        for kind, sizes, layout in SHAPE.findall(shape)
        if "S(1)" not in layout
    )


class Program:
    """The computations of a compiled program, by name."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        lines: list[Instruction] = []
        for line in text.splitlines():
            if head := re.match(r"(ENTRY )?%([\w.\-]+) \(", line):
                lines = self.computations[head[2]] = []
                self.entry = head[2] if head[1] else self.entry
            elif found := LINE.match(line):
                lines.append(Instruction(*found.groups()))
        self.named = {x.name: x for lines in self.computations.values() for x in lines}
        self.shapes = {name: x.shape for name, x in self.named.items()}

    def inner(self, name: str, op: str = "") -> Iterator[Instruction]:
        """Yield a computation's instructions with those of its fusions, but not of its loops."""
        for x in self.computations[name]:
            if x.op in ("fusion", "call"):
                for called in x.called:
                    yield from self.inner(called, op)
            if op in ("", x.op):
                yield x

    def fixed_trips(self, loop: Instruction) -> int | None:
        """Return the trips of a loop, `None` if values decide: from a note or the condition."""
        if found := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(found[1])
        (condition,) = re.findall(r"condition=%([\w.\-]+)", loop.rest)
        limits = [int(x.rest.split(")")[0]) for x in self.inner(condition, "constant")
                  if x.shape.startswith("s32[]")]  # fmt: skip
        return limits[0] if len(limits) == 1 else None

    def launched(
        self, name: str, trips: Callable[[Instruction], float], times: float = 1
    ) -> Iterator[tuple[Instruction, float]]:
        """Yield what a computation runs, with its loops', and how often."""
        for x in self.computations[name]:
            if x.op in CALLS:
                # One branch of a conditional runs: the branches share its time.
                share = {"while": trips, "conditional": lambda x: 1 / len(x.called)}
                repeats = times * share.get(x.op, lambda x: 1)(x)
                for called in x.called:
                    yield from self.launched(called, trips, repeats)
            elif x.op not in FREE and not x.op.endswith("-done"):
                yield x, times

    @functools.cache  # noqa: B019 - programs live as long as the process
    def flops(self, x: Instruction) -> float:
        """Return the FLOPs of an instruction's matrix products, a kernel's of attention too."""
        if x.op == "fusion":
            return sum(self.flops(y) for called in x.called for y in self.inner(called))
        if x.op == "dot":
            lhs = dims(self.shapes[x.operands[0]])
            axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.rest)
            return 2.0 * math.prod(x.dims) * math.prod(lhs[int(i)] for i in axes[1].split(",") if i)
        if x.op == "convolution":  # a product, on TPUs
            _, kernel, out = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.rest).groups()
            rhs = dims(self.shapes[x.operands[1]])
            summed = rhs[kernel.index("i")]
            for axis, size in enumerate(rhs):
                digit = kernel[axis]
                if digit.isdigit() and x.dims[out.index(digit)] == 1:
                    summed *= size
            return 2.0 * math.prod(x.dims) * summed
        if x.op == "custom-call":
            return self._attention_flops(x)
        return 0.0

    def _attention_flops(self, x: Instruction) -> float:
        """Count all pairs of cuDNN's blocks, which masks hide, and half of those of splash."""
        shapes = [dims(self.shapes[name]) for name in x.operands]
        if "__cudnn$fmha" in x.rest:
            (B, Q, H, d), (_, S, *_) = shapes[:2]  # the shape is [B, Q, H, d], whatever its layout
            products = 5 if "Backward" in x.rest else 2
            return 2.0 * products * B * H * Q * S * d
        if "splash_mha" in x.name:
            H, T, d = next(s for s in shapes if len(s) == 3 and s[1] > 8)
            products = 4 if "dkv" in x.name else 3 if "dq" in x.name else 2
            return 2.0 * products * H * T * (T + 1) / 2 * d
        return 0.0

    def moved_bytes(self, x: Instruction, used: float, made: Container[str] = ()) -> float:
        """Return the bytes that one launch reads and writes; of a cache for cuDNN the `used` part.

        Arrays that are changed in place or looked up in count with the part that is touched. With
        the instructions that run before and after, `made`, arrays of theirs up to `NEAR` are free.
        """

        def size(name: str) -> float:
            source = self.named[name]
            while source.op in ("bitcast", "get-tuple-element"):
                source = self.named[source.operands[0]]
            whole = shape_bytes(self.shapes[name])
            return 0.0 if source.name in made and whole <= NEAR else whole

        if x.op == "custom-call" and "fmha" in x.rest:
            queries, *columns = map(size, x.operands[:3])
            return queries + used * sum(columns) + size(x.name)
        # All else as a fusion of one instruction.
        inside, names = [x], x.operands
        if x.op == "fusion":
            inside = self.computations[x.called[0]]
            places = {int(y.rest.split(")")[0]): y.name for y in inside if y.op == "parameter"}
            names = [name for _, name in sorted(places.items())]
        pairs = zip(x.operands, names, strict=False)
        total = sum(self._read_part(inside, name) * size(operand) for operand, name in pairs)
        # Of what is changed in place, the new part counts.
        new = [y.operands[WRITTEN[y.op]] for y in inside if y.op in WRITTEN]
        return total + (sum(shape_bytes(self.shapes[name]) for name in new) or size(x.name))

    def _read_part(self, inside: list[Instruction], name: str) -> float:
        """Return the part of a value that a fusion reads, 0 to 1: of some, lookups and slices."""
        users = [y for y in inside if name in y.operands]
        part = 0.0 if users else 1.0
        for y in users:
            smaller = math.prod(y.dims) / math.prod(dims(self.shapes[name]))
            if y.op in SPARSE and y.operands[0] == name:
                part += smaller if y.op in ("gather", "dynamic-slice") else 0
            elif y.op == "slice":
                part += smaller * self._read_part(inside, y.name)
            elif y.op in PASSED_ON:
                part += self._read_part(inside, y.name)
            else:
                return 1.0
        return min(part, 1.0)

    def copied_bytes(self, x: Instruction) -> float:
        """Return the bytes of a copy or transpose, 0 for all else and for what is small.

        A `copy-start` moves weights into a TPU's vector memory before they are needed.
        """
        ops = {x.op}
        if x.op == "fusion":
            ops = {y.op for y in self.inner(x.called[0])} - FREE - {"reshape"}
        is_copy = bool(ops) and ops <= {"copy", "transpose"}
        size = shape_bytes(x.shape)
        return size if is_copy and size > LARGE else 0.0


def collective_bytes(x: Instruction) -> float:
    """Return the bytes of a collective's results, 0 for other instructions."""
    if x.op.removesuffix("-start") not in COLLECTIVES:
        return 0.0
    arrays = [shape_bytes(f"{kind}[{sizes}]") for kind, sizes, _ in SHAPE.findall(x.shape)]
    # A started collective's shape also has its operands.
    starts_pair = x.op in ("all-gather-start", "collective-permute-start")
    return sum(arrays[len(arrays) // 2 :] if starts_pair else arrays)
