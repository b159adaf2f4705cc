"""Causal attention inside the segments of packed rows: one function, and the programs that can compute it.

Each takes (q [B, T, H, d], k and v [B, T, K, d], segments int32 [B, T] or None for one segment a row) and gives [B, T, H, d] in
q's dtype: query head h reads key head h // (H / K), a token the tokens up to itself in its row that have its segment.

    xla      everywhere, in any dtype; holds scores, [B, H, T, T], less what stands behind a block of queries
    cudnn    NVIDIA; 16-bit types alone
    splash   TPU; holds no scores at all
"""

import jax
import jax.numpy as jnp

from jax_ppo.sharding import split_heads

LEAST_BLOCK, MOST_BLOCKS = 64, 4  # of xla: queries in one, blocks in a row
SPLASH_BLOCKS = (512, 256, 128)  # tokens; the largest that divides the row


def choose(wanted: str, platform: str, dtype, head_dim: int, length: int) -> str:
    """The program to use. Raises ValueError, saying why, where `wanted` cannot run.

    Args:
      wanted: one of the above, or "auto": the platform's own where it can run, else xla.
      platform: "cpu", "cuda", "rocm" or "tpu".
      length: tokens of a row, T.
    """
    if wanted == "auto":
        own = {"cuda": "cudnn", "tpu": "splash"}.get(platform, "xla")
        return "xla" if _obstacle(own, platform, dtype, head_dim, length) else own
    obstacle = _obstacle(wanted, platform, dtype, head_dim, length)
    if obstacle:
        raise ValueError(obstacle)
    return wanted


def _obstacle(name, platform, dtype, head_dim, length):
    if name == "cudnn":
        if platform != "cuda":
            return f"cuDNN needs an NVIDIA GPU, this is {platform}"
        if jnp.dtype(dtype).itemsize != 2:
            return f"cuDNN's attention takes 16-bit types, not {jnp.dtype(dtype).name}"
        if head_dim % 8 or head_dim > 128:
            return f"cuDNN's attention takes heads of a multiple of 8 up to 128, the model's have {head_dim}"
        if length % 2:
            return f"cuDNN's attention takes rows of an even length, these have {length} tokens"
    if name == "splash":
        if platform != "tpu":
            return f"splash attention needs a TPU, this is {platform}"
        if length % SPLASH_BLOCKS[-1]:
            return f"splash attention takes rows of a multiple of {SPLASH_BLOCKS[-1]} tokens, these have {length}"
    return None


def attend(name: str, q_BxTxHxd, k_BxTxKxd, v_BxTxKxd, segments_BxT):
    """Runs the program of that name. Compilers split xla over devices; of the others each device runs its rows and heads."""
    run = xla if name == "xla" else split_heads({"cudnn": cudnn, "splash": splash}[name])
    return run(q_BxTxHxd, k_BxTxKxd, v_BxTxKxd, segments_BxT)


def xla(q_BxTxHxd, k_BxTxKxd, v_BxTxKxd, segments_BxT):
    """Query heads that share a key head are one product with it: on CPU twice as fast as jax.nn.dot_product_attention.

    Long rows are cut into blocks of queries, and none is multiplied with the keys that stand behind its block.
    """
    B, T, H, d = q_BxTxHxd.shape
    K = k_BxTxKxd.shape[2]
    k_BxKxTxd, v_BxKxTxd = k_BxTxKxd.swapaxes(1, 2), v_BxTxKxd.swapaxes(1, 2)

    def block(start, stop):
        q_BxKxGQxd = (q_BxTxHxd[:, start:stop] * d**-0.5).reshape(B, stop - start, K, -1, d).transpose(0, 2, 3, 1, 4).reshape(
            B, K, -1, d)
        scores = jnp.einsum("bkqd,bksd->bkqs", q_BxKxGQxd, k_BxKxTxd[:, :, :stop], preferred_element_type=jnp.float32)
        scores = scores.reshape(B, K, -1, stop - start, stop)
        scores = jnp.where(_visible(start, stop, segments_BxT)[:, None, None], scores, -1e30)
        weights = jax.nn.softmax(scores, axis=-1).reshape(B, K, -1, stop).astype(v_BxTxKxd.dtype)
        out_BxKxGQxd = jnp.einsum("bkqs,bksd->bkqd", weights, v_BxKxTxd[:, :, :stop])
        return out_BxKxGQxd.reshape(B, K, -1, stop - start, d).transpose(0, 3, 1, 2, 4).reshape(B, -1, H, d)

    size = max(LEAST_BLOCK, -(-T // MOST_BLOCKS))
    return jnp.concatenate([block(start, min(start + size, T)) for start in range(0, T, size)], axis=1)


def cudnn(q_BxTxHxd, k_BxTxKxd, v_BxTxKxd, segments_BxT):
    mask = None if segments_BxT is None else _visible(0, q_BxTxHxd.shape[1], segments_BxT)[:, None]
    return jax.nn.dot_product_attention(q_BxTxHxd, k_BxTxKxd, v_BxTxKxd, mask=mask, is_causal=mask is None,
                                        implementation="cudnn")


def splash(q_BxTxHxd, k_BxTxKxd, v_BxTxKxd, segments_BxT, interpret=False):
    """`interpret` runs the kernel's Python on any platform, slowly."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash_lib  # a fifth of a second that others spare

    _, T, H, d = q_BxTxHxd.shape
    block = next(size for size in SPLASH_BLOCKS if T % size == 0)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq",
             "block_kv_dq")
    kernel = splash_lib.make_splash_mha(
        splash_lib.MultiHeadMask([splash_lib.CausalMask((T, T))] * H), head_shards=1, q_seq_shards=1,
        block_sizes=splash_lib.BlockSizes(**dict.fromkeys(names, block)), interpret=interpret)
    q, k, v = ((x.swapaxes(1, 2)) for x in (q_BxTxHxd * d**-0.5, k_BxTxKxd, v_BxTxKxd))
    segments = None if segments_BxT is None else splash_lib.SegmentIds(segments_BxT, segments_BxT)
    return jax.vmap(kernel)(q, k, v, segments).swapaxes(1, 2)


def _visible(start, stop, segments_BxT):
    """bool [B or 1, stop - start, stop]: which token (last axis) is seen from which of those from `start` on."""
    causal = jnp.tril(jnp.ones((stop - start, stop), bool), start)[None]
    if segments_BxT is None:
        return causal
    return causal & (segments_BxT[:, start:stop, None] == segments_BxT[:, None, :stop])
