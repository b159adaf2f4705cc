"""Held-out evaluation: sample, score with the rules and the reward model, average."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jax_ppo.data import prompt_batches
from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.ppo import forward_passes
from jax_ppo.ppo.mini_batches import sample_lengths
from jax_ppo.ppo.rewarding import RuleRewards, mean_of_known
from jax_ppo.run import critic_quality
from jax_ppo.run.evaluation_statistics import describe_prompts
from jax_ppo.run.life_cycle import EvaluationFailed
from jax_ppo.run.parts import PPORun
from jax_ppo.run.sample_reports import describe_samples
from jax_ppo.runtime import heartbeat, placement
from jax_ppo.runtime.devices import release_freed_memory
from jax_ppo.training.random_streams import Stream
from jax_ppo.training.state import TrainState
from jax_ppo.types import Rollout, with_nan

# Rollout, scores [B], correct [B], records of all samples
Responses = tuple[Rollout, np.ndarray, np.ndarray, list[dict[str, Any]]]
Respond = Callable[[PromptBatch, int], Responses]  # takes a batch, the index of its first sample


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Averages over all held-out prompts and their responses."""

    accuracy: float | None  # share of correct answers, 0..1; `None` if the rules do not define it
    reward_mean: float  # the mean reward, of rules and reward model
    length_mean: float  # tokens per response
    figures: dict[str, float]  # of `evaluation_statistics.describe_prompts` and the environment
    records: list[dict[str, Any]]  # all responses, those to a prompt adjacent: see `sample_reports`
    responses_per_prompt: int
    failures: int = 0  # responses that the rule failed on: not in the accuracy
    scored: int = 0  # responses that were scored


@heartbeat.activity("preparing the evaluation")
def evaluate_policy(
    run: PPORun, state: TrainState, before_batch: Callable[[], None] = lambda: None
) -> Evaluation:
    """Evaluate the policy on the held-out prompts, sampled as `rollout.val_kwargs` says.

    The random draws are the same at every step, so that only the policy makes a difference.
    `before_batch` is called before each batch; it may raise to end the evaluation. Raise
    `EvaluationFailed` if the reward function failed on every response.
    """
    rewards_of_batches: list[RuleRewards] = []
    predictions: list[critic_quality.Predictions] = []
    forward = run.step_options.forward
    has_critic = forward.values and (state.critic is not None or forward.shared_trunk)
    algorithm = run.config.algorithm
    measures_critic = has_critic and critic_quality.knows_rewards(algorithm, state.control)
    key = run.sample_keys(Stream.EVALUATION, 0)
    address = {"seed": run.config.seed, "stream": "evaluation", "step": 0}

    def respond(batch: PromptBatch, first: int) -> Responses:
        before_batch()
        activity.update(f"batch {len(rewards_of_batches) + 1}")
        prompts = run.place_prompts(batch.prompts)
        rollout = run.engine.generate(prompts, key, run.held_out_sampling, first)
        rule_rewards = run.rules.score(batch, rollout)
        rewards_of_batches.append(rule_rewards)
        # Whole responses: with the reward model's scores, without rewards within the responses.
        rewards = response_rewards(run, state, batch, rollout, rule_rewards)
        if measures_critic:
            predictions.append(
                critic_quality.predict_returns(run, state, batch, rollout, rule_rewards, rewards)
            )
        if rule_rewards.steps is not None:
            rewards = rewards + rule_rewards.steps.sum(1)
        scores = placement.to_host(rewards)
        correct = with_nan(placement.to_host(rule_rewards.correct))
        every, start = range(len(scores)), address | {"sample": first}
        records = describe_samples(
            every, batch, rollout, scores, rule_rewards, run.tokenizer, start
        )
        return rollout, scores, correct, records

    assert run.held_out is not None, "there are no validation files"
    batches = prompt_batches.evaluation_batches(run.held_out, run.config.data.val_batch_size)
    release_freed_memory(state)
    run.engine.update_weights(run.policy_params(state))
    try:
        with heartbeat.activity("evaluation") as activity:
            evaluation = evaluate_batches(batches, respond)
    finally:
        run.engine.release_weights()
    critic = critic_quality.describe_critic(predictions) if predictions else {}
    figures = {f"critic/{name}": value for name, value in critic.items()}
    evaluation = dataclasses.replace(evaluation, figures=evaluation.figures | figures)
    return count_failures(evaluation, rewards_of_batches)


