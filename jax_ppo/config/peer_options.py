"""The tables of other frameworks' options: one TOML file for each framework, in peers/.

`[options]` maps an answer (our option, or why there is none) to the names that have it there. Names
are compared without `actor_rollout_ref.`; one that ends in `.*` stands for all options of a group
that have no separate answer. verl, TRL and OpenRLHF also have tables of their programs
(`Program`) and of the options that name data (`DataOptions`), from which commands are translated.
"""

import dataclasses
import functools
import re
import tomllib
from pathlib import Path
from typing import Any

FRAMEWORKS = ("verl", "trl", "openrlhf", "tunix", "nemo_rl")
VERL_PREFIX = "actor_rollout_ref."
PEERS = Path(__file__).with_name("peers")

AnswersByName = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of another framework, and what runs the same task here."""

    names: str  # pattern of the names of its script or module, without folders and `.py`
    # The configuration that a translated command starts from; empty: there is no such task.
    base: str = ""
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
    # The options with the name of a part of the data set.
    subsets: list[str] = dataclasses.field(default_factory=list)
    # The options with the weights of several data sets.
    weights: list[str] = dataclasses.field(default_factory=list)
    # Without any of these options the data are not read; empty: they always are.
    only_with: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Framework:
    """The tables of one framework."""

    title: str  # its name in messages
    options: AnswersByName
    # Its programs, the most usual one first; none: its commands are not translated.
    programs: tuple[Program, ...]
    data: tuple[DataOptions, ...]  # the options that name data


@functools.cache
def read_framework(name: str) -> Framework:
    """Return the tables of one of `FRAMEWORKS`."""
    table: dict[str, Any] = {"defaults": {}, "programs": [], "data": []}
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
        options=_by_name(table["options"]),
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
    """Return the counterparts of another framework's option in words; `None` if none has it.

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


def find_program(programs: tuple[Program, ...], word: str) -> tuple[Program, bool] | None:
    """Return the program that a script or module is, and whether it has exactly that name.

    A user's script such as `train_grpo.py` has a program's name as a part.
    """
    name = re.split(r"[./]", word.removesuffix(".py").removesuffix(".sh"))[-1].replace("-", "_")
    for program in programs:
        if re.fullmatch(program.names, name):
            return program, True
    for part in name.split("_"):
        for program in programs:
            if re.fullmatch(program.names, part):
                return program, False
    return None
