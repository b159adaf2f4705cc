"""Advantages and returns of a rollout's tokens.

An estimator's parameters name its inputs. One that names arrays of a response ([T]: `rewards_T`,
`values_T`, `mask_T`, `starts_T`, where turns start, and `bootstrap_value`) is mapped over the
responses; others get whole arrays: `scores_B`, the sums of the responses' rewards; `n`, the number
of responses per prompt, which are adjacent; `rewards` [B, T], which include the KL penalty if there
is one, and are 0 where the policy did not choose the token; and `mask` [B, T], True where it did.

A user-defined estimator, `algorithm.adv_estimator=module:function`, works without a critic and gets
`rewards`, `mask` and `n`. Its further parameters name figures, [B] each: numbers that the reward
function returns with each response. It returns an advantage per response [B] or per token [B, T],
or that and a dict of scalars, which are logged as advantages/NAME.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jax_ppo.config import plugins
from jax_ppo.config.schema import Algorithm
from jax_ppo.errors import UserError
from jax_ppo.kernels.advantages import equalize_groups, length_adaptive_lam
from jax_ppo.kernels.masked_statistics import (
    Moments,
    explained_variance,
    is_constant,
    masked_max,
    masked_mean,
    masked_sum,
    masked_variance,
    moments_std,
    normalize_by_moments,
    update_moments,
    whiten,
    zero_outside,
)
from jax_ppo.ppo.forward_passes import ForwardOutputs
from jax_ppo.ppo.reward_shaping import Estimates, ExperienceOptions, Mask, Masks, Tokens
from jax_ppo.registries import ADVANTAGE_ESTIMATORS, inputs_named
from jax_ppo.training.learner import Metrics
from jax_ppo.types import Sequences

_GIVEN = ("rewards", "mask", "n")  # parameters of every user-defined estimator


def estimate_advantages(
    options: ExperienceOptions,
    token_rewards: Tokens,
    sequences: Sequences,
    masks: Masks,
    outputs: ForwardOutputs,
    return_moments: Moments | None,
    figures: Mapping[str, Float32[Array, " B"]],
) -> tuple[Estimates, Moments | None, Metrics]:
    """Return advantages and returns, the moments of returns with this step's, and metrics."""
    if options.has_critic:
        values, final_values = critic_values(options, sequences, outputs, return_moments)
        estimates = generalized_advantages(
            options.algorithm, token_rewards, values, final_values, masks
        )
        assert estimates.returns is not None
        metrics = critic_metrics(values, estimates.returns, learned_values(masks))
    else:
        advantages, metrics = critic_free_advantages(
            options.algorithm, options.responses_per_prompt, token_rewards, masks.actions, figures
        )
        estimates = Estimates(advantages, returns=None)
    metrics |= {
        "advantages/mean": masked_mean(estimates.advantages, masks.loss),
        "advantages/std": jnp.sqrt(masked_variance(estimates.advantages, masks.loss)),
    }
    if options.whitens_advantages:
        # Over the whole rollout, and only now: raw advantages have given the critic's targets.
        estimates = estimates._replace(
            advantages=whiten(estimates.advantages, masks.loss, size=estimates.size)
        )
    return *normalize_returns(options, estimates, masks, return_moments), metrics


def critic_values(
    options: ExperienceOptions,
    sequences: Sequences,
    outputs: ForwardOutputs,
    moments: Moments | None,
) -> tuple[Tokens, Float32[Array, " B"]]:
    """Return values in units of reward, and the value that each response bootstraps from.

    The latter is the final state's value for a truncated response if bootstrapping is configured,
    and 0 otherwise.
    """
    bootstraps = options.algorithm.bootstrap_truncated
    assert outputs.values is not None, "GAE needs a critic's values"
    values = outputs.values
    final_values = jnp.zeros(len(sequences.truncated), jnp.float32)
    if bootstraps:
        assert outputs.last_values is not None, "bootstrapping needs the final states' values"
        final_values = outputs.last_values
    # The critic predicts normalized returns; rewards are in another unit.
    if options.normalizes_values:
        assert moments is not None, "normalized values need the moments of returns"
        mean = moments.mean
        std = moments_std(moments)
        values = mean + std * values
        final_values = mean + std * final_values
    return values, jnp.where(sequences.truncated & bootstraps, final_values, 0.0)


