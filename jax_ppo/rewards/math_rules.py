r"""The rule for MATH and its relatives: the last `\boxed{...}`, compared as mathematics.

Answers that are not the same text are compared by math-verify, which parses LaTeX with sympy. That
may take unbounded time, so the rule runs in worker processes with a time limit.
"""

import re

from jax_ppo.errors import UserError
from jax_ppo.rewards.rules import RewardResult

MAX_ANSWER = 500  # characters; a longer answer is not compared

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
# Spacing and delimiters of LaTeX that do not change the meaning.
_LAYOUT = re.compile(r"\\(?:left|right|[,;!:]|text(?=\{))|\$|\s+")


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last complete `\boxed{...}` of a text, or `None`."""
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 0
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[match.end() + 1 : end].strip()
    return None


def score_math(solution: str, ground_truth: str) -> RewardResult:
    r"""Return 1 if the last `\boxed{...}` of the response equals the ground truth, otherwise 0.

    `extra` holds `answered`, 1 if there is such an answer and 0 otherwise.

    Args:
      solution: the response.
      ground_truth: the answer in LaTeX, with or without `\boxed{}`.

    Raises:
      UserError: math-verify is not installed.
    """
    answer = last_boxed(solution)
    if answer is None:
        return RewardResult(score=0.0, correct=False, extra={"answered": 0.0})
    correct = answers_agree(answer, last_boxed(ground_truth) or ground_truth)
    return RewardResult(
        score=float(correct),
        correct=correct,
        extra={"answered": 1.0},
        answer=_strip_layout(answer),
    )


def answers_agree(answer: str, ground_truth: str) -> bool:
    """Return whether two answers in LaTeX are the same text or the same mathematics."""
    text = _strip_layout(answer)
    if not text or len(text) > MAX_ANSWER:
        return False
    return text == _strip_layout(ground_truth) or _are_equal(answer, ground_truth)


def _strip_layout(answer: str) -> str:
    """Return an answer without spacing, dollar signs and a final full stop."""
    return _LAYOUT.sub("", answer).rstrip(".")


def _are_equal(answer: str, ground_truth: str) -> bool:
    try:
        import math_verify
    except ImportError as error:
        raise UserError(
            "the rule `math` needs the package math-verify: pip install 'jax_ppo[math]'"
        ) from error
    # math-verify's own time limits use signals; the worker pool limits the time instead.
    gold = math_verify.parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    parsed = math_verify.parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return bool(math_verify.verify(gold, parsed, timeout_seconds=None))
