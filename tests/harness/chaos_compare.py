"""Compare a run that `chaos.py` has disturbed with an undisturbed one."""

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

from chaos_variants import Variant
from whole_run import read_metrics


@dataclasses.dataclass
class Reference:
    """An undisturbed run.

    Attributes:
      workdir: its work directory.
      durations: the longest duration of each phase, in seconds.
      occurrences: how often each phase began.
      examples: for each step the announced ids of its examples.
    """

    workdir: Path
    durations: dict[str, float]
    occurrences: collections.Counter[str]
    examples: dict[int, set[str]]


class Failure(Exception):
    """A run that a fault has changed."""


def validate_examples(examples: dict[int, set[str]]) -> None:
    """Validate that a run consumes each example once per epoch, one batch per step."""
    steps = sorted(examples)
    if steps != list(range(len(steps))) or any(len(ids) != 1 for ids in examples.values()):
        raise Failure(f"examples of steps {steps}")
    consumed = [id_ for step in steps for id_ in next(iter(examples[step])).split()]
    # 24 examples: the three steps of the first epoch consume each of them.
    if sorted(map(int, consumed[:24])) != list(range(24)):
        raise Failure(f"an epoch consumes {consumed[:24]}")


def compare_runs(
    variant: Variant, workdir: Path, reference: Reference, examples: dict[int, set[str]]
) -> None:
    """Compare a completed run with an undisturbed one.

    Raises:
      Failure: they differ.
    """
    ours = _describe(variant, workdir, examples)
    theirs = _describe(variant, reference.workdir, reference.examples)
    for name in theirs | ours:
        if ours.get(name) != theirs.get(name):
            raise Failure(f"{name}: {ours.get(name)!r:.500} instead of {theirs.get(name)!r:.500}")


def _describe(variant: Variant, workdir: Path, examples: dict[int, set[str]]) -> dict[str, Any]:
    """Return what disturbances may not change, by names."""
    rows = read_metrics(workdir)
    summary = json.loads((workdir / "summary.json").read_text())
    exported = (path for export in variant.exports for path in (workdir / export).rglob("*"))
    return {
        "examples": examples,
        "rows": len(rows),
        **{f"step {row['step']}, {name}": x for row in rows for name, x in row.items()},
        **{f"summary.json, {x}": summary[x] for x in ("evaluations", "steps", "total_steps")},
        **{str(x.relative_to(workdir)): x.read_bytes() for x in exported if x.is_file()},
        # Nothing temporary remains.
        "work directory": sorted(path.name for path in workdir.iterdir()),
    }
