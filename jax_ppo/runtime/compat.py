"""Everything that the package uses of libraries without their promise to keep it.

Each entry says on which versions it was tried and what happens without it. Where there is no
fallback, pyproject.toml has an upper bound. JAX is imported late: some callers run before it.
"""

import contextlib
import ctypes
import functools
import importlib
import multiprocessing.util
from collections.abc import Callable, Iterator
from typing import Any

# Has XLA parse its flags: a quarter of a second, without devices or the package jax. Tried with
# jaxlib 0.10.2 and 0.12.0; otherwise all flags pass, and XLA itself reports one that it refuses.
PARSES_XLA_FLAGS = """
try:
    from jaxlib import _jax
    options = _jax.CompileOptions()
except (ImportError, AttributeError):
    raise SystemExit(0)
options.executable_build_options.debug_options
"""


def distributed_state() -> Any:
    """Return what `jax.distributed.initialize` has connected to.

    It has `client` (`None` in a run of one process), `process_id`, `num_processes` and
    `coordinator_address`. Tried with jax 0.10.2 and 0.12.0; pyproject.toml bounds jax.
    """
    from jax._src import distributed

    return distributed.global_state


def gloo_at(hostname: Callable[[], str | None]) -> contextlib.AbstractContextManager[None]:
    """Let Gloo, which JAX starts in the block, listen on `hostname()`.

    Tried with jaxlib 0.10.2 and 0.12.0; otherwise Gloo resolves the name of the host.
    """

    def at_hostname(make: Callable[..., object]) -> Callable[..., object]:
        return lambda distributed_client: make(
            distributed_client=distributed_client, hostname=hostname()
        )

    return _replace("jaxlib._jax", "make_gloo_tcp_collectives", at_hostname)


def no_gradients_of_masks() -> contextlib.AbstractContextManager[None]:
    """Keep cuDNN's attention, traced in the block, from gradients of boolean masks.

    Nobody can ask for them, but jax 0.10.2 computes arrays of the masks' size. jax 0.12.0 computes
    none, and lacks what is replaced here.
    """
    library = "jax._src.cudnn.fused_attention_stablehlo"
    return _replace(library, "should_export_dbias", lambda _: lambda *_: False)


@contextlib.contextmanager
def _replace(module: str, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function of a module in the block, if there is one of this name."""
    try:
        library = importlib.import_module(module)
        original = getattr(library, name)
    except (ImportError, AttributeError):
        yield
        return
    setattr(library, name, wrap(original))
    try:
        yield
    finally:
        setattr(library, name, original)


def take_metadata_store(temporary_path: Any) -> Any:
    """Return what writes an Orbax checkpoint's last metadata, and keep Orbax from using it.

    Tried with orbax-checkpoint 0.12.8, which pyproject.toml bounds: nothing public writes the
    metadata before the checkpoint is complete.
    """
    store = temporary_path._checkpoint_metadata_store
    temporary_path._checkpoint_metadata_store = None
    return store


@functools.cache
def malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`; `None` with another C library."""
    with contextlib.suppress(OSError, TypeError, AttributeError):
        return ctypes.CDLL(None).malloc_trim
    return None


def release_multiprocessing() -> None:
    """Release semaphores of multiprocessing now, of which its resource tracker would warn.

    Tried with Python 3.11 to 3.13; otherwise the tracker warns.
    """
    with contextlib.suppress(AttributeError):
        multiprocessing.util._run_finalizers()  # type: ignore[attr-defined]
