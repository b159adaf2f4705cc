"""The memory that layers keep of a sequence, and the attention of one new token per row to it.

A layer that computes keys and values has a column of them for each token, a recurrent one a state
of fixed size (`RecurrentState`), and one that reads another layer's has none. The token at position
i of a sequence is in column i of its row. The columns of a layer are (keys, values), in the layout
that the program reads without rearranging it:

    cpu    keys [B, K, d, S], values [B, K, S, d]; reads an eighth, a quarter, a half or all of S,
           the least that holds every row's sequence
    gpu    the same layout; reads all columns
    tpu    both [B, S, K, d]; reads all columns
    cudnn  the layout of tpu, on NVIDIA with 16-bit types; reads each row up to its end

Reading a part of an array copies it first, which costs less than reading everything on CPUs alone.
On a GPU, each layer would also have to wait until the host has chosen the part.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jax_ppo.kernels import vocabulary_chunks
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.attention import MASKED_LOGIT, softmax_with_sinks
from jax_ppo.models.attention_kernels import cudnn_products
from jax_ppo.runtime.parallelism.split_attention import num_split_kv_heads, split_heads

TRANSPOSED = ("cpu", "gpu")  # programs whose keys have the columns last
MIN_READ_WIDTH = 128  # least number of columns that a CPU reads

Columns = tuple[jax.Array, jax.Array]


class RecurrentState(NamedTuple):
    """The memory of a Gated DeltaNet or a short convolution: a token must be run exactly once."""

    # float32 [B, H, K, V], the state of each head; a short convolution has no heads.
    matrix: jax.Array
    # [B, W - 1, C], the inputs of the convolution of the last tokens; zeros before the first one.
    window: jax.Array


LayerCache = Columns | RecurrentState


def select_cache_program(
    wanted: str, platform: str, attention: str, architecture: Architecture, max_columns: int
) -> str:
    """Return the program for one new token per row; raise `ValueError` if it cannot run.

    `wanted` is "xla", "cudnn", or "auto": cudnn if it can run, else xla. `platform` is "cpu",
    "cuda", "rocm" or "tpu", `attention` the program for whole sequences, `max_columns` at least S.
    """
    a = architecture
    # cuDNN reads from column 0 to a row's end: a window that is shorter would be ignored.
    has_window = any(a.layers_are_local) and (a.sliding_window or max_columns) < max_columns
    obstacles = {
        f"cuDNN reads the cache only with cuDNN for whole sequences, not {attention}": attention
        != "cudnn",
        "cuDNN reads the cache only of layers without a sliding window; this model's is "
        f"{a.sliding_window}": has_window,
        "cuDNN reads keys and values of heads; this model's cache holds latents": a.latent_size,
        "cuDNN does not support the model's attention sinks": a.attention_sinks,
    }
    obstacle = next((reason for reason, applies in obstacles.items() if applies), None)
    if wanted == "cudnn" and obstacle:
        raise ValueError(obstacle)
    if wanted == "xla" or obstacle:
        return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    return "cudnn"


def keep_states(
    cache: tuple[LayerCache, ...], before: tuple[LayerCache, ...], is_kept_b: Bool[Array, " b"]
) -> tuple[LayerCache, ...]:
    """Return the cache with the recurrent states of some of its rows as they were before."""

    def keep(new: jax.Array, old: jax.Array) -> jax.Array:
        is_kept_B = pad_rows(is_kept_b, len(new) - len(is_kept_b))
        return jnp.where(is_kept_B.reshape(-1, *[1] * (new.ndim - 1)), old, new)

    return tuple(
        jax.tree.map(keep, layer, old) if isinstance(layer, RecurrentState) else layer
        for layer, old in zip(cache, before, strict=True)
    )


def empty_cache(
    architecture: Architecture, program: str, rows: int, length: int, dtype: DTypeLike
) -> tuple[LayerCache, ...]:
    """Return what layers remember before the first token: `length` (S) columns, or a state."""
    a = architecture

    def columns(kv_heads: int, head_dim: int) -> Columns:
        zeros = jnp.zeros((rows, length, num_split_kv_heads(kv_heads), head_dim), dtype)
        return cache_layout(program, zeros, zeros)

    def state() -> RecurrentState:
        heads = (rows, a.delta_value_heads, a.delta_key_dim, a.delta_value_dim)
        window = (rows, a.delta_window - 1, sum(a.delta_widths) or a.hidden_size)
        return RecurrentState(jnp.zeros(heads, jnp.float32), jnp.zeros(window, dtype))

    return tuple(state() if heads is None else columns(*heads) for heads in a.cache_heads)


def cache_layout(
    program: str, k_BxTxKxd: Float[Array, "B T K d"], v_BxTxKxd: Float[Array, "B T K d"]
) -> Columns:
    """Return keys and values in the program's layout: a cache of T columns."""
    if program in TRANSPOSED:
        return k_BxTxKxd.transpose(0, 2, 3, 1), v_BxTxKxd.swapaxes(1, 2)
    return k_BxTxKxd, v_BxTxKxd


