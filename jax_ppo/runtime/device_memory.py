"""Bytes on a device: what devices report, and what arrays or their shapes take."""

import math
from typing import Any

import jax

from jax_ppo.runtime import compat

_GIB = 2**30
_LARGE = 2**28  # bytes of arrays with which a step takes much longer than freeing memory
# Names in JAX's statistics of a device, and ours.
_STATISTICS = {"bytes_in_use": "memory/used_gib", "peak_bytes_in_use": "memory/peak_gib"}


def read_memory_limit() -> int | None:
    """Return the bytes that programs may use on the smallest device of this process.

    `None` if the platform does not report it, as on CPUs.
    """
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    limits = [figures["bytes_limit"] for figures in statistics if "bytes_limit" in figures]
    return min(limits, default=None)


def measure_device_memory() -> dict[str, float]:
    """Return the memory in use and its peak so far, in GiB, of the fullest device of this process.

    A figure that the platform does not report is left out; CPUs report none.
    """
    figures: dict[str, float] = {}
    for device in jax.local_devices():
        statistics = device.memory_stats() or {}
        for statistic, name in _STATISTICS.items():
            if statistic in statistics:
                figures[name] = max(figures.get(name, 0.0), statistics[statistic] / _GIB)
    return figures


def release_freed_memory(resident: Any) -> None:
    """Return what programs on CPU devices have freed to the system, where malloc keeps it.

    glibc keeps up to 64 MiB for each thread that has run a program, and there are dozens. A limit
    of malloc itself (M_MMAP_THRESHOLD) would have the system clear memory for each product.

    Args:
      resident: the arrays that stay; if they are small, nothing is done.
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
