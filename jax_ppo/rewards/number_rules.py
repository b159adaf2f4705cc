"""Built-in rules: the score of a response from its text alone.

Model output is never evaluated: answers are extracted by a pattern from the last CLIP characters,
in linear time, and compared as exact numbers.
"""

import contextlib
import dataclasses
import json
import re

from jax_ppo.rewards.numbers import format_quantity, last_number, leading_number, parse_number
from jax_ppo.thoughts import after_thinking

GSM8K_METHODS = ("strict", "flexible")
CLIP = 300  # characters at the end of a response that are searched for an answer, as in verl

JOYFUL_WORDS = frozenset(
    "happy happily smile smiled love loved fun play played playing laugh laughed hug "
    "hugged friend friends joy glad excited proud kind sing dance shared cheered".split()
)
JOYFUL_ENOUGH = 5  # distinct words for the full score

# Matches overlap, so that of several on a line the last one counts.
_STRICT = re.compile(r"#### (?=([-\u2212]?[0-9.,][^\n]*))")
_LAST_LINE = re.compile(r"#### -?\d+\s*\Z")
_WORD = re.compile(r"[a-z]+")


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """The reward of one response."""

    score: float  # the reward, finite
    # Whether the answer is right; None if the rule does not define correctness.
    correct: bool | None = None
    # Other numbers to report, by name.
    extra: dict[str, float] = dataclasses.field(default_factory=dict)
    # Rewards within the response: (characters of its text up to the end of a step, reward of the
    # step).
    step_rewards: tuple[tuple[int, float], ...] = ()
    # The answer that the rule extracted from the response, in a form in which equal answers are
    # equal texts; `None` if there is none, or if the rule extracts no answers.
    answer: str | None = None
    # Names of what else a user-defined function returned, which cannot be reported.
    ignored: tuple[str, ...] = ()
    # Whether a user-defined function returned None, as TRL's do where they do not apply.
    is_missing: bool = False


def read_final_part(response: str) -> tuple[str, bool]:
    """Return the part of a response that answers, and whether `<answer>` tags mark it.

    It is the content of the last `<answer>...</answer>` after the thinking, or else all text after
    the thinking.
    """
    text = after_thinking(response)
    before, closed, _ = text.rpartition("</answer>")
    _, opened, answer = before.rpartition("<answer>")
    if closed and opened:
        return answer.strip(), True
    return text, False


# The backslash of a LaTeX command, which JSON must have twice: it would read `\frac` as a form feed
# and "rac". `\n` is a line break, except in the commands that begin with it.
_COMMAND = re.compile(r"(?<!\\)\\(?!n(?!eq|ot|abla)|u[0-9a-fA-F]{4})(?=[A-Za-z]{2})")

# A list as Python prints it, not JSON: with " only around texts that have an apostrophe.
_PYTHON_LIST = re.compile(r"\[\s*('.*['\"]|\".*')\s*,?\s*\]", re.DOTALL)


def listed_texts(ground_truth: str) -> list[str]:
    """Return the entries of a ground truth that is a JSON list of texts, or else itself alone.

    A list as Python prints it has none: `['a' 'b']` may be NumPy's, of two texts.
    """
    ground_truth = ground_truth.strip()
    if _PYTHON_LIST.fullmatch(ground_truth):
        return []
    if ground_truth.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            entries = json.loads(_COMMAND.sub(r"\\\\", ground_truth))
            if entries and isinstance(entries[0], str):
                return list(map(str, entries))
    return [ground_truth]


def grade_answer(
    answer: str | None, correct: bool = False, score: float | None = None
) -> RewardResult:
    """Return the result for an answer; `None` is no answer. The score is 1 or 0 unless given.

    `extra` holds `answered`, 1 if there is an answer and 0 otherwise.
    """
    return RewardResult(
        score=float(correct) if score is None else score,
        correct=correct,
        extra={"answered": float(answer is not None)},
        answer=answer,
    )


def extract_gsm8k(text: str, method: str) -> str | None:
    """Return the answer in the last CLIP characters, without grouping and currency, or None.

    The method "strict" takes the number after the last `#### `, as verl does, so that the format is
    learned too. "flexible" takes the last number in any notation: `####42`, `#### $1,234`,
    `#### **42**`, `-3`, `42.00`, `42.`. A minus directly after a word, a number or a bracket is
    read as a subtraction sign.
    """
    tail = text[-CLIP:]
    if method == "strict":
        answers = _STRICT.findall(tail)
        if not answers:
            return None
        # "#### ," has no number either.
        return leading_number(answers[-1]) or answers[-1].split()[0].replace(",", "") or None
    return last_number(tail)


def score_gsm8k(solution: str, ground_truth: str, method: str = "strict") -> RewardResult:
    """Return 1 if the response's answer equals the ground truth as a number, otherwise 0."""
    text, is_answer = read_final_part(solution)
    answer = extract_gsm8k(text, method)
    # Within <answer> tags, the number may stand alone.
    if answer is None and is_answer and parse_number(text):
        answer = text
    if answer is None:
        return grade_answer(None)
    number = parse_number(answer)
    correct = number is not None and number == parse_number(ground_truth)
    if number is not None:
        # One text for 42, 42.0 and 42.00.
        answer = format_quantity(number)
    return grade_answer(answer, correct)


def score_arithmetic(solution: str, ground_truth: str) -> RewardResult:
    """Score as `score_gsm8k`, strict, and require that nothing follows the answer.

    A response must end as the worked solutions do, or with `<answer>` tags.
    """
    if not solution.rstrip().endswith("</answer>") and not _LAST_LINE.search(solution):
        solution = ""
    return score_gsm8k(solution, ground_truth, "strict")


def score_story(solution: str) -> RewardResult:
    """Return the number of distinct JOYFUL_WORDS in the response, over JOYFUL_ENOUGH, at most 1.

    Only distinct words count, so that repetition earns nothing. `extra` holds `joyful_words`, their
    number.
    """
    words = len(JOYFUL_WORDS.intersection(_WORD.findall(solution.lower())))
    return RewardResult(score=min(1.0, words / JOYFUL_ENOUGH), extra={"joyful_words": float(words)})
