"""The update: all epochs, mini-batches and micro-batches of a role in one compiled, donated call.

Actor and critic learn from the same rollout, each in its own optimizer steps, or in common ones if
they share a trunk. Each token's weight in a loss is fixed by its whole mini-batch before the
mini-batch is split into micro-batches or over devices, so neither split changes the gradient.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float32, Int32

from jax_ppo.config.schema import Config, Critic, Optim
from jax_ppo.kernels import losses
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo import objectives
from jax_ppo.ppo.objectives import ActorContext, ActorLossOptions, Metric, Metrics, Weights
from jax_ppo.runtime import dispatch
from jax_ppo.runtime.sharding import TRAIN_RULES, constrain_rows, constrain_tree
from jax_ppo.training import packing
from jax_ppo.training.networks import Networks, full_parameters
from jax_ppo.training.optimizer import descend, learning_rate, make_optimizer
from jax_ppo.training.state import TrainState
from jax_ppo.types import Experience, MiniBatches, Params

# The actor stops at this multiple of actor.target_kl, as in Spinning Up and Stable-Baselines3.
TARGET_KL_MARGIN = 1.5


@dataclasses.dataclass(frozen=True)
class ActorOptions:
    """What the actor's update reads; a static argument of the compiled function.

    Attributes:
      loss: options of the actor's loss.
      shared_critic: the critic's section if it shares the actor's trunk, otherwise `None`.
      loss_scale: tokens, the divisor of loss_agg_mode "seq-mean-token-sum-norm".
      warmup_steps: first steps of the run, in which only the critic learns.
    """

    loss: ActorLossOptions
    shared_critic: Critic | None
    loss_scale: float
    warmup_steps: int


@dataclasses.dataclass(frozen=True)
class CriticOptions:
    """What the critic's update reads; a static argument of the compiled function.

    Attributes:
      critic: the section of the config.
      aggregation: see `kernels.losses.AGGREGATIONS`.
      loss_scale: tokens, the divisor of "seq-mean-token-sum-norm".
    """

    critic: Critic
    aggregation: str
    loss_scale: float


@dataclasses.dataclass(frozen=True)
class UpdateOptions:
    """What the update of each role reads."""

    actor: ActorOptions
    critic: CriticOptions

    @classmethod
    def from_config(cls, config: Config) -> "UpdateOptions":
        """Collect what the update reads."""
        loss_scale = config.actor.loss_scale_factor or config.data.max_response_length
        return cls(
            actor=ActorOptions(
                loss=ActorLossOptions.from_config(config),
                shared_critic=config.critic if config.shares_trunk else None,
                loss_scale=loss_scale,
                warmup_steps=config.trainer.critic_warmup,
            ),
            critic=CriticOptions(
                critic=config.critic,
                aggregation=config.critic.loss_agg_mode or config.actor.loss_agg_mode,
                loss_scale=loss_scale,
            ),
        )


def update_state(
    options: UpdateOptions,
    nets: Networks,
    total_steps: int,
    state: TrainState,
    experience: Experience,
    actor_batches: MiniBatches,
    critic_batches: MiniBatches | None,
) -> tuple[TrainState, Metrics]:
    """Train actor and critic on one rollout.

    Args:
      options: see `UpdateOptions`.
      nets: the roles' models.
      total_steps: number of steps of the whole run, at which the learning rate schedules end.
      state: its trained trees are donated.
      experience: of the rollout.
      actor_batches: the actor's optimizer steps.
      critic_batches: the critic's; `None` without a critic of its own.

    Returns:
      The new state, and metrics: scalars on the mesh, reduced over a role's optimizer steps as
      `objectives.Metric` states; NaN if no step had tokens to learn from. During the critic's
      warm-up the actor's metrics describe the step that it did not take.
    """
    programs = update_programs(
        options, nets, total_steps, state, experience, actor_batches, critic_batches
    )
    (step, actor, actor_optimizer, metrics), *critic_results = dispatch.run_together(programs)
    changes = {"actor": actor, "actor_optimizer": actor_optimizer}
    for critic, critic_optimizer, critic_metrics in critic_results:  # one or none
        changes |= {"critic": critic, "critic_optimizer": critic_optimizer}
        metrics |= critic_metrics
    return dataclasses.replace(state, step=step, control=experience.control, **changes), metrics


def update_programs(
    options: UpdateOptions,
    nets: Networks,
    total_steps: int,
    state: TrainState,
    experience: Experience,
    actor_batches: MiniBatches,
    critic_batches: MiniBatches | None,
) -> list[dispatch.Program]:
    """Return the programs of `update_state`: the actor's, and that of a critic of its own."""
    fixed_state = dataclasses.replace(
        state, actor=None, critic=None, actor_optimizer=None, critic_optimizer=None
    )
    shared_args = (fixed_state, experience)
    actor_args = (state.actor, state.actor_optimizer, *shared_args, actor_batches)
    programs: list[dispatch.Program] = [
        (update_actor, (options.actor, nets.actor, total_steps, *actor_args))
    ]
    if critic_batches is not None:
        critic_args = (state.critic, state.critic_optimizer, *shared_args, critic_batches)
        programs.append((update_critic, (options.critic, nets.critic, total_steps, *critic_args)))
    return programs


