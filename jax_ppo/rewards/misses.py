"""Wrong responses next to what their rule looked for, as a warning shows them."""

from collections.abc import Sequence

import numpy as np

from jax_ppo.rewards.batch import ScoredBatch
from jax_ppo.types import Example

_TAIL = 80  # characters of a response that are shown


def describe_misses(
    examples: Sequence[Example], responses_text: Sequence[str], scored: ScoredBatch, count: int = 3
) -> tuple[str, ...]:
    """Return a line for each of at most `count` wrong responses, the nearest misses first.

    Nearest are responses that contain the ground truth, but not where the rule reads it; then those
    in which the rule read another answer. Different lines only.

    Args:
      examples: n examples.
      responses_text: n responses.
      scored: their scores. Responses whose correctness is undefined are no misses.
      count: how many lines to return.
    """
    wrong = np.flatnonzero(scored.correct == 0).tolist()

    def distance(row: int) -> int:
        truth = str(examples[row].ground_truth).strip()
        if truth and truth in responses_text[row]:
            return 0
        return 1 if scored.answers[row] is not None else 2

    lines: dict[str, None] = {}
    for row in sorted(wrong, key=distance):
        if len(lines) == count:
            break
        answer = scored.answers[row]
        read = "" if answer is None else f"read {answer!r} "
        line = f"looked for {examples[row].ground_truth!r}, {read}in {_tail(responses_text[row])}"
        lines.setdefault(line)
    return tuple(lines)


def _tail(text: str) -> str:
    """Return the end of a text in quotes; unprintable characters are escaped."""
    return repr(text) if len(text) <= _TAIL else f"...{text[-_TAIL:]!r}"
