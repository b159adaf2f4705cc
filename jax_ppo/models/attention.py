"""Causal attention within the segments of packed rows, and the programs that compute it.

Each program takes q [B, T, H, d], k and v [B, T, K, d] and segments int32 [B, T] (or `None` if
each row is one segment), and returns [B, T, H, d] in the type of q. Query head h reads key head
h // (H / K). A token reads itself and the earlier tokens in its row that have the same segment.
The options are

    scale           factor on the product of query and key; None: d ** -0.5
    softcap         c: logits become c tanh(logit / c); None: no cap
    sinks           a logit [H] in each head's softmax that belongs to no key; None: there is none
    sliding_window  a token reads itself and the sliding_window - 1 tokens before it; None: all

and the programs, of which attention_kernels.py selects one,

    xla     runs everywhere, with any type, and alone with sinks; it stores logits [B, H, T, T]
            except for the keys that no query of a block reads
    cudnn   NVIDIA only, with 16-bit types only, without soft cap; it stores no logits, and with
            segments a mask [B, Q, T] of one block of queries at a time
    splash  TPU only; it stores no logits

The devices of `mesh.context` hold parts of the same rows: two blocks that are mirror images in the
row (`packing.split_columns`), so that they have as many earlier keys each. A device attends to the
keys of whole rows, which it gathers: with grouped queries they are small beside the activations,
64 MiB per layer for 32,768 tokens with 4 key heads of 128 in bfloat16. Only splash skips all that
its queries do not read: xla and cuDNN skip the second half of the row for the first block of
queries (cuDNN if it is even).
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_ppo.kernels import vocabulary_chunks
from jax_ppo.models.attention_kernels import (
    CUDNN_TILE,
    cudnn_block_size,
    cudnn_products,
    forget_mask,
    make_splash_kernel,
    run_splash_kernel,
)
from jax_ppo.runtime.parallelism.split_attention import (
    RowPart,
    attend_over_parts,
    num_row_parts,
    split_heads,
)

# Queries per block and blocks per row in `xla_attention`.
MIN_QUERY_BLOCK = 64
MAX_QUERY_BLOCKS = 4
MASKED_LOGIT = -1e30

Queries = Float[Array, "B T H d"]
Keys = Float[Array, "B T K d"]
Segments = Int[Array, "B T"] | None


def run_attention(
    program: str, q: Queries, k: Keys, v: Keys, segments: Segments, **options: Any
) -> Queries:
    """Run a program for whole rows: xla's is split by compilers, the others run on each device."""
    programs: dict[str, Callable[..., jax.Array]] = {
        "xla": xla_attention,
        "cudnn": cudnn_attention,
        "splash": splash_attention,
    }
    run: Callable[..., jax.Array] = functools.partial(programs[program], **options)
    if program != "xla":
        run = split_heads(run)
    return run(q, k, v, segments)