_compiled = functools.partial(
    jax.jit,
    static_argnames=("options", "net", "total_steps"),
    donate_argnames=("params", "optimizer_state"),
)


@_compiled
def update_actor(
    options: ActorOptions,
    net: Transformer,
    total_steps: int,
    params: Params,
    optimizer_state: optax.OptState,
    fixed_state: TrainState,
    experience: Experience,
    batches: MiniBatches,
) -> tuple[Int32[Array, ""], Params, optax.OptState, Metrics]:
    """Train the actor, and a critic that shares its trunk.

    Args:
      options: see `ActorOptions`.
      net: the actor's model.
      total_steps: number of steps of the whole run.
      params: donated.
      optimizer_state: donated.
      fixed_state: the state without its trained trees.
      experience: of the rollout.
      batches: the optimizer steps to take.

    Returns:
      The next step's number, the new parameters and optimizer state, and metrics.
    """
    step, warmup = fixed_state.step, options.warmup_steps
    actor = options.loss.actor
    rate = learning_rate(actor.optim, jnp.maximum(step - warmup, 0), total_steps - warmup)
    update_enabled = step >= warmup
    reference = fixed_state.reference
    context = objectives.actor_context(actor, step, fixed_state.control, reference)
    params, optimizer_state, metrics = actor_role(options, net, base=reference).train(
        params, optimizer_state, rate, update_enabled, context, experience, batches
    )
    metrics["actor/lr"] = jnp.where(update_enabled, rate, 0.0)
    params, optimizer_state = _constrain_to_train_layout(params, optimizer_state)
    return step + 1, params, optimizer_state, metrics


@_compiled
def update_critic(
    options: CriticOptions,
    net: Transformer,
    total_steps: int,
    params: Params,
    optimizer_state: optax.OptState,
    fixed_state: TrainState,
    experience: Experience,
    batches: MiniBatches,
) -> tuple[Params, optax.OptState, Metrics]:
    """Train a critic of its own; arguments as for `update_actor`.

    Returns:
      The new parameters and optimizer state, and metrics.
    """
    rate = learning_rate(options.critic.optim, fixed_state.step, total_steps)
    params, optimizer_state, metrics = critic_role(options, net, base=fixed_state.reference).train(
        params, optimizer_state, rate, True, None, experience, batches
    )
    params, optimizer_state = _constrain_to_train_layout(params, optimizer_state)
    return params, optimizer_state, metrics | {"critic/lr": rate}


def _constrain_to_train_layout(*trees: Any) -> Any:
    """Keep outputs in the layout of inputs.

    Otherwise the compiler splits arrays that the table of rules replicates, and the next call would
    compile another program.
    """
    return constrain_tree(trees, TRAIN_RULES)


