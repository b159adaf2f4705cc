"""Scores of a batch of responses as arrays, and lines about those that failed or are wrong."""

import dataclasses
import functools
import logging
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jax_ppo.config.schema import Reward
from jax_ppo.errors import printable_lines, shorten
from jax_ppo.rewards.custom import BatchFunction, score_whole_batch
from jax_ppo.rewards.number_rules import RewardResult
from jax_ppo.rewards.samples import (
    Outcome,
    ProgressReporter,
    RewardFunction,
    RewardRow,
    ScoringFailure,
    TimeoutCounter,
    ignore_progress,
    score_sample,
)
from jax_ppo.rewards.worker_pool import RewardWorkers
from jax_ppo.thoughts import after_thinking
from jax_ppo.types import Example

log = logging.getLogger(__name__)

LONGEST_ANSWER = 200
_TAIL = 80  # characters of a wrong response that are shown


@dataclasses.dataclass(frozen=True)
class ScoredBatch:
    """Scores of n responses."""

    scores: np.ndarray  # float32 [n], finite
    # float32 [n], 1 or 0, and NaN if the rule does not define correctness or failed.
    correct: np.ndarray
    # bool [n], True if a response could not be scored: its rule raised an error, returned a score
    # that is not finite, or its worker hung or died. It has the fallback score.
    failed: np.ndarray
    # Other numbers that the rule reported, by name: float32 [n], NaN if a response has no such
    # number.
    extra: dict[str, np.ndarray]
    # Rewards within each response, as in RewardResult.
    step_rewards: list[tuple[tuple[int, float], ...]]
    # The answers that the rule read, as in RewardResult, cut to LONGEST_ANSWER characters.
    answers: list[str | None]
    # The first response that could not be scored and why; "" if there is none.
    first_failure: str = ""

    @property
    def failures(self) -> int:
        """Return the number of responses that could not be scored."""
        return int(self.failed.sum())

    def fill_up(self, length: int, score: float) -> "ScoredBatch":
        """Return the results of `length` responses; the added ones count as failed, untried."""
        missing = length - len(self.scores)

        def extend(values: np.ndarray, value: float) -> np.ndarray:
            return np.pad(values, (0, missing), constant_values=value)

        return dataclasses.replace(
            self,
            scores=extend(self.scores, score),
            correct=extend(self.correct, math.nan),
            failed=extend(self.failed, True),
            extra={name: extend(values, math.nan) for name, values in self.extra.items()},
            step_rewards=self.step_rewards + [()] * missing,
            answers=self.answers + [None] * missing,
        )


def score_batch(
    reward_function: RewardFunction | BatchFunction | RewardWorkers,
    examples: Sequence[Example],
    responses_text: Sequence[str],
    fallback_score: float = 0.0,
    max_timeouts: int = Reward.max_timeouts,
    tokens: Sequence[Sequence[int] | np.ndarray] = (),
    report_progress: ProgressReporter = ignore_progress,
    thoughts: Sequence[str] = (),
) -> ScoredBatch:
    """Score n responses, each for its example; `tokens` are those of the responses, if known.

    `thoughts` are the marks of thoughts that the prompts have opened, "" without one.
    A sample that cannot be scored affects no other and gets the fallback score. Such samples are
    counted, and the first one of the batch is logged with its traceback. `RewardWorkers` read
    `max_timeouts` from their own options.

    Raises:
      ValueError: the numbers of responses and examples differ.
    """
    rows = [
        RewardRow.from_example(example, ids)
        for example, ids in zip(examples, tokens or [()] * len(examples), strict=True)
    ]
    if thoughts:
        rows = [row._replace(thought=mark) for row, mark in zip(rows, thoughts, strict=True)]
    outcomes = _score_samples(reward_function, rows, responses_text, max_timeouts, report_progress)
    results: list[RewardResult] = []
    failed = np.zeros(len(outcomes), bool)
    first_failure = ""
    for row, outcome in enumerate(outcomes):
        if isinstance(outcome, ScoringFailure):
            failed[row] = True
            results.append(RewardResult(score=fallback_score))
            first_failure = first_failure or _describe_failure(
                row, examples[row], responses_text[row], outcome
            )
        else:
            results.append(outcome)
    if first_failure:
        log.warning(
            "%d of %d responses could not be scored and got config.reward.fallback_score=%g. "
            "The first was %s",
            failed.sum(),
            len(results),
            fallback_score,
            first_failure,
        )
    for name in sorted({name for result in results for name in result.ignored}):
        _report_ignored_name(name)
    if missing := sum(result.is_missing for result in results):
        _report_missing_rewards("all" if missing == len(results) else "some")
    names = sorted({name for result in results for name in result.extra})
    return ScoredBatch(
        scores=np.array([result.score for result in results], np.float32),
        correct=np.array(
            [math.nan if x.correct is None else float(x.correct) for x in results], np.float32
        ),
        failed=failed,
        extra={
            name: np.array([result.extra.get(name, math.nan) for result in results], np.float32)
            for name in names
        },
        step_rewards=[result.step_rewards for result in results],
        answers=[result.answer and result.answer[:LONGEST_ANSWER] for result in results],
        first_failure=first_failure,
    )


