"""The table of built-in rules: what they score and read, and the rows that select them."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from jax_ppo.rewards import math_rules, number_rules, text_rules
from jax_ppo.rewards.number_rules import format_quantity, parse_number
from jax_ppo.rewards.samples import RewardFunction, RewardResult, RewardRow
from jax_ppo.rewards.text_rules import listed_texts

_NO_ANSWERS = ("proof", "notfound", "n/a")  # what data sets write where there is none
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


@dataclasses.dataclass(frozen=True)
class Rule:
    """A built-in rule."""

    # Takes a response, a right answer to its row, and by name what `parse_argument` returns.
    score: Callable[..., RewardResult]
    sources: tuple[str, ...] = ()  # `data_source`s that select it; `aime*`: all with this beginning
    # Reads the argument in a term's brackets, "" without one; raises `ValueError` if it is invalid.
    parse_argument: Callable[[str], dict[str, Any]] | None = None
    # Returns what is wrong with a ground truth, "" if nothing is.
    obstacle: Callable[[Any], str] = lambda ground_truth: ""
    # Returns a response that is right for a ground truth; `None` if none can be made.
    perfect: Callable[[Any], str] | None = None
    markers: tuple[str, ...] = ()  # forms of answers that it reads, besides `<answer>`; empty: any
    reads_thought: bool = True  # also what is behind the mark of a thought that the prompt opened
    is_isolated: bool = False  # its time is unbounded, so that it runs only in worker processes
    module: str = ""  # a module that it imports; "" without one
    extra: str = ""  # the extra of jax_ppo that installs it

    def bind(self, argument: str) -> RewardFunction:
        """Return the reward function for an argument; raise `ValueError` if that is invalid."""
        if argument and self.parse_argument is None:
            raise ValueError("takes no argument")
        options = self.parse_argument(argument) if self.parse_argument else {}

        def score(row: RewardRow, response: str) -> RewardResult:
            results = []
            response = row.thought * self.reads_thought + response
            for truth in _alternatives(row.ground_truth) or [row.ground_truth]:
                results.append(self.score(response, truth, **options))
                if results[-1].correct:
                    break
            return max(results, key=lambda result: result.score)

        return score

    def find_obstacle(self, ground_truth: Any) -> str:
        """Return why no response to a row can be right; "" if a perfect one scores as right."""
        if ground_truth == []:
            return "is empty"
        for truth in _alternatives(ground_truth):
            if obstacle := self.obstacle(truth):
                return obstacle
            if self.perfect is not None:
                row = RewardRow("", truth)
                if not self.bind("")(row, self.perfect(truth)).correct:
                    return "is not read whole, so that no response is right"
        return ""


def _alternatives(ground_truth: Any) -> list[Any]:
    """Return the right answers of a row, numbers as text."""
    truths = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    return [str(truth) if isinstance(truth, (int, float)) else truth for truth in truths]


def _parse_method(argument: str) -> dict[str, Any]:
    method = argument or "strict"
    if method not in number_rules.GSM8K_METHODS:
        raise ValueError(f"expected one of {', '.join(number_rules.GSM8K_METHODS)}")
    return {"method": method}


def _parse_tags(argument: str) -> dict[str, Any]:
    tags = tuple(tag.strip() for tag in (argument or "think,answer").split(","))
    if not all(re.fullmatch(r"[\w-]+", tag) for tag in tags):
        raise ValueError("expected tag names, as in format[think,answer]")
    return {"tags": tags}


def _parse_bounds(argument: str) -> dict[str, Any]:
    bounds = re.fullmatch(r"(\d{1,9}):(\d{1,9})", argument)
    if bounds is None or int(bounds[1]) > int(bounds[2]):
        raise ValueError("expected the minimum and maximum number of words, as in length[5:200]")
    return {"least": int(bounds[1]), "most": int(bounds[2])}


def _unless(is_valid: Callable[[Any], object], problem: str) -> Callable[[Any], str]:
    """Return the `obstacle` of a rule whose ground truths have one problem, or none."""
    return lambda ground_truth: "" if is_valid(ground_truth) else problem


def _is_integer(ground_truth: Any) -> bool:
    number = parse_number(str(ground_truth))
    return number is not None and not number.is_time and number.value.denominator == 1


_number_obstacle = _unless(lambda truth: parse_number(str(truth)), "is not a number")
_text_obstacle = _unless(
    lambda truth: isinstance(truth, str) and truth.strip(), "is empty or not text"
)


def _perfect_number(ground_truth: Any) -> str:
    number = parse_number(str(ground_truth))
    assert number is not None, "`_number_obstacle` rejects it"
    return f"#### {format_quantity(number)}"


def _texts_obstacle(ground_truth: Any) -> str:
    obstacle = _text_obstacle(ground_truth)
    if not obstacle and not all(map(str.strip, listed_texts(ground_truth))):
        return "has an empty entry"
    return obstacle


def _answer_obstacle(ground_truth: Any) -> str:
    obstacle = _texts_obstacle(ground_truth)
    if not obstacle and not listed_texts(ground_truth):
        return "is a list as Python prints it but must be JSON"
    return obstacle


def _box_obstacle(ground_truth: Any) -> str:
    if obstacle := _answer_obstacle(ground_truth):
        return obstacle
    for answer in math_rules.right_answers(ground_truth):
        if math_rules.last_boxed(f"\\boxed{{{answer}}}") != answer.strip():
            return "has braces that do not match"
        if answer.lower() in _NO_ANSWERS or len(_WORD.findall(answer)) > 11:  # prose
            return "cannot be the answer in a box"
    return ""


def _pattern_obstacle(ground_truth: Any) -> str:
    try:
        re.compile(ground_truth)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        return f"is not a regular expression: {error}"
    return _text_obstacle(ground_truth)


def _schema_obstacle(ground_truth: Any) -> str:
    try:
        schema = text_rules.parse_schema(ground_truth)
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    return "" if isinstance(schema, dict) else "is not a JSON schema"


RULES = {
    "gsm8k": Rule(
        number_rules.score_gsm8k,
        sources=("openai/gsm8k",),
        parse_argument=_parse_method,
        obstacle=_number_obstacle,
        perfect=_perfect_number,
        markers=("####",),
    ),
    "arithmetic": Rule(
        number_rules.score_arithmetic,
        sources=("arithmetic",),
        obstacle=_unless(_is_integer, "is not a whole number"),
        perfect=_perfect_number,
        markers=("####",),
    ),
    "sums": Rule(
        functools.partial(number_rules.score_gsm8k, method="flexible"),
        sources=("sums",),
        obstacle=_number_obstacle,
        perfect=_perfect_number,
    ),
    "stories": Rule(
        lambda response, truth: text_rules.score_story(response),
        sources=("stories",),
        reads_thought=False,
    ),
    "math": Rule(
        math_rules.score_math,
        sources=(
            "lighteval/MATH",
            "DigitalLearningGmbH/MATH-lighteval",
            "EleutherAI/hendrycks_math",
            "HuggingFaceH4/MATH-500",
            "HuggingFaceH4/aime_2024",
            "numina_*",
        ),
        obstacle=_box_obstacle,
        perfect=lambda truth: f"\\boxed{{{math_rules.right_answers(truth)[0]}}}",
        markers=("\\boxed",),
        is_isolated=True,
        module="math_verify",
        extra="math",
    ),
    "math_dapo": Rule(
        math_rules.score_dapo,
        sources=("math_dapo", "math", "math_dapo_reasoning", "aime*"),
        obstacle=_answer_obstacle,
        perfect=lambda truth: f"Answer: {math_rules.right_answers(truth)[0]}",
        markers=("Answer:", "\\boxed"),
    ),
    "boxed": Rule(
        math_rules.score_boxed,
        sources=("char_count",),
        obstacle=_box_obstacle,
        perfect=lambda truth: f"\\boxed{{{truth}}}",
        markers=("\\boxed",),
    ),
    "multiple_choice": Rule(
        text_rules.score_choice,
        sources=("multiple_choice",),
        obstacle=_unless(
            lambda truth: isinstance(truth, str) and text_rules.parse_choice(truth),
            "is not one letter",
        ),
        perfect=lambda truth: f"Answer: {text_rules.parse_choice(truth)}",
    ),
    "exact": Rule(
        text_rules.score_exact,
        sources=("exact",),
        obstacle=_texts_obstacle,
        perfect=lambda truth: truth,
    ),
    "search_qa": Rule(
        text_rules.score_search_answer,
        sources=("searchR1_*",),
        obstacle=_unless(
            text_rules.search_targets,
            "is not text, a list of texts, or a dict with either as `target`",
        ),
        perfect=lambda truth: f"<answer>{text_rules.search_targets(truth)[0]}</answer>",
        markers=("<answer>",),
    ),
    # The data choose the pattern and a model the text, so that the time to match has no bound.
    "regex": Rule(
        text_rules.score_regex,
        sources=("regex",),
        obstacle=_pattern_obstacle,
        reads_thought=False,
        is_isolated=True,
    ),
    "json_schema": Rule(
        text_rules.score_json,
        sources=("json_schema",),
        obstacle=_schema_obstacle,
        is_isolated=True,
        module="jsonschema",
        extra="json",
    ),
    "format": Rule(
        lambda response, truth, tags: text_rules.score_format(response, tags),
        parse_argument=_parse_tags,
    ),
    "length": Rule(
        lambda response, truth, least, most: text_rules.score_length(response, least, most),
        parse_argument=_parse_bounds,
        reads_thought=False,
    ),
}

_RULE_OF_SOURCE = {source: name for name, rule in RULES.items() for source in rule.sources}

SOURCES = tuple(_RULE_OF_SOURCE)


def rule_of_source(source: str) -> str | None:
    """Return the name of the rule that a `data_source` selects, `None` if there is none."""
    prefixes = (name for name in SOURCES if name.endswith("*") and source.startswith(name[:-1]))
    return _RULE_OF_SOURCE.get(source) or _RULE_OF_SOURCE.get(next(prefixes, ""))
