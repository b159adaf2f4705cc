"""Rules about the text of a response: exact answers, choices, patterns, JSON, format and length."""

import json
import re
from typing import Any

from jax_ppo.errors import UserError
from jax_ppo.rewards.rules import RewardResult

# The letter after "answer is", in brackets or alone at the end; the last one counts.
_CHOICE = re.compile(
    r"(?:answer\s*(?:is|:)?\s*\(?|\\boxed\{\s*\(?|####\s*\(?)([A-Z])\b|\(([A-Z])\)|\b([A-Z])\W*\Z",
    re.IGNORECASE,
)
_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n```\Z", re.DOTALL)


def score_exact(solution: str, ground_truth: str) -> RewardResult:
    """Return 1 if the response is the ground truth, ignoring surrounding blanks, otherwise 0."""
    answer = solution.strip()
    correct = answer == ground_truth.strip()
    return RewardResult(score=float(correct), correct=correct, answer=answer)


def score_choice(solution: str, ground_truth: str) -> RewardResult:
    """Return 1 if the letter that the response chooses is the ground truth, otherwise 0.

    A choice is `answer is B`, `Answer: (B)`, `(B)`, `#### B`, a boxed letter, or a letter at the
    very end; the last one counts. `extra` holds `answered`.
    """
    choices = _CHOICE.findall(solution[-1000:])
    if not choices:
        return RewardResult(score=0.0, correct=False, extra={"answered": 0.0})
    # Each alternative of the pattern has a group of its own; all others are empty.
    letter = "".join(choices[-1]).upper()
    correct = letter == ground_truth.strip().strip("()").upper()
    return RewardResult(
        score=float(correct), correct=correct, extra={"answered": 1.0}, answer=letter
    )


def score_regex(solution: str, ground_truth: str) -> RewardResult:
    """Return 1 if the response has a match of the regular expression `ground_truth`, else 0."""
    correct = re.search(ground_truth, solution) is not None
    return RewardResult(score=float(correct), correct=correct)


def score_json(solution: str, ground_truth: Any) -> RewardResult:
    """Return 1 if the response is JSON that satisfies the ground truth's schema, otherwise 0.

    The JSON may be fenced as code. `extra` holds `is_json`.

    Args:
      solution: the response.
      ground_truth: a JSON schema, as an object or as text.

    Raises:
      UserError: jsonschema is not installed.
    """
    try:
        import jsonschema
    except ImportError as error:
        raise UserError(
            "the rule `json_schema` needs the package jsonschema: pip install 'jax_ppo[json]'"
        ) from error
    text = solution.strip()
    if fenced := _FENCE.match(text):
        text = fenced[1]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return RewardResult(score=0.0, correct=False, extra={"is_json": 0.0})
    schema = parse_schema(ground_truth)
    correct = jsonschema.Draft202012Validator(schema).is_valid(value)
    return RewardResult(score=float(correct), correct=correct, extra={"is_json": 1.0})


def parse_schema(ground_truth: Any) -> Any:
    """Return a JSON schema from an object or from text."""
    if isinstance(ground_truth, str):
        return json.loads(ground_truth)
    return ground_truth


def score_format(solution: str, tags: tuple[str, ...]) -> RewardResult:
    """Return 1 if the response consists of these tags in order, each once, otherwise 0.

    The form is `<think>...</think><answer>...</answer>` for the tags think and answer, optionally
    with blanks between them.
    """
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    once = all(solution.count(mark) == 1 for mark in marks)
    pattern = r"\s*".join(rf"<{re.escape(tag)}>.*</{re.escape(tag)}>" for tag in tags)
    has_form = once and re.fullmatch(pattern, solution.strip(), re.DOTALL) is not None
    return RewardResult(score=float(has_form))


def score_length(solution: str, least: int, most: int) -> RewardResult:
    """Return 1 if the response has `least` to `most` words, otherwise 0; `extra` holds `words`."""
    words = len(solution.split())
    return RewardResult(score=float(least <= words <= most), extra={"words": float(words)})