def _score_samples(
    reward_function: RewardFunction | BatchFunction | RewardWorkers,
    rows: Sequence[RewardRow],
    responses: Sequence[str],
    max_timeouts: int,
    report_progress: ProgressReporter,
) -> list[Outcome]:
    if isinstance(reward_function, BatchFunction):
        return score_whole_batch(reward_function, rows, responses)
    if isinstance(reward_function, RewardWorkers):
        return reward_function.score(rows, responses, report_progress)
    outcomes: list[Outcome] = []
    timeouts = TimeoutCounter(max_timeouts)
    for row, response in zip(rows, responses, strict=True):
        outcomes.append(score_sample(reward_function, row, response))
        report_progress(len(outcomes))
        if timeouts.should_give_up(outcomes[-1]):
            return outcomes + timeouts.fail_rest(len(rows) - len(outcomes))
    return outcomes


@functools.cache
def _report_ignored_name(name: str) -> None:
    """Warn once in a run of an entry that is not reported."""
    log.warning(
        "the reward function returned %r, which is no number: it is not reported (said once)", name
    )


@functools.cache
def _report_missing_rewards(which: str) -> None:
    """Say once in a run that responses, "all" of a batch or "some", have no reward."""
    log.warning(
        "the reward function returned None for %s responses of a batch: they score 0 (said once)",
        which,
    )


def _describe_failure(row: int, example: Example, response: str, failure: ScoringFailure) -> str:
    """Describe a sample and why it failed, in printable characters."""
    separator = "\n" if "\n" in failure.cause else " "
    return printable_lines(
        f"row {row} of the batch, data_source={example.data_source!r}, "
        f"extra_info={shorten(repr(example.extra_info), 200)}, "
        f"response ending in {response[-200:]!r}:{separator}{failure.cause}"
    )


class Miss(NamedTuple):
    """A wrong response, what its rule looked for, and the answer that it read there, if any."""

    ground_truth: object
    response: str
    answer: str | None


def scored_misses(
    examples: Sequence[Example], responses_text: Sequence[str], scored: ScoredBatch
) -> list[Miss]:
    """Return the wrong responses of a batch; one of undefined correctness is not wrong."""
    return [
        Miss(examples[row].ground_truth, responses_text[row], scored.answers[row])
        for row in np.flatnonzero(scored.correct == 0).tolist()
    ]


def describe_misses(misses: Iterable[Miss]) -> tuple[str, ...]:
    """Return at most three lines that show wrong responses, without duplicates, nearest first.

    The nearest misses contain the ground truth, but not where the rule looks for it. Next come
    responses in which the rule found another answer.
    """

    def distance(miss: Miss) -> int:
        truth = str(miss.ground_truth).strip()
        if truth and truth in miss.response:
            return 0
        if miss.answer is not None:
            return 1
        return 2

    lines: dict[str, None] = {}
    for miss in sorted(misses, key=distance):
        if len(lines) == 3:
            break
        line = f"looked for {miss.ground_truth!r}, "
        if miss.answer is not None:
            line += f"read {miss.answer!r} "
        is_cut = len(miss.response) > _TAIL
        is_thought = bool(miss.response) and not after_thinking(miss.response)
        line += "in " + "a thought that does not end: " * is_thought
        line += f"{'...' * is_cut}{miss.response[-_TAIL:]!r}"
        lines.setdefault(line)
    return tuple(lines)
