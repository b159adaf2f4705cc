"""Read the collectives of a compiled program from its text."""

import dataclasses
import re

import numpy as np

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
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    loops: int


def read_collectives(text: str) -> list[Collective]:
    """Return the collectives of a compiled program, from its `as_text()`."""
    bodies = _computations(text)
    depths = _loop_depths(text, bodies)
    pattern = re.compile(rf" = (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
    return [
        _collective(match[2], match[1], depths.get(name, 0))
        for name, lines in bodies.items()
        for line in lines
        if (match := pattern.search(line))
    ]


def _collective(kind: str, result: str, loops: int) -> Collective:
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", result)
    shapes = tuple(tuple(int(size) for size in dims.split(",") if size) for _, dims in arrays)
    types = [dtype for dtype, _ in arrays]
    sizes = [BYTES[d] * int(np.prod(shape)) for d, shape in zip(types, shapes, strict=True)]
    return Collective(kind, shapes, sum(sizes), loops)


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
