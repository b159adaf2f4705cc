"""Suggestions for options that do not exist: another framework's, or misspelled ones.

The tables of other frameworks' options are TOML files in peers/. `[options]` maps an answer (our
option, or why there is none) to the names that have it there, `[no_effect]` those that need no
counterpart, and `[values]` values by their names there. Names are compared without
`actor_rollout_ref.`; one that ends in `.*` stands for all options of a group that have no separate
answer. verl, TRL and OpenRLHF also have tables of their programs (`Program`) and of the options
that name data (`DataOptions`), from which commands are translated.
"""

import dataclasses
import difflib
import functools
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jax_ppo.config.schema import options_by_name

FRAMEWORKS = ("verl", "trl", "openrlhf", "tunix", "nemo_rl")
VERL_PREFIX = "actor_rollout_ref."
PEERS = Path(__file__).with_name("peers")

AnswersByName = dict[str, str]
_CUTOFF = 0.75  # similarity, 0..1, below which nothing is suggested
_PART_CUTOFF = 0.55  # that of last parts, for options of the same section
# How many options of a section, and how many of which the name is a part, are listed at most.
_MAX_LISTED = 12
_MAX_PARTS = 3
_SAME_LAST_PART = 0.1  # weight of an equal last part relative to the similarity of the whole name


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of another framework, and what runs the same task here."""

    names: str  # pattern of the names of its script or module, without folders and `.py`
    base: str = ""  # configuration that a translated command starts from, if there is one
    command: str = "train"  # train, sft or reward_model
    # Answers to options that mean something else than in the framework's other programs.
    options: AnswersByName = dataclasses.field(default_factory=dict)
    # Its defaults, by its own names, in which the base may differ.
    defaults: dict[str, str] = dataclasses.field(default_factory=dict)
    # Our options whose value it always has, without an option for them.
    always: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the first of its names, for messages."""
        return re.split(r"[|(]", self.names)[0]


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """The options of another framework that together name data sets, with their older names."""

    target: str  # our option
    names: list[str]  # the options with files or names on the Hugging Face hub, separated by commas
    splits: list[str]  # the options with the split
    default_split: str = "train"  # the split if none of these is given
    subsets: Sequence[str] = ()  # the options with the name of a part of the data set
    weights: Sequence[str] = ()  # the options with the weights of several data sets
    # Without any of these options the data are not read; empty: they always are.
    only_with: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Framework:
    """The tables of one framework."""

    title: str  # its name in messages
    options: AnswersByName
    no_effect: frozenset[str]  # answers that leave nothing to do
    values: dict[str, dict[str, str]]  # values of our options by their names there
    programs: tuple[Program, ...]  # the most usual one first; none: its commands are not translated
    data: tuple[DataOptions, ...]  # the options that name data


@functools.cache
def read_framework(name: str) -> Framework:
    """Return the tables of one of `FRAMEWORKS`."""
    table: dict[str, Any] = {"defaults": {}, "no_effect": {}, "values": {}}
    table |= {"programs": [], "data": []}
    table |= tomllib.loads((PEERS / f"{name}.toml").read_text(encoding="utf-8"))
    programs = [
        # The framework's defaults hold for all of its programs.
        Program(
            **program
            | {
                "options": _by_name(program.get("options", {})),
                "defaults": {**table["defaults"], **program.get("defaults", {})},
            }
        )
        for program in table["programs"]
    ]
    return Framework(
        title=table["title"],
        options=_by_name(table["options"] | table["no_effect"]),
        no_effect=frozenset(table["no_effect"]),
        values=table["values"],
        programs=tuple(programs),
        data=tuple(DataOptions(**group) for group in table["data"]),
    )


def _by_name(table: dict[str, list[str]]) -> AnswersByName:
    return {name: answer for answer, names in table.items() for name in names}


def find_answer(options: AnswersByName, name: str) -> str | None:
    """Return a table's answer to a name, or to the smallest group `a.b.*` that contains it."""
    if name in options:
        return options[name]
    parts = name.split(".")
    groups = (".".join(parts[:end]) + ".*" for end in range(len(parts) - 1, 0, -1))
    return next((options[group] for group in groups if group in options), None)


def explain_peer_option(name: str) -> str | None:
    """Return the counterparts of another framework's option, as text; `None` if none has it.

    The name has no `config.`; its hyphens count as underscores.
    """
    normalized = name.replace("-", "_").removeprefix(VERL_PREFIX)
    answers: dict[str, list[str]] = {}
    for framework in map(read_framework, FRAMEWORKS):
        answer = find_answer(framework.options, normalized)
        if answer is not None:
            answers.setdefault(answer, []).append(framework.title)
    if not answers:
        return None
    return "; ".join(
        f"{' and '.join(titles)}'s {normalized}: {answer}" for answer, titles in answers.items()
    )


def suggest_option(name: str) -> str:
    """Return a sentence that helps with an unknown option, written so without `config.`."""
    if (explanation := explain_peer_option(name)) is not None:
        return f"{explanation}."
    names = options_by_name()
    # Some of verl's options have the same name here, except for the section around the actor's.
    if name.startswith(VERL_PREFIX):
        name = name.removeprefix(VERL_PREFIX)
        if name in names:
            return f"verl's {name}: config.{name}."
    if any(option.startswith(f"{name}.") for option in names):
        return f"It is a section; its options are config.{name}.NAME."
    nearest = find_nearest(name, names)
    if not nearest:
        section = f"{name.rpartition('.')[0]}."
        siblings = [x.removeprefix(section) for x in names if x.startswith(section)]
        if 0 < len(siblings) <= _MAX_LISTED:
            return f"config.{section}* are {', '.join(siblings)}."
        return "`python -m jax_ppo config` lists all options."
    return f"Did you mean {' or '.join(f'config.{option}' for option in nearest)}?"


def find_nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known options that a misspelled name may mean, several without a section."""
    names, name = list(known), name.lower()
    section, _, last_part = name.rpartition(".")
    if not section:
        # The section is missing, and the last part may be misspelled.
        by_last_part: dict[str, list[str]] = {}
        for option in names:
            by_last_part.setdefault(option.rpartition(".")[2], []).append(option)
        matches = difflib.get_close_matches(name, by_last_part, n=1, cutoff=_CUTOFF)
        if matches:
            return by_last_part[matches[0]]

    begins, ends = f"{section}.{last_part}", f"_{last_part}"
    parts = [
        x for x in names if x.startswith(begins) or (x.startswith(section) and x.endswith(ends))
    ]
    if 0 < len(parts) <= _MAX_PARTS and last_part:
        return parts

    def similarity(option: str) -> float:
        ratio = difflib.SequenceMatcher(None, name, option).ratio()
        has_same_last_part = option.rpartition(".")[2] == last_part
        # A name that is deeper than an option belongs to another framework's section.
        is_deeper = name.count(".") > option.count(".")
        return ratio + _SAME_LAST_PART * (has_same_last_part and not is_deeper)

    best = max(names, key=similarity)
    best_section, _, best_part = best.rpartition(".")
    # An equal section says nothing about what is left of the name, unless that is short for it.
    letters = iter(best_part)
    is_guess = best_section == section and not all(letter in letters for letter in last_part)
    part_ratio = difflib.SequenceMatcher(None, last_part, best_part).ratio()
    if similarity(best) < _CUTOFF or (is_guess and part_ratio < _PART_CUTOFF):
        return []
    return [best]
