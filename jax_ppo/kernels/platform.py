"""The platform that programs are compiled for, by which kernels choose their constants."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

_assumed_platform: ContextVar[str | None] = ContextVar("assumed_platform", default=None)


def target_platform() -> str:
    """Return the platform of the mesh in context, or of the default backend if there is none."""
    assumed = _assumed_platform.get()
    if assumed is not None:
        return assumed
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.platform
    return jax.default_backend()


@contextlib.contextmanager
def assume_platform(platform: str) -> Iterator[None]:
    """Trace programs as if for `platform`, in whose place CPU devices may stand."""
    token = _assumed_platform.set(platform)
    try:
        yield
    finally:
        _assumed_platform.reset(token)
