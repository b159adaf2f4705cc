"""Which process of a run is slow: the time that each needs for its own work in a step.

A step ends in all processes at the same time, since each waits for the slowest. So a process counts
its seconds without those in which it waits for its devices or for the others. It puts them into the
store of JAX's coordination service; process 0 reads the store, and no process waits.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator

from jax_ppo.runtime import compat

_KEY = "jax_ppo/own_seconds"
_waited_seconds = 0.0
_is_waiting = False


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Count the block as a wait for devices or other processes; blocks may be nested."""
    global _is_waiting, _waited_seconds
    if _is_waiting:
        yield
        return
    _is_waiting = True
    started = time.monotonic()
    try:
        yield
    finally:
        _is_waiting = False
        _waited_seconds += time.monotonic() - started


def take_waited_seconds() -> float:
    """Return the seconds spent waiting since the last call."""
    global _waited_seconds
    seconds = _waited_seconds
    _waited_seconds = 0.0
    return seconds


def exchange_own_seconds(seconds: float) -> dict[int, float]:
    """Publish this process's seconds of a step, and return the latest ones of all processes.

    Returns:
      Seconds by process, on process 0; another process's may be of the step before. Empty on
      the others, and in a run of one process.
    """
    state = compat.distributed_state()
    if state.client is None:
        return {}
    state.client.key_value_set(f"{_KEY}/{state.process_id}", repr(seconds), allow_overwrite=True)
    if state.process_id != 0:
        return {}
    entries = state.client.key_value_dir_get(_KEY)
    return {int(key.rpartition("/")[2]): float(value) for key, value in entries}


def find_straggler(seconds: dict[int, float]) -> tuple[int, float]:
    """Return the slowest process, and by how many seconds it is slower than the median.

    The lower median: of two processes, the faster one is the measure.
    """
    slowest = max(seconds, key=lambda process: seconds[process])
    return slowest, seconds[slowest] - statistics.median_low(seconds.values())
