"""Causal attention inside the segments of packed rows: one function, and the programs that can compute it.

Each takes (q [B, T, H, d], k and v [B, T, K, d], segments int32 [B, T] or None for one segment a row) and gives [B, T, H, d] in
q's dtype: query head h reads key head h // (H / K), a token the tokens up to itself in its row that have its segment. Options:

    scale           factor on the product of query and key; None: d ** -0.5
    softcap         c: the scores are c tanh(score / c); None: they stay
    sliding_window  a token reads itself and sliding_window - 1 tokens before it; None: all before it

    xla      everywhere, in any dtype; holds scores, [B, H, T, T], less what no query of a block reads
    cudnn    NVIDIA; 16-bit types alone, without a softcap
    splash   TPU; holds no scores at all
"""

import functools

import jax
import jax.numpy as jnp

from jax_ppo.kernels import softcap as kernel
from jax_ppo.runtime.sharding import split_heads

MIN_QUERY_BLOCK, MAX_QUERY_BLOCKS = 64, 4  # of xla: queries in one, blocks in a row
SPLASH_BLOCKS = (512, 256, 128)  # tokens; the largest that divides the row


def select_attention_program(
    wanted: str, platform: str, dtype, head_dim: int, length: int, softcap: float | None = None
) -> str:
    """The program to use. Raises ValueError, saying why, where `wanted` cannot run.

    Args:
      wanted: one of the above, or "auto": the platform's own where it can run, else xla.
      platform: "cpu", "cuda", "rocm" or "tpu".
      length: tokens of a row, T.
    """
    if wanted == "auto":
        own = {"cuda": "cudnn", "tpu": "splash"}.get(platform, "xla")
        return "xla" if _obstacle(own, platform, dtype, head_dim, length, softcap) else own
    obstacle = _obstacle(wanted, platform, dtype, head_dim, length, softcap)
    if obstacle:
        raise ValueError(obstacle)
    return wanted


def _obstacle(name, platform, dtype, head_dim, length, softcap):
    if name == "cudnn":
        if platform != "cuda":
            return f"cuDNN needs an NVIDIA GPU, this is {platform}"
        if jnp.dtype(dtype).itemsize != 2:
            return f"cuDNN's attention takes 16-bit types, not {jnp.dtype(dtype).name}"
        if head_dim % 8 or head_dim > 128:
            return f"cuDNN's attention takes heads of a multiple of 8 up to 128, the model's have {head_dim}"
        if length % 2:
            return f"cuDNN's attention takes rows of an even length, these have {length} tokens"
        if softcap is not None:
            return f"cuDNN's attention has no soft cap of scores, the model's is {softcap}"
    if name == "splash":
        if platform != "tpu":
            return f"splash attention needs a TPU, this is {platform}"
        if length % SPLASH_BLOCKS[-1]:
            return f"splash attention takes rows of a multiple of {SPLASH_BLOCKS[-1]} tokens, these have {length}"
    return None


def run_attention(name: str, q_BxTxHxd, k_BxTxKxd, v_BxTxKxd, segments_BxT, **options):
    """Runs the program of that name. Compilers split xla over devices; of the others each device runs its rows and heads."""
    run = functools.partial(
        {"xla": xla_attention, "cudnn": cudnn_attention, "splash": splash_attention}[name],
        **options,
    )
    return (run if name == "xla" else split_heads(run))(
        q_BxTxHxd, k_BxTxKxd, v_BxTxKxd, segments_BxT
    )


