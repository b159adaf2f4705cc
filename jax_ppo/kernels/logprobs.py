"""Log-probabilities of tokens from hidden states, without an array over [rows, length, vocabulary]."""

import jax
import jax.numpy as jnp


def token_logprobs(
    hidden_RxLxD: jax.Array,
    unembedding_VxD: jax.Array,
    targets_RxL: jax.Array,
    temperature: float | jax.Array,
    chunk_size: int = 128,
    with_entropy: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """log p(target) and the entropy of p, where p = softmax(hidden @ unembedding.T / temperature).

    Works through the length `chunk_size` positions at a time, all rows in each chunk so that rows may stay sharded over
    devices, and forgets each chunk's logits; the gradient computes them again. The largest temporaries are therefore a
    few of [R, chunk_size, V], whatever L is. Values depend on chunk_size by rounding alone.

    Args:
      hidden_RxLxD: last hidden states, in the dtype to multiply in (the logits are float32 in any case). Position t
        predicts targets[:, t]: any shift by one is the caller's. There is no mask here: padding must be finite.
      unembedding_VxD: output embedding, the float32 master where there is one; each chunk casts it to hidden's dtype.
      targets_RxL: token ids in [0, V); an id outside it gets log-prob 0.
      temperature: > 0, the one the tokens were sampled at.

    Returns:
      (logprobs_RxL <= 0, entropy_RxL in [0, log V]), float32, in nats. The entropy is None if not with_entropy.
    """
    assert hidden_RxLxD.ndim == 3 and unembedding_VxD.ndim == 2, (hidden_RxLxD.shape, unembedding_VxD.shape)
    assert hidden_RxLxD.shape[2] == unembedding_VxD.shape[1], (hidden_RxLxD.shape, unembedding_VxD.shape)
    assert hidden_RxLxD.shape[:2] == targets_RxL.shape, (hidden_RxLxD.shape, targets_RxL.shape)
    assert chunk_size > 0, chunk_size

    @jax.checkpoint
    def score_chunk(chunk):
        hidden_RxCxD, targets_RxC = chunk
        # The cast is in here so that the chunks' gradients are summed in the master's float32: summed in bfloat16 over
        # some hundreds of chunks they are wrong by percents.
        unembedding = unembedding_VxD.astype(hidden_RxCxD.dtype)
        logits_RxCxV = jnp.einsum("rcd,vd->rcv", hidden_RxCxD, unembedding, preferred_element_type=jnp.float32)
        all_RxCxV = jax.nn.log_softmax(logits_RxCxV / temperature)
        # Not a gather: the gradient of this is a select, which fuses; that of a gather is a scatter into [R, chunk, V].
        is_target_RxCxV = jnp.arange(unembedding.shape[0]) == targets_RxC[..., None]
        logprobs_RxC = jnp.sum(jnp.where(is_target_RxCxV, all_RxCxV, 0.0), axis=-1)
        # Each term is >= 0, so the sum is; logsumexp - E[logit] would dip below 0 by rounding.
        entropy_RxC = -jnp.sum(jnp.exp(all_RxCxV) * all_RxCxV, axis=-1) if with_entropy else None
        return logprobs_RxC, entropy_RxC

    length = targets_RxL.shape[1]
    if length <= chunk_size:
        return score_chunk((hidden_RxLxD, targets_RxL))
    chunks = (_split(hidden_RxLxD, chunk_size), _split(targets_RxL, chunk_size))
    return jax.tree.map(lambda x_NxRxC: _join(x_NxRxC, length), jax.lax.map(score_chunk, chunks))


def _split(x_RxL, chunk_size):
    """[R, L, ...] -> [number of chunks, R, chunk_size, ...], filled up with zeros, which are dropped again by _join."""
    rows, length, *rest = x_RxL.shape
    x_RxL = jnp.pad(x_RxL, [(0, 0), (0, -length % chunk_size)] + [(0, 0)] * len(rest))
    return jnp.swapaxes(x_RxL.reshape(rows, -1, chunk_size, *rest), 0, 1)


def _join(x_NxRxC, length):
    return jnp.swapaxes(x_NxRxC, 0, 1).reshape(x_NxRxC.shape[1], -1)[:, :length]