def cache_length(program: str, cache: tuple[LayerCache, ...]) -> int:
    """Return S, the number of columns of the layers that have some."""
    columns = next(layer for layer in cache if not isinstance(layer, RecurrentState))
    return columns[0].shape[column_axes(program)[0]]


def column_axes(program: str) -> tuple[int, int]:
    """Return the axis of columns in keys and in values."""
    return (3, 2) if program in TRANSPOSED else (1, 1)


def write_rows(
    program: str, layer: LayerCache, rows_g: Int[Array, " g"], new_rows: LayerCache
) -> LayerCache:
    """Write rows into the first columns of the cache, or whole states.

    Rows `rows_g` outside the cache are dropped; `new_rows` has g rows of at most S columns.
    """

    def write(cache: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        place = (rows_g, *[slice(None)] * (axis - 1), slice(new.shape[axis]))
        return cache.at[place].set(new, mode="drop")

    if isinstance(layer, RecurrentState):
        return jax.tree.map(lambda x, new: x.at[rows_g].set(new, mode="drop"), layer, new_rows)
    keys, values = map(write, layer, new_rows, column_axes(program))
    return keys, values


def write_tokens(
    program: str,
    layer: Columns,
    k_bx1xKxd: Float[Array, "b 1 K d"],
    v_bx1xKxd: Float[Array, "b 1 K d"],
    columns_b: Int[Array, " b"],
) -> Columns:
    """Write one token per row into that row's column; rows from the b-th on are left alone."""

    def write(cache: jax.Array, new: jax.Array, axis: int) -> jax.Array:
        # One column per row, within the cache by construction.
        place = (jnp.arange(len(new)), *[slice(None)] * (axis - 1), columns_b)
        new = new.squeeze(axis).astype(cache.dtype)
        return cache.at[place].set(new, mode="promise_in_bounds")

    new = cache_layout(program, k_bx1xKxd, v_bx1xKxd)
    keys, values = map(write, layer, new, column_axes(program))
    return keys, values


def attend_to_cache(
    program: str,
    q_bx1xHxd: Float[Array, "b 1 H d"],
    layer: Columns,
    columns_b: Int[Array, " b"],
    *,
    sliding_window: int | None = None,
    **options: Any,
) -> Float[Array, "b 1 H d"]:
    """Return the attention of one new token per row to the first b rows of the cache.

    `layer` includes the new tokens, and each row is read up to its new token.
    """
    keys, values = layer
    length = cache_length(program, (layer,))
    # A window as wide as the cache hides nothing, and the programs are simpler without.
    if sliding_window is not None and sliding_window >= length:
        sliding_window = None
    if program == "cpu":
        return _attend_up_to_longest(q_bx1xHxd, keys, values, columns_b, sliding_window, options)
    idle_rows = len(keys) - len(q_bx1xHxd)  # the other programs run for all rows of the cache
    q_Bx1xHxd = pad_rows(q_bx1xHxd, idle_rows)
    columns_B = pad_rows(columns_b, idle_rows)
    if program == "cudnn":
        assert sliding_window is None, "select_cache_program refuses it"

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, columns_B: jax.Array) -> jax.Array:
            # A row's sequence ends with the new token, in its column.
            return cudnn_products(q, k, v, None, **options, key_value_seq_lengths=columns_B + 1)

        out_Bx1xHxd = split_heads(attend)(q_Bx1xHxd, keys, values, columns_B)
    else:
        readable_BxS = readable_columns(columns_B, jnp.arange(length), sliding_window)
        out_Bx1xHxd = _products(program, q_Bx1xHxd, keys, values, readable_BxS, **options)
    return out_Bx1xHxd[: len(q_bx1xHxd)]


