"""Held-out evaluation: sample, score with the rules and the reward model, average."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.errors import UserError
from jax_ppo.ppo import forward_passes
from jax_ppo.ppo.mini_batches import sample_lengths
from jax_ppo.ppo.reward_shaping import last_actions
from jax_ppo.ppo.rewarding import RuleRewards, add_reward_model_scores, mean_of_known
from jax_ppo.run import critic_quality
from jax_ppo.run.evaluation_statistics import describe_prompts
from jax_ppo.run.parts import PPORun
from jax_ppo.run.sample_records import describe_samples
from jax_ppo.runtime import heartbeat, placement, sharding
from jax_ppo.runtime.devices import release_freed_memory
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.training.random_streams import Stream
from jax_ppo.training.state import TrainState
from jax_ppo.types import Prompts, Rollout

# (prompts on the mesh, key, index of the first sample) -> rollout
SampleFunction = Callable[[Prompts, jax.Array, int], Rollout]
# (batch, rollout, index of the first sample) -> scores [B], correct [B], records of all samples
RewardFunction = Callable[[PromptBatch, Rollout, int], tuple[np.ndarray, np.ndarray, list[dict]]]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Averages over all held-out prompts and their responses.

    Attributes:
      accuracy: share of correct answers, 0..1; `None` if the rules do not define correctness.
      reward_mean: the mean reward, of rules and reward model.
      length_mean: tokens per response.
      figures: further statistics by name: see `evaluation_statistics.describe_prompts`; and the
        environment's metrics.
      records: all responses, those to a prompt one after the other: see `sample_records`.
      responses_per_prompt: how many.
      greedy: the same of one greedy response per prompt; `None` unless that was asked for.
      failures: responses that the rule failed on: they have the fallback score, and the accuracy
        does not count them.
      scored: all responses that were scored, among them those that fill up the last batch.
      first_failure: the first response of this process that the rule failed on and why.
    """

    accuracy: float | None
    reward_mean: float
    length_mean: float
    figures: dict[str, float]
    records: list[dict[str, Any]]
    responses_per_prompt: int
    greedy: "Evaluation | None" = None
    failures: int = 0
    scored: int = 0
    first_failure: str = ""

    def samples(self, count: int) -> list[dict[str, Any]]:
        """Return the records of the first responses to different prompts."""
        return self.records[:: self.responses_per_prompt][:count]


def evaluate_policy(
    run: PPORun,
    state: TrainState,
    before_batch: Callable[[], None] = lambda: None,
    rank_by: str = "none",
) -> Evaluation:
    """Evaluate the policy on the held-out prompts, sampled as `rollout.val_kwargs` says.

    With `rollout.val_kwargs.and_greedy`, the prompts are then answered greedily, too. The random
    draws are the same at every step, so that only the policy makes a difference.

    `before_batch` is called before each batch; it may raise an exception to end the evaluation.

    Raises:
      UserError: the reward function failed on every response.
    """
    sampling = run.held_out_sampling
    options = run.config.rollout.val_kwargs
    release_freed_memory(state)
    run.engine.update_weights(run.policy_params(state))
    try:
        evaluation = _evaluate_sampled(run, state, sampling, before_batch, rank_by)
        if not options.and_greedy or sampling.temperature == 0:
            return evaluation
        greedy = dataclasses.replace(sampling, temperature=0.0, n=1)
        return dataclasses.replace(
            evaluation, greedy=_evaluate_sampled(run, state, greedy, before_batch)
        )
    finally:
        run.engine.release_weights()