def xla_attention(
    q_BxTxHxd, k_BxTxKxd, v_BxTxKxd, segments_BxT, *, scale=None, softcap=None, sliding_window=None
):
    """Query heads that share a key head are one product with it: on CPU twice as fast as jax.nn.dot_product_attention.

    Long rows are cut into blocks of queries, and none is multiplied with the keys that stand behind it, or before the first
    query's sliding window.
    """
    B, T, H, d = q_BxTxHxd.shape
    K = k_BxTxKxd.shape[2]
    k_BxKxTxd, v_BxKxTxd = k_BxTxKxd.swapaxes(1, 2), v_BxTxKxd.swapaxes(1, 2)

    def block(start, stop):
        keys = slice(max(0, start + 1 - (sliding_window or stop)), stop)
        q_BxKxGQxd = (
            (q_BxTxHxd[:, start:stop] * _scale(scale, d))
            .reshape(B, stop - start, K, -1, d)
            .transpose(0, 2, 3, 1, 4)
            .reshape(B, K, -1, d)
        )
        scores = jnp.einsum(
            "bkqd,bksd->bkqs", q_BxKxGQxd, k_BxKxTxd[:, :, keys], preferred_element_type=jnp.float32
        )
        scores = kernel.softcap(scores, softcap).reshape(B, K, -1, stop - start, stop - keys.start)
        scores = jnp.where(
            _visible(slice(start, stop), keys, segments_BxT, sliding_window)[:, None, None],
            scores,
            -1e30,
        )
        weights = (
            jax.nn.softmax(scores, axis=-1)
            .reshape(B, K, -1, stop - keys.start)
            .astype(v_BxTxKxd.dtype)
        )
        out_BxKxGQxd = jnp.einsum("bkqs,bksd->bkqd", weights, v_BxKxTxd[:, :, keys])
        return (
            out_BxKxGQxd.reshape(B, K, -1, stop - start, d)
            .transpose(0, 3, 1, 2, 4)
            .reshape(B, -1, H, d)
        )

    size = max(MIN_QUERY_BLOCK, -(-T // MAX_QUERY_BLOCKS))
    return jnp.concatenate(
        [block(start, min(start + size, T)) for start in range(0, T, size)], axis=1
    )


def cudnn_attention(
    q_BxTxHxd, k_BxTxKxd, v_BxTxKxd, segments_BxT, *, scale=None, softcap=None, sliding_window=None
):
    assert softcap is None, "choose refuses it"
    row, mask = slice(0, q_BxTxHxd.shape[1]), None
    if segments_BxT is not None or sliding_window is not None:
        mask = _visible(row, row, segments_BxT, sliding_window)[:, None]
    return jax.nn.dot_product_attention(
        q_BxTxHxd,
        k_BxTxKxd,
        v_BxTxKxd,
        mask=mask,
        is_causal=mask is None,
        scale=scale,
        implementation="cudnn",
    )


def splash_attention(
    q_BxTxHxd,
    k_BxTxKxd,
    v_BxTxKxd,
    segments_BxT,
    *,
    scale=None,
    softcap=None,
    sliding_window=None,
    interpret=False,
):
    """`interpret` runs the kernel's Python on any platform, slowly."""
    from jax.experimental.pallas.ops.tpu import (
        splash_attention as splash_lib,  # a fifth of a second that others spare
    )

    _, T, H, d = q_BxTxHxd.shape
    block = next(size for size in SPLASH_BLOCKS if T % size == 0)
    names = (
        "block_q",
        "block_kv",
        "block_kv_compute",
        "block_q_dkv",
        "block_kv_dkv",
        "block_kv_dkv_compute",
        "block_q_dq",
        "block_kv_dq",
    )
    mask = (
        splash_lib.CausalMask((T, T))
        if sliding_window is None
        else splash_lib.LocalMask((T, T), (sliding_window - 1, 0), 0)
    )
    attend_heads = splash_lib.make_splash_mha(
        splash_lib.MultiHeadMask([mask] * H),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap,
        block_sizes=splash_lib.BlockSizes(**dict.fromkeys(names, block)),
        interpret=interpret,
    )
    q, k, v = ((x.swapaxes(1, 2)) for x in (q_BxTxHxd * _scale(scale, d), k_BxTxKxd, v_BxTxKxd))
    segments = None if segments_BxT is None else splash_lib.SegmentIds(segments_BxT, segments_BxT)
    return jax.vmap(attend_heads)(q, k, v, segments).swapaxes(1, 2)


def _scale(scale, head_dim):
    return head_dim**-0.5 if scale is None else scale


def _visible(queries: slice, keys: slice, segments_BxT, sliding_window):
    """bool [B or 1, queries, keys]: which token (last axis) is read from which. Both are parts of a row."""
    distance = jnp.arange(queries.start, queries.stop)[:, None] - jnp.arange(keys.start, keys.stop)
    visible = (distance >= 0)[None]
    if sliding_window is not None:
        visible &= distance < sliding_window
    if segments_BxT is not None:
        visible &= segments_BxT[:, queries, None] == segments_BxT[:, None, keys]
    return visible
