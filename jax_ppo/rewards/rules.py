"""The built-in rules: what a response is worth, from its text alone.

Nothing that a model wrote is evaluated: answers are found by pattern in the last CLIP characters, in linear time, and
compared as decimal numbers.
"""

import dataclasses
import decimal
import re

METHODS = ("strict", "flexible")
CLIP = 300  # characters at the end of a response in which an answer is looked for, as in verl

JOYFUL_WORDS = frozenset(
    (
        "happy",
        "happily",
        "smile",
        "smiled",
        "love",
        "loved",
        "fun",
        "play",
        "played",
        "playing",
        "laugh",
        "laughed",
        "hug",
        "hugged",
        "friend",
        "friends",
        "joy",
        "glad",
        "excited",
        "proud",
        "kind",
        "sing",
        "dance",
        "shared",
        "cheered",
    )
)
JOYFUL_ENOUGH = 5  # distinct words for the full score

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(
    r"((?<![\w)])-)?\$?(\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d+)?|\.\d+)", re.ASCII
)
_WORD = re.compile(r"[a-z]+")


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """What one response earned.

    Attributes:
      score: the reward, finite.
      correct: whether the answer is right; None where the rule has no notion of it.
      extra: other numbers to report, by name.
      step_rewards: rewards within the response: (characters of its text up to a step's end, the step's reward).
    """

    score: float
    correct: bool | None = None
    extra: dict[str, float] = dataclasses.field(default_factory=dict)
    step_rewards: tuple[tuple[int, float], ...] = ()


def extract_gsm8k(text: str, method: str) -> str | None:
    """The answer that a response gives, without commas and dollar signs, or None. Looks at the last CLIP characters.

    Args:
      text: the response.
      method: "strict" takes the last `#### N`, as verl does, so that the form is learnt too. "flexible" takes the last
        number, however it is written: `####42`, `#### $1,234`, `#### **42**`, `-3`, `42.00`, `42.`; a minus right after
        a word, a number or a bracket counts as a sign of subtraction.

    Raises:
      ValueError: another method.
    """
    tail = text[-CLIP:]
    if method == "strict":
        found = _STRICT.findall(tail)
        return found[-1].replace(",", "") or None if found else None
    if method == "flexible":
        found = _NUMBER.findall(tail)
        return found[-1][0] + found[-1][1].replace(",", "") if found else None
    raise ValueError(f"config.reward.gsm8k_method={method!r}: expected one of {METHODS}")


def parse_number(text: str) -> decimal.Decimal | None:
    """The finite number that a text is, commas left out, or None. `42`, `42.` and `42.00` are equal."""
    try:
        number = decimal.Decimal(text.replace(",", "").strip())
    except decimal.InvalidOperation:
        return None
    return number if number.is_finite() else None


def gsm8k(solution: str, ground_truth: str, method: str = "strict") -> RewardResult:
    """1 if the response's answer equals the ground truth as a number, otherwise 0. extra: answered (0 or 1)."""
    answer = extract_gsm8k(solution, method)
    number = None if answer is None else parse_number(answer)
    correct = number is not None and number == parse_number(ground_truth)
    return RewardResult(float(correct), correct, {"answered": float(answer is not None)})


def arithmetic(solution: str, ground_truth: str) -> RewardResult:
    """gsm8k, strict, with nothing behind the number: the response must end as the worked examples do."""
    ended = re.search(r"#### -?\d+\s*\Z", solution) is not None
    return gsm8k(solution if ended else "", ground_truth, "strict")


def stories(solution: str) -> RewardResult:
    """The number of different words of JOYFUL_WORDS in the response, over 5, at most 1.

    Different words, so that saying one of them again earns nothing. extra: joyful_words, that number.
    """
    words = len(JOYFUL_WORDS.intersection(_WORD.findall(solution.lower())))
    return RewardResult(min(1.0, words / JOYFUL_ENOUGH), None, {"joyful_words": float(words)})