def _evaluate_sampled(
    run: PPORun,
    state: TrainState,
    sampling: SamplingOptions,
    before_batch: Callable[[], None],
    rank_by: str = "none",
) -> Evaluation:
    """Evaluate the weights that the engine holds; `sampling` says how responses are drawn."""

    def sample(prompts: Prompts, key: jax.Array, first_sample_index: int) -> Rollout:
        return run.engine.generate(prompts, key, sampling, first_sample_index)

    rewards_of_batches: list[RuleRewards] = []
    predictions: list[critic_quality.Predictions] = []
    forward = run.step_options.forward
    has_critic = forward.values and (state.critic is not None or forward.shared_trunk)
    # Once per evaluation: not again for its greedy pass.
    measures_critic = (
        has_critic
        and sampling is run.held_out_sampling
        and critic_quality.knows_unit_of_rewards(state.control)
    )

    def reward(
        batch: PromptBatch, rollout: Rollout, first_sample_index: int
    ) -> tuple[np.ndarray, np.ndarray, list[dict[str, Any]]]:
        activity.update(f"batch {len(rewards_of_batches) + 1}")
        rule_rewards = run.rules.score(batch, rollout)
        rewards_of_batches.append(rule_rewards)
        # Whole responses: with the reward model's scores, without rewards within the responses.
        rewards = response_rewards(run, state, batch, rollout, rule_rewards)
        if measures_critic:
            num_real = len(rewards) // len(batch.examples) * batch.count
            predictions.append(
                critic_quality.predict_returns(
                    run, state, batch, rollout, rule_rewards, rewards, num_real
                )
            )
        if rule_rewards.steps is not None:
            rewards = rewards + rule_rewards.steps.sum(1)
        scores = placement.to_host(rewards)
        correct = placement.to_host(rule_rewards.correct)
        address = {
            "seed": run.config.seed,
            "stream": "evaluation",
            "step": 0,
            "sample": first_sample_index,
        }
        records = describe_samples(
            range(len(scores)),
            batch,
            rollout,
            scores,
            correct,
            rule_rewards.answers,
            run.tokenizer,
            address,
        )
        if rank_by != "none":
            ranks = rank_responses(run, state, batch, rollout, rule_rewards, rank_by)
            for record, rank in zip(records, placement.to_host(ranks).tolist(), strict=True):
                record["rank"] = rank
        return scores, correct, records

    def batches() -> Iterator[PromptBatch]:
        for batch in run.held_out_batches():
            before_batch()
            yield batch

    with heartbeat.activity("evaluation") as activity:
        evaluation = evaluate(
            sample=sample,
            reward=reward,
            batches=batches(),
            mesh=run.mesh,
            key=run.sample_keys(Stream.EVALUATION, 0),
        )
    evaluation = with_failures(evaluation, rewards_of_batches)
    require_scores(evaluation)
    if not predictions:
        return evaluation
    critic = critic_quality.describe_critic(critic_quality.join_predictions(predictions))
    figures = {f"critic/{name}": value for name, value in critic.items()}
    return dataclasses.replace(evaluation, figures=evaluation.figures | figures)


def with_failures(evaluation: Evaluation, rewards: Sequence[RuleRewards]) -> Evaluation:
    """Return the evaluation with what the rewards of its batches say about failures."""
    causes = (batch.first_failure for batch in rewards if batch.first_failure)
    return dataclasses.replace(
        evaluation,
        failures=sum(batch.failures for batch in rewards),
        scored=sum(batch.scored for batch in rewards),
        first_failure=next(causes, ""),
    )


def require_scores(evaluation: Evaluation) -> None:
    """Raise `UserError` if the reward function failed on every response."""
    if evaluation.failures and evaluation.failures == evaluation.scored:
        sample, _, cause = evaluation.first_failure.partition("\n")
        raise UserError(
            f"the reward function failed on all {evaluation.scored} responses of the held-out "
            f"evaluation. The first failure was {sample}",
            details=cause,
        )


