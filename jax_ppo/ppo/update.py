"""The update: all epochs, mini-batches and micro-batches of a role in one compiled call.

Actor and critic learn from the same rollout, in separate optimizer steps, or in the same ones if
they share a trunk. Each token's weight in a loss is fixed by its whole mini-batch before the
mini-batch is split into micro-batches or over devices, so neither split changes the gradient.
"""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo import plugin_trials
from jax_ppo.ppo.objectives import ActorObjective, CriticObjective, UpdateOptions
from jax_ppo.runtime.compiled_programs import ROUNDED_ALIKE, CompiledProgram, program
from jax_ppo.training.learner import Learner, Metrics
from jax_ppo.training.networks import Networks
from jax_ppo.training.optimizer import learning_rate, rounding_seed
from jax_ppo.training.random_streams import Stream
from jax_ppo.training.state import TrainState, reference_policy
from jax_ppo.types import Experience, MiniBatches, Params, pytree

# The actor stops at this multiple of actor.target_kl, as in Spinning Up and Stable-Baselines3.
TARGET_KL_MARGIN = 1.5


@dataclasses.dataclass(frozen=True)
class UpdateSetup:
    """The constants of a run's updates; a static argument of compiled functions."""

    options: UpdateOptions
    nets: Networks
    total_steps: int  # of the run; learning rate schedules end there


@pytree
class Trained:
    """A role's parameters and optimizer state; the update replaces them, donating the buffers."""

    params: Params
    optimizer_state: optax.OptState


def update_state(
    setup: UpdateSetup,
    state: TrainState,
    experience: Experience,
    batches: Mapping[str, MiniBatches],
) -> tuple[TrainState, Metrics]:
    """Train the actor and a separate critic, if there is one, on one rollout.

    The trained trees of `state` are donated. `batches` are the mini-batches of each role. Return
    the new state, and metrics: scalars on the mesh, reduced as `learner.Metric` states; NaN without
    tokens to learn from. The actor's are computed during `trainer.critic_warmup`, too.
    """
    arguments = update_arguments(setup, state, experience, batches)
    trained: dict[str, Trained] = {}
    if "actor" in arguments:
        # With `rollout.exact`, compiled to round as the forward pass does.
        train_actor = _update_actor_exactly if setup.options.is_exact else update_actor
        trained["actor"], step, metrics = train_actor(*arguments["actor"])
    else:
        step, metrics = next_step(state.step), {}
    if "critic" in arguments:
        trained["critic"], critic_metrics = update_critic(*arguments["critic"])
        metrics |= critic_metrics
    state = TrainState(
        step=step,
        models={**state.models, **{role: trees.params for role, trees in trained.items()}},
        optimizers={role: trees.optimizer_state for role, trees in trained.items()},
        control=experience.control,
    )
    return state, metrics


def update_arguments(
    setup: UpdateSetup,
    state: TrainState,
    experience: Experience,
    batches: Mapping[str, MiniBatches],
) -> dict[str, tuple[UpdateSetup, Trained, TrainState, Experience, MiniBatches]]:
    """Return the arguments of `update_actor` and `update_critic`, by the roles that are trained."""
    # A donated buffer must not occur in another argument, so the state goes without trained trees.
    fixed_state = state.without_trained()
    return {
        role: (
            setup,
            Trained(state.models[role], state.optimizers[role]),
            fixed_state,
            experience,
            batches[role],
        )
        for role in batches
        if role in state.optimizers
    }


@program()
def next_step(step: Int32[Array, ""]) -> Int32[Array, ""]:
    """Return the number of the next step, for a run that does not train the actor."""
    return step + 1


# Donated trees are updated in place: no second copy of parameters and optimizer state. On one
# device, XLA pairs results with donated buffers of the same shape in order, even with buffers in
# the host's memory. So the new trees come before all other results, in the arguments' order.
_JIT = {"static_argnames": ("setup",), "donate_argnames": ("trained",)}


@program("update_actor", **_JIT)
def update_actor(
    setup: UpdateSetup,
    trained: Trained,
    fixed_state: TrainState,
    experience: Experience,
    batches: MiniBatches,
) -> tuple[Trained, Int32[Array, ""], Metrics]:
    """Train the actor, and a critic that shares its trunk.

    Return the new trees, the next step's number, and metrics. `trained` is donated.
    """
    options, nets = setup.options, setup.nets
    fixed_state = fixed_state.on_device()
    actor, step = options.actor, fixed_state.step
    # The actor learns, and its schedule starts, after the first steps, in which only a critic does.
    warmup = options.critic_warmup
    rate = learning_rate(actor.optim, jnp.maximum(step - warmup, 0), setup.total_steps - warmup)
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
        trained.params, trained.optimizer_state, rate, update_enabled, batches
    )
    # Log a rate of 0 where the actor did not learn.
    metrics["actor/lr"] = jnp.where(update_enabled, rate, 0.0)
    return Trained(params, optimizer_state), step + 1, metrics


_update_actor_exactly = CompiledProgram(
    update_actor.__wrapped__, "update_actor", **_JIT, **ROUNDED_ALIKE
)


@program("update_critic", **_JIT)
def update_critic(
    setup: UpdateSetup,
    trained: Trained,
    fixed_state: TrainState,
    experience: Experience,
    batches: MiniBatches,
) -> tuple[Trained, Metrics]:
    """Train a separate critic; return the new trees, and metrics. `trained` is donated."""
    options, critic = setup.options, setup.nets.critic
    assert critic is not None, "there is no separate critic"
    # The critic learns from the first step on, so its schedule spans the whole run.
    rate = learning_rate(options.critic.optim, fixed_state.step, setup.total_steps)
    # The critic needs only its adapters' base, which is never offloaded: no `on_device` here.
    learner = critic_learner(options, critic, experience, fixed_state.reference)
    params, optimizer_state, metrics = learner.scan_mini_batches(
        trained.params, trained.optimizer_state, rate, True, batches
    )
    return Trained(params, optimizer_state), metrics | {"critic/lr": rate}


def actor_learner(
    options: UpdateOptions,
    net: Transformer,
    experience: Experience,
    base: Params | None,
    reference: tuple[Transformer, Params] | None = None,
    teacher: tuple[Transformer, Params] | None = None,
) -> Learner:
    """Return the learner of the actor; with a shared trunk, of actor and critic together."""
    actor = options.actor
    early_stop = None
    if actor.target_kl is not None:
        early_stop = ("actor/approx_kl", TARGET_KL_MARGIN * actor.target_kl)
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
        options=actor,
        early_stop=early_stop,
        rounding_seed=rounding_seed(actor.optim, options.rounding_seed),
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
        options=critic,
        rounding_seed=rounding_seed(critic.optim, options.rounding_seed),
    )
