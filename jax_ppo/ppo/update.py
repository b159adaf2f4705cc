"""The update: all epochs, mini-batches and micro-batches of a role in one compiled call.

Actor and critic learn from the same rollout, in separate optimizer steps, or in the same ones if
they share a trunk. Each token's weight in a loss is fixed by its whole mini-batch before the
mini-batch is split into micro-batches or over devices, so neither split changes the gradient.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo import plugin_trials
from jax_ppo.ppo.objectives import (
    ActorObjective,
    CriticObjective,
    UpdateOptions,
)
from jax_ppo.runtime.compilation import jit_rounded_alike
from jax_ppo.runtime.parallelism.replicas import computed_by_replicas
from jax_ppo.training.learner import EarlyStop, Learner, Metrics
from jax_ppo.training.networks import Networks
from jax_ppo.training.optimizer import learning_rate, rounding_seed
from jax_ppo.training.random_streams import Stream
from jax_ppo.training.state import TrainState, reference_policy
from jax_ppo.types import Experience, MiniBatches, Params

# The actor stops at this multiple of actor.target_kl, as in Spinning Up and Stable-Baselines3.
TARGET_KL_MARGIN = 1.5


def update_state(
    options: UpdateOptions,
    nets: Networks,
    total_steps: int,
    state: TrainState,
    experience: Experience,
    batches: Mapping[str, MiniBatches],
) -> tuple[TrainState, Metrics]:
    """Train the actor and a separate critic, if there is one, on one rollout.

    The trained trees of `state` are donated. Learning rate schedules end at `total_steps`.
    `batches` are the mini-batches of each role.

    Returns:
      The new state, and metrics: scalars on the mesh, reduced over a role's optimizer steps as
      `learner.Metric` states; NaN if no optimizer step had tokens to learn from. Values of each
      optimizer step, if logged, are arrays [U] under `learner.OPTIMIZER_STEPS` + ROLE/NAME. While
      only the critic learns (`trainer.critic_warmup`), the actor's metrics are computed, too.
    """
    arguments = update_arguments(options, nets, total_steps, state, experience, batches)
    models, optimizers = dict(state.models), {}
    if "actor" in arguments:
        models["actor"], optimizers["actor"], step, metrics = actor_program(options)(
            *arguments["actor"]
        )
    else:
        step, metrics = next_step(state.step), {}
    if "critic" in arguments:
        models["critic"], optimizers["critic"], critic_metrics = update_critic(*arguments["critic"])
        metrics |= critic_metrics
    state = TrainState(step=step, models=models, optimizers=optimizers, control=experience.control)
    return state, metrics


def update_arguments(
    options: UpdateOptions,
    nets: Networks,
    total_steps: int,
    state: TrainState,
    experience: Experience,
    batches: Mapping[str, MiniBatches],
) -> dict[str, tuple[Any, ...]]:
    """Return, by role, the arguments of `update_actor` and `update_critic` if they are trained."""
    # No other argument may share a donated buffer, so `without_trained` drops the trained trees.
    fixed_state = state.without_trained()
    return {
        role: (
            options,
            nets,
            total_steps,
            state.models[role],
            state.optimizers[role],
            fixed_state,
            experience,
            batches[role],
        )
        for role in batches
        if role in state.optimizers
    }


@jax.jit
def next_step(step: Int32[Array, ""]) -> Int32[Array, ""]:
    """Return the number of the next step, for a run that does not train the actor."""
    return step + 1


# Donated trees are updated in place: no second copy of parameters and optimizer state. On one
# device, XLA gives the first result of a shape the first donated buffer of that shape, even one in
# the host's memory. Therefore the new trees precede all other results, in the arguments' order.
_JIT = {
    "static_argnames": ("options", "nets", "total_steps"),
    "donate_argnames": ("params", "optimizer_state"),
}
_compiled = functools.partial(jax.jit, **_JIT)


def actor_program(options: UpdateOptions) -> Any:
    """Return `update_actor`; with `rollout.exact`, compiled to round as the forward pass does."""
    return _update_actor_exactly if options.is_exact else update_actor


@_compiled
@computed_by_replicas(num_static=3)
def update_actor(
    options: UpdateOptions,
    nets: Networks,
    total_steps: int,
    params: Params,
    optimizer_state: optax.OptState,
    fixed_state: TrainState,
    experience: Experience,
    batches: MiniBatches,
) -> tuple[Params, optax.OptState, Int32[Array, ""], Metrics]:
    """Train the actor, and a critic that shares its trunk.

    Return the new parameters and optimizer state, the next step's number, and metrics. `params` and
    `optimizer_state` are donated; `fixed_state` is the state with every role's trained trees
    removed.
    """
    fixed_state = fixed_state.on_device()
    # The actor's schedule starts after the critic's warm-up.
    step = fixed_state.step
    warmup = options.warmup_steps
    actor = options.actor
    rate = learning_rate(actor.optim, jnp.maximum(step - warmup, 0), total_steps - warmup)
    update_enabled = step >= warmup
    teacher = None
    if options.teacher_coef:
        teacher = (nets["teacher"], fixed_state.role_params("teacher", nets))
    learner = actor_learner(
        options,
        nets.actor,
        experience,
        base=fixed_state.reference,
        reference=reference_policy(nets, fixed_state),
        teacher=teacher,
    )
    params, optimizer_state, metrics = learner.scan_mini_batches(
        params, optimizer_state, rate, update_enabled, batches
    )
    # Log a rate of 0 where the actor did not learn.
    metrics["actor/lr"] = jnp.where(update_enabled, rate, 0.0)
    return params, optimizer_state, step + 1, metrics


_update_actor_exactly = jit_rounded_alike(update_actor, **_JIT)


@_compiled
@computed_by_replicas(num_static=3)
def update_critic(
    options: UpdateOptions,
    nets: Networks,
    total_steps: int,
    params: Params,
    optimizer_state: optax.OptState,
    fixed_state: TrainState,
    experience: Experience,
    batches: MiniBatches,
) -> tuple[Params, optax.OptState, Metrics]:
    """Train a separate critic; as `update_actor`, without the step's number."""
    # The critic learns from the first step on, so its schedule spans the whole run.
    rate = learning_rate(options.critic.optim, fixed_state.step, total_steps)
    assert nets.critic is not None, "there is no separate critic"
    # Not `on_device`: of the fixed state the critic reads only the base of its adapters, which is
    # never offloaded.
    learner = critic_learner(options, nets.critic, experience, fixed_state.reference)
    params, optimizer_state, metrics = learner.scan_mini_batches(
        params, optimizer_state, rate, True, batches
    )
    return params, optimizer_state, metrics | {"critic/lr": rate}


