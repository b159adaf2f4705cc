"""Properties of devices: memory, peak rates, and the type that they compute fast in.

bfloat16 halves memory and time where devices have units for it. XLA's programs for CPUs are no
faster with it, even with AVX512_BF16 (measured), and several times slower without.
"""

import contextlib
import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import jax

from jax_ppo.config.schema import Model
from jax_ppo.runtime import compat
from jax_ppo.runtime.topologies import DEVICE_TYPES

_GIB = 2**30
_LARGE = 2**28  # bytes of arrays with which a step takes much longer than freeing memory
# Linux's files with a container's limit: control groups of version 2, and of version 1.
_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# Names in JAX's statistics of a device, and ours.
_STATISTICS = {"bytes_in_use": "memory/used_gib", "peak_bytes_in_use": "memory/peak_gib"}


def read_memory_limit() -> int | None:
    """Return the bytes for programs on this process's smallest device; `None` if not reported."""
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    limits = [figures["bytes_limit"] for figures in statistics if "bytes_limit" in figures]
    return min(limits, default=None)


def read_host_memory() -> int:
    """Return the bytes of memory of this host, or of the container if it is given less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in _CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # it does not exist, or says "max"
            limits.append(int(Path(file).read_text()))
    return min(limits)


def measure_device_memory() -> dict[str, float]:
    """Return the memory in use and its peak, in GiB, on the fullest device, where it is known."""
    figures: dict[str, float] = {}
    for device in jax.local_devices():
        statistics = device.memory_stats() or {}
        for statistic, name in _STATISTICS.items():
            if statistic in statistics:
                figures[name] = max(figures.get(name, 0.0), statistics[statistic] / _GIB)
    return figures


def release_freed_memory(resident: Any) -> None:
    """Return what programs on CPU devices have freed to the system, where malloc keeps it.

    glibc keeps up to 64 MiB for each of dozens of threads; its own limit (M_MMAP_THRESHOLD) would
    slow down each product. If the arrays that stay, `resident`, are small, nothing is done.
    """
    # On accelerators, programs use other memory.
    trim = compat.malloc_trim() if jax.default_backend() == "cpu" else None
    if trim is not None and bytes_per_device(resident) >= _LARGE:
        trim(0)


def bytes_per_device(tree: Any) -> int:
    """Return the bytes that one device holds of arrays, or of shapes with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def total_peak_flops() -> float | None:
    """Return the peak FLOPs per second of all devices of the run; `None` if one is unknown."""
    peaks = {kind: known.flops for known in DEVICE_TYPES.values() for kind in known.jax_kinds}
    kinds = [device.device_kind for device in jax.devices()]
    return sum(peaks[kind] for kind in kinds) if set(kinds) <= peaks.keys() else None


LEAST_CAPABILITY = 8.0  # of an NVIDIA GPU with units for bfloat16: Ampere


def resolve_dtype(options: Model, platform: str, compute_capability: str | None = None) -> Model:
    """Return the section with a `dtype` that is not `auto`.

    `platform` is JAX's name of the devices' platform, or cuda or rocm for gpu;
    `compute_capability` is an NVIDIA GPU's, such as "9.0".
    """
    if options.dtype != "auto":
        return options
    is_fast = has_bfloat16(platform, compute_capability)
    return dataclasses.replace(options, dtype="bfloat16" if is_fast else "float32")


def resolve_dtype_here(options: Model) -> tuple[Model, str]:
    """Return the section with this machine's `dtype`, and a line about it for the user."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    resolved = resolve_dtype(options, device.platform, capability)
    line = f"computing in {resolved.dtype} on {device.device_kind}"
    if not has_bfloat16(device.platform, capability):
        if resolved.dtype == "bfloat16":
            line += ", which has no fast bfloat16: config.model.dtype=float32 may take less time"
        elif options.dtype == "auto":
            line += ", which has no fast bfloat16"
    return resolved, line


def has_bfloat16(platform: str, compute_capability: str | None) -> bool:
    """Return whether XLA's programs for a device are faster in bfloat16 than in float32."""
    if platform == "cpu":
        return False
    try:
        return float(compute_capability or LEAST_CAPABILITY) >= LEAST_CAPABILITY
    except ValueError:
        return True  # AMD's names, such as gfx942
