"""Lines of a warning that show wrong responses next to what their rule looked for."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jax_ppo.rewards.batch import ScoredBatch
from jax_ppo.types import Example

_TAIL = 80  # characters of a response that are shown


class Miss(NamedTuple):
    """A wrong response, what its rule looked for, and the answer that it read there, if any."""

    ground_truth: object
    response: str
    answer: str | None


def scored_misses(
    examples: Sequence[Example], responses_text: Sequence[str], scored: ScoredBatch
) -> list[Miss]:
    """Return the wrong responses of a batch; undefined correctness is no miss."""
    return [
        Miss(examples[row].ground_truth, responses_text[row], scored.answers[row])
        for row in np.flatnonzero(scored.correct == 0).tolist()
    ]


def describe_misses(misses: Iterable[Miss], count: int = 3) -> tuple[str, ...]:
    """Return at most `count` lines about wrong responses, without duplicates, the nearest first.

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
        if len(lines) == count:
            break
        line = f"looked for {miss.ground_truth!r}, "
        if miss.answer is not None:
            line += f"read {miss.answer!r} "
        line += f"in {_tail(miss.response)}"
        lines.setdefault(line)
    return tuple(lines)


def _tail(text: str) -> str:
    """Return the end of a text in quotes; unprintable characters are escaped."""
    if len(text) <= _TAIL:
        return repr(text)
    return f"...{text[-_TAIL:]!r}"
