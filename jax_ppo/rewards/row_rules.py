"""Which built-in rules score a row, by the terms of `reward.terms` or the row's `data_source`.

Before a run, what prevents them: a missing rule or package, a ground truth of another form.
"""

import difflib
import functools
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
    """Yield one line for each reason why the reward function cannot score examples, with its rows.

    A user-defined function accepts everything; otherwise there must be a rule for the data_source,
    unless terms name rules, and the ground truth must have the rule's form.
    """
    if options.function:
        return
    found: dict[tuple[str, bool], list[Example]] = {}  # by the reason, and if it quotes the truth
    for example in examples:
        source = example.data_source
        for name, rule in rules_of_source(source, options.parsed_terms):
            if rule is None:
                found.setdefault((_describe_missing_rule(source), False), []).append(example)
            elif obstacle := rule.find_obstacle(example.ground_truth):
                reason = (
                    f"{obstacle}, as {_describe_rule(name, source)} requires; correct the data, or "
                    "set config.reward.function=module:function"
                )
                if is_asked := bool(column := _reference_column(example)):
                    reason = _ask(column, f", which {_describe_rule(name, source)} requires")
                found.setdefault((reason, not is_asked), []).append(example)
    locations = {id(e): e.describe_location(row) for row, e in enumerate(examples, 1)}
    for (reason, quotes_truth), rows in found.items():
        if quotes_truth:
            truths = list(dict.fromkeys(repr(example.ground_truth) for example in rows))
            reason = f"ground_truth={truths[0]}{', for example,' * (len(truths) > 1)} {reason}"
        yield f"{_join_locations([locations[id(example)] for example in rows])}: {reason}"


def find_unread_references(examples: Sequence["Example"]) -> Iterator[str]:
    """Yield a question for each column that may be the reference answer that its rows lack."""
    found: dict[str, list[str]] = {}
    for row, example in enumerate(examples, 1):
        if column := _reference_column(example):
            found.setdefault(column, []).append(example.describe_location(row))
    for column, locations in found.items():
        yield f"{_join_locations(locations)}: {_ask(column)}"


def _reference_column(example: "Example") -> str:
    """Return the column that may be the reference answer of a row without one; "" if none may."""
    if example.ground_truth not in ("", []):
        return ""
    return next(filter(_REFERENCE.fullmatch, map(str, example.extra_info)), "")


def _ask(column: str, use: str = "") -> str:
    return f"is `{column}` the reference answer{use}? --config.data.ground_truth_key={column}"


def _join_locations(locations: Sequence[str]) -> str:
    """Return where rows are: "a.csv:2-201", or "a.csv:2-201 (12 rows)" if others lie between."""
    files: dict[str, list[int]] = {}
    for location in locations:
        [(name, number)] = re.findall(r"\A(.*?)(\d*)\Z", location, re.DOTALL)
        files.setdefault(name, []).append(int(number or 0))
    texts = []
    for name, numbers in files.items():
        first, last, count = min(numbers), max(numbers), len(numbers)
        text = f"{name}{first}" if count == 1 else f"{name}{first}-{last}"
        texts.append(text + f" ({count} rows)" * (count <= last - first))
    return ", ".join(texts[:3]) + f" and {len(texts) - 3} more files" * (len(texts) > 3)


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


@functools.cache
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
