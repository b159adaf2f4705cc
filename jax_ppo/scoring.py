"""Rollout and rewards → Experience: log-probs of the policy and of the reference, values, shaped rewards, advantages.

`actor_logprobs` and `critic_values` are the one way from parameters to numbers: the update differentiates the same functions,
which is what makes the first mini-batch's ratio 1.
"""

import functools

import jax
import jax.numpy as jnp

from jax_ppo import packing as packing_lib
from jax_ppo.kernels import advantages as advantages_lib
from jax_ppo.kernels import importance, kl, logprobs, masked
from jax_ppo.models import heads
from jax_ppo.models.transformer import Transformer
from jax_ppo.schema import Config
from jax_ppo.sharding import constrain_rows, split_by_device
from jax_ppo.state import Networks, TrainState
from jax_ppo.types import Experience, Packing, Rollout, Sequences, pytree


def actor_logprobs(model: Transformer, params, rows: packing_lib.Rows, temperature: float, with_entropy: bool = True):
    """Log-prob of each target and entropy of its distribution at the sampling temperature, float32 [R, L], 0 off the mask."""
    hidden, _ = model.apply({"params": params}, rows.tokens, rows.positions, rows.segments)
    hidden, targets, mask = (split_by_device(x) for x in (hidden, rows.targets, rows.mask))
    values, entropy = logprobs.token_logprobs(hidden, heads.unembedding(params), targets, mask, temperature,
                                              with_entropy=with_entropy)
    return values.reshape(rows.mask.shape), entropy.reshape(rows.mask.shape) if with_entropy else None


def critic_values(model: Transformer, params, rows: packing_lib.Rows):
    """Value of the state before each target, float32 [R, L], 0 off the mask."""
    hidden, _ = model.apply({"params": params}, rows.tokens, rows.positions, rows.segments)
    return masked.zero_outside(heads.scalars(params, hidden), rows.mask)


@pytree
class Scores:
    """What the frozen passes over a rollout give; [B, T] float32, 0 past the length.

    Attributes:
      old_logprobs: of the policy that the update starts from; None where the sampler's own serve (reuses_logprobs).
      values: of the critic.
      ref_logprobs: of the reference; None without one.
    """

    old_logprobs: jax.Array | None
    values: jax.Array
    ref_logprobs: jax.Array | None


@functools.partial(jax.jit, static_argnames=("length",))
def join(rollout: Rollout, length: int) -> Sequences:
    """Prompt and response without the gap between them. `length`: S, columns of the result."""
    column = jnp.arange(length)
    prompts, lengths = rollout.prompts.lengths[:, None], rollout.lengths[:, None]

    def pick(tokens, index):
        return jnp.take_along_axis(tokens, jnp.clip(index, 0, tokens.shape[1] - 1), axis=1)

    from_prompt = pick(rollout.prompts.tokens, jnp.broadcast_to(column, (prompts.shape[0], length)))
    from_response = pick(rollout.responses, column - prompts)
    tokens = jnp.where(column < prompts, from_prompt, jnp.where(column < prompts + lengths, from_response, 0))
    return Sequences(tokens, rollout.prompts.lengths, rollout.lengths)


def reuses_logprobs(config: Config) -> bool:
    """Whether the sampler's log-probs serve as the old policy's, so that its pass over the rollout is spared.

    In float32 the two differ by 1e-6 on CPU; elsewhere products of float32 are rounded to fewer bits, and differently from
    program to program. Where a rollout is learned from in one optimizer step the update takes the old log-probs to be those it
    differentiates (their ratio is 1), and the sampler's are no more than a figure to report, unless the reward has a KL.
    """
    if config.algorithm.rollout_is != "none":
        return False  # it is what importance weights compare the sampler's with
    exact = config.model.dtype == "float32" and jax.default_backend() == "cpu"
    unused = config.updates_once and not config.algorithm.use_kl_in_reward
    return config.rollout.reuse_logprobs == "always" or (config.rollout.reuse_logprobs == "auto" and (exact or unused))


@functools.partial(jax.jit, static_argnames=("config", "nets"))
def score(config: Config, nets: Networks, state: TrainState, sequences: Sequences, plan: Packing, micro_batches) -> Scores:
    """Runs critic, reference and, where its log-probs are wanted, actor over packed rows, a micro-batch at a time.

    Args:
      plan: Packing [A, R, L].
      micro_batches: int32 scalar, how many of the A hold something.
    """
    temperature = config.rollout.temperature
    zeros = jnp.zeros((len(sequences.lengths), config.data.max_response_length), jnp.float32)
    first = Scores(None if reuses_logprobs(config) else zeros, zeros, None if state.reference is None else zeros)

    def policy_logprobs(params, rows, into):
        if into is None:
            return None
        logprobs_RxL, _ = actor_logprobs(nets.actor, params, rows, temperature, with_entropy=False)
        return packing_lib.to_samples(logprobs_RxL, rows, into)

    def micro_batch(i, scores):
        rows = packing_lib.gather(sequences, jax.tree.map(lambda x: constrain_rows(x[i]), plan))
        values = packing_lib.to_samples(critic_values(nets.critic, state.critic, rows), rows, scores.values)
        return Scores(policy_logprobs(state.actor, rows, scores.old_logprobs), values,
                      policy_logprobs(state.reference, rows, scores.ref_logprobs))

    return jax.lax.fori_loop(0, micro_batches, micro_batch, first)


