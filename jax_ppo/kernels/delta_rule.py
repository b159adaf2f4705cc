"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464): attention with a state of fixed size.

Each head has a state S [K, V], which is zero before the first token of a sequence. A token with
query q, key k, value v, decay g <= 0 (a logarithm) and rate b in (0, 1) changes it to

    S' = exp(g) S + b k (v - exp(g) S^T k)^T

and its output is S'^T q. `delta_step` computes one token, `delta_chunks` whole rows of sequences.
Everything is in float32. Shape suffixes: H heads, K and V the widths of keys and values, C tokens
of a chunk, N chunks of a row.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK = 64  # most tokens of a chunk; a power of two
STRONGEST_DECAY = -1e4  # nothing is left of the state; a chunk's sum is exact in float32

# By default, accelerators multiply float32 with fewer bits.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def delta_step(
    state_BxHxKxV: Float[Array, "B H K V"],
    q_BxHxK: Float[Array, "B H K"],
    k_BxHxK: Float[Array, "B H K"],
    v_BxHxV: Float[Array, "B H V"],
    decay_BxH: Float[Array, "B H"],
    rate_BxH: Float[Array, "B H"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """Return the outputs of one token per row, and the states after it.

    `state_BxHxKxV` is before it; the other arguments are as for `delta_chunks`.
    """
    state = jnp.exp(decay_BxH)[..., None, None] * state_BxHxKxV
    known_BxHxV = _einsum("bhkv,bhk->bhv", state, k_BxHxK)
    change_BxHxV = rate_BxH[..., None] * (v_BxHxV - known_BxHxV)
    state += k_BxHxK[..., None] * change_BxHxV[..., None, :]
    return _einsum("bhkv,bhk->bhv", state, q_BxHxK), state


def delta_chunks(
    q_BxTxHxK: Float[Array, "B T H K"],
    k_BxTxHxK: Float[Array, "B T H K"],
    v_BxTxHxV: Float[Array, "B T H V"],
    decay_BxTxH: Float[Array, "B T H"],
    rate_BxTxH: Float[Array, "B T H"],
    segments_BxT: Int[Array, "B T"] | None = None,
    ends_B: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"] | None]:
    """Return the outputs of all tokens, and the states after some of them.

    With d_ij = exp(g_{j + 1} + ... + g_i) and the state S before a chunk, the changes u_i of its
    tokens solve

        u_i + b_i sum_{j < i} d_ij (k_i^T k_j) u_j = b_i (v_i - d_i0 S^T k_i)

    and the output of token i is d_i0 S^T q_i + sum_{j <= i} d_ij (q_i^T k_j) u_j, so that a scan
    over chunks takes the place of one over tokens. d is zero between tokens of two segments.

    Args:
      q_BxTxHxK: queries.
      k_BxTxHxK: keys, of length 1 or less.
      v_BxTxHxV: values.
      decay_BxTxH: logarithms of the factors on the states, 0 or less.
      rate_BxTxH: rates, from 0 to 1.
      segments_BxT: the sequence of each token; a sequence's tokens are adjacent. `None`: each row
        is one sequence.
      ends_B: numbers of tokens, 0 to T, after which states are returned: the states of
        the sequence that the last one of these tokens belongs to. `None`: no state is returned.
    """
    B, T, H, K = q_BxTxHxK.shape
    V = v_BxTxHxV.shape[-1]
    C = min(CHUNK, 1 << (T - 1).bit_length())
    if segments_BxT is None:
        segments_BxT = jnp.zeros((B, T), jnp.int32)

    def chunks(x: jax.Array) -> jax.Array:
        """Return [N, B, C, ...]; tokens after the row change nothing."""
        x = jnp.pad(x, ((0, 0), (0, -T % C), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(B, -1, C, *x.shape[2:]).swapaxes(0, 1)

    q, k, v = (chunks(x).swapaxes(2, 3) for x in (q_BxTxHxK, k_BxTxHxK, v_BxTxHxV))
    decay, rate = (chunks(x).swapaxes(2, 3) for x in (decay_BxTxH, rate_BxTxH))
    segments_NxBx1xC = chunks(segments_BxT)[:, :, None]
    N = len(q)

    from_start, between = _decay_factors(decay, segments_NxBx1xC)
    slowed = rate[..., None] * k
    system = _einsum("nbhik,nbhjk->nbhij", slowed, k) * between * jnp.tri(C, k=-1)
    inverse = _invert_unit_lower(system)
    targets = _einsum("nbhij,nbhjv->nbhiv", inverse, rate[..., None] * v)
    reads_of_state = _einsum("nbhij,nbhjk->nbhik", inverse, from_start[..., None] * slowed)
    attention = _einsum("nbhik,nbhjk->nbhij", q, k) * between
    queries = from_start[..., None] * q

    def run_chunk(carry: tuple[jax.Array, ...], chunk: tuple) -> tuple[tuple, jax.Array]:
        state, *found = carry
        number, k, targets, reads_of_state, attention, queries, between, from_start = chunk
        changes = targets - _einsum("bhck,bhkv->bhcv", reads_of_state, state)
        outputs = _einsum("bhck,bhkv->bhcv", queries, state)
        outputs += _einsum("bhij,bhjv->bhiv", attention, changes)

        def state_after(weights_BxHxC: jax.Array, kept_BxH: jax.Array) -> jax.Array:
            added = _einsum("bhck,bhcv->bhkv", weights_BxHxC[..., None] * k, changes)
            return kept_BxH[..., None, None] * state + added

        if ends_B is not None:
            last_B = ends_B - 1 - number * C
            is_here_B = (last_B >= 0) & (last_B < C)
            rows, last_B = jnp.arange(B), jnp.clip(last_B, 0, C - 1)
            at_end = state_after(between[rows, :, last_B], from_start[rows, :, last_B])
            found = [jnp.where(is_here_B[:, None, None, None], at_end, found[0])]
        return (state_after(between[:, :, -1], from_start[..., -1]), *found), outputs

    zeros = jnp.zeros((B, H, K, V), jnp.float32)
    first = (zeros,) if ends_B is None else (zeros, zeros)
    inputs = (jnp.arange(N), k, targets, reads_of_state, attention, queries, between, from_start)
    (_, *found), out_NxBxHxCxV = jax.lax.scan(run_chunk, first, inputs)
    out_BxTxHxV = out_NxBxHxCxV.transpose(1, 0, 3, 2, 4).reshape(B, N * C, H, V)[:, :T]
    return out_BxTxHxV, found[0] if found else None


def _decay_factors(
    decay_NxBxHxC: Float[Array, "N B H C"], segments_NxBx1xC: Int[Array, "N B 1 C"]
) -> tuple[Float[Array, "N B H C"], Float[Array, "N B H C C"]]:
    """Return d_i0, from the start of the chunk to each token, and d_ij, between two tokens."""
    decay = jnp.maximum(decay_NxBxHxC, STRONGEST_DECAY)
    is_visible = segments_NxBx1xC[..., None] == segments_NxBx1xC[..., None, :]
    is_visible &= jnp.tri(decay.shape[-1], dtype=bool)
    # Sums of whole numbers are exact: a strong decay does not round the decays after it. Each sum
    # is over the token's own segment: the decays of others would cancel in the differences below,
    # but their gradients only up to rounding.
    whole = jnp.round(decay)
    whole, rest = (
        _einsum("nbij,nbhj->nbhi", 1.0 * is_visible[:, :, 0], x) for x in (whole, decay - whole)
    )
    between = whole[..., None] - whole[..., None, :]
    between += rest[..., None] - rest[..., None, :]
    # Masked before the exponential, which could overflow.
    between = jnp.exp(jnp.where(is_visible, between, -jnp.inf))
    before_NxBx1 = jnp.roll(segments_NxBx1xC[..., -1], 1, axis=0)
    # Before the first chunk the state is zero, whatever is compared.
    is_continued = segments_NxBx1xC == before_NxBx1[..., None]
    return jnp.where(is_continued, jnp.exp(whole + rest), 0.0), between


def _invert_unit_lower(system: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """Return the inverse of 1 + `system`, which is zero on and above the diagonal.

    The inverse of a triangle [[A, 0], [B, D]] is [[A', 0], [-D' B A', D']] with the inverses A' and
    D' of its halves: from blocks of one token, blocks are joined in pairs. These are products only,
    which compilers can split over devices.
    """
    C = system.shape[-1]
    index = jnp.arange(C)
    inverse = jnp.broadcast_to(jnp.eye(C, dtype=system.dtype), system.shape)
    size = 1
    while size < C:
        is_pair = index[:, None] // (2 * size) == index // (2 * size)
        is_joint = is_pair & (index[:, None] // size > index // size)
        joints = jnp.where(is_joint, system, 0.0)
        inverse -= _einsum("...ij,...jk,...kl->...il", inverse, joints, inverse)
        size *= 2
    return inverse
