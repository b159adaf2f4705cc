"""Start JAX's backends: their flags, which platforms there are, and how processes connect.

XLA aborts the process at the first flag in XLA_FLAGS that it does not know. JAX is imported late.
"""

import contextlib
import os
import shlex
import socket
import subprocess
import sys

from jax_ppo.errors import UserError
from jax_ppo.runtime import compat

# JAX's settings with the values that a run works with, the default first. The names in capitals
# are environment variables.
_SETTINGS = {
    "jax_enable_x64": (False,),
    "jax_numpy_rank_promotion": ("allow",),
    "jax_numpy_dtype_promotion": ("standard",),
    "jax_disable_jit": (False,),
    "jax_transfer_guard": (None, "allow", "log"),
    "jax_threefry_partitionable": (True,),
    "jax_default_prng_impl": ("threefry2x32",),
    "jax_random_seed_offset": (0,),
}
# Flags of XLA for GPUs that runs set, with reasons and measurements. By default XLA (jaxlib 0.10.2)
# records fusions and calls of libraries in command buffers, uses Triton for products and measures
# candidates of each (autotuning level 4).
GPU_FLAGS = {
    "--xla_gpu_enable_latency_hiding_scheduler=true": "exchanges between GPUs overlap with "
    "computation; NVIDIA's images for JAX set it. Compiled for an H100: same kernels and seconds",
}
_NVIDIA = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")  # one is there if JAX looks for a GPU
TRIED = "JAX_PPO_TRIED_XLA_FLAGS"  # the value tried already, for the processes that this one starts


def start_backends() -> None:
    """Let JAX find its devices; raise `UserError` if there are none, or for a refused flag."""
    require_settings()
    import jax

    platforms = jax.config.jax_platforms or "cuda"  # type: ignore[attr-defined]
    if {"cuda", "gpu"} & {*platforms.split(",")} and any(map(os.path.exists, _NVIDIA)):
        add_gpu_flags()
    try:
        # Gloo, which connects the CPUs of several processes, would resolve the name of the host,
        # which some machines cannot, and others resolve to an address of the loopback interface.
        with compat.gloo_at(_own_address):
            jax.devices()
    # The latter, without a text, for "cuda" without a GPU.
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition(" (set JAX_PLATFORMS=")[0].rstrip(".")
        reason = reason or "there is no such device"
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
        if not platforms:
            raise UserError(f"JAX finds no devices: {reason}") from error
        raise UserError(
            f"JAX_PLATFORMS={platforms}: {reason}; unset it, and JAX takes what this machine has"
        ) from error


def _own_address() -> str | None:
    """Return the address of the interface to the coordinator, or `None` if there is none."""
    host, _, port = (compat.distributed_state().coordinator_address or "").rpartition(":")
    with contextlib.suppress(OSError, ValueError):
        options = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        family, kind, _, _, address = options[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return probe.getsockname()[0]
    return None


def require_settings() -> None:
    """Raise `UserError` for settings of JAX or flags in XLA_FLAGS with which no run works."""
    try:
        import jax
    except ValueError as error:  # such as "invalid truth value" of a variable
        raise UserError(f"JAX cannot be imported: {error}") from error
    for name, needed in _SETTINGS.items():
        if (value := getattr(jax.config, name, needed[0])) not in needed:
            raise UserError(
                f"{name.upper()}={value}: with this setting of JAX a run would fail or draw other "
                f"samples; unset it, which means {needed[0]}"
            )
    refused = refused_flags()
    if refused:
        raise UserError(
            f"XLA_FLAGS: the installed jaxlib does not know {shlex.join(refused)}, or not this "
            "value; leave it out, or install another jaxlib"
        )


def add_gpu_flags() -> None:
    """Add `GPU_FLAGS` to XLA_FLAGS, before the first backend starts.

    The user's flags win, and a flag that XLA would refuse is left out; a line says so.
    """
    for flag in GPU_FLAGS:
        before = os.environ.get("XLA_FLAGS", "")
        if flag in before.split():
            continue
        reason = "XLA_FLAGS sets it" if flag.partition("=")[0] in before else ""
        if not reason:
            os.environ["XLA_FLAGS"] = f"{before} {flag}".strip()
            if refused_flags():
                os.environ["XLA_FLAGS"], reason = before, "the installed jaxlib refuses it"
        if reason:
            print(f"note: a run leaves out {flag}: {reason}", file=sys.stderr)


def refused_flags() -> list[str]:
    """Return the flags at which a child process ends; unset XLA_FLAGS if it is blank."""
    flags = os.environ.get("XLA_FLAGS", "")
    if not flags.strip():
        os.environ.pop("XLA_FLAGS", None)  # XLA would read blanks as the name of a file
        return []
    if os.environ.get(TRIED) == flags:
        return []
    refused: list[str] = []
    # Anything else than a flag may be wrong: then jaxlib reports it when it is used.
    if not _parses(flags) and _parses(""):
        try:
            single = shlex.split(flags)
        except ValueError:  # a quotation that is not closed
            single = [flags]
        refused = [flag for flag in single if not _parses(flag)]
    if not refused:
        os.environ[TRIED] = flags
    return refused


def _parses(flags: str) -> bool:
    return not subprocess.run(
        [sys.executable, "-c", compat.PARSES_XLA_FLAGS],
        env=os.environ | {"XLA_FLAGS": flags},
        capture_output=True,
    ).returncode