@functools.partial(jax.jit, static_argnames=("model",))
def reward_model_scores(model: Transformer, params, sequences: Sequences, plan: Packing, micro_batches):
    """The reward model's scalar at each sample's last token, float32 [B]. Arguments as for `score`."""
    last = sequences.prompt_lengths + sequences.lengths - 1

    def micro_batch(i, scores_B):
        rows = packing_lib.gather(sequences, jax.tree.map(lambda x: constrain_rows(x[i]), plan))
        hidden, _ = model.apply({"params": params}, rows.tokens, rows.positions, rows.segments)
        ends = (rows.segments >= 0) & (rows.positions == last[rows.samples])
        outside = len(scores_B)  # dropped
        return scores_B.at[jnp.where(ends, rows.samples, outside)].set(heads.scalars(params, hidden), mode="drop")

    return jax.lax.fori_loop(0, micro_batches, micro_batch, jnp.zeros(len(last), jnp.float32))


@functools.partial(jax.jit, static_argnames=("config",))
def experience(config: Config, kl_coef, sequences: Sequences, scores: Scores, rewards_B,
               sampled_BxT) -> tuple[Experience, dict]:
    """Shapes the rewards and estimates advantages.

    r_t = [t is the last token] * reward - kl_coef * KL_t (Ziegler et al. 2019), then GAE (Schulman et
    al. 2016) on the raw values; the returns are taken before the advantages are whitened over the whole rollout.

    Args:
      kl_coef: float32 scalar, used if algorithm.use_kl_in_reward.
      rewards_B: float32 [B], the reward of each sample.
      sampled_BxT: float32 [B, T], Rollout.logprobs: the old log-probs where `scores` has none, else measured against them:
        the same numbers from another program, or those of older weights.

    Returns:
      the experience, and metrics: scalars on the mesh.
    """
    options = config.algorithm
    old_logprobs = sampled_BxT if scores.old_logprobs is None else scores.old_logprobs
    column = jnp.arange(scores.values.shape[1])
    mask = column < sequences.lengths[:, None]
    last = column == sequences.lengths[:, None] - 1
    token_rewards = jnp.where(last, rewards_B[:, None], 0.0)
    mean_kl = jnp.float32(0)
    if scores.ref_logprobs is not None:
        estimate = kl.kl_estimate(old_logprobs, scores.ref_logprobs, mask, options.kl_penalty)
        mean_kl = masked.masked_mean(estimate, mask)
        if options.use_kl_in_reward:
            token_rewards = token_rewards - kl_coef * estimate
    gae = jax.vmap(functools.partial(advantages_lib.gae, gamma=options.gamma, lam=options.lam))
    raw_advantages, returns = gae(token_rewards, scores.values, mask)
    advantages = masked.whiten(raw_advantages, mask) if options.whiten_advantages else raw_advantages
    metrics = {
        "reward/mean": rewards_B.mean(), "reward/std": rewards_B.std(),
        "reward/min": rewards_B.min(), "reward/max": rewards_B.max(),
        "reward/shaped_mean": masked.masked_sum(token_rewards, mask) / len(rewards_B),
        "kl/reference": mean_kl, "kl/coefficient": kl_coef,
        "critic/advantages_mean": masked.masked_mean(raw_advantages, mask),
        "critic/advantages_std": jnp.sqrt(masked.masked_variance(raw_advantages, mask)),
        "critic/returns_mean": masked.masked_mean(returns, mask),
        "critic/returns_std": jnp.sqrt(masked.masked_variance(returns, mask)),
        "critic/values_mean": masked.masked_mean(scores.values, mask),
        "critic/values_std": jnp.sqrt(masked.masked_variance(scores.values, mask)),
        "critic/explained_variance": masked.explained_variance(scores.values, returns, mask),
        "response_length/mean": sequences.lengths.mean(dtype=jnp.float32),
        "response_length/min": sequences.lengths.min(), "response_length/max": sequences.lengths.max(),
    }
    if scores.old_logprobs is not None:
        metrics["rollout/logprob_difference"] = masked.masked_mean(jnp.abs(sampled_BxT - old_logprobs), mask)
    weights = None
    if options.rollout_is != "none":
        threshold = options.rollout_is_threshold
        weights = importance.truncated_weights(old_logprobs, sampled_BxT, mask, options.rollout_is, threshold)
        metrics |= {"rollout/importance_mean": masked.masked_mean(weights, mask),
                    "rollout/importance_cut_share": masked.masked_mean((weights >= threshold).astype(jnp.float32), mask)}
    experience = Experience(sequences, old_logprobs, scores.ref_logprobs, scores.values, advantages, returns, weights, mean_kl)
    return experience, metrics
