"""The type of the computation: `config.model.dtype`, whose `auto` depends on the devices.

bfloat16 halves memory and time where devices have units for it. XLA's programs for CPUs are no
faster with it, also where the CPU has instructions for it (AVX512_BF16: a forward and a backward
pass took the same CPU seconds in both types), and several times slower where it has none.
"""

import dataclasses

import jax

from jax_ppo.config.schema import Config

LEAST_CAPABILITY = 8.0  # of an NVIDIA GPU with units for bfloat16: Ampere


def resolve_dtype(config: Config, platform: str, compute_capability: str | None = None) -> Config:
    """Return the options with a `model.dtype` that is no longer `auto`.

    Args:
      config: all options.
      platform: JAX's name of the devices' platform; cuda and rocm, if that is known, for gpu.
      compute_capability: an NVIDIA GPU's, such as "9.0".
    """
    if config.model.dtype != "auto":
        return config
    dtype = "float32"
    if has_bfloat16(platform, compute_capability):
        dtype = "bfloat16"
    return dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))


def resolve_dtype_here(config: Config) -> tuple[Config, str]:
    """Return the options with this machine's `model.dtype`, and a line about it for the user."""
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    resolved = resolve_dtype(config, device.platform, capability)
    line = f"computing in {resolved.model.dtype} on {device.device_kind}"
    if not has_bfloat16(device.platform, capability):
        if resolved.model.dtype == "bfloat16":
            line += ", which has no fast bfloat16: config.model.dtype=float32 may take less time"
        elif config.model.dtype == "auto":
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
