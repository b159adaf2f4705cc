"""Token log-probabilities from hidden states, in chunks, with their closed-form gradient.

Logits are computed only for the positions that the mask selects, one chunk at a time, and are then
discarded, so that no array over [tokens, vocabulary] is ever built. The backward pass recomputes
the logits of each chunk from what the forward pass saved: one number per token.

Shape letters: G groups (one per device: no data moves between groups), N positions per group, C
positions per chunk, V vocabulary, D model width.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Integer, Shaped

from jax_ppo.kernels.masked import zero_outside
from jax_ppo.kernels.softcap import softcap, softcap_slope

# Bytes of float32 logits per chunk. On CPU they should stay in the cache. Elsewhere a chunk must be
# long enough that reading and writing the sum of the unembedding gradient once per chunk costs less
# than the matrix products.
CHUNK_BYTES = {"cpu": 4 * 2**20}
CHUNK_BYTES_ELSEWHERE = 512 * 2**20
MIN_CHUNK_SIZE = 128

_assumed_platform: ContextVar[str | None] = ContextVar("assumed_platform", default=None)


def _sum_groups(gradient_GxVxD: jax.Array) -> jax.Array:
    return gradient_GxVxD.sum(0)


class UnembeddingLayout(NamedTuple):
    """The steps by which an unembedding that is split over devices reaches the chunks and back.

    Both run once per pass, outside the loop over chunks. Functions without a name of their own
    would compile another program per call.

    Attributes:
      gather: maps the weights [V, D], in the dtype of the products, to those that chunks read.
      sum_groups: maps the float32 gradient [G, V, D] to its sum over groups, [V, D].
    """

    gather: Callable[[jax.Array], jax.Array] = jnp.asarray
    sum_groups: Callable[[jax.Array], jax.Array] = _sum_groups


NOT_SPLIT = UnembeddingLayout()


def target_platform() -> str:
    """Return the platform that is compiled for.

    This is the platform of the mesh in context, which may differ from this machine's, or that of
    the default backend if there is no mesh.
    """
    assumed = _assumed_platform.get()
    if assumed is not None:
        return assumed
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


@contextlib.contextmanager
def assume_platform(platform: str) -> Iterator[None]:
    """Trace programs as for `platform` while the context is open, whatever they are compiled for.

    An estimate of a machine's memory is compiled for CPU devices if the machine's own compiler is
    missing.
    """
    token = _assumed_platform.set(platform)
    try:
        yield
    finally:
        _assumed_platform.reset(token)


def default_chunk_size(vocabulary: int, platform: str) -> int:
    """Return the positions per chunk whose logits fill the chunk budget of the platform.

    At least MIN_CHUNK_SIZE, however large the vocabulary is.
    """
    return max(CHUNK_BYTES.get(platform, CHUNK_BYTES_ELSEWHERE) // (4 * vocabulary), MIN_CHUNK_SIZE)


def token_logprobs(
    hidden_GxNxD: Float[Array, " G N D"],
    unembedding_VxD: Float[Array, " V D"],
    targets_GxN: Integer[Array, " G N"],
    mask_GxN: Shaped[Array, " G N"],
    temperature: float,
    chunk_size: int | None = None,
    with_entropy: bool = True,
    logit_softcap: float | None = None,
    layout: UnembeddingLayout = NOT_SPLIT,
) -> tuple[Float32[Array, " G N"], Float32[Array, " G N"] | None]:
    """Return log p(target) and the entropy of p, where p = softmax(logits / temperature).

    logits = hidden @ unembedding.T, or c tanh(hidden @ unembedding.T / c) with a soft cap c.

    The positions where mask = 1 are moved to the front of each group, and only as many chunks are
    computed as the fullest group needs: the cost follows the mask, while one compiled program
    serves all masks. The largest temporaries are a few arrays of [G, chunk_size, V]. Values depend
    on chunk_size and on the rest of the mask through rounding only.

    With z = logits / temperature and H the entropy, the gradient is

        d log p(target) / dz_v = [v = target] - p_v        dH / dz_v = -p_v (log p_v + H)

    and through a soft cap d logits_v / d (hidden @ unembedding.T)_v = 1 - (logits_v / c)^2.

    Its matrix products are in the dtype of `hidden` with float32 sums, including the sum of the
    unembedding gradient over chunks. That sum is kept per group until the last chunk, so that
    groups on several devices exchange it once. The temperature receives no gradient. An entropy
    that no loss is differentiated through costs nothing in the backward pass.

    Args:
      hidden_GxNxD: last hidden states, in the dtype of the matrix products (logits are always
        float32). Position n predicts targets[:, n]: a shift by one is up to the caller.
      unembedding_VxD: output embedding, the float32 master copy if there is one.
      targets_GxN: token ids in [0, V) where mask = 1.
      mask_GxN: 1 where a log-prob is computed, in any pattern. Elsewhere hidden states and targets
        may hold anything, NaN included.
      temperature: > 0, the sampling temperature of the tokens.
      chunk_size: positions of each group per chunk; `default_chunk_size` if None.
      with_entropy: whether to compute the entropy.
      logit_softcap: c > 0, or None for no soft cap.
      layout: how an unembedding that is split over devices is gathered.

    Returns:
      (logprobs_GxN <= 0, entropy_GxN in [0, log V]), float32, in nats, 0 where mask = 0. The
      entropy is None unless `with_entropy`.
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
    logprobs, entropy = _token_logprobs(
        hidden_GxNxD,
        unembedding_VxD,
        targets_GxN,
        mask_GxN.astype(bool),
        temperature,
        min(chunk_size, hidden_GxNxD.shape[1]),
        with_entropy,
        logit_softcap,
        layout,
    )
    return logprobs, entropy if with_entropy else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8))
