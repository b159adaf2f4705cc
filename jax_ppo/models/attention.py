"""Causal attention within the segments of packed rows, and the programs that compute it.

Each program takes q [B, T, H, d], k and v [B, T, K, d] and segments int32 [B, T] (or `None` if
each row is one segment), and returns [B, T, H, d] in the type of q. Query head h reads key head
h // (H / K). A token reads itself and the earlier tokens in its row that have the same segment.
The options are

    scale           factor on the product of query and key; None: d ** -0.5
    softcap         c: logits become c tanh(logit / c); None: no cap
    sinks           a logit [H] in each head's softmax that belongs to no key; None: there is none
    sliding_window  a token reads itself and the sliding_window - 1 tokens before it; None: all

and the programs

    xla     runs everywhere, with any type, and alone with sinks; it stores logits [B, H, T, T]
            except for the keys that no query of a block reads
    cudnn   NVIDIA only, with 16-bit types only, without soft cap; it stores no logits, and with
            segments a mask [B, Q, T] of one block of queries at a time
    splash  TPU only; it stores no logits

attention_programs.py selects one of them. Where a mesh splits packed rows, attention_over_parts.py
runs them.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_ppo.kernels import vocabulary_chunks
from jax_ppo.models.attention_programs import SPLASH_BLOCKS
from jax_ppo.runtime.compat import no_gradients_of_masks
from jax_ppo.runtime.parallelism.heads import split_heads

# Queries per block and blocks per row in `xla_attention`.
MIN_QUERY_BLOCK = 64
MAX_QUERY_BLOCKS = 4
# The same in `cudnn_attention`, where the mask of a block has 2 bytes per pair of a query and a
# key; and the keys of a tile of its kernels.
MIN_CUDNN_QUERY_BLOCK = 512
MAX_CUDNN_QUERY_BLOCKS = 8
CUDNN_TILE = 128
MASKED_LOGIT = -1e30

Queries = Float[Array, "B T H d"]
Keys = Float[Array, "B T K d"]


Segments = Int[Array, "B T"] | None


def run_attention(
    program: str,
    q_BxTxHxd: Queries,
    k_BxTxKxd: Keys,
    v_BxTxKxd: Keys,
    segments_BxT: Segments,
    **options: Any,
) -> Queries:
    """Run a program.

    Compilers split xla's over devices by themselves. Each device runs the other programs for its
    own rows and heads.
    """
    programs: dict[str, Callable[..., jax.Array]] = {
        "xla": xla_attention,
        "cudnn": cudnn_attention,
        "splash": splash_attention,
    }
    run: Callable[..., jax.Array] = functools.partial(programs[program], **options)
    # Compilers cannot split these kernels over devices themselves.
    if program != "xla":
        run = split_heads(run)
    return run(q_BxTxHxd, k_BxTxKxd, v_BxTxKxd, segments_BxT)


def xla_attention(
    q_BxTxHxd: Queries,
    k_BxTxKxd: Keys,
    v_BxTxKxd: Keys,
    segments_BxT: Segments,
    *,
    sliding_window: int | None = None,
    **options: Any,
) -> Queries:
    """Compute attention with matrix products alone.

    The query heads that share a key head form one product with it, which on a CPU is twice as
    fast as jax.nn.dot_product_attention. Long rows are split into blocks of queries; a block is
    not multiplied with the keys after it or before its first query's sliding window.
    """
    T = q_BxTxHxd.shape[1]
    k_BxKxTxd = k_BxTxKxd.swapaxes(1, 2)
    v_BxKxTxd = v_BxTxKxd.swapaxes(1, 2)
    blocks = [
        attend_block_of_queries(
            q_BxTxHxd[:, queries],
            k_BxKxTxd[:, :, keys],
            v_BxKxTxd[:, :, keys],
            visible_in_block(queries, keys, segments_BxT, sliding_window),
            **options,
        )
        for queries, keys in blocks_of_queries(T, query_block_size(T), segments_BxT, sliding_window)
    ]
    return jnp.concatenate(blocks, axis=1)


def blocks_of_queries(
    length: int, size: int, segments_BxT: Segments, sliding_window: int | None, tile: int = 1
) -> Iterator[tuple[slice, slice]]:
    """Yield the columns of each block of queries and of the keys that it reads.

    The keys end with the block's last query. They begin with the window of its first query, or at
    the multiple of `tile` before. The last block also has what would be less than a tile.
    """
    starts = range(0, max(1, length - tile + 1), size)
    for start in starts:
        stop = length if start == starts[-1] else start + size
        first = max(0, start + 1 - (sliding_window or stop)) // tile * tile
        yield slice(start, stop), slice(first, stop)


def visible_in_block(
    queries: slice, keys: slice, segments_BxT: Segments, sliding_window: int | None
) -> Bool[Array, "B_or_1 Q S"]:
    """Return which keys the queries of a block read, from the columns of both in the row."""
    own_segments: Segments = jax.tree.map(lambda x: x[:, queries], segments_BxT)
    key_segments: Segments = jax.tree.map(lambda x: x[:, keys], segments_BxT)
    columns_Q = jnp.arange(queries.start, queries.stop)
    return visible_keys(columns_Q, keys, own_segments, key_segments, sliding_window)


def query_block_size(length: int) -> int:
    """Return the number of queries that `xla_attention` multiplies with their keys at once."""
    # In long rows, four blocks skip three quarters of the products above the diagonal.
    return max(MIN_QUERY_BLOCK, -(-length // MAX_QUERY_BLOCKS))


def attend_block_of_queries(
    q_BxQxHxd: Float[Array, "B Q H d"],
    k_BxKxSxd: Float[Array, "B K S d"],
    v_BxKxSxd: Float[Array, "B K S d"],
    visible: Bool[Array, "B_or_1 Q S"],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
) -> Float[Array, "B Q H d"]:
    """Compute the attention of a block of queries to the keys that they read."""
    B, Q, H, d = q_BxQxHxd.shape
    K, S = k_BxKxSxd.shape[1:3]
    # All queries of a group, one after the other: one matrix product per key head.
    q_BxKxGQxd = (
        (q_BxQxHxd * _scale(scale, d))
        .reshape(B, Q, K, -1, d)
        .transpose(0, 2, 3, 1, 4)
        .reshape(B, K, -1, d)
    )
    logits = jnp.einsum(
        "bkqd,bksd->bkqs", q_BxKxGQxd, k_BxKxSxd, preferred_element_type=jnp.float32
    )
    if softcap is not None:
        # float32 has these bits: nothing is rounded. Without it, a CPU's compiler fuses the cap and
        # the softmax in programs without gradients alone, and computes other logits there.
        logits = jax.lax.reduce_precision(vocabulary_chunks.softcap(logits, softcap), 8, 23)
    logits = logits.reshape(B, K, -1, Q, S)
    # Added, not selected: the gradient of a sum needs no mask.
    logits += jnp.where(visible, 0.0, MASKED_LOGIT)[:, None, None]
    if sinks is not None:
        sinks = sinks.reshape(K, -1, 1, 1)
    weights = softmax_with_sinks(logits, sinks).reshape(B, K, -1, S)
    out_BxKxGQxd = jnp.einsum("bkqs,bksd->bkqd", weights.astype(v_BxKxSxd.dtype), v_BxKxSxd)
    return out_BxKxGQxd.reshape(B, K, -1, Q, d).transpose(0, 3, 1, 2, 4).reshape(B, -1, H, d)


def softmax_with_sinks(logits: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Return the softmax over the last axis, with one more logit that is left out of the result.

    The further logits `sinks`, if any, broadcast to [..., 1].
    """
    if sinks is None:
        return jax.nn.softmax(logits, axis=-1)
    top = jax.lax.stop_gradient(jnp.maximum(logits.max(-1, keepdims=True), sinks))
    weights = jnp.exp(logits - top)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(sinks - top))