@dataclasses.dataclass(frozen=True)
class EarlyStop:
    """End of a role's optimizer steps on a rollout.

    Attributes:
      metric: the metric that is compared.
      limit: no further steps are taken once a mini-batch exceeds it.
    """

    metric: str
    limit: float


@dataclasses.dataclass(frozen=True)
class Role:
    """How one role learns.

    Attributes:
      name: the prefix of its own metrics.
      net: its model.
      objective: (params, context, rows, experience, weights) -> (loss, metrics), see objectives.py.
      metrics: how each of the objective's metrics is reduced.
      optim: options of the optimizer.
      grad_clip: largest global gradient norm.
      aggregation: see `kernels.losses.AGGREGATIONS`.
      loss_scale: tokens, the divisor of "seq-mean-token-sum-norm".
      early_stop: `None` takes all steps.
      base: frozen parameters that the role's adapters apply to; `None` without adapters.
    """

    name: str
    net: Transformer
    objective: Callable[..., objectives.LossAndMetrics]
    metrics: Mapping[str, Metric]
    optim: Optim
    grad_clip: float
    aggregation: str
    loss_scale: float
    early_stop: EarlyStop | None = None
    base: Params | None = None

    def train(
        self,
        params: Params,
        optimizer_state: optax.OptState,
        rate: Float32[Array, ""],
        update_enabled: bool | jax.Array,
        context: ActorContext | None,
        experience: Experience,
        batches: MiniBatches,
    ) -> tuple[Params, optax.OptState, Metrics]:
        """Take all optimizer steps on one rollout.

        Args:
          params: the role's parameters, or its adapters.
          optimizer_state: for them.
          rate: the learning rate.
          update_enabled: bool scalar; False measures without moving anything.
          context: constants of the objective.
          experience: of the rollout.
          batches: U mini-batches.

        Returns:
          The new parameters and optimizer state, and metrics.
        """
        transform = make_optimizer(self.optim, self.grad_clip)

        def mini_batch(carry, batch: MiniBatches):
            params, optimizer_state, within_target_kl = carry
            # Past the target, or without any token to learn from, no micro-batch is run.
            any_tokens = jnp.any(count_learned_tokens(experience, batch) > 0)
            has_tokens = within_target_kl & any_tokens
            batch = dataclasses.replace(batch, counts=jnp.where(has_tokens, batch.counts, 0))
            gradients, metrics = self.gradients(params, context, experience, batch)
            if self.early_stop is not None:
                within_target_kl &= metrics[self.early_stop.metric] <= self.early_stop.limit
            params, optimizer_state, norm, is_finite = descend(
                transform=transform,
                params=params,
                opt_state=optimizer_state,
                gradients=gradients,
                rate=rate,
                update_enabled=update_enabled & within_target_kl & has_tokens,
            )
            metrics |= {
                f"{self.name}/grad_norm": norm,
                f"{self.name}/skipped": (~is_finite).astype(jnp.float32),
            }
            carry = (params, optimizer_state, within_target_kl)
            return carry, (metrics, has_tokens, within_target_kl & has_tokens)

        start = (params, optimizer_state, jnp.bool_(True))
        (params, optimizer_state, _), (metrics_U, has_tokens_U, taken_U) = jax.lax.scan(
            mini_batch, start, batches
        )
        metrics = self._reduce_over_steps(metrics_U, has_tokens_U)
        if self.early_stop is not None:
            metrics[f"{self.name}/steps_taken"] = jnp.sum(taken_U)
        return params, optimizer_state, metrics

    def gradients(
        self,
        params: Params,
        context: ActorContext | None,
        experience: Experience,
        batch: MiniBatches,
    ) -> tuple[Params, Metrics]:
        """Return gradients and metrics of one mini-batch, summed over micro-batches in float32.

        Args:
          params: the role's parameters, or its adapters.
          context: constants of the objective.
          experience: of the rollout.
          batch: one mini-batch, without the leading U.
        """
        # Weights are those of the whole mini-batch, whatever its split.
        counts_B = count_learned_tokens(experience, batch)
        loss_B = losses.loss_weights(counts_B, self.aggregation, self.loss_scale)
        mean_B = losses.loss_weights(counts_B, "token-mean")

        def micro_batch(i: jax.Array, carry: tuple[Params, Metrics]) -> tuple[Params, Metrics]:
            plan = jax.tree.map(lambda x: constrain_rows(x[i]), batch.packing)
            rows = packing.gather_rows(experience.sequences, plan)
            weights = Weights(
                loss=jnp.where(rows.mask, loss_B[rows.samples], 0),
                mean=jnp.where(rows.mask, mean_B[rows.samples], 0),
            )

            def objective(learned: Params) -> objectives.LossAndMetrics:
                everything = full_parameters(self.net, learned, self.base)
                return self.objective(everything, context, rows, experience, weights)

            gradients, metrics = jax.grad(objective, has_aux=True)(params)
            gradient_sum, totals = carry
            totals = {
                name: metric.combine(totals[name], metrics[name])
                for name, metric in self.metrics.items()
            }
            return jax.tree.map(jnp.add, gradient_sum, gradients), totals

        zeros = jax.tree.map(jnp.zeros_like, params)
        start = {name: jnp.float32(metric.start) for name, metric in self.metrics.items()}
        return jax.lax.fori_loop(0, batch.counts, micro_batch, (zeros, start))

    def _reduce_over_steps(self, metrics_U: Metrics, has_tokens_U: Bool[Array, " U"]) -> Metrics:
        """Return one value per metric from the optimizer steps that had tokens."""
        reductions = {
            **self.metrics,
            f"{self.name}/grad_norm": Metric.MEAN,
            f"{self.name}/skipped": Metric.SUM,
        }
        return {
            name: reductions[name].over_steps(values_U, has_tokens_U)
            for name, values_U in metrics_U.items()
        }


