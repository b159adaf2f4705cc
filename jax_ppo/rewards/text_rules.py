"""Rules about the text of a response: exact answers, choices, patterns, JSON, format and length."""

import contextlib
import json
import re
import string
from typing import Any

from jax_ppo.rewards.samples import RewardResult, grade_answer
from jax_ppo.thoughts import after_thinking

# A letter is a choice if nothing but punctuation follows on its line, or a word if the letter is
# upper-case and no article. "A or B" is none.
_LETTER = (
    r"(?:([A-Za-z])(?!\s*[,/&]\s*\(?[A-Z]\b)(?=[\s*_`$\"'\])}]*(?:[.,:;!?)\]}。，]|\n|\Z))"
    r"|([B-HJ-Z])(?=[*_`$\"'\])}]*\s+(?!\(?(?:or|and|is)\b)[\w(–—-])"
    r"|([AI])(?=[*_`$\"'\])}]*\s+(?:(?:because|since|as|due)\b|[(–—-](?!or\b))))"
)
_OPENING = r"(?:[\s*_`$\"'(\[{]|\\(?:text|math)(?:bf|rm)?\{)*(?:(?:option|choice)\s+\(?)?"
_STATED_CHOICE = re.compile(
    r"(?:(?:\banswer(?:\s+is)?|\b(?:option|choice)\s+is|故选|答案[是为选]?)\s*[:：]?|####|\\boxed)"
    rf"{_OPENING}(?-i:{_LETTER})"
    r"|\b(?-i:([A-Z]))\)?\s+is\s+(?:the\s+)?(?:correct|right|best|answer)\b",
    re.IGNORECASE,
)
_CHOICES = (
    _STATED_CHOICE,
    re.compile(r"\(([A-Za-z])\)"),
    re.compile(r"(?<!\bor )(?<!\band )(?<!\bnot )(?<![A-Z], )(?<![A-Z][,/&])\b([A-Z])\W*\Z"),
    # The whole response is an option with its text.
    re.compile(r"\A[\s*]*([A-Z])[.):]\**\s[^\n]*(?:\n\s*)?\Z"),
)
_WHOLE_CHOICE = re.compile(r"[\s*(\[]*([A-Za-z])[\s*]*(?:[.):\]].*)?\Z", re.DOTALL)
_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n```\Z", re.DOTALL)
# The backslash of a LaTeX command, which JSON must have twice: it would read `\frac` as a form feed
# and "rac". `\n` is a line break, except in the commands that begin with it.
_COMMAND = re.compile(r"(?<!\\)\\(?!n(?!eq|ot|abla)|u[0-9a-fA-F]{4})(?=[A-Za-z]{2})")

# A list as Python prints it, not JSON: with " only around texts that have an apostrophe.
_PYTHON_LIST = re.compile(r"\[\s*('.*['\"]|\".*')\s*,?\s*\]", re.DOTALL)

JOYFUL_WORDS = frozenset(
    "happy happily smile smiled love loved fun play played playing laugh laughed hug "
    "hugged friend friends joy glad excited proud kind sing dance shared cheered".split()
)
JOYFUL_ENOUGH = 5  # distinct words for the full score
_WORD = re.compile(r"[a-z]+")


def read_final_part(response: str) -> tuple[str, bool]:
    """Return the last `<answer>` or all text after the thinking, and whether tags mark it."""
    text = after_thinking(response)
    before, closed, _ = text.rpartition("</answer>")
    _, opened, answer = before.rpartition("<answer>")
    if closed and opened:
        return answer.strip(), True
    return text, False


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


def score_exact(solution: str, ground_truth: str) -> RewardResult:
    """Return 1 if the response answers the ground truth, ignoring surrounding blanks, otherwise 0.

    The whole response or its final part must be the ground truth, or an entry of a JSON list.
    """
    truths = {truth.strip() for truth in (ground_truth, *listed_texts(ground_truth))}
    answer = read_final_part(solution)[0].strip()
    if solution.strip() in truths:
        answer = solution.strip()
    correct = answer in truths
    return RewardResult(score=float(correct), correct=correct, answer=answer)


def score_choice(solution: str, ground_truth: str) -> RewardResult:
    """Return 1 if the letter that the response chooses is the ground truth, otherwise 0.

    A choice is the content of `<answer>` tags; or the last of `answer is B`, `Answer: (B)`,
    `#### B`, `B is correct` and a boxed letter; or the last `(B)`; or a capital letter at the very
    end; or the beginning of a response of one line, as in `B. a cat`. The thinking is not read.
    `extra` holds `answered`.
    """
    letter = _find_choice(*read_final_part(solution))
    return grade_answer(letter, letter is not None and letter == parse_choice(ground_truth))


def parse_choice(text: str) -> str | None:
    """Return the letter of a ground truth such as `B`, `b`, `(B)` or `B.`; otherwise `None`."""
    match = re.fullmatch(r"\(?([A-Za-z])\)?\.?", text.strip())
    return match and match[1].upper()


def _find_choice(text: str, is_answer: bool) -> str | None:
    whole = _WHOLE_CHOICE.match(text) if is_answer else None
    if whole:
        return whole[1].upper()
    for pattern in _CHOICES:
        matches = list(pattern.finditer(text[-1000:]))
        if matches:
            return next(filter(None, matches[-1].groups())).upper()
    return None


def score_search_answer(solution: str, ground_truth: Any) -> RewardResult:
    """Return 1 if the `<answer>` of the response is one of the targets, otherwise 0, as verl does.

    Case, punctuation, articles and blanks are ignored. More than 10 tags earn a quarter. The ground
    truth is a target, a list of them, or a dict with either as `target`.
    """
    text, is_answer = read_final_part(solution)
    if not is_answer:
        return grade_answer(None)
    answer = _normalize_words(text)
    correct = answer in map(_normalize_words, search_targets(ground_truth))
    is_flood = max(solution.count("<answer>"), solution.count("</answer>")) > 10
    return grade_answer(answer, correct, score=float(correct) * (0.25 if is_flood else 1.0))


def search_targets(ground_truth: Any) -> list[str]:
    """Return the targets of a ground truth; an empty list if it has another form."""
    if isinstance(ground_truth, dict):
        ground_truth = ground_truth.get("target")
    targets = listed_texts(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(targets, list) or not all(
        isinstance(target, str) and _normalize_words(target) for target in targets
    ):
        return []
    return targets


def _normalize_words(text: str) -> str:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text).split())


def score_regex(solution: str, ground_truth: str) -> RewardResult:
    """Return 1 if the response has a match of the regular expression `ground_truth`, else 0."""
    correct = re.search(ground_truth, solution) is not None
    return RewardResult(score=float(correct), correct=correct)


def score_json(solution: str, ground_truth: Any) -> RewardResult:
    """Return 1 if the response is JSON that satisfies the ground truth's schema, otherwise 0.

    The JSON may be fenced as code, and follow the thinking. `extra` holds `is_json`.
    """
    import jsonschema

    text = after_thinking(solution).strip()
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
    solution = solution.strip()
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    once = all(solution.count(mark) == 1 for mark in marks)
    pattern = r"\s*".join(rf"<{re.escape(tag)}>.*</{re.escape(tag)}>" for tag in tags)
    has_form = once and re.fullmatch(pattern, solution, re.DOTALL) is not None
    return RewardResult(score=float(has_form))


def score_length(solution: str, least: int, most: int) -> RewardResult:
    """Return 1 if the response has `least` to `most` words, otherwise 0; `extra` holds `words`."""
    words = len(solution.split())
    return RewardResult(score=float(least <= words <= most), extra={"words": float(words)})


def score_story(solution: str) -> RewardResult:
    """Return the number of distinct JOYFUL_WORDS, over JOYFUL_ENOUGH and at most 1."""
    words = len(JOYFUL_WORDS.intersection(_WORD.findall(solution.lower())))
    return RewardResult(score=min(1.0, words / JOYFUL_ENOUGH), extra={"joyful_words": float(words)})