def cudnn_attention(
    q_BxTxHxd: Queries,
    k_BxTxKxd: Keys,
    v_BxTxKxd: Keys,
    segments_BxT: Segments,
    *,
    sliding_window: int | None = None,
    **options: Any,
) -> Queries:
    """Compute attention with cuDNN.

    Causal masks and windows are built in. Segments need a mask as an array, of one block of queries
    at a time.
    """
    if segments_BxT is None:
        options |= {"is_causal": True}
        if sliding_window is not None:
            options |= {"local_window_size": (sliding_window - 1, 0)}
        return cudnn_products(q_BxTxHxd, k_BxTxKxd, v_BxTxKxd, None, **options)

    def attend_block(queries: slice, keys: slice) -> jax.Array:
        @forget_mask
        def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: Segments) -> jax.Array:
            visible = visible_in_block(queries, keys, segments, sliding_window)
            return cudnn_products(q, k, v, visible, **options)

        return attend(q_BxTxHxd[:, queries], k_BxTxKxd[:, keys], v_BxTxKxd[:, keys], segments_BxT)

    T = q_BxTxHxd.shape[1]
    columns = blocks_of_queries(
        T, cudnn_block_size(T), segments_BxT, sliding_window, tile=CUDNN_TILE
    )
    return jnp.concatenate([attend_block(*block) for block in columns], axis=1)


