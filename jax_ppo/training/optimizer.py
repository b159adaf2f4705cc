"""AdamW, learning rate schedules, and the optimizer step that skips non-finite gradients.

Values stored in bfloat16, the upper half of float32, are rounded stochastically, so that small
changes count on average.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from jax_ppo.config.parsing import PARAMETER_GROUPS
from jax_ppo.config.schema import Actor, Critic, Supervised
from jax_ppo.config.training_options import Optim
from jax_ppo.models.lora import split_params
from jax_ppo.registries import LEARNING_RATE_SCHEDULES
from jax_ppo.training.random_streams import Stream
from jax_ppo.types import Params

T = TypeVar("T")  # a pytree

_DROPPED_BITS = 16  # of float32 in bfloat16: sign, exponent and 7 bits of the fraction are left

DECAYED_LEAVES = ("kernel", "embedding", "lora_a", "lora_b")  # matrices: no norms, no biases


def make_optimizer(section: Actor | Critic | Supervised) -> optax.GradientTransformation:
    """Return a section's optimizer: AdamW after clipping by global norm, without the learning rate.

    Loshchilov & Hutter 2019, arXiv 1711.05101. Weight decay applies to matrices only. `descend`
    applies the rate, and stores moments that are bfloat16 by stochastic rounding. `init` takes all
    parameters; the state is of those that are trained.
    """
    options = section.optim

    def is_matrix(params: Params) -> Params:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key in DECAYED_LEAVES, params
        )

    transform = optax.chain(
        # Clipping comes first, so that Adam's moments never see a longer gradient.
        optax.clip_by_global_norm(section.grad_clip),
        optax.scale_by_adam(b1=options.beta1, b2=options.beta2, eps=options.eps),
        # Decay follows Adam: it is decoupled from the moments, as in AdamW.
        optax.add_decayed_weights(options.weight_decay, mask=is_matrix),
    )

    def init(params: Params) -> optax.OptState:
        # optax has an option for the type of the first moment only; the count is an integer.
        return jax.tree.map(
            lambda x: (
                x.astype(options.moments_dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
            ),
            transform.init(split_frozen(section, params)[0]),
        )

    return optax.GradientTransformation(init, transform.update)


def split_frozen(section: object, params: Params) -> tuple[Params, Params]:
    """Return the parameters that a section of the options trains, and those that it freezes."""
    group = section.freeze if isinstance(section, Critic) else "none"
    return (params, {}) if group == "none" else split_params(params, PARAMETER_GROUPS[group])


def rounding_seed(options: Optim, seed: int) -> int:
    """Return the seed if anything is stored in bfloat16, else 0, so that seeds share programs."""
    stored = (options.param_dtype, options.moments_dtype, options.gradient_dtype)
    return seed if "bfloat16" in stored else 0


def rounding_keys(
    seed: int, stream: Stream, opt_state: optax.OptState
) -> tuple[jax.Array, jax.Array]:
    """Return two keys for the next optimizer step: for what it stores, and for its gradient sum.

    They depend on the number of steps taken, so that a resumed run continues with the same noise.
    `stream` numbers what is trained; `opt_state` is the state before the step.
    """
    stream_key = jax.random.fold_in(jax.random.key(seed), stream)
    count = optax.tree.get(opt_state, "count")
    stored_key, sum_key = jax.random.split(jax.random.fold_in(stream_key, count))
    return stored_key, sum_key


def learning_rate(options: Optim, step: int | jax.Array, total_steps: int) -> jax.Array:
    """Return a learning rate that rises from `lr / lr_warmup_steps`, then follows `lr_schedule`.

    `step` counts, from 0, the steps that trained this model before; the run has `total_steps`.
    """
    warmup_steps = options.lr_warmup_steps
    decay_steps = max(total_steps - warmup_steps, 1)
    schedule = LEARNING_RATE_SCHEDULES[options.lr_schedule].function(options, decay_steps)
    warmup_rate = options.lr * (step + 1) / max(warmup_steps, 1)
    scheduled_rate = schedule(jnp.maximum(step - warmup_steps, 0))
    return jnp.where(step < warmup_steps, warmup_rate, scheduled_rate)


def constant_rate(options: Optim, decay_steps: int) -> optax.Schedule:
    """Return the schedule of a constant rate."""
    return optax.constant_schedule(options.lr)


def linear_rate(options: Optim, decay_steps: int) -> optax.Schedule:
    """Return the schedule of a rate that falls linearly."""
    return optax.linear_schedule(options.lr, options.lr * options.min_lr_ratio, decay_steps)


def cosine_rate(options: Optim, decay_steps: int) -> optax.Schedule:
    """Return the schedule of a rate that falls along half a cosine."""
    return optax.cosine_decay_schedule(options.lr, decay_steps, alpha=options.min_lr_ratio)


def descend(
    transform: optax.GradientTransformation,
    params: Params,
    opt_state: optax.OptState,
    gradients: Params,
    rate: jax.Array,
    update_enabled: bool | jax.Array = True,
    key: jax.Array | None = None,
) -> tuple[Params, optax.OptState, jax.Array, jax.Array]:
    """Take one optimizer step, unless the gradient is not finite or updates are disabled.

    It is computed in float32; `key`, the first of `rounding_keys`, rounds what is stored in
    bfloat16. A skipped step changes no bit. Return parameters and optimizer state, the global
    gradient norm before clipping, and whether it is finite.
    """
    gradients = widen(gradients)
    wide_params = widen(params)
    norm = optax.tree.norm(gradients)
    is_finite = jnp.isfinite(norm)
    # The step is computed in any case; selecting afterwards avoids a branch on the mesh.
    updates, new_opt_state = transform.update(gradients, widen(opt_state), wide_params)
    new_params = jax.tree.map(lambda p, u: p - rate * u, wide_params, updates)
    stored = (params, opt_state)
    if any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(stored)):
        assert key is not None, "what is stored in bfloat16 is rounded with a key"
        new_params, new_opt_state = store_like((new_params, new_opt_state), stored, key)

    def select(new: T, old: T) -> T:
        return jax.tree.map(lambda n, o: jnp.where(is_finite & update_enabled, n, o), new, old)

    return select(new_params, params), select(new_opt_state, opt_state), norm, is_finite


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """Return float32 `x` in bfloat16, rounded up or down with probabilities that keep its mean.

    A value at a share p of the way between two neighbours becomes the farther one from zero with
    probability p, in steps of 2^-16 of their distance. Rounding to nearest would lose each change
    below half of that distance (2^-9 of the value), such as most steps of an optimizer. Infinities
    and NaN are kept. The result depends on key, values and shape, not on the mesh.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = _hash_positions(x.shape, key) >> _DROPPED_BITS
    # The carry into the upper half has the probability of the share that is dropped.
    raised = (bits + noise) >> _DROPPED_BITS
    rounded = jax.lax.bitcast_convert_type(raised.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _hash_positions(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    """Return a uint32 per position, from the position and the key.

    Unlike `jax.random.bits`, it stores nothing in between; 16 uniform bits are enough.
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
    """Return the float32 tree, each leaf rounded stochastically where `stored` has bfloat16."""
    leaves, structure = jax.tree.flatten(tree)
    rounded = [
        round_stochastically(x, jax.random.fold_in(key, i)) if like.dtype == jnp.bfloat16 else x
        for i, (x, like) in enumerate(zip(leaves, jax.tree.leaves(stored), strict=True))
    ]
    return jax.tree.unflatten(structure, rounded)


def gradient_shapes(params: Any, dtype: str) -> Any:
    """Return shapes and shardings of a sum of gradients; "float32" widens bfloat16 parameters'."""

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
    """Return the sum in the types of `gradient_sum`, rounded by `key` if they are bfloat16."""
    total = jax.tree.map(jnp.add, widen(gradient_sum), gradients)
    if any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(gradient_sum)):
        assert key is not None, "a sum in bfloat16 is rounded with a key"
        return store_like(total, gradient_sum, key)
    return total
