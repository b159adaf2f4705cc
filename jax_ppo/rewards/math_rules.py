r"""The rules for mathematics: MATH and its relatives, and DAPO's.

`score_math` compares the last `\boxed{...}` as mathematics. Answers that are not the same text are
compared by math-verify, which parses LaTeX with sympy. That may take unbounded time, so the rule
runs in worker processes with a time limit.
"""

import logging
import re

from jax_ppo.rewards.number_rules import CLIP, Quantity, format_quantity, parse_number
from jax_ppo.rewards.samples import RewardResult, grade_answer
from jax_ppo.rewards.text_rules import listed_texts, read_final_part

MAX_ANSWER = 500  # characters; a longer answer is not compared

_TOKEN = re.compile(r"(\\(?:boxed|fbox)(?![a-zA-Z])\s*)(\{)?|\\.|[{}]", re.DOTALL)
# What TeX puts into a box without braces, or a number.
_UNBRACED = re.compile(r"-?\d+(?:[.,/]\d+)*|\\[a-z]+(?:\{[^{}]*\})+|[A-Za-z](?![A-Za-z])")
# Displayed mathematics may begin on the next line.
_ANSWER_LINE = re.compile(r"answer[*_]*\s*[:：][\s*_]*(?:(?:\\\[|\$\$)\s*)?([^\n]+)", re.IGNORECASE)
_TEXT_COMMAND = re.compile(r"\\(?:text|math|mbox)[a-z]*\s*\{([^{}]*)\}")
_ARGUMENT = r"\s*(?:\{([^{}]*)\}|(\w))"
_FRACTION = re.compile(rf"\\[dt]?frac{_ARGUMENT}{_ARGUMENT}")
# A fraction of numbers or letters that needs no parentheses, and a number in front of it.
_PLAIN_FRACTION = re.compile(
    r"(?<![\w.}])(\d+(?=\\frac\{\d+\}))?"
    r"\\frac\{(-?[\d.,]*\d|[a-z])\}\{([\d.,]*\d|[a-z])\}(?![\w{\\])"
)
_ROOT = re.compile(r"\\sqrt\s*(\w)")
# A number with a letter directly behind it, or one or two after a blank, that begin no unit,
# ordinal, time or exponent.
_NO_UNIT = (
    r"(?!(?:[cdkmn]?m|[km]?g|m?[lL]|cc|ft|ha|hrs?|h|in|lbs?|mi|min|mph|oz|pt|qt|sq|s|yd|st|nd|rd|th"
    r"|am|pm|kWh|days|feet|[a-z]{5,})\b)"  # nobody writes a product of five letters
)
_FACTOR = re.compile(
    rf"[-+]?[\d.,/]*\d(?:{_NO_UNIT}(?![eE][-+]?\d)[^\W\d_]| {_NO_UNIT}[a-z]{{1,2}}\b)"
)
_DECORATION = re.compile(r"\\?\$|\\[,;!: ()\[\]]|\{,\}|\^\{?\\circ\}?(?:[CF]\b)?|\\(?=%)|\*\*|`")
# The left side of a single assignment, as in `x = 3`; of several, none is removed.
_ASSIGNMENT = re.compile(
    r"\A(?:[^=]*|(?:(?!(?:\\l|(?<![A-Za-z]))(?:and|or)(?![A-Za-z])|[,;]).)*)=(?!.*=)"
)
_MIXED = re.compile(r"(?<![\w.}])(\d+) +(\d{1,2})/(\d{1,3})(?![\w/])")
# Characters that stand for digits and LaTeX.
_DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹０１２３４５６７８９", "-" + "0123456789" * 2)
_SUPERSCRIPT = re.compile("⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_POWER = re.compile(r"\^\{(-?\d+)\}(?!\d)")
_ROOT_SIGN = re.compile(r"√(?:(\w+)|\(([^()]*)\))")
_SYMBOLS = str.maketrans(
    {
        **{"½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}"},
        **{"¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "\u2212": "-", "×": r"\times "},
        **{"·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "°": r"^{\circ}"},
        **{"∅": r"\emptyset ", "~": " "},
    }
)
# Spacing and delimiters of LaTeX that do not change the meaning.
_LAYOUT = re.compile(r"\\(?:left|right|[,;!:])|\$|\s+")


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last complete `\boxed{...}` of a text, or `None`.

    Braces may be nested, and escaped ones are text. Without braces, as in `\boxed 5`, a number, a
    letter or a command is the content.
    """
    last_start, content = -1, None
    open_braces: list[int] = []  # where the content begins, -1 outside of boxes
    for match in _TOKEN.finditer(text):
        if match[1]:
            unbraced = None if match[2] else _UNBRACED.match(text, match.end())
            if match[2]:
                open_braces.append(match.end())
            elif unbraced:
                last_start, content = match.end(), unbraced[0]
        elif match[0] == "{":
            open_braces.append(-1)
        elif match[0] == "}" and open_braces:
            start = open_braces.pop()
            if start > last_start:
                last_start, content = start, text[start : match.start()].strip()
    return content


def score_boxed(solution: str, ground_truth: str) -> RewardResult:
    r"""Return 1 if the last `\boxed{...}` of the response is the text of the ground truth, or 0."""
    answer = last_boxed(read_final_part(solution)[0])
    return grade_answer(answer, answer == ground_truth.strip())


def score_math(solution: str, ground_truth: str) -> RewardResult:
    r"""Return 1 if the last `\boxed{...}` of the response equals the ground truth, otherwise 0.

    Within `<answer>` tags the box may be missing. The ground truth may have one.
    """
    text, is_answer = read_final_part(solution)
    answer = last_boxed(text)
    if answer is None and is_answer:
        answer = text
    if answer is None:
        return grade_answer(None)
    correct = any(answers_agree(answer, truth) for truth in right_answers(ground_truth))
    return grade_answer(_strip_layout(answer), correct)


def score_dapo(solution: str, ground_truth: str) -> RewardResult:
    r"""Return 1 if the last `Answer: ...` equals the ground truth, otherwise -1, as verl does.

    Without one the last `\boxed{...}` or the content of `<answer>` tags counts. Only the last CLIP
    characters are searched. Numbers are compared as numbers, other answers as text without layout.
    """
    text, is_answer = read_final_part(solution)
    tail = text[-CLIP:]
    answers = _ANSWER_LINE.findall(tail)
    written = answers[-1] if answers else last_boxed(tail)
    if written is None and is_answer:
        written = text
    if written is None:
        return grade_answer(None, score=-1.0)
    answer = _plain_answer(written)
    correct = answer != "" and answer in map(_plain_answer, right_answers(ground_truth))
    return grade_answer(answer, correct, score=1.0 if correct else -1.0)


def right_answers(ground_truth: str) -> list[str]:
    """Return the answers of a ground truth, one or a JSON list: the last box of each, if any."""
    return [last_boxed(truth) or truth for truth in listed_texts(ground_truth)]


def _write_latex(answer: str) -> str:
    """Return an answer with LaTeX for characters such as π, and for mixed numbers (1 1/2)."""
    answer = _ROOT_SIGN.sub(r"\\sqrt{\1\2}", answer)
    answer = _SUPERSCRIPT.sub(r"^{\g<0>}", answer).translate(_DIGITS).translate(_SYMBOLS)
    answer = answer.replace(r"\varnothing", r"\emptyset")
    return _MIXED.sub(r"\1\\frac{\2}{\3}", answer)


def _plain_answer(answer: str) -> str:
    """Return the number that an answer in LaTeX is, in one notation, or else its text."""
    boxed = last_boxed(answer)
    # A backslash at the end is the rest of a space or of a line break.
    answer = _write_latex((answer if boxed is None else boxed).strip().rstrip("\\ "))
    answer = _ASSIGNMENT.sub("", answer)
    answer = _TEXT_COMMAND.sub(r" \1", _DECORATION.sub("", answer))
    answer = _FRACTION.sub(r"\\frac{\1\2}{\3\4}", _ROOT.sub(r"\\sqrt{\1}", answer))
    answer = _PLAIN_FRACTION.sub(
        lambda match: f"{match[1] + ' ' if match[1] else ''}{match[2]}/{match[3]}", answer
    )
    answer = _POWER.sub(r"^\1", answer)
    number = _parse_quantity(answer)
    return _strip_layout(answer) if number is None else format_quantity(number)


def _parse_quantity(answer: str) -> Quantity | None:
    """Return the number that an answer is; letters directly behind it are factors, or a unit."""
    answer = " ".join(answer.split())
    return None if _FACTOR.match(answer) else parse_number(answer)


def answers_agree(answer: str, ground_truth: str) -> bool:
    """Return whether two answers in LaTeX are the same text or the same mathematics."""
    answer, ground_truth = _write_latex(answer), _write_latex(ground_truth)
    text = _strip_layout(answer)
    if not text or len(text) > MAX_ANSWER:
        return False
    number = _parse_quantity(answer)
    is_same_number = number is not None and number == _parse_quantity(ground_truth)
    return text == _strip_layout(ground_truth) or is_same_number or _are_equal(answer, ground_truth)


def _strip_layout(answer: str) -> str:
    """Return an answer without spacing, dollar signs and a final full stop."""
    return _LAYOUT.sub("", _TEXT_COMMAND.sub(r"\1", answer)).rstrip(".")


def _are_equal(answer: str, ground_truth: str) -> bool:
    import math_verify

    # math-verify's own time limits use signals; the worker pool limits the time instead. It would
    # warn of that in each process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = math_verify.parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    parsed = math_verify.parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return bool(math_verify.verify(gold, parsed, timeout_seconds=None))