def run_attention_over_parts(
    program: str, q: Queries, k: Keys, v: Keys, segments: Segments, **options: Any
) -> Queries:
    """Run a program for the parts of packed rows; arguments as for `run_attention`."""
    assert segments is not None, "packed rows have segments"
    if program != "splash":
        window = options.pop("sliding_window", None)

        def run_blocks(q: Queries, k: Keys, v: Keys, part: RowPart) -> Queries:
            # The first block of queries reads nothing of the second half of the row. Which earlier
            # blocks a device could skip differs from device to device, but the program does not.
            T, block = k.shape[1], q.shape[1] // 2
            blocks = [(slice(block), slice(T // 2)), (slice(block, None), slice(T))]
            if program == "cudnn" and block % 2:
                blocks = [(slice(None), slice(T))]  # cuDNN takes even numbers of queries
            return _attend_in_blocks(program, (q, k, v), part, blocks, window, options)

        return attend_over_parts(run_blocks)(q, k, v, segments)
    scale = options.pop("scale", None)
    parts = num_row_parts()
    splash = make_splash_kernel(q.shape[2], q.shape[1] * parts, parts, **options)

    def run_part(q: Queries, k: Keys, v: Keys, part: RowPart, kernel: Any) -> Queries:
        return run_splash_kernel(kernel, q, k, v, part.segments, part.row_segments, scale)

    return attend_over_parts(run_part, splash)(q, k, v, segments)


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
    k_BxKxTxd, v_BxKxTxd = k_BxTxKxd.swapaxes(1, 2), v_BxTxKxd.swapaxes(1, 2)

    def attend_block(queries: slice, keys: slice) -> jax.Array:
        q, k, v = q_BxTxHxd[:, queries], k_BxKxTxd[:, :, keys], v_BxKxTxd[:, :, keys]
        of_queries = of_keys = segments_BxT
        if segments_BxT is not None:
            of_queries, of_keys = segments_BxT[:, queries], segments_BxT[:, keys]
        columns_Q = jnp.arange(queries.start, queries.stop)
        visible = visible_keys(columns_Q, keys, of_queries, of_keys, sliding_window)
        return attend_block_of_queries(q, k, v, visible, **options)

    blocks = blocks_of_queries(T, query_block_size(T), sliding_window)
    return jnp.concatenate([attend_block(*block) for block in blocks], axis=1)


def query_block_size(length: int) -> int:
    """Return the number of queries that `xla_attention` multiplies with their keys at once."""
    # In long rows, four blocks skip three quarters of the products above the diagonal.
    return max(MIN_QUERY_BLOCK, -(-length // MAX_QUERY_BLOCKS))


def cudnn_attention(
    q_BxTxHxd: Queries,
    k_BxTxKxd: Keys,
    v_BxTxKxd: Keys,
    segments_BxT: Segments,
    *,
    sliding_window: int | None = None,
    **options: Any,
) -> Queries:
    """Compute attention with cuDNN: its causal masks and windows, a mask per block for segments."""
    if segments_BxT is None:
        options |= {"is_causal": True}
        if sliding_window is not None:
            options |= {"local_window_size": (sliding_window - 1, 0)}
        return cudnn_products(q_BxTxHxd, k_BxTxKxd, v_BxTxKxd, None, **options)
    T = q_BxTxHxd.shape[1]
    blocks = blocks_of_queries(T, cudnn_block_size(T), sliding_window, tile=CUDNN_TILE)
    row = RowPart(segments_BxT, segments_BxT, jnp.arange(T))
    qkv = (q_BxTxHxd, k_BxTxKxd, v_BxTxKxd)
    return _attend_in_blocks("cudnn", qkv, row, blocks, sliding_window, options)


def splash_attention(
    q: Queries, k: Keys, v: Keys, segments: Segments, *, scale: float | None = None, **options: Any
) -> Queries:
    """Compute attention with JAX's kernel for TPUs; options as for `make_splash_kernel`."""
    attend_heads = make_splash_kernel(q.shape[2], q.shape[1], **options)
    return run_splash_kernel(attend_heads, q, k, v, segments, segments, scale)


def _attend_in_blocks(
    program: str,
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    part: RowPart,
    blocks: Iterable[tuple[slice, slice]],
    sliding_window: int | None,
    options: dict[str, Any],
) -> Queries:
    def attend_block(queries: slice, keys: slice) -> jax.Array:
        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, of_queries: jax.Array, of_keys: jax.Array
        ) -> jax.Array:
            columns = part.columns[queries]
            visible = visible_keys(columns, keys, of_queries, of_keys, sliding_window)
            if program == "cudnn":
                return cudnn_products(q, k, v, visible, **options)
            keys_first = (k.swapaxes(1, 2), v.swapaxes(1, 2))
            return attend_block_of_queries(q, *keys_first, visible, **options)

        if program == "cudnn":
            attend = forget_mask(attend)
        q, k, v = (x[:, at] for x, at in zip(qkv, (queries, keys, keys), strict=True))
        return attend(q, k, v, part.segments[:, queries], part.row_segments[:, keys])

    return jnp.concatenate([attend_block(*block) for block in blocks], axis=1)


def blocks_of_queries(
    length: int, size: int, sliding_window: int | None, tile: int = 1
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


def visible_keys(
    columns_Q: Int[Array, " Q"],
    keys: slice,
    query_segments: Segments,
    key_segments: Segments,
    sliding_window: int | None,
) -> Bool[Array, "B_or_1 Q S"]:
    """Return which keys, a slice of a row, each query reads, from its column in the row."""
    # Columns of the row serve as well as positions in the segment: only differences count.
    distance = columns_Q[:, None] - jnp.arange(keys.start or 0, keys.stop)
    visible = (distance >= 0)[None]
    if sliding_window is not None:
        visible &= distance < sliding_window
    if query_segments is not None and key_segments is not None:
        visible &= query_segments[:, :, None] == key_segments[:, None]
    return visible


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
    q_BxKxGQxd = (  # all queries of a group, one after the other: one matrix product per key head
        (q_BxQxHxd * (d**-0.5 if scale is None else scale))
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
    """Return the softmax over the last axis, whose further logits `sinks` [..., 1] are left out."""
    if sinks is None:
        return jax.nn.softmax(logits, axis=-1)
    top = jax.lax.stop_gradient(jnp.maximum(logits.max(-1, keepdims=True), sinks))
    weights = jnp.exp(logits - top)
    return weights / (weights.sum(-1, keepdims=True) + jnp.exp(sinks - top))
