"""Keys and values of the tokens so far, and the attention of one new token a row to them.

The token at position i of a sequence stands in column i of its row. A layer's cache is (keys, values), in the form that the
program reads without rearranging it:

    cpu    keys [B, K, d, S], values [B, K, S, d]; read up to an eighth, a quarter or a half of S where that holds every row
    gpu    the same; all columns are read
    tpu    both [B, S, K, d]; all columns are read
    cudnn  the same, on NVIDIA in 16-bit types; each row is read up to its own end

A part of an array is copied before it is read. For a CPU that costs less than reading all. Accelerators read all, rows that are
not asked about too; and a GPU would wait in each layer for the host to choose how far.
"""

import functools

import jax
import jax.numpy as jnp

from jax_ppo.kernels import softcap as kernel
from jax_ppo.runtime.sharding import split_heads

TRANSPOSED = ("cpu", "gpu")
MIN_READ_WIDTH = 128  # columns that a CPU reads at least


def select_cache_program(
    wanted: str, platform: str, attention: str, architecture, num_columns: int
) -> str:
    """The program to use. Raises ValueError, saying why, where `wanted` cannot run.

    Args:
      wanted: "xla", "cudnn", or "auto": cudnn where it can run, else xla.
      platform: "cpu", "cuda", "rocm" or "tpu".
      attention: what whole sequences take (attention.py).
      columns: S, at most.
    """
    obstacle = None
    if attention != "cudnn":
        obstacle = f"cuDNN reads the cache only where whole sequences take its attention, these take {attention}"
    elif any(architecture.layers_are_local) and architecture.sliding_window < num_columns:
        obstacle = f"cuDNN reads the cache of layers without a sliding window, this model's is {architecture.sliding_window}"
    if wanted == "cudnn" and obstacle:
        raise ValueError(obstacle)
    if wanted == "xla" or obstacle:
        return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    return "cudnn"


def empty_cache(program: str, rows: int, length: int, kv_heads: int, head_dim: int, dtype):
    """A layer's cache of zeros; `length` is S."""
    zeros = jnp.zeros((rows, length, kv_heads, head_dim), dtype)
    return cache_layout(program, zeros, zeros)


def cache_layout(program: str, k_BxTxKxd, v_BxTxKxd):
    """The cache that holds these T columns."""
    if program in TRANSPOSED:
        return k_BxTxKxd.transpose(0, 2, 3, 1), v_BxTxKxd.swapaxes(1, 2)
    return k_BxTxKxd, v_BxTxKxd


def num_columns(program: str, layer) -> int:
    """S."""
    return layer[0].shape[_column_axes(program)[0]]


def _column_axes(program):
    """Of keys and values."""
    return (3, 2) if program in TRANSPOSED else (1, 1)


def write_rows(program: str, layer, rows_g, new_rows):
    """Puts new rows, of fewer columns, into the first columns of the rows `rows_g`; nowhere for a row that is not there."""

    def put(cache, new, axis):
        place = (rows_g, *[slice(None)] * (axis - 1), slice(new.shape[axis]))
        return cache.at[place].set(new, mode="drop")

    return tuple(map(put, layer, new_rows, _column_axes(program)))


def write_tokens(program: str, layer, k_bx1xKxd, v_bx1xKxd, columns_b):
    """Puts the keys and values of a token a row into that row's column; rows past the b-th are left alone."""

    def put(cache, new, axis):
        place = (jnp.arange(len(new)), *[slice(None)] * (axis - 1), columns_b)
        return cache.at[place].set(new.squeeze(axis).astype(cache.dtype), mode="promise_in_bounds")

    return tuple(
        map(put, layer, cache_layout(program, k_bx1xKxd, v_bx1xKxd), _column_axes(program))
    )