def pad_rows(x: jax.Array, rows: int) -> jax.Array:
    """Return `x` with this number of rows of zeros behind it."""
    return jnp.pad(x, ((0, rows), *[(0, 0)] * (x.ndim - 1)))


def read_widths(length: int) -> tuple[int, ...]:
    """Return the widths, of `length` columns (S), that a CPU may read; it reads the least one."""
    parts = {-(-length >> i) for i in (1, 2, 3) if length >> i >= MIN_READ_WIDTH}
    return tuple(sorted({length} | parts))


def _attend_up_to_longest(
    q_bx1xHxd: jax.Array,
    keys_BxKxdxS: jax.Array,
    values_BxKxSxd: jax.Array,
    columns_b: jax.Array,
    sliding_window: int | None,
    options: dict[str, Any],
) -> jax.Array:
    """Read the columns up to the longest row's; those before a sliding window are masked."""

    def read(width: int, q: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        keys, values = keys[: len(q), ..., :width], values[: len(q), :, :width]
        readable = readable_columns(columns_b, jnp.arange(width), sliding_window)
        return _products("cpu", q, keys, values, readable, **options)

    # The widths are fixed when compiled; the longest row chooses among them at each step.
    *shorter, whole = read_widths(values_BxKxSxd.shape[2])
    # A switch on the sum of an empty array crashes jax 0.11.2's compiler on several devices.
    if not shorter:
        return read(whole, q_bx1xHxd, keys_BxKxdxS, values_BxKxSxd)
    branch = jnp.sum(columns_b.max() >= jnp.array(shorter, jnp.int32))
    branches = [functools.partial(read, width) for width in (*shorter, whole)]
    return jax.lax.switch(branch, branches, q_bx1xHxd, keys_BxKxdxS, values_BxKxSxd)


def readable_columns(
    columns_B: jax.Array, held_S: jax.Array, sliding_window: int | None
) -> Bool[Array, "B S"]:
    """Return which of the columns `held_S` the new tokens in columns `columns_B` read."""
    distance = columns_B[:, None] - held_S
    readable = distance >= 0
    if sliding_window is not None:
        readable &= distance < sliding_window
    return readable


def _products(
    program: str,
    q_Bx1xHxd: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    readable_BxS: jax.Array,
    sinks: jax.Array | None = None,
    **options: float | None,
) -> Float[Array, "B 1 H d"]:
    logits_BxKxGxS = cache_logits(program, q_Bx1xHxd, keys, readable_BxS, **options)
    if sinks is not None:
        sinks = sinks.reshape(*logits_BxKxGxS.shape[1:3], 1)
    weights_BxKxGxS = softmax_with_sinks(logits_BxKxGxS, sinks).astype(values.dtype)
    values_axes = "bksd" if program in TRANSPOSED else "bskd"
    out = jnp.einsum(f"bkgs,{values_axes}->bkgd", weights_BxKxGxS, values)
    return out.reshape(q_Bx1xHxd.shape)


def cache_logits(
    program: str,
    q_Bx1xHxd: jax.Array,
    keys: jax.Array,
    readable_BxS: jax.Array,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Array, "B K G S"]:
    """Return the masked logits of queries and keys in float32; keys in the program's layout."""
    B = len(q_Bx1xHxd)
    d = q_Bx1xHxd.shape[-1]
    keys_axes = "bkds" if program in TRANSPOSED else "bskd"
    K = keys.shape[keys_axes.index("k")]
    # Query heads are grouped by the key head that they read, which is not repeated.
    q_BxKxGxd = (q_Bx1xHxd * (d**-0.5 if scale is None else scale)).reshape(B, K, -1, d)
    logits = jnp.einsum(
        f"bkgd,{keys_axes}->bkgs", q_BxKxGxd, keys, preferred_element_type=jnp.float32
    )
    logits = vocabulary_chunks.softcap(logits, softcap)
    return jnp.where(readable_BxS[:, None, None], logits, MASKED_LOGIT)
