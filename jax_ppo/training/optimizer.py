"""AdamW, learning rate schedules, and the optimizer step that skips non-finite gradients."""

from typing import TypeVar

import jax
import jax.numpy as jnp
import optax

from jax_ppo.config.training_options import Optim
from jax_ppo.registries import LEARNING_RATE_SCHEDULES
from jax_ppo.training.random_streams import Stream
from jax_ppo.training.stochastic_rounding import store_like, widen
from jax_ppo.types import Params

T = TypeVar("T")  # a pytree

DECAYED_LEAVES = ("kernel", "embedding", "lora_a", "lora_b")  # matrices: no norms, no biases


def make_optimizer(options: Optim, grad_clip: float) -> optax.GradientTransformation:
    """Return AdamW after clipping by global norm, without the learning rate.

    Loshchilov & Hutter 2019, arXiv 1711.05101. Weight decay applies to matrices only. `descend`
    applies the rate, and stores moments that are bfloat16 by stochastic rounding.
    """

    def is_matrix(params: Params) -> Params:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key in DECAYED_LEAVES, params
        )

    transform = optax.chain(
        # Clipping comes first, so that Adam's moments never see a longer gradient.
        optax.clip_by_global_norm(grad_clip),
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
            transform.init(params),
        )

    return optax.GradientTransformation(init, transform.update)


def rounding_seed(options: Optim, seed: int) -> int:
    """Return the seed if anything is stored in bfloat16, else 0.

    It is a constant of compiled programs: runs that differ in their seed alone share those that
    round nothing.
    """
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
    """Return the schedule of a rate that stays."""
    return optax.constant_schedule(options.lr)


def linear_rate(options: Optim, decay_steps: int) -> optax.Schedule:
    """Return the schedule of a rate that falls in a line."""
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

    The step is computed in float32. Parameters and moments keep their types: those in bfloat16 are
    rounded stochastically, by `key`, the first of `rounding_keys`. A skipped step leaves parameters
    and optimizer state unchanged to the bit.

    Returns:
      The new parameters, the new optimizer state, the global gradient norm before clipping, and
      whether that norm is finite.
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
