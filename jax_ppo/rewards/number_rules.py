"""The rules for answers that are numbers, and the notations in which numbers are read.

Model output is never evaluated: answers are extracted by a pattern from the last CLIP characters,
in linear time, and compared as exact numbers.

A number has an optional sign and currency and is one of

    decimal    42  .5  1,234.50  1{,}234  1 000  1'000  1,00,000
    exponent   1.5e3  1.5 x 10^3
    fraction   3/4  and, with a whole part, 1 1/2
    time       12:30  7:05:30  3:15 pm

A unit may follow, and is not compared: 5 km, 50%, 3 square feet. Values are exact, so that any two
notations of a number are equal.
"""

import decimal
import re
from fractions import Fraction
from typing import NamedTuple

from jax_ppo.rewards.samples import RewardResult, grade_answer
from jax_ppo.rewards.text_rules import read_final_part

GSM8K_METHODS = ("strict", "first", "flexible")
CLIP = 300  # characters at the end of a response that are searched for an answer, as in verl
LONGEST_NUMBER = 60  # characters of a ground truth

_INTEGER = (
    r"(?:\d{1,3}(?:(?:,|\{,\}|,\\!)\d{3})+(?!\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)"
    r"|\d{1,3}(?:[ '\u00a0\u2009\u202f]\d{3})+(?![\d-])|\d+)"
)
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d+)?|\.\d+)"
_EXPONENT = (
    r"(?:[eE](?P<{0}>[-+]?\d{{1,2}})(?!\d)"
    r"|[ ]?(?:[x×*]|\\times|\\cdot)[ ]?10(?:\^|\*\*)\{{?(?P<{0}_power>[-+]?\d{{1,2}})(?!\d)\}}?)?"
)
# A minus directly after a word, a number or a bracket is a subtraction sign.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)])[-+\u2212][$€£¥]?|[$€£¥][-+\u2212]?)?"
    r"(?:(?P<time>\d{1,2}(?::[0-5]\d){1,2})(?![:\d])(?:[ ]?(?P<half>[aApP])\.?[mM]\b\.?)?"
    r"|(?P<whole>\d{1,9})[ ](?P<above>\d{1,2})/(?P<below>\d{1,3})(?![\d/])"
    rf"|(?P<number>{_DECIMAL}){_EXPONENT.format('exponent')}"
    rf"(?:[ ]?/[ ]?(?P<divisor>{_DECIMAL}){_EXPONENT.format('divisor_exponent')}(?![\d/]))?)",
    re.ASCII,
)
# What makes a number a part of something longer, such as 1.2.3, 40+2 and 4_2.
_CONTINUATION = re.compile(r"(?:[-+*/^_=:.,'×]+|[eE][-+]?)\d")
_UNIT_WORD = re.compile(r"(?=.*(?:[^\W\d_]|[%°$€£¥]))(?:[^\W\d_]|[%°$€£¥./'()-])+(?:\^?[23])?")
_MOST_UNIT_WORDS = 3
# Words that change the value or add another one.
_NO_UNITS = frozenset(
    "a.m am and b billion billions crore dozen dozens half hundred hundreds hundredths k lakh "
    "million millions minus n or out p.m pi plus pm tenths thousand thousands thousandths to "
    "trillion x y z π".split()
)
# Matches overlap, so that of several on a line the last one counts.
_STRICT = re.compile(r"#### (?=([-\u2212]?[0-9.,][^\n]*))")
_LAST_LINE = re.compile(r"#### -?\d+\s*\Z")
_BLANK = re.compile("[ \u00a0\u2009\u202f]")
_GROUPING = re.compile(r"[,'{}\\! \u00a0\u2009\u202f]")


class Quantity(NamedTuple):
    """A number, or a time of day or duration in hours."""

    value: Fraction
    is_time: bool = False


