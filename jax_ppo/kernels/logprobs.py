"""Log-probabilities of tokens from hidden states, without an array over [tokens, vocabulary], and their gradient.

Logits are computed for the places that the mask names and for no other, a chunk at a time, and forgotten. The gradient, in
closed form, computes each chunk's logits once more from what the forward pass kept of it: one number a token.

Shape letters: G groups (one a device: nothing here crosses from one into another), N places, C places of a chunk, V, D.
"""

import functools

import jax
import jax.numpy as jnp

from jax_ppo.kernels.masked import zero_outside
from jax_ppo.kernels.softcap import softcap, softcap_slope

# Float32 logits of a chunk. On CPU they should stay in the cache; elsewhere a chunk must be long enough that the sum of the
# unembedding's gradient, read and written once a chunk, costs less than the products.
CHUNK_BYTES = {"cpu": 4 * 2**20}
CHUNK_BYTES_ELSEWHERE = 512 * 2**20
LEAST_CHUNK = 128


def target_platform() -> str:
    """What is compiled for: the platform of the mesh in context, which need not be this machine's, or else the backend's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


def default_chunk_size(vocabulary: int, platform: str) -> int:
    """C where it is not given: as many places as have CHUNK_BYTES of logits on this platform, LEAST_CHUNK at least."""
    return max(CHUNK_BYTES.get(platform, CHUNK_BYTES_ELSEWHERE) // (4 * vocabulary), LEAST_CHUNK)


def token_logprobs(
    hidden_GxNxD: jax.Array,
    unembedding_VxD: jax.Array,
    targets_GxN: jax.Array,
    mask_GxN: jax.Array,
    temperature: float,
    chunk_size: int | None = None,
    with_entropy: bool = True,
    logit_softcap: float | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """log p(target) and the entropy of p, where p = softmax(logits / temperature) and logits = hidden @ unembedding.T.

    With a soft cap c, logits = c tanh(hidden @ unembedding.T / c).

    Places where mask = 1 are brought together group by group, and as many chunks of them computed as the fullest group needs:
    cost follows the mask, while the compiled program is one for all masks. The largest temporaries are a few of
    [G, chunk_size, V]. Values depend on chunk_size and mask by rounding alone.

    With z = logits / temperature and H the entropy, the gradient that is propagated is

        d log p(target) / dz_v = [v = target] - p_v        dH / dz_v = -p_v (log p_v + H)

    and through a soft cap d logits_v / d (hidden @ unembedding.T)_v = 1 - (logits_v / c)^2.

    Its products are in hidden's dtype with float32 sums, the one over chunks (of the unembedding's gradient) included. That
    sum is kept group by group until the last chunk: groups on several devices exchange it once. There is no gradient to the
    temperature; an entropy that no loss is differentiated through costs nothing in the backward pass.

    Args:
      hidden_GxNxD: last hidden states, in the dtype to multiply in (logits are float32 in any case). Place n predicts
        targets[:, n]: any shift by one is the caller's.
      unembedding_VxD: output embedding, the float32 master where there is one.
      targets_GxN: token ids in [0, V) where mask = 1.
      mask_GxN: 1 where a log-prob is computed, in any pattern. Elsewhere hidden states and targets may be anything, NaN included.
      temperature: > 0, the one the tokens were sampled at.
      chunk_size: places of each group at a time; None chooses by `default_chunk_size`.
      logit_softcap: c > 0; None: none.

    Returns:
      (logprobs_GxN <= 0, entropy_GxN in [0, log V]), float32, in nats, 0 where mask = 0. The entropy is None if not
      with_entropy.
    """
    assert hidden_GxNxD.ndim == 3 and unembedding_VxD.ndim == 2, (
        hidden_GxNxD.shape,
        unembedding_VxD.shape,
    )
    assert hidden_GxNxD.shape[2] == unembedding_VxD.shape[1], (
        hidden_GxNxD.shape,
        unembedding_VxD.shape,
    )
    shapes = (hidden_GxNxD.shape[:2], targets_GxN.shape, mask_GxN.shape)
    assert len(set(shapes)) == 1, f"hidden, targets, mask differ in [G, N]: {shapes}"
    assert chunk_size is None or chunk_size > 0, chunk_size
    chunk_size = chunk_size or default_chunk_size(unembedding_VxD.shape[0], target_platform())
    chunk_size = min(chunk_size, hidden_GxNxD.shape[1])
    logprobs, entropy = _token_logprobs(
        hidden_GxNxD,
        unembedding_VxD,
        targets_GxN,
        mask_GxN.astype(bool),
        temperature,
        chunk_size,
        with_entropy,
        logit_softcap,
    )
    return logprobs, entropy if with_entropy else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _token_logprobs(hidden, unembedding, targets, mask, temperature, chunk_size, with_entropy, cap):
    return _forward(hidden, unembedding, targets, mask, temperature, chunk_size, with_entropy, cap)[
        :2
    ]


def _forward(hidden, unembedding, targets, mask, temperature, chunk_size, with_entropy, cap):
    """log p(target), entropy (0 if not asked for) and logsumexp z, each [G, N]."""
    chunks = MaskedChunks(mask, chunk_size)
    weight = unembedding.astype(hidden.dtype)

    def chunk(i, kept):
        z = chunk_logits(chunks.gather(hidden, i), weight, cap) / temperature
        target = jnp.take_along_axis(z, chunks.gather(targets, i)[..., None], axis=-1)[..., 0]
        top = jnp.max(z, axis=-1)
        shifted = z - top[..., None]
        total = jnp.sum(jnp.exp(shifted), axis=-1)
        # Both terms of the entropy are >= 0; logsumexp - E[z] would dip below 0 by rounding.
        spread = (
            jnp.sum(jnp.exp(shifted) * -shifted, axis=-1) / total
            if with_entropy
            else -jnp.log(total)
        )
        # Compiled, z - top need not be 0 at the top: the division by the temperature is contracted into the difference.
        logprob, entropy = (target - top) - jnp.log(total), jnp.log(total) + spread
        new = jnp.minimum(logprob, 0), jnp.maximum(entropy, 0), top + jnp.log(total)
        return tuple(chunks.write(whole, x, i) for whole, x in zip(kept, new, strict=True))

    compact = jax.lax.fori_loop(0, chunks.count, chunk, (chunks.buffer(jnp.float32),) * 3)
    return tuple(zero_outside(chunks.scatter(x), mask) for x in compact)


def _forward_and_residuals(
    hidden, unembedding, targets, mask, temperature, chunk_size, with_entropy, cap
):
    hidden, unembedding, targets, mask = (x.value for x in (hidden, unembedding, targets, mask))
    logprobs, entropy, logsumexp = _forward(
        hidden, unembedding, targets, mask, temperature, chunk_size, with_entropy, cap
    )
    return (logprobs, entropy), (hidden, unembedding, targets, mask, entropy, logsumexp)


def _backward(temperature, chunk_size, with_entropy, cap, residuals, cotangents):
    hidden, unembedding, targets, mask, entropy, logsumexp = residuals
    of_logprobs, of_entropy = (_known(x, mask) for x in cotangents)
    chunks = MaskedChunks(mask, chunk_size)
    weight = unembedding.astype(hidden.dtype)
    V, D = unembedding.shape

    def chunk(i, sums):
        states = chunks.gather(hidden, i)
        x = chunk_logits(states, weight, cap)
        log_p = x / temperature - chunks.gather(logsumexp, i)[..., None]
        slope = jnp.zeros_like(x)
        if of_logprobs is not None:
            is_target = jnp.arange(V) == chunks.gather(targets, i)[..., None]
            slope = chunks.gather(of_logprobs, i)[..., None] * (is_target - jnp.exp(log_p))
        if of_entropy is not None:
            fall = log_p + chunks.gather(entropy, i)[..., None]
            slope = slope - chunks.gather(of_entropy, i)[..., None] * jnp.exp(log_p) * fall
        slope = (slope / temperature * softcap_slope(x, cap)).astype(hidden.dtype)
        of_states = jnp.einsum("gcv,vd->gcd", slope, weight, preferred_element_type=jnp.float32)
        of_weight = jnp.einsum("gcv,gcd->gvd", slope, states, preferred_element_type=jnp.float32)
        return chunks.write(sums[0], of_states.astype(hidden.dtype), i), sums[1] + of_weight

    start = chunks.buffer(hidden.dtype, D), jnp.zeros((mask.shape[0], V, D), jnp.float32)
    of_hidden, of_unembedding = jax.lax.fori_loop(0, chunks.count, chunk, start)
    of_hidden = jnp.where(mask[..., None], chunks.scatter(of_hidden), 0)
    return of_hidden, of_unembedding.sum(0).astype(unembedding.dtype), None, None


_token_logprobs.defvjp(_forward_and_residuals, _backward, symbolic_zeros=True)


def _known(cotangent, mask):
    """The cotangent where it counts, or None where nothing is differentiated through its output."""
    unused = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return None if unused else zero_outside(cotangent, mask)


def chunk_logits(states_GxCxD, weight_VxD, cap):
    """[G, C, V] float32 of a chunk."""
    return softcap(
        jnp.einsum("gcd,vd->gcv", states_GxCxD, weight_VxD, preferred_element_type=jnp.float32), cap
    )


class MaskedChunks:
    """The places that a mask [G, N] names, brought to the front of each group and cut into chunks of C.

    Attributes:
      count: int32 scalar, chunks that the fullest group needs.
    """

    def __init__(self, mask_GxN, size):
        self._size, places = size, mask_GxN.shape[1]
        named = jnp.sum(mask_GxN, axis=1, keepdims=True)
        order = jnp.argsort(~mask_GxN, axis=1, stable=True)
        self._order = jnp.pad(order, ((0, 0), (0, -places % size)))
        self._named = jnp.arange(self._order.shape[1]) < named
        self._rank = jnp.maximum(jnp.cumsum(mask_GxN, axis=1) - 1, 0)
        self.count = (jnp.max(named) + size - 1) // size

    def _cut(self, x, i):
        return jax.lax.dynamic_slice_in_dim(x, i * self._size, self._size, axis=1)

    def gather(self, x_GxN, i):
        """Chunk i of x, [G, C, ...]; 0 where the group has no more places, so that nothing there reaches a sum."""
        at, named = self._cut(self._order, i), self._cut(self._named, i)
        trailing = (slice(None),) * 2 + (None,) * (x_GxN.ndim - 2)
        return jnp.where(named[trailing], jnp.take_along_axis(x_GxN, at[trailing], axis=1), 0)

    def buffer(self, dtype, *trailing):
        """Where chunks are put, [G, N filled up to whole chunks, ...]."""
        return jnp.zeros((*self._order.shape, *trailing), dtype)

    def write(self, buffer, chunk, i):
        return jax.lax.dynamic_update_slice_in_dim(buffer, chunk, i * self._size, axis=1)

    def scatter(self, buffer):
        """[G, N, ...] with everything back in its place; anything where the mask is 0."""
        trailing = (slice(None),) * 2 + (None,) * (buffer.ndim - 2)
        return jnp.take_along_axis(buffer, self._rank[trailing], axis=1)
