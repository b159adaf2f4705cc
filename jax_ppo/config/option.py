"""The facts of an option, their declaration in a field of the schema, and lists of options."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

COMMANDS = ("train", "critic", "evaluate", "score", "sft", "reward_model")
# Groups of commands for `read_by`. `plan` takes the options of `train`.
POLICY = ("train",)
PPO = ("train", "critic")
SAMPLING = (*PPO, "evaluate")
ADVANTAGES = (*PPO, "score")
MODELS = (*PPO, "evaluate", "score")
SUPERVISED = ("sft", "reward_model")
LEARNING = (*PPO, *SUPERVISED)
REPORTS = (*PPO, "evaluate", *SUPERVISED)

Bound = int | float
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class OptionRule:
    """A condition, mostly on other options, under which an option may differ from its default.

    Where it is not met, a value other than the default is an error if the rule has a message;
    otherwise the value has no effect, and a note says so.
    """

    is_met: Callable[[Any], object]  # whether a `Config` meets the condition
    # The condition as text, for notes and the reference page: "`critic.path` is set"; empty: the
    # page does not mention the rule.
    summary: str
    # The error's text after `config.NAME=VALUE: `, a template with the `Config` as `c`, such as
    # `{c.actor.clip_ratio!r}`, the `{command}`, and the option's `{default!r}` and `{meaning}`.
    message: str = ""
    at_default: bool = False  # whether the default is an error, too
    commands: tuple[str, ...] = ()  # the commands it applies to; empty: all that read the option
    first_step_only: bool = False  # where met, only the first step uses it: not a resumed run

    @property
    def is_noted(self) -> bool:
        """Return whether a value has no effect, and is noted, unless the condition is met."""
        return not self.message and not self.first_step_only


def unread_unless(rule: OptionRule) -> OptionRule:
    """Return the rule without its error: where it is not met, a value has no effect."""
    return dataclasses.replace(rule, message="")


@dataclasses.dataclass(frozen=True)
class Facts:
    """Everything that is declared about an option besides its name, type and default."""

    doc: str = ""
    unit: str = ""  # the unit of a number, such as "tokens"
    choices: tuple[str, ...] | None = None
    is_plugin: bool = False  # `module:function` or `file.py:function` is permitted, too
    # Other names of some choices; the value is replaced by the choice.
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)
    is_list: bool = False  # items separated by commas; a list of them is accepted too
    is_json: bool = False  # JSON list or a single item; a list of items is accepted too
    # Turns a text into its value; raises `ValueError` for one that has none.
    parse: Callable[[Any], object] | None = None
    at_least: Bound | None = None  # inclusive lower bound
    above: Bound | None = None  # exclusive lower bound
    at_most: Bound | None = None  # inclusive upper bound
    below: Bound | None = None  # exclusive upper bound
    is_automatic: bool = False  # unset, the run chooses; may be written as "auto"
    not_zero: bool = False  # 0 is refused, although the bounds permit it
    # The commands that read the option; `None`: as in its section, or all.
    read_by: tuple[str, ...] | None = None
    rules: tuple[OptionRule, ...] = ()  # in the order in which they are applied
    # A run cannot be resumed with another value; `None`: as in its section.
    fixed_on_resume: bool | None = None

    def inherit(self, section: Facts) -> Facts:
        """Return these facts, with those of the enclosing section where this has none."""
        # Rules are the exception: those of the section and of the option all apply.
        fixed = self.fixed_on_resume
        return dataclasses.replace(
            self,
            read_by=section.read_by if self.read_by is None else self.read_by,
            rules=section.rules + self.rules,
            fixed_on_resume=section.fixed_on_resume if fixed is None else fixed,
        )


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of the schema."""

    name: str  # dotted name without the leading `config.`
    value_type: type  # `float` for both `float` and `float | None`
    optional: bool  # whether `None` ("not set") is permitted
    default: Any
    facts: Facts  # the declared and inherited facts

    @property
    def read_by(self) -> tuple[str, ...]:
        """Return the commands that read the option."""
        return COMMANDS if self.facts.read_by is None else self.facts.read_by


def option(default: T, doc: str, **facts: Any) -> T:
    """Declare an option, with other fields of `Facts`, as a field that is typed as its value."""
    metadata = {"facts": Facts(doc=doc, **facts)}
    return typing.cast(T, dataclasses.field(default=default, metadata=metadata))


def redeclare(cls: type, name: str, **facts: Any) -> Any:
    """Declare an option with the default, meaning and facts of another section's; override some."""
    field = next(field for field in dataclasses.fields(cls) if field.name == name)
    metadata = {"facts": dataclasses.replace(field.metadata["facts"], **facts)}
    return dataclasses.field(default=field.default, metadata=metadata)


def section(cls: type[T], **facts: Any) -> T:
    """Declare a section as a dataclass field; its options inherit the facts."""
    metadata = {"facts": Facts(**facts)}
    return typing.cast(T, dataclasses.field(default_factory=cls, metadata=metadata))


def iterate_options(
    cls: type, prefix: str = "", inherited: Facts | None = None
) -> Iterator[Option]:
    """Yield the options of a section and of those inside it, in order, named after a prefix."""
    for field in dataclasses.fields(cls):
        facts: Facts = field.metadata["facts"].inherit(inherited or Facts())
        field_type = typing.cast(type, field.type)
        if dataclasses.is_dataclass(field_type):
            yield from iterate_options(field_type, f"{prefix}{field.name}.", facts)
        else:
            value_type = strip_none(field_type)
            yield Option(
                name=prefix + field.name,
                value_type=value_type,
                optional=value_type is not field_type,
                default=field.default,
                facts=facts,
            )


def strip_none(annotation: Any) -> type:
    """Return `float` for `float | None`, and any other type unchanged."""
    for argument in typing.get_args(annotation):
        if argument is not type(None):
            return argument
    return annotation


def option_value(config: Any, name: str) -> object:
    """Return the value of the option of a `Config` with this dotted name."""
    return functools.reduce(getattr, name.split("."), config)