def _token_logprobs(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    temperature: float,
    chunk_size: int,
    with_entropy: bool,
    cap: float | None,
    layout: UnembeddingLayout,
) -> tuple[jax.Array, jax.Array]:
    logprobs, entropy, _ = _forward(
        hidden, unembedding, targets, mask, temperature, chunk_size, with_entropy, cap, layout
    )
    return logprobs, entropy


def _forward(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    mask: jax.Array,
    temperature: float,
    chunk_size: int,
    with_entropy: bool,
    cap: float | None,
    layout: UnembeddingLayout,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return log p(target), entropy (0 unless `with_entropy`) and logsumexp z, each [G, N]."""
    chunks = MaskedChunks(mask, chunk_size)
    weight = layout.gather(unembedding.astype(hidden.dtype))

    def process_chunk(i: jax.Array, buffers: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # Shifting by the largest logit keeps exp from overflowing.
        z = chunk_logits(chunks.gather(hidden, i), weight, cap) / temperature
        target = jnp.take_along_axis(z, chunks.gather(targets, i)[..., None], axis=-1)[..., 0]
        top = jnp.max(z, axis=-1)
        shifted = z - top[..., None]
        total = jnp.sum(jnp.exp(shifted), axis=-1)
        # Both terms of the entropy are >= 0; logsumexp - E[z] would dip below 0 by rounding.
        if with_entropy:
            mean_gap = jnp.sum(jnp.exp(shifted) * -shifted, axis=-1) / total
        else:
            # This makes the entropy exactly 0.
            mean_gap = -jnp.log(total)
        logprob = (target - top) - jnp.log(total)
        entropy = jnp.log(total) + mean_gap
        # The compiler may fuse the division by the temperature into the difference, so that
        # z - top is not exactly 0 at the largest logit.
        results = (jnp.minimum(logprob, 0), jnp.maximum(entropy, 0), top + jnp.log(total))
        return tuple(chunks.write(buffer, x, i) for buffer, x in zip(buffers, results, strict=True))

    # Only as many chunks as the fullest group needs are computed.
    empty = (chunks.buffer(jnp.float32),) * 3
    compact = jax.lax.fori_loop(0, chunks.count, process_chunk, empty)
    logprobs, entropy, logsumexp = (zero_outside(chunks.scatter(x), mask) for x in compact)
    return logprobs, entropy, logsumexp


# With symbolic zeros, jax wraps each differentiable argument in an object with its `.value`.
def _forward_and_residuals(
    hidden: Any,
    unembedding: Any,
    targets: Any,
    mask: Any,
    temperature: float,
    chunk_size: int,
    with_entropy: bool,
    cap: float | None,
    layout: UnembeddingLayout,
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    hidden, unembedding, targets, mask = (x.value for x in (hidden, unembedding, targets, mask))
    logprobs, entropy, logsumexp = _forward(
        hidden, unembedding, targets, mask, temperature, chunk_size, with_entropy, cap, layout
    )
    return (logprobs, entropy), (hidden, unembedding, targets, mask, entropy, logsumexp)


def _backward(
    temperature: float,
    chunk_size: int,
    with_entropy: bool,
    cap: float | None,
    layout: UnembeddingLayout,
    residuals: tuple[jax.Array, ...],
    cotangents: tuple[Any, Any],
) -> tuple[jax.Array, jax.Array, None, None]:
    hidden, unembedding, targets, mask, entropy, logsumexp = residuals
    # A loss without an entropy bonus has no cotangent for it: that term is then left out.
    logprobs_grad, entropy_grad = (_masked_cotangent(x, mask) for x in cotangents)
    chunks = MaskedChunks(mask, chunk_size)
    V = len(unembedding)

    def logits_grad(i: jax.Array, logits: jax.Array) -> jax.Array:
        # The saved logsumexp spares the backward pass a reduction over the vocabulary.
        log_p = logits / temperature - chunks.gather(logsumexp, i)[..., None]
        slope = jnp.zeros_like(logits)
        if logprobs_grad is not None:
            is_target = jnp.arange(V) == chunks.gather(targets, i)[..., None]
            slope = chunks.gather(logprobs_grad, i)[..., None] * (is_target - jnp.exp(log_p))
        if entropy_grad is not None:
            excess = log_p + chunks.gather(entropy, i)[..., None]
            slope = slope - chunks.gather(entropy_grad, i)[..., None] * jnp.exp(log_p) * excess
        return slope / temperature

    gradients = hidden_and_weight_grad(mask, chunks, hidden, unembedding, cap, logits_grad, layout)
    return *gradients, None, None


_token_logprobs.defvjp(_forward_and_residuals, _backward, symbolic_zeros=True)


def hidden_and_weight_grad(
    mask: Bool[Array, " G N"],
    chunks: "MaskedChunks",
    hidden: Float[Array, " G N D"],
    unembedding: Float[Array, " V D"],
    cap: float | None,
    logits_grad: Callable[[jax.Array, jax.Array], jax.Array],
    layout: UnembeddingLayout,
) -> tuple[Float[Array, " G N D"], Float[Array, " V D"]]:
    """Return the gradients by hidden states and output embedding, chunk by chunk.

    Args:
      mask: positions that have logits.
      chunks: of this mask.
      hidden: hidden states; the gradient is 0 outside the mask.
      unembedding: the output embedding.
      cap: soft cap of the logits, if any.
      logits_grad: from the index of a chunk and its soft-capped logits [G, C, V] to the gradient
        by these logits.
      layout: of the output embedding.
    """
    weight = layout.gather(unembedding.astype(hidden.dtype))
    groups, width = len(hidden), hidden.shape[-1]

    def process_chunk(
        i: jax.Array, sums: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        states = chunks.gather(hidden, i)
        logits = chunk_logits(states, weight, cap)
        # From the gradient by soft-capped logits to that by plain products.
        slope = (logits_grad(i, logits) * softcap_slope(logits, cap)).astype(hidden.dtype)
        states_grad = jnp.einsum("gcv,vd->gcd", slope, weight, preferred_element_type=jnp.float32)
        weight_grad = jnp.einsum("gcv,gcd->gvd", slope, states, preferred_element_type=jnp.float32)
        hidden_buffer, weight_sum = sums
        hidden_buffer = chunks.write(hidden_buffer, states_grad.astype(hidden.dtype), i)
        return hidden_buffer, weight_sum + weight_grad

    # The sum over chunks is kept in float32: in bfloat16 small shares would be lost.
    weight_sum = jnp.zeros((groups, *unembedding.shape), jnp.float32)
    start = (chunks.buffer(hidden.dtype, width), weight_sum)
    hidden_grad, weight_sum = jax.lax.fori_loop(0, chunks.count, process_chunk, start)
    hidden_grad = jnp.where(mask[..., None], chunks.scatter(hidden_grad), 0)
    # Groups are on different devices: this sum is their one exchange.
    return hidden_grad, layout.sum_groups(weight_sum).astype(unembedding.dtype)


def _masked_cotangent(cotangent: Any, mask: jax.Array) -> jax.Array | None:
    """Return the cotangent, 0 outside the mask; None if nothing is differentiated through it."""
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None
    return zero_outside(cotangent, mask)


def chunk_logits(
    states_GxCxD: Float[Array, " G C D"], weight_VxD: Float[Array, " V D"], cap: float | None
) -> Float32[Array, " G C V"]:
    """Return the logits of one chunk, soft-capped unless `cap` is None."""
    logits = jnp.einsum("gcd,vd->gcv", states_GxCxD, weight_VxD, preferred_element_type=jnp.float32)
    return softcap(logits, cap)


class MaskedChunks:
    """The positions that a mask [G, N] selects, moved to the front of each group, in chunks of C.

    Attributes:
      count: number of chunks that the fullest group needs.
    """

    count: Int32[Array, ""]

    def __init__(self, mask_GxN: Bool[Array, " G N"], size: int) -> None:
        self._size = size
        positions = mask_GxN.shape[1]
        selected_counts = jnp.sum(mask_GxN, axis=1, keepdims=True)
        # Selected positions first, in their order: False sorts before True.
        order = jnp.argsort(~mask_GxN, axis=1, stable=True)
        # Padded to whole chunks, since a slice past the end would be moved back inside.
        self._order = jnp.pad(order, ((0, 0), (0, -positions % size)))
        self._selected = jnp.arange(self._order.shape[1]) < selected_counts
        # The inverse of the order: where each selected position was moved to.
        self._rank = jnp.maximum(jnp.cumsum(mask_GxN, axis=1) - 1, 0)
        self.count = (jnp.max(selected_counts) + size - 1) // size

    def _slice(self, x: jax.Array, i: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, i * self._size, self._size, axis=1)

    def gather(self, x_GxN: Shaped[Array, " G N *rest"], i: jax.Array) -> jax.Array:
        """Return chunk i of x, [G, C, ...].

        It is 0 where the group has no more positions, so that the padding adds nothing to a sum.
        """
        order = self._slice(self._order, i)
        selected = self._slice(self._selected, i)
        expand = (slice(None),) * 2 + (None,) * (x_GxN.ndim - 2)
        return jnp.where(selected[expand], jnp.take_along_axis(x_GxN, order[expand], axis=1), 0)

    def buffer(self, dtype: Any, *trailing: int) -> jax.Array:
        """Return zeros to write chunks into, [G, N rounded up to whole chunks, ...]."""
        return jnp.zeros((*self._order.shape, *trailing), dtype)

    def write(self, buffer: jax.Array, chunk: jax.Array, i: jax.Array) -> jax.Array:
        """Return the buffer with chunk i replaced."""
        return jax.lax.dynamic_update_slice_in_dim(buffer, chunk, i * self._size, axis=1)

    def scatter(self, buffer: jax.Array) -> jax.Array:
        """Return the buffer in the original order, [G, N, ...]; unspecified where the mask is 0."""
        expand = (slice(None),) * 2 + (None,) * (buffer.ndim - 2)
        return jnp.take_along_axis(buffer, self._rank[expand], axis=1)
