"""The platform that programs are compiled for, by which kernels choose their constants."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax

_assumed_platform: ContextVar[str | None] = ContextVar("assumed_platform", default=None)


def target_platform() -> str:
    """Return the platform that programs are compiled for.

    This is the platform of the mesh in context, which may differ from this machine's, or that of
    the default backend if there is no mesh.
    """
    assumed = _assumed_platform.get()
    if assumed is not None:
        return assumed
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device.platform
    return jax.default_backend()


@contextlib.contextmanager
def assume_platform(platform: str) -> Iterator[None]:
    """Trace programs as if for `platform` in the context, whatever they are compiled for.

    An estimate of a machine's memory is compiled for CPU devices if the compiler for that machine
    is missing.
    """
    token = _assumed_platform.set(platform)
    try:
        yield
    finally:
        _assumed_platform.reset(token)
