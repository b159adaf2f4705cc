"""Experience → new TrainState: every epoch, mini-batch and micro-batch in one compiled, donated call.

Actor and critic take the same mini-batches. Each token's weight in a loss is fixed by its whole mini-batch before anything is
cut into micro-batches or spread over devices, so that neither changes the gradient.
"""

import functools

import jax
import jax.numpy as jnp

from jax_ppo import packing as packing_lib
from jax_ppo import state as state_lib
from jax_ppo.kernels import kl, losses
from jax_ppo.schema import Config
from jax_ppo.scoring import actor_logprobs, critic_values, reuses_logprobs
from jax_ppo.sharding import TRAIN_RULES, constrain_rows, constrain_tree
from jax_ppo.state import Networks, TrainState
from jax_ppo.types import Experience, Packing


@functools.partial(jax.jit, static_argnames=("config", "nets", "total_steps"), donate_argnames=("state",))
def update(config: Config, nets: Networks, total_steps: int, state: TrainState, experience: Experience, plan: Packing,
           micro_batches_U, members_UxB) -> tuple[TrainState, dict]:
    """Trains actor and critic on one rollout.

    Args:
      config: static; actor.*, critic.*, algorithm.kl_ctrl and trainer.critic_warmup are read.
      total_steps: steps of the whole run, which the learning rates' schedules end with.
      state: donated.
      plan: Packing [U, A, R, L] of the U = epochs x mini-batches optimizer steps, in their order.
      micro_batches_U: int32 [U], how many of the A micro-batches hold something.
      members_UxB: bool [U, B], the samples of each mini-batch.

    Returns:
      the new state, and metrics: scalars on the mesh, means over the U optimizer steps; extremes for *_min and *_max, the sum
      for update/skipped. In the critic's warm-up the actor's metrics are those of the step that it did not take.
    """
    warmup = config.trainer.critic_warmup
    actor_rate = state_lib.learning_rate(config.actor.optim, jnp.maximum(state.step - warmup, 0), total_steps - warmup)
    critic_rate = state_lib.learning_rate(config.critic.optim, state.step, total_steps)
    actor_learns = state.step >= warmup

    def mini_batch(trained, inputs):
        packing, count, members = inputs
        actor, critic, actor_optimizer, critic_optimizer = trained
        lengths = jnp.where(members, experience.sequences.lengths, 0)
        gradients, metrics = _gradients(config, nets, (actor, critic), experience, packing, count, lengths)
        actor, actor_optimizer, actor_norm, actor_finite = state_lib.descend(
            state_lib.optimizer(config.actor.optim, config.actor.grad_clip), actor, actor_optimizer, gradients[0],
            actor_rate, actor_learns)
        critic, critic_optimizer, critic_norm, critic_finite = state_lib.descend(
            state_lib.optimizer(config.critic.optim, config.critic.grad_clip), critic, critic_optimizer, gradients[1],
            critic_rate)
        metrics |= {"actor/grad_norm": actor_norm, "critic/grad_norm": critic_norm,
                    "update/skipped": (~actor_finite).astype(jnp.float32) + (~critic_finite).astype(jnp.float32)}
        return (actor, critic, actor_optimizer, critic_optimizer), metrics

    trained = (state.actor, state.critic, state.actor_optimizer, state.critic_optimizer)
    trained, metrics = jax.lax.scan(mini_batch, trained, (plan, micro_batches_U, members_UxB))
    # Left to itself the compiler splits what the table repeats, and the next call would be another program.
    actor, critic, actor_optimizer, critic_optimizer = constrain_tree(trained, TRAIN_RULES)
    kl_coef = state.kl_coef
    if config.algorithm.kl_ctrl.type == "adaptive":
        control = config.algorithm.kl_ctrl
        moved = kl.adaptive_kl_coef(kl_coef, experience.kl, control.target_kl, control.horizon, members_UxB.shape[1])
        kl_coef = jnp.where(jnp.isfinite(moved), moved, kl_coef)  # one broken rollout must not break all that follow
    new_state = TrainState(state.step + 1, actor, critic, state.reference, state.reward, actor_optimizer, critic_optimizer,
                           kl_coef)
    rates = {"actor/lr": jnp.where(actor_learns, actor_rate, 0.0), "critic/lr": critic_rate}
    return new_state, _over_steps(metrics) | rates


