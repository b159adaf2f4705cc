"""The form of the tables of other frameworks' programs, of their defaults and their data."""

import dataclasses
import re
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of another framework, and what runs the same task here.

    Attributes:
      names: pattern of the names of its script or module, without folders and `.py`.
      base: the configuration that a translated command starts from; empty: there is no such task.
      command: train, sft or reward_model.
      options: answers to options that mean something else than in the framework's other programs.
      defaults: its defaults, by its own names, in which the base may differ.
      always: our options whose value it always has, without an option for them.
    """

    names: str
    base: str = ""
    command: str = "train"
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    defaults: dict[str, str] = dataclasses.field(default_factory=dict)
    always: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the first of its names, for messages."""
        return re.split(r"[|(]", self.names)[0]


class DataOptions(NamedTuple):
    """The options of another framework that together name data sets, with their older names.

    Attributes:
      target: our option.
      names: the options with files or names on the Hugging Face hub, separated by commas.
      splits: the options with the split.
      default_split: the split if none of these is given.
      subsets: the options with the name of a part of the data set.
      weights: the options with the weights of several data sets.
      only_with: without any of these options the data are not read; empty: they always are.
    """

    target: str
    names: tuple[str, ...]
    splits: tuple[str, ...]
    default_split: str = "train"
    subsets: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    only_with: tuple[str, ...] = ()


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