def evaluate(
    *,
    sample: SampleFunction,
    reward: RewardFunction,
    batches: Iterable[PromptBatch],
    mesh: Mesh,
    key: jax.Array,
) -> Evaluation:
    """Sample every batch and average over its real rows.

    Args:
      sample: samples responses.
      reward: scores them, for the rows of all processes; `correct` is NaN where it is undefined,
        and the records hold `answer`.
      batches: batches of one size; the first `count` prompts of each are real.
      mesh: the run's mesh.
      key: the same for every batch; samples differ by their index.
    """
    scores: list[np.ndarray] = []
    correct: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    sources: list[str] = []
    records: list[dict[str, Any]] = []
    metrics: dict[str, list[np.ndarray]] = {}
    n = 1
    first_sample_index = 0
    for batch in batches:
        prompts = placement.place(
            batch.prompts, sharding.batch_rows(mesh, len(batch.prompts.lengths))
        )
        rollout = sample(prompts, key, first_sample_index)
        batch_scores, batch_correct, batch_records = reward(batch, rollout, first_sample_index)
        # The last batch is filled up with repeated prompts; samples of a prompt are adjacent.
        n = len(batch_scores) // len(batch.examples)
        num_real = n * batch.count
        sources += [example.data_source for example in batch.examples[: batch.count]]
        scores.append(batch_scores[:num_real])
        correct.append(batch_correct[:num_real])
        lengths.append(placement.to_host(rollout.lengths)[:num_real])
        records += batch_records[:num_real]
        for name, values in (rollout.environment_metrics or {}).items():
            metrics.setdefault(name, []).append(placement.to_host(values)[:num_real])
        # A sample's random numbers follow from its index over all batches.
        first_sample_index += len(batch_scores)
    all_scores = np.concatenate(scores)
    all_correct = np.concatenate(correct)
    # Rules that do not define correctness report NaN.
    defined_correct = all_correct[~np.isnan(all_correct)]
    accuracy = float(defined_correct.mean()) if len(defined_correct) else None
    ranks = None
    if "rank" in records[0]:
        ranks = np.array([record["rank"] for record in records]).reshape(-1, n)
    means = {
        f"environment/{name}": mean_of_known(np.concatenate(values))
        for name, values in metrics.items()
    }
    return Evaluation(
        accuracy=accuracy,
        reward_mean=float(all_scores.mean()),
        length_mean=float(np.concatenate(lengths).mean()),
        figures=describe_prompts(
            all_scores.reshape(-1, n),
            all_correct.reshape(-1, n),
            np.array([record["answer"] for record in records], object).reshape(-1, n),
            sources,
            ranks,
        )
        | {name: mean for name, mean in means.items() if not np.isnan(mean)},
        records=records,
        responses_per_prompt=n,
    )


def response_rewards(
    run: PPORun,
    state: TrainState,
    batch: PromptBatch,
    rollout: Rollout,
    rule_rewards: RuleRewards,
    model_weight: float | None = None,
) -> jax.Array:
    """Return the rewards [B] of whole responses that are not trained on.

    They are the sum of the rules' scores and the reward model's, if there is one. Unless another is
    given, its weight is that of the options.
    """
    if run.nets.reward is None:
        return rule_rewards.scores
    inputs = rule_rewards.model_inputs
    if inputs is None:
        sequences = forward_passes.join_sequences(rollout, run.config.sequence_length)
        inputs = (sequences, *run.packer.pack_rows(sample_lengths(batch, rollout)))
    return add_reward_model_scores(
        run.nets,
        state,
        rule_rewards.scores,
        inputs,
        run.config.reward.score_position,
        run.rules.model_weight if model_weight is None else model_weight,
    )


def rank_responses(
    run: PPORun,
    state: TrainState,
    batch: PromptBatch,
    rollout: Rollout,
    rule_rewards: RuleRewards,
    rank_by: str,
) -> jax.Array:
    """Return what the responses are ranked by [B].

    It is the reward model's score, or the critic's value of the state in which the policy chose its
    last token: the last value that the critic is trained on, since a reward follows.
    """
    if rank_by == "reward_model":
        unscored = dataclasses.replace(rule_rewards, scores=jnp.zeros_like(rule_rewards.scores))
        return response_rewards(run, state, batch, rollout, unscored, model_weight=1.0)
    options = run.step_options
    only_values = dataclasses.replace(
        options.forward,
        old_logprobs=False,
        reference=False,
        full_kl=False,
        last_values=False,
        teacher=False,
    )
    outputs = forward_passes.run_forward_passes(
        only_values,
        run.nets,
        state,
        forward_passes.join_sequences(rollout, options.sequence_length),
        *run.packer.pack_rows(sample_lengths(batch, rollout)),
    )
    assert outputs.values is not None, "there is a critic"
    return _last_values(outputs.values, rollout.action_mask)


@jax.jit
def _last_values(values_BxT: jax.Array, actions_BxT: jax.Array) -> jax.Array:
    return jnp.where(last_actions(actions_BxT), values_BxT, 0.0).sum(1)
