"""Logits of the positions that a mask selects, one chunk of positions at a time."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32

from jax_ppo.kernels.platform import target_platform

# Bytes of float32 logits per chunk. On CPU they should stay in the cache. Elsewhere a chunk's
# products must outweigh reading and writing the sum of the unembedding gradient once per chunk.
CHUNK_BYTES = {"cpu": 4 * 2**20}
CHUNK_BYTES_ELSEWHERE = 512 * 2**20

MIN_CHUNK_SIZE = 128

# The logit of a token that could not be drawn. Its probability is exactly 0, and unlike that of
# -inf, its share p log p of an entropy is 0 too.
DROPPED = -1e30


class UnembeddingLayout(NamedTuple):
    """The steps by which an unembedding that is split over devices reaches the chunks and back.

    Both run once per pass, outside the loop over chunks. Use functions that are defined once: a new
    lambda per call would compile another program each time.
    """

    # Maps the weights [V, D], in the dtype of the products, to those that chunks read.
    gather: Callable[[jax.Array], jax.Array] = jnp.asarray
    # Maps the float32 gradient [G, V, D] and a dtype to the sum over groups, [V, D], in that dtype.
    sum_groups: Callable[[jax.Array, DTypeLike], jax.Array] = lambda x_GxVxD, dtype: x_GxVxD.sum(
        0
    ).astype(dtype)


class LogitOptions(NamedTuple):
    """How logits are computed: static options of programs."""

    temperature: float  # > 0, of sampling, by which logits are divided
    softcap: float | None = None  # c > 0 of c tanh(logits / c)
    num_ids: int | None = None  # ids from here on are never drawn, and p is 0; `None`: all can be
    layout: UnembeddingLayout = UnembeddingLayout()  # how an unembedding is gathered
    chunk_size: int = 0  # positions per chunk; 0: `default_chunk_size`

    def chunked(self, positions: int, vocabulary: int) -> "LogitOptions":
        """Return the options with a chunk size of at most the positions of a group."""
        size = self.chunk_size or default_chunk_size(vocabulary)
        return self._replace(chunk_size=min(size, positions))


def assert_widths(hidden: Float[Array, " G N D"], unembedding: Float[Array, " V D"]) -> None:
    """Assert that hidden states and an unembedding have three and two axes, and one width."""
    shapes = (hidden.shape, unembedding.shape)
    assert hidden.ndim == 3 and unembedding.ndim == 2 and shapes[0][2] == shapes[1][1], shapes


def default_chunk_size(vocabulary: int) -> int:
    """Return the positions per chunk whose logits fill the budget of the target platform."""
    platform = target_platform()
    size = CHUNK_BYTES.get(platform, CHUNK_BYTES_ELSEWHERE) // (4 * vocabulary)
    if platform not in CHUNK_BYTES:
        # The nearest power of two: whole tiles of products, and responses of common lengths are
        # whole chunks, where 883 positions would leave a quarter of the computed logits unused.
        size = 2 ** round(math.log2(max(size, 1)))
    return max(size, MIN_CHUNK_SIZE)


class MaskedChunks:
    """The positions that a mask [G, N] selects, moved to each group's front, in chunks of C."""

    count: Int32[Array, ""]  # number of chunks that the fullest group needs

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

    def gather(self, x_GxN: jax.Array, i: jax.Array) -> jax.Array:
        """Return chunk i of x [G, N, ...], [G, C, ...]; 0 where the group has no more positions."""
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


def chunk_logits(
    states_GxCxD: Float[Array, " G C D"], weight_VxD: Float[Array, " V D"], options: LogitOptions
) -> Float32[Array, " G C V"]:
    """Return the logits of one chunk, soft-capped if there is a cap, with ids dropped."""
    logits = jnp.einsum("gcd,vd->gcv", states_GxCxD, weight_VxD, preferred_element_type=jnp.float32)
    return drop_ids(softcap(logits, options.softcap), options.num_ids)


def drop_ids(logits: Float32[Array, "... V"], num_ids: int | None) -> Float32[Array, "... V"]:
    """Return the logits with `DROPPED` from id `num_ids`, if any, on: these ids have no text."""
    if num_ids is None:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < num_ids, logits, DROPPED)


def sum_products(x: Float32[Array, "... V"], y: Float32[Array, "... V"]) -> Float32[Array, "..."]:
    """Return the sums of x y over the vocabulary."""
    # float32 has 8 and 23 bits: this rounds nothing. It keeps XLA for CPUs from handing product and
    # sum to a library, with which the loop over chunks takes four times as long.
    return jnp.sum(jax.lax.reduce_precision(x * y, 8, 23), axis=-1)


def softcap(x: Float[Array, " *shape"], cap: float | None) -> Float[Array, " *shape"]:
    """Return cap tanh(x / cap), in (-cap, cap) (Gemma 2, section 2); x itself if `cap` is None."""
    if cap is None:
        return x
    return cap * jnp.tanh(x / cap)


def softcap_slope(y: Float[Array, " *shape"], cap: float | None) -> Float[Array, " *shape"] | float:
    """Return dy / dx at the x for which y = softcap(x, cap): 1 - (y / cap)^2, in [0, 1]."""
    if cap is None:
        return 1.0
    return 1 - (y / cap) ** 2


def hidden_and_weight_grad(
    mask: Bool[Array, " G N"],
    chunks: "MaskedChunks",
    hidden: Float[Array, " G N D"],
    unembedding: Float[Array, " V D"],
    logits_grad: Callable[[jax.Array, jax.Array], jax.Array],
    options: LogitOptions,
) -> tuple[Float[Array, " G N D"], Float[Array, " V D"]]:
    """Return the gradients of hidden states and output embedding, chunk by chunk.

    `logits_grad` maps a chunk's index and soft-capped logits [G, C, V] to their gradient.
    """
    weight = options.layout.gather(unembedding.astype(hidden.dtype))

    def process_chunk(
        i: jax.Array, sums: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        states = chunks.gather(hidden, i)
        logits = chunk_logits(states, weight, options._replace(num_ids=None))
        slope = logits_grad(i, drop_ids(logits, options.num_ids))
        # From the gradient with respect to soft-capped logits to that of the plain products.
        slope = (slope * softcap_slope(logits, options.softcap)).astype(hidden.dtype)
        states_grad = jnp.einsum("gcv,vd->gcd", slope, weight, preferred_element_type=jnp.float32)
        weight_grad = jnp.einsum("gcv,gcd->gvd", slope, states, preferred_element_type=jnp.float32)
        hidden_buffer, weight_sum = sums
        hidden_buffer = chunks.write(hidden_buffer, states_grad.astype(hidden.dtype), i)
        return hidden_buffer, weight_sum + weight_grad

    # The sum over chunks is kept in float32: in bfloat16 small shares would be lost.
    weight_sum = jnp.zeros((len(hidden), *unembedding.shape), jnp.float32)
    start = (chunks.buffer(hidden.dtype, hidden.shape[-1]), weight_sum)
    hidden_grad, weight_sum = jax.lax.fori_loop(0, chunks.count, process_chunk, start)
    hidden_grad = jnp.where(mask[..., None], chunks.scatter(hidden_grad), 0)
    # Groups are on different devices: this sum is their one exchange.
    return hidden_grad, options.layout.sum_groups(weight_sum, unembedding.dtype)
