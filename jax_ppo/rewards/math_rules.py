r"""The rules for mathematics: MATH and its relatives, and DAPO's.

`score_math` compares the last `\boxed{...}` as mathematics. Answers that are not the same text are
compared by math-verify, which parses LaTeX with sympy. That may take unbounded time, so the rule
runs in worker processes with a time limit.
"""

import logging
import re

from jax_ppo.rewards.numbers import format_quantity, parse_number
from jax_ppo.rewards.rules import CLIP, RewardResult, grade_answer, read_final_part

MAX_ANSWER = 500  # characters; a longer answer is not compared

_TOKEN = re.compile(r"(\\(?:boxed|fbox)(?![a-zA-Z])\s*)(\{)?|\\.|[{}]", re.DOTALL)
# What TeX puts into a box without braces, or a number.
_UNBRACED = re.compile(r"-?\d+(?:[.,/]\d+)*|\\[a-z]+(?:\{[^{}]*\})+|[A-Za-z](?![A-Za-z])")
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_TEXT_COMMAND = re.compile(r"\\(?:text|math|mbox)[a-z]*\s*\{([^{}]*)\}")
_ARGUMENT = r"\s*(?:\{([^{}]*)\}|(\w))"
_FRACTION = re.compile(rf"\\[dt]?frac{_ARGUMENT}{_ARGUMENT}")
_ROOT = re.compile(r"\\sqrt\s*(\w)")
_DECORATION = re.compile(r"\\\$|\$|\\[,;!: ()\[\]]|\{,\}|\^\{?\\circ\}?|\\(?=%)|\*\*|`")
# Spacing and delimiters of LaTeX that do not change the meaning.
_LAYOUT = re.compile(r"\\(?:left|right|[,;!:]|text(?=\{))|\$|\s+")


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
    correct = answers_agree(answer, last_boxed(ground_truth) or ground_truth)
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
    correct = answer != "" and answer == _plain_answer(ground_truth)
    return grade_answer(answer, correct, score=1.0 if correct else -1.0)


def _plain_answer(answer: str) -> str:
    """Return the number that an answer in LaTeX is, in one notation, or else its text."""
    answer = answer.rpartition("=")[2]
    boxed = last_boxed(answer)
    answer = answer if boxed is None else boxed
    answer = _TEXT_COMMAND.sub(r" \1", _DECORATION.sub("", answer))
    answer = _ROOT.sub(r"\\sqrt{\1}", _FRACTION.sub(r"\1\2/\3\4", answer))
    number = parse_number(answer)
    return _strip_layout(answer) if number is None else format_quantity(number)


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
    import math_verify

    # math-verify's own time limits use signals; the worker pool limits the time instead. It would
    # warn of that in each process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = math_verify.parse(f"\\boxed{{{ground_truth}}}", parsing_timeout=None)
    parsed = math_verify.parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return bool(math_verify.verify(gold, parsed, timeout_seconds=None))
