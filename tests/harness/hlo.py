"""Read the collectives of a compiled program from its text."""

import dataclasses
import re

import numpy as np
from jax.sharding import Mesh

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: one of `COLLECTIVES`.
      shapes: dimensions of its results on one device.
      bytes: of its results on one device.
      loops: number of loops around it.
      groups: devices that exchange with each other, by their places in the mesh; none if all do.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    loops: int
    groups: tuple[tuple[int, ...], ...]

    def axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes of the mesh along which devices exchange."""
        places = np.arange(mesh.size)[None] if not self.groups else np.array(self.groups)
        coordinates = np.unravel_index(places, mesh.devices.shape)
        varies = [bool((axis != axis[:, :1]).any()) for axis in coordinates]
        return tuple(name for name, along in zip(mesh.axis_names, varies, strict=True) if along)


def read_collectives(text: str) -> list[Collective]:
    """Return the collectives of a compiled program, from its `as_text()`."""
    bodies = _computations(text)
    depths = _loop_depths(text, bodies)
    pattern = re.compile(rf" = (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
    return [
        _collective(match[2], match[1], depths.get(name, 0), _device_groups(line))
        for name, lines in bodies.items()
        for line in lines
        if (match := pattern.search(line))
    ]


def _collective(
    kind: str, result: str, loops: int, groups: tuple[tuple[int, ...], ...]
) -> Collective:
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", result)
    shapes = tuple(tuple(int(size) for size in dims.split(",") if size) for _, dims in arrays)
    types = [dtype for dtype, _ in arrays]
    sizes = [BYTES[d] * int(np.prod(shape)) for d, shape in zip(types, shapes, strict=True)]
    return Collective(kind, shapes, sum(sizes), loops, groups)


def _device_groups(line: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices in an instruction, in any of the forms that XLA writes."""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})?\}", line)
    if listed:
        groups = re.findall(r"\{([\d,]+)\}", listed[1] or "")
        return tuple(tuple(map(int, group.split(","))) for group in groups)
    # [4,2]<=[8], or with the numbers in another order [4,2]<=[2,4]T(1,0)
    counted = re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", line)
    if counted:
        return _to_groups(_numbers(counted[2]).reshape(_integers(counted[1])))
    # Axes of a mesh of XLA's own: mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a':(2)2}
    named = re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{(.*?)\}", line)
    assert named is not None, f"another form of groups: {line}"
    sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", named[1])}
    parts = re.findall(r"('\w+')(?::\((\d+)\)(\d+))?", named[3])
    shape: list[int] = []
    grouped: list[int] = []
    for axis, size in sizes.items():
        # A part of an axis has what lies before it, its size, and what is left.
        for outer, inner in [(o or 1, i or size) for name, o, i in parts if name == axis]:
            grouped.append(len(shape) + 1)
            shape += [int(outer), int(inner)]
            size //= int(outer) * int(inner)
        shape.append(size)
    devices = np.arange(np.prod(shape)) if named[2] is None else _numbers(named[2])
    last = np.moveaxis(devices.reshape(shape), grouped, range(-len(grouped), 0))
    return _to_groups(last.reshape(-1, np.prod([shape[axis] for axis in grouped])))


def _numbers(text: str) -> np.ndarray:
    """Return the numbers that XLA writes as [2,4] or, transposed, as [2,4]T(1,0)."""
    shape, _, order = text.partition("T")
    sizes = _integers(shape.strip("[]"))
    numbers = np.arange(np.prod(sizes)).reshape(sizes)
    return numbers.transpose(_integers(order.strip("()"))) if order else numbers


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _to_groups(numbers: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, numbers.tolist()))


def _computations(text: str) -> dict[str, list[str]]:
    """Return the instructions of each computation by its name."""
    bodies: dict[str, list[str]] = {}
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if header:
            instructions = bodies.setdefault(header[1], [])
        elif line.startswith("  "):
            instructions.append(line)
    return bodies


def _loop_depths(text: str, bodies: dict[str, list[str]]) -> dict[str, int]:
    """Return the number of loops around each computation that is reached from the entry."""
    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    assert entry is not None
    depths: dict[str, int] = {}
    waiting = [(entry[1], 0)]
    while waiting:
        name, depth = waiting.pop()
        if name not in bodies or depths.get(name, -1) >= depth:
            continue
        depths[name] = depth
        for line in bodies[name]:
            called = re.findall(r"(?:to_apply|calls|body|condition|computation)=%?([\w.\-]+)", line)
            branches = re.search(r"branch_computations=\{([^}]*)\}", line)
            if branches:
                called += [branch.strip(" %") for branch in branches[1].split(",")]
            inside = " while(" in line
            waiting += [(other, depth + inside) for other in called]
    return depths
