"""Reward functions from options.

A reward function takes a RewardRow and the text of a response and returns a RewardResult.
`resolve_reward_function` returns the built-in one, which applies a rule by each row's data_source,
wraps a user-defined one, or adds up the terms of `reward.terms`. A rule is an entry of `RULES`.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jax_ppo.config import plugins
from jax_ppo.config.schema import Reward
from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.rewards import math_rules, rules, text_rules
from jax_ppo.rewards.batch_functions import (
    BatchFunction,
    batch_arguments,
    wrap_batch_function,
)
from jax_ppo.rewards.custom import REWARD_ARGUMENTS, parse_reward_output
from jax_ppo.rewards.judge import Judge
from jax_ppo.rewards.rules import RewardResult
from jax_ppo.rewards.samples import RewardFunction, RewardRow
from jax_ppo.rewards.terms import MODEL, Term, parse_terms

if TYPE_CHECKING:  # `jax_ppo.types` imports jax, which reward workers do not load
    from jax_ppo.types import Example

AUTO = "auto"  # the term of each row's own rule
JUDGE = "judge"  # the term of the server of `reward.url`


@dataclasses.dataclass(frozen=True)
class Rule:
    """A built-in rule.

    Attributes:
      bind: returns the reward function for the argument in a term's brackets, "" without one;
        raises `ValueError` for a wrong one.
      sources: the values of `data_source` that select the rule.
      obstacle: returns what is wrong with a ground truth, "" if nothing is.
      is_isolated: whether its time is unbounded, so that it runs in worker processes only.
    """

    bind: Callable[[str], RewardFunction]
    sources: tuple[str, ...] = ()
    obstacle: Callable[[Any], str] = lambda ground_truth: ""
    is_isolated: bool = False


def _without_argument(score: Callable[[str, Any], RewardResult]) -> Callable[[str], RewardFunction]:
    """Return the `bind` of a rule that takes the response, the ground truth and no argument."""

    def bind(argument: str) -> RewardFunction:
        if argument:
            raise ValueError("takes no argument")
        return lambda row, response: score(response, row.ground_truth)

    return bind


def _bind_gsm8k(argument: str) -> RewardFunction:
    method = argument or "strict"
    if method not in rules.GSM8K_METHODS:
        raise ValueError(f"expected one of {', '.join(rules.GSM8K_METHODS)}")
    return lambda row, response: rules.score_gsm8k(response, row.ground_truth, method)


def _bind_story(argument: str) -> RewardFunction:
    return lambda row, response: rules.score_story(response)


def _bind_format(argument: str) -> RewardFunction:
    tags = tuple(tag.strip() for tag in argument.split(",")) if argument else ("think", "answer")
    if not all(re.fullmatch(r"[\w-]+", tag) for tag in tags):
        raise ValueError("expected names of tags, as in format[think,answer]")
    return lambda row, response: text_rules.score_format(response, tags)


def _bind_length(argument: str) -> RewardFunction:
    bounds = re.fullmatch(r"(\d{1,9}):(\d{1,9})", argument)
    if bounds is None or int(bounds[1]) > int(bounds[2]):
        raise ValueError("expected the least and the greatest number of words, as in length[5:200]")
    least, most = map(int, bounds.groups())
    return lambda row, response: text_rules.score_length(response, least, most)


def _number_obstacle(ground_truth: Any) -> str:
    return "" if rules.parse_number(str(ground_truth)) is not None else "is not a number"


def _text_obstacle(ground_truth: Any) -> str:
    return "" if isinstance(ground_truth, str) and ground_truth.strip() else "is empty or not text"


def _pattern_obstacle(ground_truth: Any) -> str:
    try:
        re.compile(ground_truth)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        return f"is not a regular expression: {error}"
    return _text_obstacle(ground_truth)


def _schema_obstacle(ground_truth: Any) -> str:
    try:
        schema = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    return "" if isinstance(schema, dict) else "is not a JSON schema"


RULES = {
    "gsm8k": Rule(bind=_bind_gsm8k, sources=("openai/gsm8k",), obstacle=_number_obstacle),
    "arithmetic": Rule(
        bind=_without_argument(rules.score_arithmetic),
        sources=("arithmetic",),
        obstacle=_number_obstacle,
    ),
    "stories": Rule(bind=_bind_story, sources=("stories",)),
    "math": Rule(
        bind=_without_argument(math_rules.score_math),
        sources=(
            "lighteval/MATH",
            "DigitalLearningGmbH/MATH-lighteval",
            "EleutherAI/hendrycks_math",
            "HuggingFaceH4/MATH-500",
            "HuggingFaceH4/aime_2024",
            "math_dapo",
            "math",
        ),
        obstacle=_text_obstacle,
        is_isolated=True,
    ),
    "multiple_choice": Rule(
        bind=_without_argument(text_rules.score_choice),
        sources=("multiple_choice",),
        obstacle=_text_obstacle,
    ),
    "exact": Rule(
        bind=_without_argument(text_rules.score_exact), sources=("exact",), obstacle=_text_obstacle
    ),
    # The pattern comes from the data and the text from a model: matching has no time bound.
    "regex": Rule(
        bind=_without_argument(text_rules.score_regex),
        sources=("regex",),
        obstacle=_pattern_obstacle,
        is_isolated=True,
    ),
    "json_schema": Rule(
        bind=_without_argument(text_rules.score_json),
        sources=("json_schema",),
        obstacle=_schema_obstacle,
        is_isolated=True,
    ),
    "format": Rule(bind=_bind_format),
    "length": Rule(bind=_bind_length),
}
RULE_OF_SOURCE = {source: name for name, rule in RULES.items() for source in rule.sources}
SOURCES = tuple(RULE_OF_SOURCE)


def resolve_reward_function(
    function: str = "",
    gsm8k_method: str = "strict",
    terms: str = "",
    judge: Judge | None = None,
) -> RewardFunction | BatchFunction:
    """Return the reward function that the options of the same names in `reward` select.

    Args:
      function: "" for the built-in rule of each row's data_source, or `module:function`, where the
        module is importable or a path to a .py file. It is called as f(data_source=, solution_str=,
        ground_truth=, extra_info=) and returns a number, or a dict with "score", optionally "acc",
        and other numbers to report; or, for a whole batch, as batch_functions.py says.
      gsm8k_method: "strict" or "flexible".
      terms: what the reward adds up; the term of a reward model is left out.
      judge: the server of `reward.url`; without a function or terms it is the whole reward.

    Raises:
      UserError: there is no such rule, module or function, or it does not accept those arguments.
    """
    if gsm8k_method not in rules.GSM8K_METHODS:
        raise UserError(
            f"config.reward.gsm8k_method={gsm8k_method!r}: expected one of {rules.GSM8K_METHODS}."
            f"{did_you_mean(gsm8k_method, rules.GSM8K_METHODS)}"
        )
    if terms:
        return _add_terms(terms, gsm8k_method, judge)
    if judge is not None and not function:
        return judge.reward_function()
    if not function:
        return lambda row, response: _apply_built_in_rule(row, response, gsm8k_method)
    return _load_function(function, "reward.function")


def _load_function(function: str, option: str) -> RewardFunction | BatchFunction:
    user_function = plugins.load_plugin(
        function, option, REWARD_ARGUMENTS, by_name=True, other_arguments=batch_arguments
    )
    arguments = batch_arguments(user_function)
    if arguments is not None:
        return wrap_batch_function(user_function, arguments)

    def call_user_function(row: RewardRow, response: str) -> RewardResult:
        return parse_reward_output(
            user_function(
                data_source=row.data_source,
                solution_str=response,
                ground_truth=row.ground_truth,
                extra_info=row.extra_info,
            )
        )

    return call_user_function


def _add_terms(text: str, gsm8k_method: str, judge: Judge | None) -> RewardFunction:
    """Return the sum of the terms; each term's score is reported by its name."""
    functions = [
        (term, _resolve_term(term, gsm8k_method, judge))
        for term in parse_terms(text)
        if term.rule != MODEL
    ]

    def score(row: RewardRow, response: str) -> RewardResult:
        total = 0.0
        correct = None
        answer = None
        extra: dict[str, float] = {}
        steps: list[tuple[int, float]] = []
        for term, function in functions:
            result = function(row, response)
            total += term.weight * result.score
            # The first term that defines correctness decides it, and reads the answer.
            if correct is None:
                correct, answer = result.correct, result.answer
            extra = {**result.extra, **extra, term.metric: result.score}
            steps += [(end, term.weight * reward) for end, reward in result.step_rewards]
        return RewardResult(
            score=total, correct=correct, extra=extra, step_rewards=tuple(steps), answer=answer
        )

    return score