def attend_to_cache(
    program: str, q_bx1xHxd, layer, columns_b, *, sliding_window: int | None = None, **options
):
    """Attention of one new token a row to the first b rows of the cache, each up to its own column.

    Args:
      columns_b: int32, the new tokens', which are in the cache already.
      scale, softcap, sliding_window: see attention.py.

    Returns:
      [b, 1, H, d].
    """
    if sliding_window is not None and sliding_window >= num_columns(program, layer):
        sliding_window = None
    if program == "cpu":
        return _to_longest(q_bx1xHxd, *layer, columns_b, sliding_window=sliding_window, **options)
    idle = len(layer[0]) - len(q_bx1xHxd)
    q_Bx1xHxd, columns_B = (
        jnp.pad(x, ((0, idle), *[(0, 0)] * (x.ndim - 1))) for x in (q_bx1xHxd, columns_b)
    )
    if program == "cudnn":
        assert sliding_window is None, "choose refuses it"
        out_Bx1xHxd = split_heads(functools.partial(_cudnn, **options))(
            q_Bx1xHxd, *layer, columns_B
        )
    else:
        readable_BxS = _readable(columns_B, num_columns(program, layer), sliding_window)
        out_Bx1xHxd = _products(program, q_Bx1xHxd, *layer, readable_BxS, **options)
    return out_Bx1xHxd[: len(q_bx1xHxd)]


def read_widths(length: int) -> tuple[int, ...]:
    """The columns that a CPU reads: the least of these that hold every row's sequence. `length` is S."""
    return tuple(
        sorted({length} | {-(-length >> i) for i in (1, 2, 3) if length >> i >= MIN_READ_WIDTH})
    )


def _to_longest(q_bx1xHxd, keys_BxKxdxS, values_BxKxSxd, columns_b, *, sliding_window, **options):
    """What a sliding window has left behind is read but not counted."""
    rows = len(q_bx1xHxd)

    def read(width, q, keys, values):
        readable = _readable(columns_b, width, sliding_window)
        return _products(
            "cpu", q, keys[:rows, ..., :width], values[:rows, :, :width], readable, **options
        )

    *shorter, whole = read_widths(values_BxKxSxd.shape[2])
    if (
        not shorter
    ):  # a choice by the sum of nothing makes jax 0.11.2's compiler crash on several devices
        return read(whole, q_bx1xHxd, keys_BxKxdxS, values_BxKxSxd)
    enough = jnp.sum(columns_b.max() >= jnp.array(shorter, jnp.int32))
    return jax.lax.switch(
        enough,
        [functools.partial(read, width) for width in (*shorter, whole)],
        q_bx1xHxd,
        keys_BxKxdxS,
        values_BxKxSxd,
    )


def _readable(columns_B, width, sliding_window):
    distance = columns_B[:, None] - jnp.arange(width)
    return (
        distance >= 0 if sliding_window is None else (distance >= 0) & (distance < sliding_window)
    )


def _products(program, q_Bx1xHxd, keys, values, readable_BxS, *, scale=None, softcap=None):
    B, _, H, d = q_Bx1xHxd.shape
    keys_axes, values_axes = ("bkds", "bksd") if program in TRANSPOSED else ("bskd", "bskd")
    K = keys.shape[keys_axes.index("k")]
    q_BxKxGxd = (q_Bx1xHxd * (d**-0.5 if scale is None else scale)).reshape(B, K, -1, d)
    scores_BxKxGxS = jnp.einsum(
        f"bkgd,{keys_axes}->bkgs", q_BxKxGxd, keys, preferred_element_type=jnp.float32
    )
    scores_BxKxGxS = kernel.softcap(scores_BxKxGxS, softcap)
    weights_BxKxGxS = jax.nn.softmax(
        jnp.where(readable_BxS[:, None, None], scores_BxKxGxS, -1e30), axis=-1
    )
    return jnp.einsum(
        f"bkgs,{values_axes}->bkgd", weights_BxKxGxS.astype(values.dtype), values
    ).reshape(B, 1, H, d)


def _cudnn(q_Bx1xHxd, keys_BxSxKxd, values_BxSxKxd, columns_B, *, scale=None, softcap=None):
    assert softcap is None, "attention.choose refuses it"
    return jax.nn.dot_product_attention(
        q_Bx1xHxd,
        keys_BxSxKxd,
        values_BxSxKxd,
        key_value_seq_lengths=columns_B + 1,
        scale=scale,
        implementation="cudnn",
    )
