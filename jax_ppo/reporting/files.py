"""Files of a run, replaced atomically: JSON without NaN, summary.json, and sampled responses.

rollouts/*.jsonl holds sampled responses, one JSON object per line, one file per step.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jax_ppo.errors import UserError, named_file
from jax_ppo.runtime import work_directory

SAMPLES_FOLDER = "rollouts"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "transformers")


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, which replaces it when the block succeeds."""
    # In the same folder, since a rename is atomic only within one file system.
    temporary = path.with_name(path.name + ".tmp")
    try:
        with named_file(path):
            yield temporary
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # a part of it, on a full disk


def write_json_lines(path: Path, objects: Iterable[dict[str, Any]]) -> None:
    """Write JSON objects, one per line; the file is replaced atomically."""
    with replace_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for value in objects:
            text = json.dumps(value, ensure_ascii=False)
            file.write(text.encode("utf-8", errors="replace").decode() + "\n")


def write_summary_file(workdir: Path, summary: dict[str, Any]) -> None:
    """Write WORKDIR/summary.json atomically. NaN and infinities become null."""
    # JSON has no NaN: readers other than Python's would refuse the file.
    text = json.dumps(to_json_value(summary), indent=2, allow_nan=False)
    with replace_file(workdir / "summary.json") as temporary:
        temporary.write_text(text + "\n")


def collect_versions() -> dict[str, Any]:
    """Return the versions of Python and the libraries, and the kind and number of devices."""
    import jax

    return {
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in _PACKAGES},
        "orbax": importlib.metadata.version("orbax-checkpoint"),
        "device_kind": jax.devices()[0].device_kind,
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
    }


def to_json_value(value: Any) -> Any:
    """Convert a value to one that JSON can represent."""
    if isinstance(value, dict):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if hasattr(value, "tolist"):  # numbers and arrays of NumPy and JAX
        return to_json_value(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_samples(workdir: Path, kind: str, step: int, records: list[dict[str, Any]]) -> None:
    """Write or replace the samples of a step; `kind` is "training" or "evaluation".

    NaN and infinities become null.
    """
    folder = workdir / SAMPLES_FOLDER
    folder.mkdir(exist_ok=True)
    lines = (to_json_value({"step": step} | record) for record in records)
    write_json_lines(folder / f"{kind}_{step:06d}.jsonl", lines)


def read_samples(workdir: Path) -> Iterator[tuple[str, int, list[dict[str, Any]]]]:
    """Yield kind, step and records of each file, by step; `UserError` if it is not JSON lines."""
    for step, kind, path in sorted(_sample_files(workdir)):
        records = []
        # The bytes of a line at a time: its number is that of an error.
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise UserError(
                    f"{path}:{number}: expected JSON: {error}; remove the file"
                ) from None
        yield kind, step, records


def drop_samples_after(workdir: Path, step: int) -> None:
    """Delete the files of later steps, which a resumed run computes again."""
    for last_step, _, path in _sample_files(workdir):
        if last_step > step:
            work_directory.remove_file(path)


def _sample_files(workdir: Path) -> Iterator[tuple[int, str, Path]]:
    """Yield step, kind and path of each file of samples; the user may keep others beside them."""
    for path in (workdir / SAMPLES_FOLDER).glob("*.jsonl"):
        if name := re.fullmatch(r"(training|evaluation)_(\d{6,})", path.stem, re.ASCII):
            yield int(name[2]), name[1], path
