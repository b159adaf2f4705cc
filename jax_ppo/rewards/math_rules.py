r"""The rule for MATH and its relatives: the last `\boxed{...}`, compared as mathematics.

Answers that are not the same text are compared by math-verify, which parses LaTeX with sympy. That
may take unbounded time, so the rule runs in worker processes with a time limit.
"""

import re

from jax_ppo.errors import UserError
from jax_ppo.rewards.rules import RewardResult

MAX_ANSWER = 500  # characters; a longer answer is not compared

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
# What LaTeX writes in several ways without a meaning of its own.
_LAYOUT = re.compile(r"\\(?:left|right|[,;!:]|text(?=\{))|\$|\s+")


def last_boxed(text: str) -> str | None:
    r"""Return what the last complete `\boxed{...}` of a text holds, or `None`."""
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
    correct = answer is not None and answers_agree(answer, last_boxed(ground_truth) or ground_truth)
    return RewardResult(
        score=float(correct),
        correct=correct,
        extra={"answered": float(answer is not None)},
        answer=None if answer is None else _LAYOUT.sub("", answer).rstrip("."),
    )


def answers_agree(answer: str, ground_truth: str) -> bool:
    """Return whether two answers in LaTeX are the same text or the same mathematics."""
    texts = [_LAYOUT.sub("", text).rstrip(".") for text in (answer, ground_truth)]
    if not texts[0] or len(texts[0]) > MAX_ANSWER:
        return False
    return texts[0] == texts[1] or _are_equal(answer, ground_truth)


def _are_equal(answer: str, ground_truth: str) -> bool:
    try:
        import math_verify
    except ImportError as error:
        raise UserError(
            "the rule `math` needs the package math-verify: pip install 'jax_ppo[math]'"
        ) from error
    # Its own time limits use signals; a worker's time limit is the pool's.
    gold, parsed = (
        math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None)
        for text in (ground_truth, answer)
    )
    return bool(math_verify.verify(gold, parsed, timeout_seconds=None))
