"""How well the critic predicts the returns of held-out responses, by position and by value.

The return of a token is the discounted sum of the rewards from it on, as the update shapes them
(normalized, with the KL penalty if it is part of the reward). It has lambda 1 and does not
bootstrap from the critic, so that no value is among its own targets.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.config.schema import Algorithm
from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.kernels.masked_statistics import ROUNDING, moments_std
from jax_ppo.ppo.experience import estimate_experience
from jax_ppo.ppo.reward_shaping import EarnedRewards
from jax_ppo.ppo.rewarding import RuleRewards
from jax_ppo.run.parts import PPORun
from jax_ppo.runtime import placement
from jax_ppo.training.state import TrainState
from jax_ppo.types import Control, Rollout

PARTS = 10  # of a response, and of the predicted values


class Predictions(NamedTuple):
    """Values and returns [N] of the tokens that the policy chose, in units of reward."""

    values: np.ndarray
    returns: np.ndarray
    tenths: np.ndarray  # the tenth of its response that a token is in, 0..9


def predict_returns(
    run: PPORun,
    state: TrainState,
    batch: PromptBatch,
    rollout: Rollout,
    rule_rewards: RuleRewards,
    rewards: jax.Array,
) -> Predictions:
    """Return the critic's predictions for the responses to the real prompts of a batch.

    The rewards must be those of the update: see `knows_rewards`.
    `rewards` [B] are of whole responses; of `rule_rewards`, only rewards within them are read.
    """
    options = run.step_options
    # The sampler's log-probs are at the temperature of evaluations.
    changes = {"old_logprobs": True}
    if not (options.experience.algorithm.use_kl_in_reward or options.forward.teacher):
        # Only a KL in the reward needs more than values.
        changes = dict.fromkeys(("old_logprobs", "reference", "full_kl"), False)
    sequences, outputs = run.run_forward_passes(state, batch, rollout, **changes)
    assert outputs.values is not None, "there is a critic"
    values, moments = outputs.values, state.control.moments.get("returns")
    if moments is not None:  # the critic predicts normalized returns
        values = moments.mean + moments_std(moments) * values
    algorithm = dataclasses.replace(
        options.experience.algorithm,
        critic_lam=1.0,
        lam_length_alpha=None,
        bootstrap_truncated=False,
    )
    # By the moments of the training so far: these responses are not added to them.
    reward = dataclasses.replace(options.experience.reward, normalize="none")
    experience, _ = estimate_experience(
        dataclasses.replace(
            options.experience, algorithm=algorithm, reward=reward, normalizes_values=False
        ),
        state.control,
        sequences,
        rollout.logprobs,
        # With values of 0 the sums of rewards are not rounded by them.
        dataclasses.replace(outputs, values=jnp.zeros_like(values)),
        EarnedRewards(rewards, rule_rewards.steps),
    )
    assert experience.returns is not None, "there is a critic"
    learned = sequences.action_mask if experience.value_mask is None else experience.value_mask
    num_real = len(rewards) // len(batch.examples) * batch.count
    arrays = (values, experience.returns, learned)
    return collect_predictions(*(placement.to_host(x)[:num_real] for x in arrays))


def knows_rewards(algorithm: Algorithm, control: Control) -> bool:
    """Return whether the rewards of held-out responses can be shaped as the update shapes them.

    Whitened rewards depend on a whole rollout, a KL needs its reference, and normalized rewards
    moments that have seen one.
    """
    moments = control.moments.get("rewards")
    has_penalty = algorithm.use_reference or not algorithm.use_kl_in_reward
    is_known = moments is None or float(moments.count) > 0
    return is_known and has_penalty and not algorithm.whiten_rewards


def collect_predictions(
    values: np.ndarray, returns: np.ndarray, actions: np.ndarray
) -> Predictions:
    """Return the predictions at the tokens of a mask, from arrays [B, T]."""
    places = np.cumsum(actions, axis=1) - 1
    lengths = np.maximum(actions.sum(axis=1, keepdims=True), 1)
    tenths = PARTS * places // lengths
    return Predictions(values[actions], returns[actions], tenths[actions])


def describe_critic(batches: Sequence[Predictions]) -> dict[str, float]:
    """Return the figures of an evaluation by name, from the predictions of its batches.

    They are, over all tokens and over each tenth of the responses (explained_variance_tenth_1 and
    so on), explained_variance (1 - Var[G - V] / Var[G]; 0 where all returns G are equal), bias (the
    mean of V - G) and error (the root of the mean square of V - G). For the calibration, tokens are
    sorted by their values into ten bins of equal size: value_bin_1 to return_bin_10 are the means
    of each bin, and calibration_error is the mean distance of the two.
    """
    predictions = Predictions(*map(np.concatenate, zip(*batches, strict=True)))
    if not len(predictions.values):
        return {}
    figures = _describe_tokens(predictions.values, predictions.returns)
    for tenth in range(PARTS):
        chosen = predictions.tenths == tenth
        if chosen.any():
            part = _describe_tokens(predictions.values[chosen], predictions.returns[chosen])
            figures |= {f"{name}_tenth_{tenth + 1}": value for name, value in part.items()}
    # Shuffled, so that equal values fall into bins whatever their responses.
    shuffled = np.random.default_rng(0).permutation(len(predictions.values))
    order = shuffled[np.argsort(predictions.values[shuffled], kind="stable")]
    bins = np.array_split(order, PARTS)
    distances = []
    for number, rows in enumerate(bins, start=1):
        if len(rows):
            value, mean_return = predictions.values[rows].mean(), predictions.returns[rows].mean()
            figures[f"value_bin_{number}"] = float(value)
            figures[f"return_bin_{number}"] = float(mean_return)
            distances.append(abs(value - mean_return))
    return figures | {"calibration_error": float(np.mean(distances))}


def _describe_tokens(values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
    errors = values.astype(np.float64) - returns
    explained = 0.0
    if np.ptp(returns) > ROUNDING * np.abs([values, returns]).max():
        explained = float(1 - errors.var() / returns.var(dtype=np.float64))
    return {
        "explained_variance": explained,
        "bias": float(errors.mean()),
        "error": float(np.sqrt(np.square(errors).mean())),
    }