def actor_learner(
    options: UpdateOptions,
    net: Transformer,
    experience: Experience,
    base: Params | None,
    reference: tuple[Transformer, Params | None] | None = None,
    teacher: tuple[Transformer, Params] | None = None,
) -> Learner:
    """Return the learner of the actor; with a shared trunk, of actor and critic together."""
    actor = options.actor
    early_stop = None
    if actor.target_kl is not None:
        early_stop = EarlyStop("actor/approx_kl", limit=TARGET_KL_MARGIN * actor.target_kl)
    return Learner(
        rounding_stream=Stream.ACTOR_ROUNDING,
        prefix="actor/",
        objective=ActorObjective(
            options=options,
            aggregation=actor.loss_agg_mode,
            reference=reference,
            teacher=teacher,
            plugin_metrics=plugin_trials.policy_loss_metrics(actor),
            net=net,
            base=base,
            experience=experience,
        ),
        optim=actor.optim,
        grad_clip=actor.grad_clip,
        early_stop=early_stop,
        rounding_seed=rounding_seed(actor.optim, options.rounding_seed),
        logs_optimizer_steps=options.logs_optimizer_steps,
    )


def critic_learner(
    options: UpdateOptions, net: Transformer, experience: Experience, base: Params | None
) -> Learner:
    """Return the learner of a separate critic."""
    critic = options.critic
    return Learner(
        rounding_stream=Stream.CRITIC_ROUNDING,
        prefix="critic/",
        objective=CriticObjective(
            options=options,
            aggregation=critic.loss_agg_mode or options.actor.loss_agg_mode,
            net=net,
            base=base,
            experience=experience,
        ),
        optim=critic.optim,
        grad_clip=critic.grad_clip,
        rounding_seed=rounding_seed(critic.optim, options.rounding_seed),
        logs_optimizer_steps=options.logs_optimizer_steps,
    )
