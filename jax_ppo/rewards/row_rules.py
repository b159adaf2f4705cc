"""Which built-in rules score a row, by the terms of `reward.terms` or the row's `data_source`.

Before a run, what prevents them: a missing rule or package, a ground truth of another form.
"""

import difflib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jax_ppo.config.parsing import Term
from jax_ppo.config.schema import Reward
from jax_ppo.errors import UserError
from jax_ppo.rewards.rule_table import RULES, SOURCES, Rule, rule_of_source

if TYPE_CHECKING:  # `jax_ppo.types` imports jax, which reward workers do not load
    from jax_ppo.types import Example

AUTO = "auto"  # the term of each row's own rule
MODEL = "model"  # the term of the reward model
JUDGE = "judge"  # the term of the server of `reward.url`
DEFAULTS = Reward()

# As in Search-R1's data; columns of an answer in other public data.
_SEARCH_TASKS = "nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle".split()
_REFERENCE = re.compile(r"(?i:labels?|targets?|gold\w*|gt|truth|\w*(answer|reference)\w*)")


def rules_of_source(source: str, terms: tuple[Term, ...]) -> Iterator[tuple[str, Rule | None]]:
    """Yield name and rule of each term that needs a built-in rule, `None` for an unknown one."""
    # Without terms, the rule of the row's source is the only one.
    for name in [term.rule for term in terms] or [AUTO]:
        if name == AUTO:
            yield AUTO, RULES.get(rule_of_source(source) or "")
        elif name not in (MODEL, JUDGE) and ":" not in name:
            yield name, RULES.get(name)


def validate_data_sources(examples: Sequence["Example"], options: Reward = DEFAULTS) -> None:
    """Raise `UserError` for the first example that `find_obstacles` cannot have scored."""
    if obstacle := next(find_obstacles(examples, options), ""):
        raise UserError(obstacle)


def find_obstacles(examples: Sequence["Example"], options: Reward = DEFAULTS) -> Iterator[str]:
    """Yield one line for each reason why the reward function cannot score an example.

    A user-defined function accepts everything; otherwise there must be a rule for the data_source,
    unless terms name rules, and the ground truth must have the rule's form.
    """
    if options.function:
        return
    for row, example in enumerate(examples, 1):
        location = example.describe_location(row)
        source = example.data_source
        for name, rule in rules_of_source(source, options.parsed_terms):
            if rule is None:
                yield f"{location}: {_describe_missing_rule(source)}"
            elif obstacle := rule.find_obstacle(example.ground_truth):
                named = next(filter(_REFERENCE.fullmatch, map(str, example.extra_info)), "")
                hint = ""
                if named and example.ground_truth in ("", []):
                    hint = f"; if {named} is the answer, set config.data.ground_truth_key={named}"
                yield (
                    f"{location}: ground_truth={example.ground_truth!r} {obstacle}, as "
                    f"{_describe_rule(name, source)} requires; correct the data, or set "
                    f"config.reward.function=module:function{hint}"
                )


def find_missing_package(examples: Sequence["Example"], options: Reward = DEFAULTS) -> str:
    """Return which package the rules of the examples need that is not installed; "" if none."""
    if options.function:
        return ""
    for source in dict.fromkeys(example.data_source for example in examples):
        for name, rule in rules_of_source(source, options.parsed_terms):
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
    # The source of a rule whose task has a similar name.
    tasks = {name.rpartition("/")[2].lower(): name for name in SOURCES}
    tasks |= {task: f"searchR1_{task}" for task in _SEARCH_TASKS}
    near = difflib.get_close_matches(source.rpartition("/")[2].lower(), tasks, n=1)
    hint = f" Did you mean {tasks[near[0]]!r}?" if near else ""
    if "countdown" in source.lower():
        hint = " The equations of Countdown need a function."
    return (
        f"{described} has no built-in rule; expected one of {examples} and others "
        "(docs/data-and-rewards.md), a rule by config.reward.terms=RULE:1.0, or "
        f"config.reward.function=module:function.{hint}"
    )