def _gradients(config, nets, params, experience, plan, micro_batches, lengths_B):
    """Sums gradients (of actor, of critic) and metrics of one mini-batch over its micro-batches, in float32."""
    weights_B = losses.loss_weights(lengths_B, config.actor.loss_agg_mode)
    token_mean_B = losses.loss_weights(lengths_B, "token-mean")

    def micro_batch(i, carry):
        rows = packing_lib.gather(experience.sequences, jax.tree.map(lambda x: constrain_rows(x[i]), plan))
        weights, token_mean = (jnp.where(rows.mask, w[rows.samples], 0) for w in (weights_B, token_mean_B))

        def loss(params):
            actor, critic = params
            of_actor, actor_metrics = _actor_loss(config, nets.actor, actor, rows, experience, weights, token_mean)
            of_critic, critic_metrics = _critic_loss(config, nets.critic, critic, rows, experience, token_mean)
            return of_actor + of_critic, actor_metrics | critic_metrics

        gradients, metrics = jax.grad(loss, has_aux=True)(params)
        combined = {name: _combine(name)(carry[1][name], metrics[name]) for name in _START}
        return jax.tree.map(jnp.add, carry[0], gradients), combined

    return jax.lax.fori_loop(0, micro_batches, micro_batch, (jax.tree.map(jnp.zeros_like, params), _START))


def _actor_loss(config, model, params, rows, experience, weights, token_mean):
    """The actor's share of the mini-batch's loss that these rows bear, and of its metrics; both add up over rows."""
    options = config.actor
    advantages = packing_lib.to_rows(experience.advantages, rows)
    logprobs, entropy = actor_logprobs(model, params, rows, config.rollout.temperature)
    if config.updates_once and reuses_logprobs(config):
        old = jax.lax.stop_gradient(logprobs)  # the same policy: a ratio of 1, whatever the sampler's program rounds otherwise
    else:
        old = packing_lib.to_rows(experience.old_logprobs, rows)
    low = options.clip_ratio if options.clip_ratio_low is None else options.clip_ratio_low
    high = options.clip_ratio if options.clip_ratio_high is None else options.clip_ratio_high
    policy = losses.policy_loss(logprobs, old, advantages, rows.mask, low, high, options.clip_ratio_c or None)
    if not options.entropy_coeff:
        entropy = jax.lax.stop_gradient(entropy)  # a factor of 0 alone would not spare its backward pass
    importance = 1 if experience.importance is None else packing_lib.to_rows(experience.importance, rows)
    policy_loss = jnp.sum(weights * importance * policy.loss)
    entropy_bonus = jnp.sum(weights * entropy)
    kl_loss = jnp.float32(0)
    if options.use_kl_loss:
        reference = packing_lib.to_rows(experience.ref_logprobs, rows)
        kl_loss = jnp.sum(weights * kl.kl_estimate(logprobs, reference, rows.mask, options.kl_loss_type))
    loss = policy_loss + options.kl_loss_coef * kl_loss - options.entropy_coeff * entropy_bonus

    def mean(x):
        return jnp.sum(token_mean * x)

    return loss, {
        "actor/loss": loss, "actor/pg_loss": policy_loss, "actor/kl_loss": kl_loss, "actor/entropy": mean(entropy),
        # Schulman's k3 of the step itself: non-negative, 0 while the policy has not moved.
        "actor/approx_kl": mean(policy.ratio - 1 - policy.log_ratio),
        "actor/ratio_mean": mean(policy.ratio),
        "actor/ratio_min": jnp.where(rows.mask, policy.ratio, jnp.inf).min(),
        "actor/ratio_max": jnp.where(rows.mask, policy.ratio, -jnp.inf).max(),
        "actor/log_ratio_max": jnp.abs(policy.log_ratio).max(),
        "actor/clip_fraction": mean(policy.clipped), "actor/dual_clip_fraction": mean(policy.dual_clipped),
    }


def _critic_loss(config, model, params, rows, experience, token_mean):
    """The critic's share of the mini-batch's loss that these rows bear, and of its metrics."""
    old = packing_lib.to_rows(experience.values, rows)
    returns = packing_lib.to_rows(experience.returns, rows)
    values = critic_values(model, params, rows)
    value = losses.value_loss(values, old, returns, rows.mask, config.critic.cliprange_value or None)
    loss = config.critic.value_loss_coef * jnp.sum(token_mean * value.loss)
    return loss, {"critic/loss": loss, "critic/clip_fraction": jnp.sum(token_mean * value.clipped)}


def _combine(name):
    return jnp.minimum if name.endswith("_min") else jnp.maximum if name.endswith("_max") else jnp.add


_START = {name: {"_min": jnp.inf, "_max": -jnp.inf}.get(name[-4:], 0.0) for name in (
    "actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/approx_kl", "actor/ratio_mean", "actor/ratio_min",
    "actor/ratio_max", "actor/log_ratio_max", "actor/clip_fraction", "actor/dual_clip_fraction", "critic/loss",
    "critic/clip_fraction")}


def _over_steps(metrics_U):
    """One figure a metric from the U optimizer steps, and the first one's largest |log ratio|, which must be near 0."""
    first = {"actor/first_log_ratio": metrics_U["actor/log_ratio_max"][0]}
    total = {"update/loss": jnp.mean(metrics_U["actor/loss"] + metrics_U["critic/loss"])}
    reduce = {"_min": jnp.min, "_max": jnp.max}
    reduced = {name: reduce.get(name[-4:], jnp.mean)(x) for name, x in metrics_U.items()}
    return reduced | first | total | {"update/skipped": metrics_U["update/skipped"].sum()}
