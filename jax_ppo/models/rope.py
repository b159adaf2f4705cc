"""Rotary position embeddings (Su et al. 2021) and the extensions that Hugging Face supports."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_ppo.models.architecture import ORIGINAL_LENGTH, Architecture

# cos and sin of the rotated pairs of a head, each float32 [B, T, 1, pairs].
Rotation = tuple[jax.Array, jax.Array]
Scaling = dict[str, Any]


def inverse_frequencies(
    architecture: Architecture, local: bool = False
) -> tuple[Float[np.ndarray, " pairs"], float]:
    """Return the inverse frequencies and the factor on cos and sin.

    In Hugging Face's code, `dynamic` and `longrope` change with the length of the sequence. Here
    they hold for sequences no longer than `max_sequence_length`, which the caller must
    enforce, so that cached keys stay valid.
    """
    scaling = dict(architecture.rope_scaling)
    kind = scaling["rope_type"]
    base = architecture.rope_theta
    # Only global layers are stretched for long contexts (Gemma 3).
    if local and architecture.local_rope_theta is not None:
        kind = "default"
        base = architecture.local_rope_theta
    dim = architecture.rotary_dim
    if architecture.global_head_dim and not local:
        dim = architecture.global_head_dim
    inverse = 1.0 / base ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    # `dynamic` changes the base only for sequences longer than the model was made for.
    if kind in ("default", "dynamic"):
        return inverse.astype(np.float32), 1.0
    if kind in ("linear", "proportional"):
        # Slow waves of the first pairs alone: the others, from this number on, are not rotated.
        inverse[int(scaling.get("partial_rotary_factor", 1.0) * dim // 2) :] = 0
        return (inverse / scaling.get("factor", 1.0)).astype(np.float32), 1.0
    if kind == "llama3":
        return _llama3(inverse, scaling).astype(np.float32), 1.0
    if kind == "yarn":
        return _yarn(inverse, scaling, architecture)
    return _longrope(inverse, scaling, architecture)


def max_sequence_length(architecture: Architecture) -> int:
    """Return the longest sequence, in tokens, for which `inverse_frequencies` is correct."""
    scaling = dict(architecture.rope_scaling)
    # Longer sequences would need the long factors, which change every cached key.
    if scaling["rope_type"] == "longrope":
        return scaling[ORIGINAL_LENGTH]
    return architecture.max_position_embeddings


def _llama3(inverse: np.ndarray, scaling: Scaling) -> np.ndarray:
    """Stretch long waves by `factor`, keep short ones and blend those between (Llama 3.1)."""
    wavelength = 2 * math.pi / inverse
    # How often each wave turns over the original context decides how it is stretched.
    rotations = scaling[ORIGINAL_LENGTH] / wavelength
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    blend = np.clip((rotations - low) / (high - low), 0, 1)
    return blend * inverse + (1 - blend) * inverse / scaling["factor"]


def _yarn(
    inverse: np.ndarray, scaling: Scaling, architecture: Architecture
) -> tuple[np.ndarray, float]:
    """Interpolate long waves, keep short ones, with a ramp between (YaRN, Peng et al. 2023)."""
    dim = architecture.rotary_dim
    factor = scaling["factor"]
    original = scaling[ORIGINAL_LENGTH]

    def dimension(rotations: float) -> float:
        # Its wave rotates so often over the original length.
        waves = math.log(original / (rotations * 2 * math.pi))
        return dim * waves / (2 * math.log(architecture.rope_theta))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # A ramp of no width is a step.
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0, 1)
    frequencies = inverse / factor * ramp + inverse * (1 - ramp)
    # The factor on cos and sin sharpens attention in longer contexts.
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = _yarn_temperature(factor)
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            all_dim = _yarn_temperature(factor, scaling["mscale_all_dim"])
            attention_factor = _yarn_temperature(factor, scaling["mscale"]) / all_dim
    return frequencies.astype(np.float32), float(attention_factor)


def _yarn_temperature(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def latent_scale(head_dim: int, rope_scaling: tuple[tuple[str, Any], ...]) -> float:
    """Return the factor on the product of a query and a key in multi-head latent attention.

    It makes up for the part of YaRN's factor on cos and sin that numbers without a rotation lack.
    """
    scaling = dict(rope_scaling)
    temperature = _yarn_temperature(scaling.get("factor", 1), scaling.get("mscale_all_dim", 0))
    return head_dim**-0.5 * temperature**2


def _longrope(
    inverse: np.ndarray, scaling: Scaling, architecture: Architecture
) -> tuple[np.ndarray, float]:
    """Apply the factors for sequences within the original length (LongRoPE, Ding et al. 2024)."""
    original = scaling[ORIGINAL_LENGTH]
    factor = scaling.get("factor") or architecture.max_position_embeddings / original
    # A value in config.json wins over the formula of the paper.
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        stretch = math.log(factor) / math.log(original) if factor > 1 else 0.0
        attention_factor = math.sqrt(1 + stretch)
    frequencies = inverse / np.asarray(scaling["short_factor"])
    return frequencies.astype(np.float32), float(attention_factor)


def rotation_tables(
    architecture: Architecture,
    positions_BxT: Int[Array, "B T"],
    length: int,
    local: bool = False,
    queries: bool = False,
) -> Rotation:
    """Return cos and sin for `rotate`, each float32 [B, T, 1, pairs].

    They are looked up in a table, because a compiler would fuse their computation into `rotate` and
    repeat it for each head of each layer. Positions outside of 0 to `length` - 1 become NaN.
    `local` selects the frequencies of local layers; with `queries`, cos and sin include the factor
    on queries at each position.
    """
    inverse, factor = inverse_frequencies(architecture, local)
    factors = np.full((length + 1, 1), factor)
    if queries:
        original = dict(architecture.rope_scaling)[ORIGINAL_LENGTH]
        growth = np.log1p(np.arange(length + 1) // original)[:, None]
        factors *= 1 + architecture.query_growth * growth
    # In float32, as transformers computes the angles.
    angles = np.arange(length, dtype=np.float32)[:, None] * inverse
    # All other positions read a last row of NaN; negative ones are large as unsigned numbers.
    # Compilers would repeat a comparison after the lookup for each head of each layer.
    angles = np.pad(angles, ((0, 1), (0, 0)), constant_values=np.nan)
    rows_BxT = jnp.minimum(positions_BxT.astype(jnp.uint32), length)

    def look_up(table: np.ndarray) -> jax.Array:
        rows = jnp.asarray(table * factors.astype(np.float32)).at[rows_BxT]
        return rows.get(mode="promise_in_bounds")[:, :, None]

    return look_up(np.cos(angles)), look_up(np.sin(angles))


def rotate(
    x_BxTxHxd: Float[Array, "B T H d"],
    cos: Float[Array, "B T 1 half"],
    sin: Float[Array, "B T 1 half"],
    interleaved: bool = False,
) -> Float[Array, "B T H d"]:
    """Rotate the first 2 half numbers of each head in float32 and return the type of the input.

    With `interleaved` the pairs are (2i, 2i + 1) instead of (i, i + half).
    """
    half = cos.shape[-1]
    if half == 0:
        return x_BxTxHxd
    wide = x_BxTxHxd[..., : 2 * half].astype(jnp.float32)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    pairs = (first * cos - second * sin, second * cos + first * sin)
    if interleaved:
        rotated = jnp.stack(pairs, axis=-1).reshape(wide.shape)
    else:
        rotated = jnp.concatenate(pairs, axis=-1)
    rotated = rotated.astype(x_BxTxHxd.dtype)
    if 2 * half == x_BxTxHxd.shape[-1]:
        return rotated
    return jnp.concatenate([rotated, x_BxTxHxd[..., 2 * half :]], axis=-1)