def generalized_advantages(
    algorithm: Algorithm,
    token_rewards: Tokens,
    values: Tokens,
    final_values: Float32[Array, " B"],
    masks: Masks,
) -> Estimates:
    """Return advantages and returns by GAE; the returns may have other lambdas.

    Steps are actions or turns: other tokens neither discount nor end an episode.
    """
    entry = ADVANTAGE_ESTIMATORS[algorithm.adv_estimator]
    arguments = entry.read_arguments(algorithm)
    arrays = {
        "rewards_T": token_rewards,
        "values_T": values,
        "mask_T": masks.actions,
        "starts_T": masks.starts,
        "bootstrap_value": final_values,
    }
    lams: dict[str, jax.Array] = {}  # lambdas may differ from sample to sample
    for name in ("lam", "turn_lam"):
        if name in arguments:
            lams[name] = jnp.full(len(values), arguments.pop(name))

    def gae(lams: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return map_responses(entry.function, arrays | lams, arguments)

    actor_lams = critic_lams = lams
    if algorithm.lam_length_alpha is not None and entry.reads("lam"):
        lam = length_adaptive_lam(masks.actions.sum(1), algorithm.lam_length_alpha)
        actor_lams = lams | {"lam": lam}
    if algorithm.critic_lam is not None:
        critic_lams = dict.fromkeys(lams, jnp.full(len(values), algorithm.critic_lam))
    advantages, returns = gae(actor_lams)
    if critic_lams is not actor_lams:
        _, returns = gae(critic_lams)  # decoupled GAE: the critic's targets with another lambda
    terms = jnp.maximum(jnp.abs(token_rewards), jnp.abs(values))
    return Estimates(advantages, returns, masked_max(terms, masks.actions))


def learned_values(masks: Masks) -> Mask:
    """Return the tokens whose values the critic learns."""
    return masks.loss if masks.values is None else masks.values


def critic_metrics(values: Tokens, returns: Tokens, loss_mask: Mask) -> Metrics:
    """Return metrics of returns and values, in units of reward."""
    means_B = masked_mean(values, loss_mask, axis=1)
    within = masked_mean(jnp.square(values - means_B[:, None]), loss_mask)
    variance = masked_variance(values, loss_mask)
    share_within = within / jnp.where(variance > 0, variance, 1.0)
    return {
        "critic/returns_mean": masked_mean(returns, loss_mask),
        "critic/returns_std": jnp.sqrt(masked_variance(returns, loss_mask)),
        "critic/values_mean": masked_mean(values, loss_mask),
        "critic/values_std": jnp.sqrt(variance),
        "critic/values_within_responses": jnp.where(
            is_constant(values, loss_mask), 0.0, share_within
        ),
        "critic/explained_variance": explained_variance(values, returns, loss_mask),
    }


def map_responses(
    function: Callable[..., Any], arrays: Mapping[str, jax.Array], arguments: Mapping[str, Any]
) -> Any:
    """Call a function for each response, with the arrays that its parameters name."""
    named = inputs_named(function, arrays)
    return jax.vmap(lambda response: function(**response, **arguments))(named)


def load_estimator(name: str) -> Callable[..., Any]:
    """Return the estimator that the option names; raise `UserError` if it cannot be loaded."""
    if ":" not in name:
        return ADVANTAGE_ESTIMATORS[name].function
    return plugins.load_plugin(
        name,
        "algorithm.adv_estimator",
        _GIVEN,
        by_name=True,
        other_arguments=lambda f: (*_GIVEN, *plugins.further_parameters(f, _GIVEN)),
    )


def figures_read(name: str) -> tuple[str, ...]:
    """Return the names of the figures that the estimator which the option names asks for."""
    return plugins.further_parameters(load_estimator(name), _GIVEN) if ":" in name else ()


def critic_free_advantages(
    algorithm: Algorithm,
    n: int,
    token_rewards: Tokens,
    actions: Mask,
    figures: Mapping[str, Float32[Array, " B"]],
) -> tuple[Tokens, Metrics]:
    """Return advantages without a critic, 0 where the mask is, and metrics of a user's estimator.

    Raise `UserError` unless it returns one number per response or per token, and scalar metrics.
    """
    name = algorithm.adv_estimator
    function = load_estimator(name)
    arguments = ADVANTAGE_ESTIMATORS.lookup(name).read_arguments(algorithm)
    if missing := [figure for figure in figures_read(name) if figure not in figures]:
        raise UserError(
            f"config.algorithm.adv_estimator={name!r}: asks for {missing[0]!r}, a number that a "
            "reward function returns with each response; responses that are read from files or "
            "selected by their rewards have none"
        )
    of_response = {"rewards_T": token_rewards, "mask_T": actions}
    if inputs_named(function, of_response):
        result = map_responses(function, of_response, arguments)
    else:
        scores_B, sizes_B = (
            masked_sum(x, actions, axis=1) for x in (token_rewards, jnp.abs(token_rewards))
        )
        inputs = {
            "rewards": zero_outside(token_rewards, actions),
            "mask": actions,
            "scores_B": equalize_groups(scores_B, sizes_B, n),
            "n": n,
            **figures,
        }
        result = function(**inputs_named(function, inputs), **arguments)
    metrics: Metrics = {}
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        result, metrics = result
    for key, value in metrics.items():
        if np.shape(value) or key in ("mean", "std"):
            raise UserError(
                f"config.algorithm.adv_estimator={name!r}: its metric {key!r} has shape "
                f"{np.shape(value)}; expected a scalar, with another name than mean and std"
            )
    if np.shape(result) not in (actions.shape, actions.shape[:1]):
        raise UserError(
            f"config.algorithm.adv_estimator={name!r}: returned {plugins.describe_result(result)}; "
            f"expected one number per response, {actions.shape[:1]}, or per token, {actions.shape}"
        )
    # The advantage of a response holds at all of its tokens.
    per_token = jnp.reshape(result, (len(actions), -1))
    # A policy gradient takes advantages as constants.
    advantages = jax.lax.stop_gradient(jnp.asarray(per_token, jnp.float32))
    scalars = {f"advantages/{key}": jnp.float32(value) for key, value in metrics.items()}
    return jnp.where(actions, advantages, 0.0), scalars


def normalize_returns(
    options: ExperienceOptions, estimates: Estimates, masks: Masks, moments: Moments | None
) -> tuple[Estimates, Moments | None]:
    """Normalize the critic's targets by moments that include them, if configured."""
    if not options.normalizes_values:
        return estimates, moments
    assert moments is not None, "the moments of returns start with the first step's control"
    assert estimates.returns is not None, "only a critic has returns to normalize"
    # Moments that already include these returns: the first step has no others.
    returns, size = estimates.returns, estimates.size
    updated = update_moments(moments, returns, learned_values(masks), size)
    normalized = normalize_by_moments(returns, updated, size)
    learned = masks.actions if masks.values is None else masks.values
    return estimates._replace(returns=zero_outside(normalized, learned)), updated
