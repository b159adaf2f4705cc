"""Compare a run that `chaos.py` has disturbed with an undisturbed one."""

import collections
import dataclasses
import json
from pathlib import Path

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
    if examples != reference.examples:
        raise Failure(f"examples {dict(examples)} instead of {dict(reference.examples)}")
    ours, theirs = read_metrics(workdir), read_metrics(reference.workdir)
    if ours != theirs:
        raise Failure(f"training_metrics.csv differs: {_first_difference(ours, theirs)}")
    summaries = (
        json.loads((folder / "summary.json").read_text()) for folder in (workdir, reference.workdir)
    )
    ours, theirs = (
        {name: summary[name] for name in ("evaluations", "steps", "total_steps")}
        for summary in summaries
    )
    if ours != theirs:
        raise Failure(f"summary.json: {ours} instead of {theirs}")
    for export in variant.exports:
        ours, theirs = read_files(workdir / export), read_files(reference.workdir / export)
        different = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
        if different:
            raise Failure(f"{export}: {different} differ")
    # Nothing temporary remains.
    ours, theirs = (
        sorted(path.name for path in folder.iterdir()) for folder in (workdir, reference.workdir)
    )
    if ours != theirs:
        raise Failure(f"the work directory holds {ours} instead of {theirs}")


def _first_difference(ours: list[dict], theirs: list[dict]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} rows instead of {len(theirs)}"
    for a, b in zip(ours, theirs, strict=True):
        for name in a | b:
            if a.get(name) != b.get(name):
                return f"step {b['step']}, {name}: {a.get(name)} instead of {b.get(name)}"
    return "nothing"


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder by their names."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
