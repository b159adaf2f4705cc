"""Compiled programs: kept on disk from one run to the next, and counted."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.monitoring

from jax_ppo.runtime import faults
from jax_ppo.storage import downloads

COMPILED = "/jax/core/compile/backend_compile_duration"  # compiled, or read from the cache
CACHE_HIT = "/jax/compilation_cache/cache_hits"


def enable_cache(option: str, report: Callable[[str], None]) -> None:
    """Make JAX keep compiled programs on disk, and look for them there before it compiles.

    Call it before any computation. Several processes, of one run or of several, may use one folder.
    JAX identifies programs by what is computed, on which kind of device and by which version of the
    compiler, so that an entry is never out of date. `option` is config.trainer.compilation_cache;
    `report` is called with a line if the folder cannot be written: the run continues without it.
    """
    # The option comes first, then JAX's own variable, then the user's cache folder.
    folder = (
        option
        or os.environ.get("JAX_COMPILATION_CACHE_DIR")
        or str(downloads.cache_folder("compiled"))
    )
    if folder == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if "://" not in folder:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            # That the folder exists is not enough: it may be read-only.
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            report(
                "note: compiled programs are not kept, each run compiles anew "
                f"(config.trainer.compilation_cache): {error}"
            )
            jax.config.update("jax_enable_compilation_cache", False)
            return
    jax.config.update("jax_compilation_cache_dir", folder)
    # JAX's own thresholds skip what compiles within a second: a run has many such programs.
    for name, value in (
        ("jax_persistent_cache_min_compile_time_secs", 0.0),
        ("jax_persistent_cache_min_entry_size_bytes", -1),
    ):
        # A threshold that the user has set in the environment is kept.
        if name.upper() not in os.environ:
            jax.config.update(name, value)


@dataclasses.dataclass
class Compilations:
    """Counts of the programs compiled so far."""

    programs: int = 0  # compiled or read from the cache
    cache_hits: int = 0  # read from the cache
    seconds: float = 0.0  # compiling and reading, summed over threads


@contextlib.contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Count every program that JAX compiles while the context is open."""
    count = Compilations()

    def add_program(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            faults.report_progress()
            count.programs += 1
            count.seconds += duration_secs

    def add_hit(event: str, **kwargs: str | int) -> None:
        count.cache_hits += event == CACHE_HIT

    jax.monitoring.register_event_duration_secs_listener(add_program)
    jax.monitoring.register_event_listener(add_hit)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(add_program)
        jax.monitoring.unregister_event_listener(add_hit)
