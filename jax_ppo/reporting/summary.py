"""summary.json: the results of a run and the software and hardware it ran on."""

import importlib.metadata
import json
import math
import platform
from pathlib import Path
from typing import Any

from jax_ppo.reporting.atomic import replace_file

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "transformers")


def write_summary_file(workdir: Path, summary: dict[str, Any]) -> None:
    """Write WORKDIR/summary.json atomically. NaN and infinities become null."""
    # JSON has no NaN: readers other than Python's would refuse the file.
    text = json.dumps(to_json_value(summary), indent=2, allow_nan=False)
    with replace_file(Path(workdir) / "summary.json") as temporary:
        temporary.write_text(text + "\n")


def collect_versions() -> dict[str, Any]:
    """Return the versions of Python and the libraries, and the kind and number of devices."""
    import jax

    versions: dict[str, Any] = {"python": platform.python_version()}
    for package in _PACKAGES:
        versions[package] = importlib.metadata.version(package)
    versions["orbax"] = importlib.metadata.version("orbax-checkpoint")
    versions["device_kind"] = jax.devices()[0].device_kind
    versions["device_count"] = jax.device_count()
    versions["process_count"] = jax.process_count()
    return versions


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