def actor_role(options: ActorOptions, net: Transformer, base: Params | None = None) -> Role:
    """Return the actor's role; with a shared trunk, that of actor and critic together."""
    actor = options.loss.actor
    metrics = objectives.ACTOR_METRICS
    objective: Callable[..., objectives.LossAndMetrics]
    if options.shared_critic is None:
        objective = functools.partial(objectives.actor_loss, options.loss, net)
    else:
        metrics = {**metrics, **objectives.CRITIC_METRICS}
        objective = functools.partial(
            objectives.shared_loss, options.loss, options.shared_critic, net
        )
    early_stop = None
    if actor.target_kl is not None:
        early_stop = EarlyStop("actor/approx_kl", limit=TARGET_KL_MARGIN * actor.target_kl)
    return Role(
        name="actor",
        net=net,
        objective=objective,
        metrics=metrics,
        optim=actor.optim,
        grad_clip=actor.grad_clip,
        aggregation=actor.loss_agg_mode,
        loss_scale=options.loss_scale,
        early_stop=early_stop,
        base=base,
    )


def critic_role(options: CriticOptions, net: Transformer, base: Params | None = None) -> Role:
    """Return the role of a critic of its own."""
    return Role(
        name="critic",
        net=net,
        objective=functools.partial(objectives.critic_loss, options.critic, net),
        metrics=objectives.CRITIC_METRICS,
        optim=options.critic.optim,
        grad_clip=options.critic.grad_clip,
        aggregation=options.aggregation,
        loss_scale=options.loss_scale,
        base=base,
    )


def count_learned_tokens(experience: Experience, batch: MiniBatches) -> Int32[Array, " B"]:
    """Return the number of action tokens of each sample that a mini-batch learns from.

    Samples outside the mini-batch, or excluded by the sample mask, have 0.
    """
    learned_B = batch.members & experience.sample_mask
    return jnp.where(learned_B, experience.action_mask.sum(1), 0)
