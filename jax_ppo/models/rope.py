"""Rotary position embedding (Su et al. 2021) with Hugging Face's ways of stretching it."""

import math

import jax.numpy as jnp
import numpy as np

from jax_ppo.models.architecture import ROPE_KINDS, Architecture

KINDS = tuple(ROPE_KINDS)


def inverse_frequencies(
    architecture: Architecture, local: bool = False
) -> tuple[np.ndarray, float]:
    """Inverse frequencies, float32 [head_dim / 2], and the factor on cos and sin. `local`: those of local layers.

    `dynamic` and `longrope` change with the length of the sequence in Hugging Face's code; here they are those of
    sequences no longer than `longest` (which the caller holds to), so that a cached key never ages.
    """
    scaling = dict(architecture.rope_scaling)
    kind, dim, base = scaling["rope_type"], architecture.head_dim, architecture.rope_theta
    if local and architecture.local_rope_theta is not None:
        kind, base = "default", architecture.local_rope_theta
    inverse = 1.0 / base ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    if kind in ("default", "dynamic"):
        return inverse.astype(np.float32), 1.0
    if kind == "linear":
        return (inverse / scaling["factor"]).astype(np.float32), 1.0
    if kind == "llama3":
        return _llama3(inverse, scaling, architecture).astype(np.float32), 1.0
    if kind == "yarn":
        return _yarn(inverse, scaling, architecture)
    if kind == "longrope":
        return _longrope(inverse, scaling, architecture)
    raise ValueError(
        f"config.json: rope_type {kind!r} is not supported, only {', '.join(KINDS)} are"
    )


def max_sequence_length(architecture: Architecture) -> int:
    """Tokens up to which `frequencies` are right: sequences must not be longer."""
    scaling = dict(architecture.rope_scaling)
    if scaling["rope_type"] == "longrope":
        return _original_length(scaling, architecture)
    return architecture.max_position_embeddings


def _original_length(scaling, architecture):
    return scaling.get("original_max_position_embeddings") or architecture.max_position_embeddings


def _llama3(inverse, scaling, architecture):
    """Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1)."""
    wavelength = 2 * math.pi / inverse
    rotations = _original_length(scaling, architecture) / wavelength
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    blend = np.clip((rotations - low) / (high - low), 0, 1)
    return blend * inverse + (1 - blend) * inverse / scaling["factor"]


def _yarn(inverse, scaling, architecture):
    """YaRN (Peng et al. 2023): long waves interpolated, short ones kept, a ramp between; cos and sin scaled."""
    dim, base, factor = architecture.head_dim, architecture.rope_theta, scaling["factor"]
    original = _original_length(scaling, architecture)

    def temperature(scale, weight=1.0):
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention = scaling.get("attention_factor")
    if attention is None and scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention = temperature(factor, scaling["mscale"]) / temperature(
            factor, scaling["mscale_all_dim"]
        )
    if attention is None:
        attention = temperature(factor)

    def dimension(rotations):  # the dimension whose wave turns so often over the original length
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0, 1)
    return (inverse / factor * ramp + inverse * (1 - ramp)).astype(np.float32), float(attention)


def _longrope(inverse, scaling, architecture):
    """LongRoPE (Ding et al. 2024), the factors for sequences within the original length."""
    original = _original_length(scaling, architecture)
    factor = scaling.get("factor") or architecture.max_position_embeddings / original
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return (inverse / np.asarray(scaling["short_factor"])).astype(np.float32), float(attention)


def rotation_tables(architecture: Architecture, positions_BxT, length: int, local: bool = False):
    """cos and sin for `rotate`, each float32 [B, T, 1, head_dim / 2]. `length`: all positions are below it (past it
    is NaN).

    Looked up: what is computed here a compiler fuses into `rotate`, and computes once more for each head of each layer.
    """
    inverse, factor = inverse_frequencies(architecture, local)
    angles = np.arange(length, dtype=np.float32)[:, None] * inverse
    tables = (jnp.asarray(turn(angles) * np.float32(factor)) for turn in (np.cos, np.sin))
    return tuple(table.at[positions_BxT].get(mode="fill")[:, :, None] for table in tables)


def rotate(x_BxTxHxd, cos, sin):
    """Turns the pairs (i, i + d / 2), computed in float32."""
    first, second = jnp.split(x_BxTxHxd.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BxTxHxd.dtype)
