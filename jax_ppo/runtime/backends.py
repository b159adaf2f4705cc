"""Start JAX's backends: which platforms there are, and the interface that processes connect by."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import jax
from jax._src import distributed as jax_distributed
from jaxlib import _jax

from jax_ppo.errors import UserError

# Not in this process: a backend may wait for other processes, and none is stopped again.
_LISTS_PLATFORMS = "from jax.extend import backend; print(*backend.backends(), sep=', ')"
_LIST_SECONDS = 60


def start_backends() -> None:
    """Let JAX find its devices; does nothing if it has.

    Raises:
      UserError: there are no devices of the platforms in JAX_PLATFORMS.
    """
    try:
        with _gloo_at_own_address():
            jax.devices()
    # The latter, without a text, for "cuda" without a GPU.
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition(" (set JAX_PLATFORMS=")[0] or "there is no such device"
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
        if not platforms:
            raise UserError(f"JAX finds no devices: {reason}") from error
        raise UserError(
            f"JAX_PLATFORMS={platforms}: {reason}; expected some of those of this machine: "
            f"{_platforms()}"
        ) from error


def _platforms() -> str:
    """Return the platforms that JAX finds by itself."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    try:
        result = subprocess.run(
            [sys.executable, "-c", _LISTS_PLATFORMS],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_LIST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "unknown"
    return result.stdout.strip() or "unknown"


@contextlib.contextmanager
def _gloo_at_own_address() -> Iterator[None]:
    """Let Gloo, which connects the CPUs of several processes, listen where the coordinator can.

    It would resolve the name of the host, which some machines cannot, and others resolve to an
    address of the loopback interface. JAX has no option for it.
    """
    make = _jax.make_gloo_tcp_collectives

    def make_at_own_address(distributed_client: _jax.DistributedRuntimeClient) -> object:
        return make(distributed_client=distributed_client, hostname=_own_address())

    _jax.make_gloo_tcp_collectives = make_at_own_address
    try:
        yield
    finally:
        _jax.make_gloo_tcp_collectives = make


def _own_address() -> str | None:
    """Return the address of the interface to the coordinator, or `None` if there is no such."""
    host, _, port = (jax_distributed.global_state.coordinator_address or "").rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        options = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        family, kind, _, _, address = options[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return probe.getsockname()[0]
    return None