def count_failures(evaluation: Evaluation, rewards: Sequence[RuleRewards]) -> Evaluation:
    """Return the evaluation with the failures in the rewards of its batches.

    Raise `EvaluationFailed`, a `UserError`, if the reward function failed on every response.
    """
    failures, scored = sum(x.failures for x in rewards), sum(x.scored for x in rewards)
    if failures and failures == scored:
        first = next((x.first_failure for x in rewards if x.first_failure), "")
        sample, _, cause = first.partition("\n")
        raise EvaluationFailed(
            f"the reward function failed on all {scored} responses of the evaluation. The first "
            f"failure was {sample}",
            details=cause,
        )
    return dataclasses.replace(evaluation, failures=failures, scored=scored)


def evaluate_batches(batches: Iterable[PromptBatch], respond: Respond) -> Evaluation:
    """Return the averages over the real rows of batches of one size.

    `respond` samples and scores the responses to a batch, for the rows of all processes; `correct`
    is NaN where it is undefined, and the records hold `answer`.
    """
    scores, correct, lengths = [], [], []
    sources: list[str] = []
    records: list[dict[str, Any]] = []
    metrics = collections.defaultdict[str, list[np.ndarray]](list)
    n = 1
    first_sample = 0
    for batch in batches:
        rollout, batch_scores, batch_correct, batch_records = respond(batch, first_sample)
        # The last batch is filled up with repeated prompts; samples of a prompt are adjacent.
        n = len(batch_scores) // len(batch.examples)
        num_real = n * batch.count
        sources += [example.data_source for example in batch.examples[: batch.count]]
        scores.append(batch_scores[:num_real])
        correct.append(batch_correct[:num_real])
        lengths.append(placement.to_host(rollout.lengths)[:num_real])
        records += batch_records[:num_real]
        for name, values in (rollout.environment_metrics or {}).items():
            metrics[f"environment/{name}"].append(with_nan(placement.to_host(values)[:num_real]))
        # A sample's random numbers follow from its index over all batches.
        first_sample += len(batch_scores)
    all_scores, all_correct = np.concatenate(scores), np.concatenate(correct)
    defined_correct = all_correct[~np.isnan(all_correct)]
    answers = np.array([record.get("answer") for record in records], object)
    figures = describe_prompts(
        all_scores.reshape(-1, n), all_correct.reshape(-1, n), answers.reshape(-1, n), sources
    )
    means = {name: mean_of_known(np.concatenate(values)) for name, values in metrics.items()}
    return Evaluation(
        accuracy=float(defined_correct.mean()) if len(defined_correct) else None,
        reward_mean=float(all_scores.mean()),
        length_mean=float(np.concatenate(lengths).mean()),
        figures=figures | {name: mean for name, mean in means.items() if not np.isnan(mean)},
        records=records,
        responses_per_prompt=n,
    )


def response_rewards(
    run: PPORun, state: TrainState, batch: PromptBatch, rollout: Rollout, rule_rewards: RuleRewards
) -> jax.Array:
    """Return the rewards [B] of responses that are not trained on: rules' and reward model's."""
    if run.nets.reward is None:
        return rule_rewards.scores
    rows = rule_rewards.model_inputs
    if rows is None:
        sequences = forward_passes.join_sequences(rollout, run.config.sequence_length)
        rows = (sequences, run.packer.pack_rows(sample_lengths(batch, rollout)))
    return run.rules.add_model_scores(run.nets, state, rule_rewards, rows)