def parse_number(text: str) -> Quantity | None:
    """Return what the whole text says: a number or a time, and a unit if any; otherwise `None`."""
    text = text.strip()
    match = _NUMBER.match(text)
    if match is None or len(text) > LONGEST_NUMBER:
        return None
    # Nothing, a full stop or a unit may follow.
    words = [word for word in _BLANK.split(text[match.end() :].rstrip(".,")) if word]
    is_unit = len(words) <= _MOST_UNIT_WORDS and all(
        _UNIT_WORD.fullmatch(word) and word.lower() not in _NO_UNITS for word in words
    )
    return _evaluate(match) if is_unit else None


def leading_number(text: str) -> str | None:
    """Return the number at the beginning of a text; `None` if something longer begins there."""
    match = _NUMBER.match(text)
    return _written(match) if match and not _CONTINUATION.match(text, match.end()) else None


def last_number(text: str) -> str | None:
    """Return the last number of a text in any notation, without currency and grouping."""
    matches = list(_NUMBER.finditer(text))
    return _written(matches[-1]) if matches else None


def format_quantity(quantity: Quantity) -> str:
    """Return the one text of all notations of a value: 42, 0.75, 1/3 or 12:30."""
    value = quantity.value
    if quantity.is_time:
        minutes, seconds = divmod(int(value * 3600), 60)
        text = f"{minutes // 60}:{minutes % 60:02}"
        return f"{text}:{seconds:02}" if seconds else text
    if value.denominator == 1:
        return str(value.numerator)
    quotient = decimal.Decimal(value.numerator) / decimal.Decimal(value.denominator)
    return f"{quotient:f}" if Fraction(quotient) == value else str(value)


def _written(match: re.Match[str]) -> str:
    """Return a match without currency and grouping, with an ASCII sign."""
    sign = "-" if _is_negative(match) else ""
    text = match[0].removeprefix(match["sign"] or "")
    if match["whole"] or match["time"]:
        return sign + text
    return sign + _GROUPING.sub("", text)


def _is_negative(match: re.Match[str]) -> bool:
    return bool({"-", "\u2212"} & set(match["sign"] or ""))


def _evaluate(match: re.Match[str]) -> Quantity | None:
    """Return the value of a match; `None` for a division by zero and an impossible time."""
    sign = -1 if _is_negative(match) else 1
    if match["time"]:
        hours, minutes, *seconds = map(Fraction, match["time"].split(":"))
        if match["half"]:
            if not 1 <= hours <= 12:
                return None
            hours = hours % 12 + 12 * (match["half"] in "pP")
        hours += (minutes * 60 + sum(seconds)) / 3600
        return Quantity(hours, is_time=True) if sign > 0 else None
    if match["whole"]:
        whole, above, below = (int(match[name]) for name in ("whole", "above", "below"))
        return Quantity(sign * (whole + Fraction(above, below))) if below else None
    value = _decimal(match, "number", "exponent")
    if match["divisor"]:
        divisor = _decimal(match, "divisor", "divisor_exponent")
        if not divisor:
            return None
        value /= divisor
    return Quantity(sign * value)


def _decimal(match: re.Match[str], digits: str, exponent: str) -> Fraction:
    power = int(match[exponent] or match[f"{exponent}_power"] or 0)
    return Fraction(_GROUPING.sub("", match[digits])) * Fraction(10) ** power


def extract_gsm8k(text: str, method: str) -> str | None:
    """Return the answer in the last CLIP characters, without grouping and currency, or None.

    The method "strict" takes the number after the last `#### `, as verl does, so that the format is
    learned too; "first" the one after the first, in the whole text, as verl did in 2024. "flexible"
    takes the last number in any notation: `####42`, `#### $1,234`, `#### **42**`, `-3`, `42.00`,
    `42.`. A minus directly after a word, a number or a bracket is read as a subtraction sign.
    """
    tail = text[-CLIP:]
    if method == "flexible":
        return last_number(tail)
    first = _STRICT.search(text)
    answers = _STRICT.findall(tail) if method == "strict" else first and [first[1]]
    if not answers:
        return None
    # "#### ," has no number either.
    return leading_number(answers[-1]) or answers[-1].split()[0].replace(",", "") or None


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