def forget_mask(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Keep only what cuDNN returns for the backward pass, which makes the mask again."""
    return jax.checkpoint(attend, policy=lambda primitive, *_, **__: "attention" in primitive.name)


def cudnn_block_size(length: int) -> int:
    """Return the number of queries whose mask `cudnn_attention` makes at once."""
    size = max(MIN_CUDNN_QUERY_BLOCK, -(-length // MAX_CUDNN_QUERY_BLOCKS))
    return -(-size // CUDNN_TILE) * CUDNN_TILE


def cudnn_products(
    q: Queries,
    k: Keys,
    v: Keys,
    visible: Bool[Array, "B_or_1 Q S"] | None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> Queries:
    """Compute attention with cuDNN to the keys that are visible, which reads all of them."""
    assert softcap is None, "select_attention_program refuses it"
    attend = functools.partial(
        jax.nn.dot_product_attention, scale=scale, implementation="cudnn", **others
    )
    if visible is None:
        return attend(q, k, v)
    if k.shape[1] % CUDNN_TILE == CUDNN_TILE // 2:
        # With so many keys and a mask, cuDNN before 9.26 can return NaN as the gradient of queries
        # on Hopper (github.com/pytorch/pytorch/issues/196678). No query reads these two.
        k, v = (jnp.pad(x, [(0, 0), (0, 2), (0, 0), (0, 0)]) for x in (k, v))
        visible = jnp.pad(visible, [(0, 0), (0, 0), (0, 2)])
    with no_gradients_of_masks():
        return attend(q, k, v, mask=visible[:, None])


def splash_attention(
    q_BxTxHxd: Queries,
    k_BxTxKxd: Keys,
    v_BxTxKxd: Keys,
    segments_BxT: Segments,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    interpret: bool = False,
) -> Queries:
    """Compute attention with JAX's kernel for TPUs.

    `interpret` runs the Python code of the kernel on any platform, slowly.
    """
    T, H = q_BxTxHxd.shape[1:3]
    attend_heads = make_splash_kernel(
        H, T, softcap=softcap, sliding_window=sliding_window, interpret=interpret
    )
    return run_splash_kernel(
        attend_heads, q_BxTxHxd, k_BxTxKxd, v_BxTxKxd, segments_BxT, segments_BxT, scale
    )


def make_splash_kernel(
    heads: int,
    length: int,
    parts: int = 1,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    interpret: bool = False,
) -> Any:
    """Return JAX's kernel for all queries of a row, in the order of the parts of the row."""
    # This import takes a fifth of a second, which other programs do not need.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash_lib

    size = next(size for size in SPLASH_BLOCKS if length // parts % size == 0)
    mask: splash_lib.CausalMask | splash_lib.LocalMask
    if sliding_window is None:
        mask = splash_lib.CausalMask((length, length))
    else:
        mask = splash_lib.LocalMask((length, length), (sliding_window - 1, 0), 0)
    if parts > 1:
        # The mask is a function of these columns.
        blocks = np.arange(length, dtype=np.int32).reshape(2 * parts, -1)
        mask.q_sequence = np.stack([blocks[:parts], blocks[::-1][:parts]], axis=1).reshape(-1)
    return splash_lib.make_splash_mha(
        splash_lib.MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=parts,
        attn_logits_soft_cap=softcap,
        block_sizes=splash_lib.BlockSizes(
            block_q=size,
            block_kv=size,
            block_kv_compute=size,
            block_q_dkv=size,
            block_kv_dkv=size,
            block_kv_dkv_compute=size,
            block_q_dq=size,
            block_kv_dq=size,
        ),
        interpret=interpret,
    )


def run_splash_kernel(
    attend_heads: Any,
    q_BxQxHxd: Queries,
    k_BxTxKxd: Keys,
    v_BxTxKxd: Keys,
    own_segments: Int[Array, "B Q"] | None,
    segments_BxT: Int[Array, "B T"] | None,
    scale: float | None,
) -> Queries:
    """Run a splash kernel for each row."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash_lib

    # The kernel has no option for the scale, so the queries are scaled.
    q = (q_BxQxHxd * _scale(scale, q_BxQxHxd.shape[-1])).swapaxes(1, 2)
    k = k_BxTxKxd.swapaxes(1, 2)
    v = v_BxTxKxd.swapaxes(1, 2)
    segments = None
    if own_segments is not None and segments_BxT is not None:
        segments = splash_lib.SegmentIds(own_segments, segments_BxT)
    return jax.vmap(attend_heads)(q, k, v, segments).swapaxes(1, 2)


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    return scale


def visible_keys(
    columns_Q: Int[Array, " Q"],
    keys: slice,
    own_segments: Segments,
    key_segments: Segments,
    sliding_window: int | None,
) -> Bool[Array, "B_or_1 Q S"]:
    """Return which keys, a slice of a row, each query reads, from its column in the row."""
    # Columns of the row serve as well as positions in the segment: only differences count.
    distance = columns_Q[:, None] - jnp.arange(keys.start or 0, keys.stop)
    visible = (distance >= 0)[None]
    if sliding_window is not None:
        visible &= distance < sliding_window
    if own_segments is not None and key_segments is not None:
        visible &= own_segments[:, :, None] == key_segments[:, None]
    return visible
