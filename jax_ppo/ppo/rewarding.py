"""Rewards of a rollout: rules run on the host, a reward model on the mesh."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from numpy.typing import ArrayLike

from jax_ppo.config.schema import Reward
from jax_ppo.data.chat_templates import opened_thought
from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.data.response_rows import GivenResponses
from jax_ppo.data.tokenizer import decode_texts
from jax_ppo.environments.host import HostEnvironment
from jax_ppo.errors import UserError
from jax_ppo.ppo import forward_passes
from jax_ppo.ppo.reward_inputs import LocalResponses, ModelInputs, RewardInputs
from jax_ppo.rewards.batch import ScoredBatch, describe_misses, score_batch, scored_misses
from jax_ppo.rewards.custom import BatchFunction, assign_step_rewards
from jax_ppo.rewards.reward_functions import is_by_rules
from jax_ppo.rewards.samples import RewardFunction, RewardResult
from jax_ppo.rewards.worker_pool import RewardWorkers
from jax_ppo.runtime import distributed, placement, sharding, signals
from jax_ppo.runtime.compiled_programs import program
from jax_ppo.training.networks import Networks
from jax_ppo.training.state import TrainState
from jax_ppo.types import NOTHING, Rollout, with_nan


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleRewards:
    """Rewards of a rollout by rules; arrays on the mesh."""

    scores: jax.Array  # float32 [B]
    # float32 [B, T], within the responses, by `reward.process_rewards` or an environment.
    steps: jax.Array | None = None
    correct: jax.Array  # float32 [B], 1 or 0; `NOTHING` if the rules do not define correctness
    failures: int = 0  # samples whose rule failed, without those that fill up the batch
    scored: int  # number of samples, without these; more than B if the batch was selected from them
    # Metrics of rules and environment, means over the samples that have them; and how many inputs
    # were too long for the reward model.
    extra: dict[str, float] = dataclasses.field(default_factory=dict)
    # The first sample of this process whose rule failed and why; "" if none did.
    first_failure: str = ""
    # The input of a reward model with another tokenizer, as `reward_model_scores` takes it; `None`
    # if the model reads the samples themselves.
    model_inputs: ModelInputs | None = None
    answers: Mapping[int, str] = dataclasses.field(default_factory=dict)  # that rules read, by row
    # Wrong responses of this process, as `describe_misses` returns them.
    misses: tuple[str, ...] = ()
    # The figures that the advantage estimator asks for, float32 [B] each.
    figures: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)


def given_rewards(
    mesh: Mesh, dataset: GivenResponses, batch: PromptBatch, rollout: Rollout
) -> RuleRewards:
    """Return the rewards that the rows of a batch have; correctness is unknown."""
    total = len(batch.examples)
    rows = sharding.batch_rows(mesh, total)
    return RuleRewards(
        scores=placement.place(dataset.rewards(batch), rows),
        steps=rollout.turn_rewards,
        correct=placement.place(np.full(total, NOTHING, np.float32), rows),
        scored=total,
    )


def policy_text(
    tokenizer: Any, response: np.ndarray, is_action: np.ndarray, starts: np.ndarray
) -> str:
    """Return what the policy wrote in a dialogue, which rules read, a line for each turn.

    `response` [length], `is_action` and `starts`, bool [T], are as in `Rollout`. A turn begins at a
    start and after tokens of others, with the mark of a thought that these opened.
    """
    is_action, starts = is_action[: len(response)], starts[: len(response)]
    borders = np.flatnonzero(np.diff(is_action) | starts[1:]) + 1
    parts = zip(np.split(response, borders), np.split(is_action, borders), strict=True)
    turns, opened = [], ""
    for part, is_turn in parts:
        if is_turn.all():
            turns.append(opened + decode_texts(tokenizer, [part])[0])
        opened = "" if is_turn.all() else opened_thought(tokenizer, "", part)
    return "\n".join(turns)


@dataclasses.dataclass(frozen=True)
class RuleScorer:
    """Scores responses by rules, each response in one process."""

    mesh: Mesh
    tokenizer: Any  # the actor's
    options: Reward  # `config.reward`
    # The reward function, or what applies it; `None` if a reward model is the only reward.
    rule: RewardFunction | BatchFunction | RewardWorkers | None
    model_weight: float  # the weight of the reward model's score
    reward_inputs: RewardInputs | None  # for a reward model with another tokenizer
    environment: HostEnvironment | None = None  # answers the policy's turns, if there is one
    figures: tuple[str, ...] = ()  # names of the figures that the advantage estimator asks for

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which the worker processes run, if there are any."""
        if isinstance(self.rule, RewardWorkers):
            return self.rule
        return contextlib.nullcontext()

    def score(self, batch: PromptBatch, rollout: Rollout) -> RuleRewards:
        """Score this process's responses.

        Rules read the policy's tokens alone, a reward model also an environment's observations.
        """
        total, max_length = rollout.responses.shape
        responses = self._decode_local(batch, rollout)
        real = batch.count * (total // len(batch.examples))  # others fill up the batch
        scored = self._apply_rule(responses, real)
        steps = rollout.turn_rewards
        if self.options.process_rewards:
            token_rewards = self._token_rewards(scored, responses.tokens, max_length)
            steps = self._place(responses, token_rewards, total)
        # Figures of all processes are exchanged at once, below.
        per_sample: dict[str, ArrayLike] = {
            f"reward/{name}": values for name, values in scored.extra.items()
        }
        for name, values in (rollout.environment_metrics or {}).items():
            per_sample[f"environment/{name}"] = with_nan(placement.local_rows(values)[1])
        per_sample["failed"] = scored.failed
        model_inputs = None
        if self.reward_inputs:
            prompts = batch.prompts
            prompt_rows = responses.indices // (total // len(batch.examples))
            last_tokens = prompts.tokens[prompt_rows, prompts.lengths[prompt_rows] - 1]
            model_inputs, per_sample["model_inputs_cut"] = self.reward_inputs(
                responses, last_tokens, total
            )
        # An exchange between processes: every process must reach this line.
        failures, extra = _describe_rollout(self.mesh, responses.indices, per_sample, total, real)
        answers = distributed.allgather_json(
            [(int(row), x) for row, x in zip(responses.indices, scored.answers, strict=True)]
        )
        read = list(map("".join, zip(responses.thoughts, responses.policy_texts, strict=True)))
        return RuleRewards(
            scores=self._place(responses, scored.scores, total),
            steps=steps,
            correct=self._place(responses, np.nan_to_num(scored.correct, nan=NOTHING), total),
            failures=failures,
            scored=real,
            extra=extra,
            first_failure=scored.first_failure,
            model_inputs=model_inputs,
            answers={row: x for pairs in answers for row, x in pairs if x is not None},
            misses=describe_misses(
                scored_misses(responses.examples, read, scored), is_by_rules(self.options)
            ),
            figures=self._place_figures(responses, scored, total),
        )

    def add_model_scores(
        self, nets: Networks, state: TrainState, rewards: RuleRewards, rows: ModelInputs
    ) -> jax.Array:
        """Return the scores [B] plus the weighted ones of the reward model, if there is one."""
        if nets.reward is None:
            return rewards.scores
        params = state.role_params("reward", nets)
        inputs = rewards.model_inputs or rows
        model_scores = forward_passes.reward_model_scores(
            nets.reward, params, *inputs, self.options.score_position
        )
        return _add_weighted(rewards.scores, model_scores, self.model_weight)

    def _place_figures(
        self, responses: LocalResponses, scored: ScoredBatch, total: int
    ) -> dict[str, jax.Array]:
        """Return the estimator's figures, [B] each; raise `UserError` if a response lacks one."""
        placed = {}
        for name in self.figures:
            values = scored.extra.get(name, np.full(len(scored.scores), np.nan, np.float32))
            values = np.where(scored.failed, np.float32(self.options.fallback_score), values)
            if np.isnan(values).any():
                raise UserError(
                    f"config.algorithm.adv_estimator: asks for {name!r}, which the reward function "
                    "did not return as a number for every response; it returned "
                    f"{', '.join(map(repr, scored.extra)) or 'no other number'}"
                )
            placed[name] = self._place(responses, values, total)
        return placed

    def _decode_local(self, batch: PromptBatch, rollout: Rollout) -> LocalResponses:
        """Return this process's share of the responses, so that no sample is scored twice."""
        indices, rows = placement.local_rows(rollout.responses)
        lengths = placement.local_rows(rollout.lengths)[1]
        responses = [row[:length] for row, length in zip(rows, lengths, strict=True)]
        texts: list[str] = []
        if responses:  # a process may have no share
            texts = decode_texts(self.tokenizer, responses)
        policy_texts = texts
        if rollout.turn_rewards is not None:
            masks = placement.local_rows(rollout.action_mask)[1]
            starts = np.zeros_like(masks)
            if rollout.turn_starts is not None:
                starts = placement.local_rows(rollout.turn_starts)[1]
            policy_texts = [
                policy_text(self.tokenizer, *row)
                for row in zip(responses, masks, starts, strict=True)
            ]
        n = len(rollout.responses) // len(batch.examples)
        examples = [batch.examples[i // n] for i in indices]
        prompts = zip(batch.examples, batch.prompts.tokens, batch.prompts.lengths, strict=True)
        opened = [opened_thought(self.tokenizer, e.prompt, ids[:end]) for e, ids, end in prompts]
        thoughts = [opened[i // n] for i in indices]
        return LocalResponses(indices, examples, responses, texts, policy_texts, thoughts)

    def _apply_rule(self, responses: LocalResponses, real: int) -> ScoredBatch:
        """Score the responses to the first `real` of all rows; the others count as failed."""
        if self.environment is not None:
            self.environment.raise_if_all_failed()
        # A hung function must not keep the run from ending.
        with signals.limited("scoring the rewards") as activity:
            count = int(np.searchsorted(responses.indices, real))
            scored = score_batch(
                # All of the reward may be a reward model's or an environment's.
                self.rule or (lambda row, response: RewardResult(0.0)),
                responses.examples[:count],
                responses.policy_texts[:count],
                self.options,
                responses.tokens[:count],
                responses.thoughts[:count],
                lambda done: activity.update(f"{done}/{count} responses"),
            )
        return scored.fill_up(len(responses.texts), self.options.fallback_score)

    def _place(self, responses: LocalResponses, values: np.ndarray, total: int) -> jax.Array:
        """Return values of this process's responses as rows of an array [B, ...] on the mesh."""
        return placement.from_local_rows(self.mesh, responses.indices, values, total)

    def _token_rewards(
        self, scored: ScoredBatch, responses: list[np.ndarray], max_length: int
    ) -> np.ndarray:
        """Return the rewards of steps at the tokens that complete them, float32 [b, T]."""

        def decode(ids: SequenceOf[int]) -> str:
            return decode_texts(self.tokenizer, [ids], clean_up_tokenization_spaces=False)[0]

        # A process may have no response at all, which `np.stack` does not take.
        rewards = np.zeros((len(responses), max_length), np.float32)
        for row, (steps, response) in enumerate(zip(scored.step_rewards, responses, strict=True)):
            rewards[row] = assign_step_rewards(steps, response.tolist(), decode, max_length)
        return rewards


class FailedSteps:
    """Counts consecutive steps in which the rule failed on every response."""

    MOST = 3

    def __init__(self, options: Reward) -> None:
        """Start counting; `options` is `config.reward`."""
        self._options = options
        self._count = 0

    def count(self, step: int, rewards: RuleRewards) -> None:
        """Count a step, from 0, that failed throughout; raise `UserError` for too many in a row."""
        if rewards.failures < rewards.scored:
            self._count = 0
            return
        self._count += 1
        if self._count >= self.MOST:
            rule = "the built-in rule"
            if self._options.function:
                rule = f"config.reward.function={self._options.function!r}"
            sample, _, cause = rewards.first_failure.partition("\n")
            raise UserError(
                f"{rule} failed on every response of {self._count} consecutive steps. The first "
                f"failure of step {step + 1} was {sample}",
                details=cause,
            )


@program(static_argnames=("weight",))
def _add_weighted(scores_B: jax.Array, model_scores_B: jax.Array, weight: float) -> jax.Array:
    return scores_B + weight * model_scores_B


def _describe_rollout(
    mesh: Mesh, indices: np.ndarray, per_sample: Mapping[str, ArrayLike], total: int, real: int
) -> tuple[int, dict[str, float]]:
    """Return how many of the `real` samples failed, and the figures in `RuleRewards.extra`.

    `per_sample` has arrays [b] by name, of the rows `indices` of B = `total`. Processes may have
    different names.
    """
    # Arrays can only be exchanged once all processes agree on their columns.
    names = sorted(set().union(*distributed.allgather_json(sorted(per_sample))))
    # NaN marks what a sample does not report, here and in the means of these columns.
    missing = np.full(len(indices), np.nan)
    columns = [per_sample.get(name, missing) for name in names]
    local = np.stack(columns, axis=1, dtype=np.float32)
    columns_B = placement.all_rows(mesh, indices, local, total).T
    everywhere = dict(zip(names, columns_B, strict=True))
    extra = {
        name: mean_of_known(values)
        for name, values in everywhere.items()
        if name.startswith(("reward/", "environment/"))
    }
    if "model_inputs_cut" in everywhere:
        extra["reward/model_inputs_cut"] = int(everywhere["model_inputs_cut"].sum())
    return int(everywhere["failed"][:real].sum()), extra


def mean_of_known(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    # np.nanmean warns where there is nothing to average.
    return math.nan if np.isnan(values).all() else float(np.nanmean(values))
