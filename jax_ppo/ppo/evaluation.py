"""Held-out evaluation: sample, score with the rules and the reward model, average."""

import dataclasses
from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ppo.data.prompts import PromptBatch
from jax_ppo.ppo import scoring
from jax_ppo.ppo.plans import sample_lengths
from jax_ppo.ppo.random_keys import EVALUATION
from jax_ppo.ppo.rewarding import RuleRewards, add_reward_model_scores
from jax_ppo.ppo.setup import PPORun
from jax_ppo.runtime import sharding
from jax_ppo.training.state import TrainState
from jax_ppo.types import Prompts, Rollout

# (prompts on the mesh, key, index of the first sample) -> rollout
SampleFunction = Callable[[Prompts, jax.Array, int], Rollout]
# (batch, rollout, number of responses to return) -> scores [B], correct [B], responses
RewardFunction = Callable[[PromptBatch, Rollout, int], tuple[np.ndarray, np.ndarray, list[dict]]]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Averages over all held-out prompts and their responses.

    Attributes:
      accuracy: share of correct answers, 0..1; `None` if the rules do not define correctness.
      reward_mean: the mean reward, of rules and reward model.
      length_mean: tokens per response.
      samples: the first responses, as dicts of prompt, response, score and correct.
    """

    accuracy: float | None
    reward_mean: float
    length_mean: float
    samples: list[dict]


def evaluate_policy(run: PPORun, state: TrainState) -> Evaluation:
    """Evaluate the policy on the held-out prompts, sampled as `rollout.val_kwargs` says.

    The random draws are the same at every step, so that only the policy makes a difference.
    """
    run.engine.update_weights(run.policy_params(state))

    def sample(prompts: Prompts, key: jax.Array, first_sample_index: int) -> Rollout:
        return run.engine.generate(prompts, key, run.held_out_sampling, first_sample_index)

    def reward(
        batch: PromptBatch, rollout: Rollout, num_samples: int
    ) -> tuple[np.ndarray, np.ndarray, list[dict]]:
        rule_rewards, samples = run.rules.score(batch, rollout, num_samples)
        scores = sharding.to_host(total_rewards(run, state, batch, rollout, rule_rewards))
        # The console shows the total, which includes the reward model's score.
        samples = [sample | {"score": float(scores[sample["row"]])} for sample in samples]
        return scores, sharding.to_host(rule_rewards.correct), samples

    evaluation = evaluate(
        sample=sample,
        reward=reward,
        batches=run.held_out_batches(),
        mesh=run.mesh,
        key=run.sample_keys(EVALUATION, 0),
        num_samples=run.config.trainer.log_samples,
    )
    run.engine.release_weights()
    return evaluation


def evaluate(
    *,
    sample: SampleFunction,
    reward: RewardFunction,
    batches: Iterable[PromptBatch],
    mesh: Mesh,
    key: jax.Array,
    num_samples: int = 0,
) -> Evaluation:
    """Sample every batch and average over its real rows.

    Args:
      sample: samples responses.
      reward: scores them, for the rows of all processes; `correct` is NaN where it is undefined.
      batches: of one size; the first `count` prompts of each are real.
      mesh: the run's mesh.
      key: the same for every batch; samples differ by their index.
      num_samples: how many responses to return.
    """
    scores, correct, lengths = [], [], []
    samples: list[dict] = []
    first_sample_index = 0
    for batch in batches:
        prompts = sharding.place(batch.prompts, sharding.rows(mesh))
        rollout = sample(prompts, key, first_sample_index)
        batch_scores, batch_correct, batch_samples = reward(
            batch, rollout, num_samples - len(samples)
        )
        # The last batch is filled up with repeated prompts; samples of a prompt are adjacent.
        num_real = len(batch_scores) // len(batch.examples) * batch.count
        scores.append(batch_scores[:num_real])
        correct.append(batch_correct[:num_real])
        lengths.append(sharding.to_host(rollout.lengths)[:num_real])
        samples += batch_samples[:num_real]
        # A sample's random numbers follow from its index over all batches.
        first_sample_index += len(batch_scores)
    all_correct = np.concatenate(correct)
    # Rules that do not define correctness report NaN.
    defined_correct = all_correct[~np.isnan(all_correct)]
    return Evaluation(
        accuracy=float(defined_correct.mean()) if len(defined_correct) else None,
        reward_mean=float(np.concatenate(scores).mean()),
        length_mean=float(np.concatenate(lengths).mean()),
        samples=samples,
    )


def total_rewards(
    run: PPORun,
    state: TrainState,
    batch: PromptBatch,
    rollout: Rollout,
    rule_rewards: RuleRewards,
) -> jax.Array:
    """Return the rewards [B] of a rollout that is not trained on.

    They are the sum of the rules' scores, their rewards of steps, and the reward model's scores.
    """
    scores = rule_rewards.scores
    if rule_rewards.steps is not None:
        scores = scores + rule_rewards.steps.sum(1)
    if run.nets.reward is None:
        return scores
    inputs = rule_rewards.model_inputs
    if inputs is None:
        sequences = scoring.join_sequences(rollout, run.config.sequence_length)
        inputs = (sequences, *run.planner.plan_scoring(sample_lengths(batch, rollout)))
    return add_reward_model_scores(
        run.nets, state, scores, inputs, run.config.reward.score_position
    )