def _resolve_term(term: Term, gsm8k_method: str, judge: Judge | None) -> RewardFunction:
    if term.rule == JUDGE:
        assert judge is not None, "`model_weight` refuses the term without an address"
        return judge.reward_function()
    if term.rule == AUTO:
        return lambda row, response: _apply_built_in_rule(row, response, gsm8k_method)
    if ":" in term.rule:
        function = _load_function(term.rule, "reward.terms")
        if isinstance(function, BatchFunction):
            raise UserError(
                f"config.reward.terms: {term.rule} takes whole batches; name it as "
                "config.reward.function, or write it for one response"
            )
        return function
    if term.rule not in RULES:
        known = [*RULES, AUTO, MODEL, JUDGE]
        raise UserError(
            f"config.reward.terms: there is no rule {term.rule!r}; expected {', '.join(known)} or "
            f"module:function.{did_you_mean(term.rule, known)}"
        )
    argument = term.argument or (gsm8k_method if term.rule == "gsm8k" else "")
    try:
        return RULES[term.rule].bind(argument)
    except ValueError as error:
        raise UserError(f"config.reward.terms: {term.rule}[{term.argument}]: {error}") from error


def model_weight(options: Reward) -> float:
    """Return the weight of the reward model's score: 1 without `reward.terms`.

    Raises:
      UserError: the terms name a reward model or a judge and there is none, or the other way
        round, or there is a reward function beside terms or a judge.
    """
    if options.url and options.function:
        raise UserError(
            f"config.reward.url={options.url!r}: config.reward.function is set; add both up with "
            f"config.reward.terms={options.function}:1.0,judge:1.0"
        )
    if not options.terms:
        return 1.0
    if options.function:
        raise UserError(
            f"config.reward.function={options.function!r}: config.reward.terms is set; add "
            f"{options.function}:1.0 to it"
        )
    weights = [term.weight for term in parse_terms(options.terms) if term.rule == MODEL]
    if bool(weights) != bool(options.model_path):
        raise UserError(
            f"config.reward.terms={options.terms!r}: the term `model:WEIGHT` and "
            "config.reward.model_path belong together"
        )
    asks = any(term.rule == JUDGE for term in parse_terms(options.terms))
    if asks != bool(options.url):
        raise UserError(
            f"config.reward.terms={options.terms!r}: the term `judge:WEIGHT` and config.reward.url "
            "belong together"
        )
    return sum(weights)


