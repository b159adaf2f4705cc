"""Decoders for a machine: their attention programs, and the row lengths that these take."""

import jax
import jax.extend
import jax.numpy as jnp
from jax.typing import DTypeLike

from jax_ppo.config.schema import Config, Model, RolloutOptions
from jax_ppo.errors import UserError
from jax_ppo.kernels.platform import target_platform
from jax_ppo.models import cache
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.attention_kernels import (
    PLATFORM_PROGRAMS,
    AttentionFacts,
    program_obstacle,
    round_row_length,
    select_attention_program,
)
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime.parallelism.split_attention import num_row_parts


def packed_row_length(config: Config) -> int:
    """Return L, the tokens of a packed row: at least as many as a sequence may have."""
    longest, parts = config.sequence_length, config.mesh.context
    rounded = round_row_length(config.model.attention, _platform(), longest, parts)
    return config.packing.row_length or rounded


def build_decoder(architecture: Architecture, options: Model, row_length: int) -> Transformer:
    """Return the decoder for packed rows; raise `UserError` if its attention cannot run here."""
    dtype = jnp.dtype(options.dtype)
    try:
        # Chosen once, by what this machine and this model can run.
        facts = _attention_facts(architecture, dtype, row_length)
        program = select_attention_program(options.attention, facts)
    except ValueError as obstacle:
        raise UserError(
            f"config.model.attention={options.attention!r}: {obstacle}; set 'auto'"
        ) from None
    return Transformer(
        architecture,
        dtype,
        remat=options.gradient_checkpointing is not False,
        remat_policy=options.gradient_checkpointing_policy,
        attention=program,
    )


def decoding_program(options: RolloutOptions, sequence_length: int, decoder: Transformer) -> str:
    """Return the program that reads the actor's cache while decoding."""
    try:
        return cache.select_cache_program(
            options.attention, _platform(), decoder.attention, decoder.architecture, sequence_length
        )
    except ValueError as obstacle:
        raise UserError(
            f"config.rollout.attention={options.attention!r}: {obstacle}; set 'auto'"
        ) from None


def describe_attention(
    options: Model, decoder: Transformer, row_length: int, decodes: bool = False
) -> str:
    """Return a line on the attention program of each phase; "" if all use xla as asked.

    `decodes`: whether the built-in engine samples from this decoder.
    """
    reason = None
    if options.attention == "auto":
        facts = _attention_facts(decoder.architecture, decoder.dtype, row_length)
        reason = program_obstacle(PLATFORM_PROGRAMS.get(facts.platform, "xla"), facts)
    reader = "cudnn" if decodes and decoder.decoding == "cudnn" else "xla"
    if decoder.attention == reader == "xla" and not reason:
        return ""  # nothing that a user would not expect
    line = f"attention: {decoder.attention} for packed rows of {row_length} tokens"
    if num_row_parts() > 1:
        line += f" in {num_row_parts()} parts"
    if reason:
        line += f" ({reason})"
    if decodes:
        line += f", {reader} for decoding"
    return line


def _attention_facts(
    architecture: Architecture, dtype: DTypeLike, row_length: int
) -> AttentionFacts:
    return AttentionFacts(
        platform=_platform(),
        dtype=dtype,
        head_dim=architecture.attended_width,
        length=row_length // num_row_parts(),
        softcap=architecture.attention_softcap,
        sinks=architecture.attention_sinks,
        gpu_generation=_gpu_generation(),
    )


def _platform() -> str:
    """Return cpu, cuda, rocm or tpu: the platform of the mesh in context, else of this machine."""
    backend = jax.extend.backend.get_backend()
    platform = target_platform()
    # A mesh of another machine, which programs are only compiled for.
    if platform != backend.platform:
        return {"gpu": "cuda"}.get(platform, platform)
    # JAX calls both kinds of GPU "gpu"; the version names CUDA or ROCm.
    if backend.platform == "gpu":
        return backend.platform_version.split()[0]
    return backend.platform


def _gpu_generation() -> int | None:
    """Return the major compute capability of NVIDIA GPUs here; `None` for any other target."""
    backend = jax.extend.backend.get_backend()
    if _platform() != "cuda" or target_platform() != backend.platform:
        return None
    # A string such as "9.0".
    return int(backend.local_devices()[0].compute_capability.split(".")[0])
