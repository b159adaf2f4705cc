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
from jax_ppo.rewards.samples import (
    Outcome,
    ProgressReporter,
    RewardFunction,
    RewardResult,
    RewardRow,
    ScoringFailure,
    TimeoutCounter,
    score_sample,
)
from jax_ppo.rewards.worker_pool import RewardWorkers
from jax_ppo.thoughts import after_thinking
from jax_ppo.types import Example

log = logging.getLogger(__name__)

LONGEST_ANSWER = 200
_TAIL = 80  # characters of a wrong response that are shown
_DEFAULTS = Reward()


@dataclasses.dataclass(frozen=True)
class ScoredBatch:
    """Scores of n responses."""

    scores: np.ndarray  # float32 [n], finite
    correct: np.ndarray  # float32 [n], 1 or 0, NaN if the rule does not define it or failed
    # bool [n], True if a response could not be scored: its rule raised an error, returned a score
    # that is not finite, or its worker hung or died. It has the fallback score.
    failed: np.ndarray
    extra: dict[str, np.ndarray]  # the rule's other numbers by name, float32 [n], NaN without one
    step_rewards: list[tuple[tuple[int, float], ...]]  # within each response, as in RewardResult
    answers: list[str | None]  # that the rule read, cut to LONGEST_ANSWER characters
    first_failure: str = ""  # first response that could not be scored and why; "" if there is none

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
    options: Reward = _DEFAULTS,
    tokens: Sequence[Sequence[int] | np.ndarray] = (),
    thoughts: Sequence[str] = (),
    report_progress: ProgressReporter = lambda done: None,
) -> ScoredBatch:
    """Score n responses, each for its example.

    `tokens` has each response's tokens, if known; `thoughts` are the marks of thoughts that the
    prompts have opened, or "". A sample that cannot be scored affects no other and gets
    `fallback_score`; such samples are counted, and the first is logged with its traceback. Raise
    `ValueError` if the numbers of responses and examples differ.
    """
    columns = (examples, tokens or [()] * len(examples), thoughts or [""] * len(examples))
    rows = [RewardRow.from_example(*row) for row in zip(*columns, strict=True)]
    outcomes = _score_samples(
        reward_function, rows, responses_text, options.max_timeouts, report_progress
    )
    failures = [(row, x.cause) for row, x in enumerate(outcomes) if isinstance(x, ScoringFailure)]
    failed = np.zeros(len(outcomes), bool)
    failed[[row for row, _ in failures]] = True
    first_failure = ""
    if failures:
        row, cause = failures[0]
        first_failure = _describe_failure(row, examples[row], responses_text[row], cause)
        log.warning(
            "%d of %d responses could not be scored and got config.reward.fallback_score=%g. "
            "The first was %s",
            len(failures),
            len(outcomes),
            options.fallback_score,
            first_failure,
        )
    fallback = RewardResult(options.fallback_score)
    results = [x if isinstance(x, RewardResult) else fallback for x in outcomes]
    _report_unread_values(results)
    names = sorted({name for result in results for name in result.extra})
    return ScoredBatch(
        scores=np.array([result.score for result in results], np.float32),
        correct=np.array([result.correct for result in results], np.float32),  # of None, NaN
        failed=failed,
        extra={
            name: np.array([result.extra.get(name) for result in results], np.float32)
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


def _report_unread_values(results: Sequence[RewardResult]) -> None:
    for name in sorted({name for result in results for name in result.ignored}):
        _warn_once(f"returned {name!r}, which is not a number: it is not reported")
    if missing := sum(result.is_missing for result in results):
        which = "all" if missing == len(results) else "some"
        _warn_once(f"returned None for {which} responses of a batch: they score 0")


@functools.cache
def _warn_once(fact: str) -> None:
    log.warning("the reward function %s (logged once)", fact)


def _describe_failure(row: int, example: Example, response: str, cause: str) -> str:
    separator = "\n" if "\n" in cause else " "
    return printable_lines(
        f"row {row} of the batch, data_source={example.data_source!r}, "
        f"extra_info={shorten(repr(example.extra_info), 200)}, "
        f"response ending in {response[-200:]!r}:{separator}{cause}"
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


def describe_misses(misses: Iterable[Miss], by_rules: bool) -> tuple[str, ...]:
    """Return at most three lines that show wrong responses, without duplicates, nearest first.

    The nearest contain the ground truth where the rule does not look; then come other answers.
    What is not graded `by_rules` alone may not look for a ground truth.
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
        if not by_rules:
            line = f"the reference is {miss.ground_truth!r}, " if miss.ground_truth else ""
        if miss.answer is not None:
            line += f"read {miss.answer!r} "
        is_cut = len(miss.response) > _TAIL
        is_thought = bool(miss.response) and not after_thinking(miss.response)
        line += "in " if by_rules or miss.answer is not None else "the response is "
        line += "a thought that does not end: " * is_thought
        line += f"{'...' * is_cut}{miss.response[-_TAIL:]!r}"
        lines.setdefault(line)
    return tuple(lines)
