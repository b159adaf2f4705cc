"""Experience → new TrainState: a role's every epoch, mini-batch and micro-batch in one compiled, donated call.

Actor and critic learn from the same rollout, each in optimizer steps of its own; or, where they share a trunk, in common ones.
Each token's weight in a loss is fixed by its whole mini-batch before anything is cut into micro-batches or
spread over devices, so that neither changes the gradient.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ppo.config.schema import Config
from jax_ppo.kernels import losses
from jax_ppo.ppo import objectives
from jax_ppo.runtime import dispatch
from jax_ppo.runtime.sharding import TRAIN_RULES, constrain_rows, constrain_tree
from jax_ppo.training import packing as packing_lib
from jax_ppo.training.networks import Networks, full_parameters
from jax_ppo.training.optimizer import descend, learning_rate, make_optimizer
from jax_ppo.training.state import TrainState
from jax_ppo.types import Experience, MiniBatches

TOO_FAR = (
    1.5  # times actor.target_kl: where the actor stops, as in Spinning Up and Stable-Baselines3
)


def update(
    config: Config,
    nets: Networks,
    total_steps: int,
    state: TrainState,
    experience: Experience,
    actor_batches: MiniBatches,
    critic_batches: MiniBatches | None,
) -> tuple[TrainState, dict]:
    """Trains actor and critic on one rollout.

    Args:
      total_steps: steps of the whole run, which the learning rates' schedules end with.
      state: its trained trees are donated.
      critic_batches: None without a critic of its own.

    Returns:
      the new state, and metrics: scalars on the mesh, means over a role's optimizer steps; extremes for *_min and *_max, sums
      for */skipped; NaN where no step had anything to learn from. In the critic's warm-up the actor's metrics are those of the
      step that it did not take.
    """
    (step, actor, actor_optimizer, metrics), *of_critic = dispatch.run_together(
        programs(config, nets, total_steps, state, experience, actor_batches, critic_batches)
    )
    moved = {"actor": actor, "actor_optimizer": actor_optimizer}
    for critic, critic_optimizer, critic_metrics in of_critic:  # one or none
        moved |= {"critic": critic, "critic_optimizer": critic_optimizer}
        metrics |= critic_metrics
    return dataclasses.replace(state, step=step, control=experience.control, **moved), metrics


def programs(
    config: Config,
    nets: Networks,
    total_steps: int,
    state: TrainState,
    experience: Experience,
    actor_batches: MiniBatches,
    critic_batches: MiniBatches | None,
) -> list[dispatch.Program]:
    """What `update` runs: the actor's program and, if there is one, the critic's."""
    rest = dataclasses.replace(
        state, actor=None, critic=None, actor_optimizer=None, critic_optimizer=None
    )
    given = config, nets, total_steps
    found = [
        (
            update_actor,
            (*given, state.actor, state.actor_optimizer, rest, experience, actor_batches),
        )
    ]
    if critic_batches is not None:
        found.append(
            (
                update_critic,
                (*given, state.critic, state.critic_optimizer, rest, experience, critic_batches),
            )
        )
    return found


_compiled = functools.partial(
    jax.jit,
    static_argnames=("config", "nets", "total_steps"),
    donate_argnames=("params", "optimizer_state"),
)


@_compiled
def update_actor(
    config: Config,
    nets: Networks,
    total_steps: int,
    params,
    optimizer_state,
    rest: TrainState,
    experience: Experience,
    batches: MiniBatches,
):
    """(the next step's number, parameters, optimizer state, metrics). `rest`: the state without its trained trees."""
    warmup = config.trainer.critic_warmup
    rate = learning_rate(
        config.actor.optim, jnp.maximum(rest.step - warmup, 0), total_steps - warmup
    )
    learns = rest.step >= warmup
    params, optimizer_state, metrics = actor_role(config, nets, rest.reference).train(
        params,
        optimizer_state,
        rate,
        learns,
        objectives.actor_context(config, rest),
        experience,
        batches,
    )
    metrics["actor/lr"] = jnp.where(learns, rate, 0.0)
    return rest.step + 1, *_in_place(params, optimizer_state), metrics


@_compiled
def update_critic(
    config: Config,
    nets: Networks,
    total_steps: int,
    params,
    optimizer_state,
    rest: TrainState,
    experience: Experience,
    batches: MiniBatches,
):
    """(parameters, optimizer state, metrics). `rest`: the state without its trained trees."""
    rate = learning_rate(config.critic.optim, rest.step, total_steps)
    params, optimizer_state, metrics = critic_role(config, nets, rest.reference).train(
        params, optimizer_state, rate, True, None, experience, batches
    )
    return *_in_place(params, optimizer_state), metrics | {"critic/lr": rate}


def _in_place(*trees):
    """Left to itself the compiler splits what the table repeats, and the next call would be another program."""
    return constrain_tree(trees, TRAIN_RULES)


@dataclasses.dataclass(frozen=True)
class Role:
    """How one role learns.

    Attributes:
      name: actor or critic, the config's section.
      objective: of objectives.py, and `metrics`, the names of what it reports.
      aggregation: of kernels.losses.AGGREGATIONS.
      target_kl: passed 1.5 times over, no more optimizer steps are taken on this rollout; None: never.
      base: frozen, what the role's parameters stand on where they are adapters.
    """

    name: str
    config: Config
    nets: Networks
    objective: Callable
    metrics: tuple[str, ...]
    aggregation: str
    target_kl: float | None = None
    base: dict | None = None

    def train(
        self,
        params,
        optimizer_state,
        rate,
        learns,
        context,
        experience: Experience,
        batches: MiniBatches,
    ):
        """All optimizer steps on one rollout: (parameters, optimizer state, metrics)."""
        options = getattr(self.config, self.name)
        transform = make_optimizer(options.optim, options.grad_clip)

        def mini_batch(carry, batch):
            params, optimizer_state, near = carry
            # Past the target, or where all samples are left out, there is nothing to do: no micro-batch is run.
            done = near & jnp.any(_learned_tokens(experience, batch) > 0)
            batch = dataclasses.replace(batch, counts=jnp.where(done, batch.counts, 0))
            gradients, metrics = self.gradients(params, context, experience, batch)
            if self.target_kl is not None:
                near &= metrics["actor/approx_kl"] <= TOO_FAR * self.target_kl
            params, optimizer_state, norm, finite = descend(
                transform, params, optimizer_state, gradients, rate, learns & near & done
            )
            metrics |= {
                f"{self.name}/grad_norm": norm,
                f"{self.name}/skipped": (~finite).astype(jnp.float32),
            }
            return (params, optimizer_state, near), (metrics, done, near & done)

        start = (params, optimizer_state, jnp.bool_(True))
        (params, optimizer_state, _), (metrics_U, done_U, taken_U) = jax.lax.scan(
            mini_batch, start, batches
        )
        metrics = self._over_steps(metrics_U, done_U)
        if self.target_kl is not None:
            metrics["actor/steps_taken"] = jnp.sum(taken_U)
        return params, optimizer_state, metrics

    def gradients(self, params, context, experience: Experience, batch: MiniBatches):
        """Gradients and metrics of one mini-batch (without the leading U), summed over its micro-batches, in float32."""
        counts_B = _learned_tokens(experience, batch)
        scale = self.config.actor.loss_scale_factor or self.config.data.max_response_length
        loss_B = losses.loss_weights(counts_B, self.aggregation, scale)
        mean_B = losses.loss_weights(counts_B, "token-mean")

        def micro_batch(i, carry):
            rows = packing_lib.gather(
                experience.sequences, jax.tree.map(lambda x: constrain_rows(x[i]), batch.packing)
            )
            weights = objectives.Weights(
                *(jnp.where(rows.mask, w[rows.samples], 0) for w in (loss_B, mean_B))
            )

            def objective(learned):
                everything = full_parameters(getattr(self.nets, self.name), learned, self.base)
                return self.objective(
                    self.config, self.nets, everything, context, rows, experience, weights
                )

            grads, metrics = jax.grad(objective, has_aux=True)(params)
            total, totals = carry
            return jax.tree.map(jnp.add, total, grads), {
                k: _folding(k)[1](totals[k], metrics[k]) for k in totals
            }

        zeros = jax.tree.map(jnp.zeros_like, params)
        start = {name: jnp.float32(_folding(name)[0]) for name in self.metrics}
        return jax.lax.fori_loop(0, batch.counts, micro_batch, (zeros, start))

    def _over_steps(self, metrics_U, done_U):
        """One figure a metric from the optimizer steps that were done; NaN where none was."""
        none_done, reduced = ~jnp.any(done_U), {}
        for name, x in metrics_U.items():
            start, _, reduce = _folding(name)
            reduced[name] = reduce(x, where=done_U, initial=start)
            if reduce is jnp.sum and not name.endswith("/skipped"):
                reduced[name] /= jnp.sum(done_U)
        if (
            self.name == "actor"
        ):  # near 0 where the old log-probs are right; 0 where those differentiated stand for them
            reduced["actor/first_log_ratio"] = metrics_U["actor/log_ratio_max"][jnp.argmax(done_U)]
        return {
            name: x if name.endswith("/skipped") else jnp.where(none_done, jnp.nan, x)
            for name, x in reduced.items()
        }


def actor_role(config: Config, nets: Networks, base: dict | None = None) -> Role:
    """With a shared trunk the role is both: actor and critic learn in the same optimizer steps."""
    options, objective, metrics = config.actor, objectives.actor_loss, objectives.ACTOR_METRICS
    if config.shares_trunk:
        objective, metrics = objectives.shared_loss, metrics + objectives.CRITIC_METRICS
    return Role(
        "actor", config, nets, objective, metrics, options.loss_agg_mode, options.target_kl, base
    )


def critic_role(config: Config, nets: Networks, base: dict | None = None) -> Role:
    return Role(
        "critic",
        config,
        nets,
        objectives.critic_loss,
        objectives.CRITIC_METRICS,
        config.critic.loss_agg_mode or config.actor.loss_agg_mode,
        base=base,
    )


def _learned_tokens(experience: Experience, batch: MiniBatches) -> jax.Array:
    """Return the number of action tokens of each sample that a mini-batch learns from, int32 [B]."""
    members_B = batch.members & experience.kept
    return jnp.where(members_B, experience.action_mask.sum(1), 0)


def _folding(name):
    """What a metric starts from, how two shares of it join, and how a list of it is reduced."""
    folding = {"_min": (jnp.inf, jnp.minimum, jnp.min), "_max": (-jnp.inf, jnp.maximum, jnp.max)}
    return folding.get(name[-4:], (0.0, jnp.add, jnp.sum))
