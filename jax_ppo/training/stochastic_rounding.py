"""Stochastic rounding to bfloat16, which keeps small changes of stored values on average."""

from typing import Any

import jax
import jax.numpy as jnp

# bfloat16 is the upper half of float32: sign, exponent and 7 bits of the fraction.
_DROPPED_BITS = 16


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """Return `x` in bfloat16, rounded up or down with probabilities that keep its mean.

    A value at a share p of the way between two neighbours becomes the farther one from zero with
    probability p, in steps of 2^-16 of their distance. Rounding to nearest would lose each change
    below half of that distance (2^-9 of the value), such as most steps of an optimizer.

    Args:
      x: float32; infinities and NaN are kept.
      key: random key; the result depends on it, on the values and on the shape, on no mesh.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = _hash_positions(x.shape, key) >> _DROPPED_BITS
    # The carry into the upper half has the probability of the share that is dropped.
    raised = (bits + noise) >> _DROPPED_BITS
    rounded = jax.lax.bitcast_convert_type(raised.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _hash_positions(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Return a uint32 per position, from the position and the key.

    `jax.random.bits` would store several numbers per parameter before they are used; a hash is
    computed where it is used. Rounding needs 16 uniform bits, and no cryptographic strength.
    """
    first_word, second_word = jax.random.bits(key, (2,), jnp.uint32)
    # The leading axis apart: stacked layers may have more elements than 32 bits count.
    hashed = jnp.full(shape, first_word)
    stride = 1
    for axis in reversed(range(len(shape))):
        position = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        if axis == 0:
            hashed += _mix(position ^ second_word)
        else:
            hashed += position * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return _mix(_mix(hashed) ^ second_word)


def _mix(x: jax.Array) -> jax.Array:
    """Return `lowbias32` of uint32 numbers (Wellons, github.com/skeeto/hash-prospector)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def widen(tree: Any) -> Any:
    """Return the tree with its bfloat16 leaves in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)


def store_like(tree: Any, stored: Any, key: jax.Array) -> Any:
    """Return the tree with leaves rounded stochastically where `stored` has bfloat16.

    The tree, as computed in float32, has the structure of `stored`; leaves of other types are left
    alone. Each leaf uses a separate key.
    """
    leaves, structure = jax.tree.flatten(tree)
    rounded = [
        round_stochastically(x, jax.random.fold_in(key, i)) if like.dtype == jnp.bfloat16 else x
        for i, (x, like) in enumerate(zip(leaves, jax.tree.leaves(stored), strict=True))
    ]
    return jax.tree.unflatten(structure, rounded)


def gradient_shapes(params: Any, dtype: str) -> Any:
    """Return shapes and shardings of a sum of gradients.

    With "float32", gradients of bfloat16 parameters are summed in float32, too.
    """

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        # Wider parameters, such as float64 in a comparison, keep their precision.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        sum_dtype = jnp.bfloat16 if dtype == "bfloat16" else wide
        return jax.ShapeDtypeStruct(x.shape, sum_dtype, sharding=getattr(x, "sharding", None))

    return jax.tree.map(shape, params)


def zero_gradients(params: Any, dtype: str) -> Any:
    """Return the start of a sum of gradients; takes the arguments of `gradient_shapes`."""
    shapes = gradient_shapes(params, dtype)
    return jax.tree.map(lambda x, sums: jnp.zeros_like(x, dtype=sums.dtype), params, shapes)


def add_gradients(gradient_sum: Any, gradients: Any, key: jax.Array | None) -> Any:
    """Return the sum in the types of `gradient_sum`, rounded stochastically if they are bfloat16.

    The random key is the micro-batch's; `None` if the sum is wider.
    """
    total = jax.tree.map(jnp.add, widen(gradient_sum), gradients)
    if any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(gradient_sum)):
        assert key is not None, "a sum in bfloat16 is rounded with a key"
        return store_like(total, gradient_sum, key)
    return total