def has_rules(options: Reward) -> bool:
    """Return whether rules score the responses, alone or beside a reward model."""
    if options.terms:
        return any(term.rule != MODEL for term in parse_terms(options.terms))
    return bool(options.function or options.url) or not options.model_path


def needs_workers(examples: Sequence["Example"], options: Reward) -> bool:
    """Return whether scores come from a user's function or from a rule without a time bound."""
    if (
        options.function
        or options.url
        or any(":" in term.rule for term in parse_terms(options.terms))
    ):
        return True
    sources = {example.data_source for example in examples}
    return any(
        rule.is_isolated
        for source in sources
        for _, rule in _rules_of_source(source, parse_terms(options.terms))
        if rule is not None
    )


def _rules_of_source(source: str, terms: tuple[Term, ...]) -> Iterator[tuple[str, Rule | None]]:
    """Yield name and rule of each term that a built-in rule scores; `None` if there is none."""
    # Without terms, the rule of the row's source is the only one.
    names = [term.rule for term in terms] or [AUTO]
    for name in names:
        if name == AUTO:
            yield AUTO, RULES.get(RULE_OF_SOURCE.get(source, ""))
        elif name not in (MODEL, JUDGE) and ":" not in name:
            yield name, RULES.get(name)


def validate_data_sources(
    examples: Sequence["Example"], function: str = "", terms: str = ""
) -> None:
    """Raise UserError for the first example that the reward function cannot score.

    Call it before a run. A user-defined function accepts everything. Otherwise each data_source
    must have a built-in rule, unless terms name the rules, and the ground truth must be what the
    rule compares with.

    Args:
      examples: the rows.
      function: config.reward.function.
      terms: config.reward.terms.
    """
    obstacle = next(find_obstacles(examples, function, terms), None)
    if obstacle is not None:
        raise UserError(obstacle)


def find_obstacles(
    examples: Sequence["Example"], function: str = "", terms: str = ""
) -> Iterator[str]:
    """Yield what keeps the reward function from scoring examples, a line for each.

    The arguments are those of `validate_data_sources`.
    """
    if function:
        return
    parsed = parse_terms(terms)
    for row, example in enumerate(examples, 1):
        source = example.data_source
        for name, rule in _rules_of_source(source, parsed):
            if rule is None:
                shown = repr(source) if source else "'' (the rows have no such column)"
                yield (
                    f"example {row}: data_source={shown} has no built-in rule; expected one of "
                    f"{SOURCES}, or config.reward.function=module:function."
                    f"{did_you_mean(source, SOURCES)}"
                )
            elif obstacle := rule.obstacle(example.ground_truth):
                required = f"data_source={source!r}" if name == AUTO else f"the rule {name!r}"
                yield (
                    f"example {row}: ground_truth={example.ground_truth!r} {obstacle}, as "
                    f"{required} requires; correct the data, or set "
                    "config.reward.function=module:function"
                )


def _apply_built_in_rule(row: RewardRow, response: str, gsm8k_method: str) -> RewardResult:
    name = RULE_OF_SOURCE.get(row.data_source)
    if name is None:
        raise UserError(
            f"data_source={row.data_source!r} has no built-in rule; expected one of {SOURCES}"
        )
    return RULES[name].bind(gsm8k_method if name == "gsm8k" else "")(row, response)
