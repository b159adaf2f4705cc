"""WORKDIR/rollouts/*.jsonl: sampled responses, one JSON object per line, one file per step."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jax_ppo.reporting.files import replace_file, to_json_value

FOLDER = "rollouts"


class LoggedSamples(NamedTuple):
    """The contents of a file; see `write_samples`."""

    kind: str
    step: int
    records: list[dict[str, Any]]


def write_samples(workdir: Path, kind: str, step: int, records: list[dict[str, Any]]) -> None:
    """Write the samples of a step; a resumed run replaces the file of a step that it repeats.

    Args:
      workdir: the run's folder.
      kind: "training", "evaluation" or "evaluation_greedy".
      step: completed steps.
      records: JSON objects. NaN and infinities become null.
    """
    folder = workdir / FOLDER
    folder.mkdir(exist_ok=True)
    with replace_file(folder / f"{kind}_{step:06d}.jsonl") as temporary:
        with temporary.open("w", encoding="utf-8") as file:
            for record in records:
                line = json.dumps(to_json_value({"step": step} | record), ensure_ascii=False)
                file.write(line + "\n")


def read_samples(workdir: Path) -> Iterator[LoggedSamples]:
    """Yield the contents of each file, in the order of the steps."""
    for path in sorted((workdir / FOLDER).glob("*_*.jsonl"), key=_step_and_kind):
        step, kind = _step_and_kind(path)
        with path.open(encoding="utf-8") as file:
            records = [json.loads(line) for line in file]
        yield LoggedSamples(kind=kind, step=step, records=records)


def drop_samples_after(workdir: Path, step: int) -> None:
    """Delete the files of later steps, which a resumed run computes again."""
    for path in (workdir / FOLDER).glob("*_*.jsonl"):
        if _step_and_kind(path)[0] > step:
            path.unlink()


def _step_and_kind(path: Path) -> tuple[int, str]:
    kind, _, step = path.stem.rpartition("_")
    return int(step), kind
