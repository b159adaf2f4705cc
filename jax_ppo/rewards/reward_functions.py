"""Reward functions from options.

A reward function takes a RewardRow and the text of a response and returns a RewardResult.
`resolve_reward_function` returns the built-in one, which applies a rule by each row's data_source,
wraps a user-defined one, or adds up the terms of `reward.terms`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax_ppo.config import plugins
from jax_ppo.config.parsing import Term
from jax_ppo.config.schema import Reward
from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.rewards.custom import (
    REWARD_ARGUMENTS,
    BatchFunction,
    batch_arguments,
    call_and_wait,
    read_reward_output,
    wrap_batch_function,
)
from jax_ppo.rewards.judge import judge_function
from jax_ppo.rewards.row_rules import AUTO, JUDGE, MODEL, rules_of_source
from jax_ppo.rewards.rule_table import RULES, SOURCES, rule_of_source
from jax_ppo.rewards.samples import RewardFunction, RewardResult, RewardRow

if TYPE_CHECKING:  # `jax_ppo.types` imports jax, which reward workers do not load
    from jax_ppo.types import Example


def resolve_reward_function(options: Reward) -> RewardFunction | BatchFunction:
    """Return the reward function that the options select.

    `function` is called as f(data_source=, solution_str=, ground_truth=, extra_info=) and returns a
    number, or a dict with "score", optionally "acc", and other numbers to report; custom.py has
    functions of whole batches. A reward model's term is left out. Without function and terms the
    judge is the whole reward. Raise `UserError` if there is no such rule or function, or it lacks
    those arguments.
    """
    if options.terms:
        return _add_terms(options)
    if options.function:
        return _load_function(options.function, "reward.function")
    return judge_function(options) if options.url else _apply_built_in_rule


def _load_function(function: str, option: str) -> RewardFunction | BatchFunction:
    user_function = plugins.load_plugin(
        function, option, REWARD_ARGUMENTS, by_name=True, other_arguments=batch_arguments
    )
    arguments = batch_arguments(user_function)
    if arguments is not None:
        return wrap_batch_function(user_function, arguments, function)

    def call_user_function(row: RewardRow, response: str) -> RewardResult:
        value = call_and_wait(
            user_function,
            data_source=row.data_source,
            solution_str=response,
            ground_truth=row.ground_truth,
            extra_info=row.extra_info,
        )
        return read_reward_output(value, response, function)

    return call_user_function


def _add_terms(options: Reward) -> RewardFunction:
    """Return the sum of the terms; each term's score is reported by its name."""
    terms = [term for term in options.parsed_terms if term.rule != MODEL]
    functions = [(term, _resolve_term(term, options)) for term in terms]

    def score(row: RewardRow, response: str) -> RewardResult:
        results = [(term, function(row, response)) for term, function in functions]
        # The first term that defines correctness decides it, and reads the answer.
        grades = (result for _, result in results if result.correct is not None)
        graded = next(grades, results[-1][1])
        total = 0.0
        extra: dict[str, float] = {}
        for term, result in results:
            total += term.weight * result.score
            extra = {**result.extra, **extra, term.metric: result.score}
        return RewardResult(
            score=total,
            correct=graded.correct,
            extra=extra,
            step_rewards=tuple(
                (end, term.weight * reward)
                for term, result in results
                for end, reward in result.step_rewards
            ),
            answer=graded.answer,
            ignored=tuple(name for _, result in results for name in result.ignored),
        )

    return score


def _resolve_term(term: Term, options: Reward) -> RewardFunction:
    if term.rule == JUDGE:
        return judge_function(options)
    if term.rule == AUTO:
        return _apply_built_in_rule
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
    try:
        return RULES[term.rule].bind(term.argument)
    except ValueError as error:
        raise UserError(f"config.reward.terms: {term.rule}[{term.argument}]: {error}") from error


def model_weight(options: Reward) -> float:
    """Return the weight of the reward model's score: 1 without `reward.terms`.

    Raise `UserError` if terms name a reward model or judge that is not configured, or leave out one
    that is, or if there is a reward function as well as terms or a judge.
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
    weights = {term.rule: term.weight for term in options.parsed_terms}
    for rule, option in ((MODEL, "model_path"), (JUDGE, "url")):
        if (rule in weights) != bool(getattr(options, option)):
            raise UserError(
                f"config.reward.terms={options.terms!r}: the term `{rule}:WEIGHT` and "
                f"config.reward.{option} belong together"
            )
    return weights.get(MODEL, 0.0)


def has_rules(options: Reward) -> bool:
    """Return whether rules score the responses, alone or together with a reward model."""
    if options.terms:
        return any(term.rule != MODEL for term in options.parsed_terms)
    return bool(options.function or options.url) or not options.model_path


def scores_any_row(options: Reward) -> bool:
    """Return whether any row can be scored: no rules apply, or a judge is the whole reward."""
    is_judged = bool(options.url) and not options.terms
    return is_judged or not has_rules(options)


def functions_of(options: Reward) -> list[str]:
    """Return the user's functions that the options name."""
    terms = [term.rule for term in options.parsed_terms if ":" in term.rule]
    return [options.function, *terms] if options.function else terms


def is_by_rules(options: Reward) -> bool:
    """Return whether built-in rules alone grade responses, neither a function nor a server."""
    return not (functions_of(options) or options.url)


def needs_workers(examples: Sequence["Example"], options: Reward) -> bool:
    """Return whether scores come from a user's function or from a rule without a time bound."""
    if not is_by_rules(options):
        return True
    terms = options.parsed_terms
    sources = {example.data_source for example in examples}
    built_in_rules = [rule for source in sources for _, rule in rules_of_source(source, terms)]
    return any(rule.is_isolated for rule in built_in_rules if rule is not None)


def _apply_built_in_rule(row: RewardRow, response: str) -> RewardResult:
    name = rule_of_source(row.data_source)
    if name is None:
        raise UserError(
            f"data_source={row.data_source!r} has no built-in rule; expected one of {SOURCES}"
        )
    return RULES[name].bind("")(row, response)
