"""Validation of rows before a run: whether rules can score them, and have their packages."""

import difflib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jax_ppo.errors import UserError
from jax_ppo.rewards.rule_table import RULES, SOURCES
from jax_ppo.rewards.terms import AUTO, parse_terms, rules_of_source

# As in Search-R1's data; columns of an answer in other public data.
_SEARCH_TASKS = "nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle".split()
_REFERENCE = re.compile(r"(?i:labels?|targets?|gold\w*|gt|truth|\w*(answer|reference)\w*)")

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
                    f"config.reward.function=module:function{_suggest_key(example)}"
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
        f"config.reward.function=module:function.{_suggest_source(source)}"
    )


def _suggest_source(source: str) -> str:
    """Return a line about the source of a rule whose task has a similar name, if there is one."""
    if "countdown" in source.lower():
        return " The equations of Countdown need a function."
    tasks = {name.rpartition("/")[2].lower(): name for name in SOURCES}
    tasks |= {task: f"searchR1_{task}" for task in _SEARCH_TASKS}
    near = difflib.get_close_matches(source.rpartition("/")[2].lower(), tasks, n=1)
    return f" Did you mean {tasks[near[0]]!r}?" if near else ""


def _suggest_key(example: "Example") -> str:
    """Return which column may be the reference answer of a row without one."""
    names = [str(name) for name in example.extra_info if _REFERENCE.fullmatch(str(name))]
    if not names or example.ground_truth not in ("", []):
        return ""
    return f"; if {names[0]} is the answer, set config.data.ground_truth_key={names[0]}"
