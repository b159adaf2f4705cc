"""Validation of rows before a run: whether rules can score them, and have their packages."""

import importlib.util
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.rewards.rule_table import RULES, SOURCES
from jax_ppo.rewards.terms import AUTO, parse_terms, rules_of_source

if TYPE_CHECKING:  # `jax_ppo.types` imports jax, which reward workers do not load
    from jax_ppo.types import Example


def validate_data_sources(
    examples: Sequence["Example"], function: str = "", terms: str = ""
) -> None:
    """Raise UserError for the first example that the reward function cannot score.

    Call it before a run. A user-defined function accepts everything. Otherwise each data_source
    must have a built-in rule, unless terms name the rules, and the ground truth must have the form
    that the rule requires. `function` and `terms` are `config.reward`'s.
    """
    obstacle = next(find_obstacles(examples, function, terms), None)
    if obstacle is not None:
        raise UserError(obstacle)


def find_obstacles(
    examples: Sequence["Example"], function: str = "", terms: str = ""
) -> Iterator[str]:
    """Yield one line for each reason why the reward function cannot score an example."""
    if function:
        return
    parsed_terms = parse_terms(terms)
    for row, example in enumerate(examples, 1):
        location = example.describe_location(row)
        source = example.data_source
        for name, rule in rules_of_source(source, parsed_terms):
            if rule is None:
                yield f"{location}: {_describe_missing_rule(source)}"
            elif obstacle := rule.find_obstacle(example.ground_truth):
                yield (
                    f"{location}: ground_truth={example.ground_truth!r} {obstacle}, as "
                    f"{_describe_rule(name, source)} requires; correct the data, or set "
                    "config.reward.function=module:function"
                )


def find_missing_package(examples: Sequence["Example"], function: str = "", terms: str = "") -> str:
    """Return which package the rules of the examples need that is not installed; "" if none."""
    if function:
        return ""
    parsed_terms = parse_terms(terms)
    for source in dict.fromkeys(example.data_source for example in examples):
        for name, rule in rules_of_source(source, parsed_terms):
            if rule is not None and rule.module and importlib.util.find_spec(rule.module) is None:
                package = rule.module.replace("_", "-")
                return (
                    f"{_describe_rule(name, source)} needs the package {package}: pip install "
                    f"'jax_ppo[{rule.extra}]'"
                )
    return ""


def _describe_rule(name: str, source: str) -> str:
    return f"data_source={source!r}" if name == AUTO else f"the rule {name!r}"


def _describe_missing_rule(source: str) -> str:
    described = f"data_source={source!r}"
    if not source:
        described += " (the rows have no such column)"
    examples = tuple(rule.sources[0] for rule in RULES.values() if rule.sources)
    return (
        f"{described} has no built-in rule; expected one of {examples} and others "
        "(docs/data-and-rewards.md), a rule by config.reward.terms=RULE:1.0, or "
        f"config.reward.function=module:function.{did_you_mean(source, SOURCES)}"
    )
