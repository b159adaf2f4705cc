"""Lines of a warning that show wrong responses next to what their rule looked for."""

from collections.abc import Sequence

import numpy as np

from jax_ppo.rewards.batch import ScoredBatch
from jax_ppo.types import Example

_TAIL = 80  # characters of a response that are shown


def describe_misses(
    examples: Sequence[Example], responses_text: Sequence[str], scored: ScoredBatch, count: int = 3
) -> tuple[str, ...]:
    """Return one line per wrong response, the nearest misses first, without duplicates.

    The nearest misses contain the ground truth, but not where the rule looks for it. Next come
    responses in which the rule found another answer.

    Args:
      examples: n examples.
      responses_text: n responses.
      scored: their scores. Responses whose correctness is undefined are not misses.
      count: maximum number of lines.
    """
    wrong = np.flatnonzero(scored.correct == 0).tolist()

    def distance(row: int) -> int:
        truth = str(examples[row].ground_truth).strip()
        if truth and truth in responses_text[row]:
            return 0
        if scored.answers[row] is not None:
            return 1
        return 2

    lines: dict[str, None] = {}
    for row in sorted(wrong, key=distance):
        if len(lines) == count:
            break
        line = f"looked for {examples[row].ground_truth!r}, "
        if scored.answers[row] is not None:
            line += f"read {scored.answers[row]!r} "
        line += f"in {_tail(responses_text[row])}"
        lines.setdefault(line)
    return tuple(lines)


def _tail(text: str) -> str:
    """Return the end of a text in quotes; unprintable characters are escaped."""
    if len(text) <= _TAIL:
        return repr(text)
    return f"...{text[-_TAIL:]!r}"
