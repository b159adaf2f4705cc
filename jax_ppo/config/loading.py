"""Turn a ConfigDict into a validated, frozen Config: names, types and ranges of single options.

A file under configs/ calls `default_config()`, sets the options of its experiment and returns the
ConfigDict. The command line overrides single options (`--config.actor.clip_ratio=0.1`), and
`from_config_dict` validates the result and freezes it. Options that depend on each other are
validated in validation.py.
"""

import contextlib
import dataclasses
import datetime
import decimal
import json
import logging
import math
import operator
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jax_ppo.config import config_files, parsing, validation
from jax_ppo.config.option import COMMANDS, LEARNING, PPO, SUPERVISED, Facts, Option, strip_none
from jax_ppo.config.schema import Config, all_options, options_by_name, replace_options
from jax_ppo.config.suggestions import suggest_option
from jax_ppo.errors import UserError, did_you_mean, shorten
from jax_ppo.registries import keep_in_memory

if typing.TYPE_CHECKING:
    import ml_collections  # imported lazily: a Config can be built and used without it

# The range of the numbers that a run computes with, which have 32 bits. A positive number below
# FLOAT32_TINY would become 0 on most devices.
FLOAT32_MAX = 3.4028234663852886e38
FLOAT32_TINY = 1.1754943508222875e-38
INT32_MAX = 2**31 - 1

# The sign, the wording and the test of each bound of `Facts`.
BOUNDS: dict[str, tuple[str, str, Callable[[Any, Any], bool]]] = {
    "at_least": (">=", "at least", operator.ge),
    "above": (">", "more than", operator.gt),
    "at_most": ("<=", "at most", operator.le),
    "below": ("<", "less than", operator.lt),
}


# A data set of the hub or of TFDS, or a generator.
_ORIGIN = re.compile(r"hf:[^/]*/[^/:@]*|tfds:[^/]*|\w+:")
_FILES = {"data.train_files", "data.val_files", "data.val_fraction"}
log = logging.getLogger(__name__)

BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
# Options without a default, and how they are reset there.
OPTIONAL = frozenset(option.name for option in all_options() if option.optional)
UNSET, AUTO = "unset", "auto"


def default_config() -> "ml_collections.ConfigDict":
    """Return all options at their defaults; `from_config_dict` refuses other names and types."""
    import ml_collections

    # Untyped and not locked: its own errors bury the nearest name, and it refuses lists of files.
    return ml_collections.ConfigDict(dataclasses.asdict(Config()), type_safe=False)


def load_config(
    file: str | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    command: str = "train",
    **options: object,
) -> Config:
    """Load a configuration, override some of its options and validate the result.

        load_config("arithmetic", trainer__total_training_steps=10)
        load_config("configs/gsm8k.py", {"actor.optim.lr": 2e-6})

    Args:
      file: A value of `--config`: the name of a shipped configuration or the path of a file, with
        an optional `:ARG` for its `get_config`; `None`: all options at their defaults.
      overrides: values by dotted name, "actor.optim.lr". `data.train_files` and `data.val_files`
        may also be rows: a list of dicts, a DataFrame of pandas, or a Dataset.
      command: the command that reads the options: train, critic, evaluate, score, sft or
        reward_model.
      **options: more overrides, as keywords with `__` for each dot: `actor__optim__lr=2e-6`.

    Raises:
      UserError: there is no such file or option, or a value is invalid.
    """
    if command not in COMMANDS:
        raise UserError(
            f"command={command!r}: expected one of {', '.join(map(repr, COMMANDS))}."
            f"{did_you_mean(command, COMMANDS)}"
        )
    values = default_config() if file is None else read_config_file(file, command)
    by_keyword = {name.replace("__", "."): value for name, value in options.items()}
    by_name = {**(overrides or {}), **by_keyword}
    for name, value in by_name.items():
        find_option(name)
        if name == "reward.function" and callable(value):
            raise UserError(f"config.{name}: pass a function as train(config, workdir, reward=f)")
        is_text = isinstance(value, str | list | tuple) and all(isinstance(x, str) for x in value)
        if name in ("data.train_files", "data.val_files") and not (is_text or value is None):
            by_name[name] = keep_rows(value, f"config.{name}")
    return override_options(values, by_name, command)


def keep_rows(rows: Any, option: str) -> str:
    """Keep a copy of rows in memory, and return the value that stands for them.

    `rows` are a list of dicts, a DataFrame of pandas or a Dataset. Raise `UserError` for others.
    """
    kind = type(rows).__name__
    if isinstance(rows, Mapping) or not hasattr(rows, "__len__"):  # a DatasetDict; a generator
        kind += f" of {shorten(', '.join(map(str, rows)))}" if isinstance(rows, Mapping) else ""
        raise UserError(
            f"{option}: expected a text, a list of dicts, a DataFrame or a Dataset, got a {kind}"
        )
    if hasattr(rows, "itertuples"):  # of pandas
        if not rows.columns.is_unique:
            raise UserError(f"{option}: several columns have the same name: {list(rows.columns)}")
        rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
    try:
        text = json.dumps(list(rows), default=_as_json)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{option}: a row cannot be written as JSON: {error}") from error
    return keep_in_memory(kind, text, text)


def _as_json(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal):
        return str(value)
    raise TypeError(f"a {type(value).__name__} is neither text, number, list nor dict")


def override_options(
    values: "ml_collections.ConfigDict", overrides: Mapping[str, object], command: str
) -> Config:
    """Override options by their dotted names; raise `UserError` unless all are then valid."""
    # Steps that override a file's options replace its epochs, which would have no effect.
    if overrides.get("trainer.total_training_steps"):
        overrides = {**_defaults("trainer.total_epochs"), **overrides}
    # Types, and sections that the file has replaced by other values, are validated below, with
    # errors that name the option, unlike ml_collections'.
    with values.ignore_type(), contextlib.suppress(KeyError):
        values.update_from_flattened_dict(overrides)
    config = from_config_dict(values, command)
    data, own = config.data, _ORIGIN.match(config.data.train_files)
    replaces_rows = overrides.keys() & _FILES == {"data.train_files"} and command in LEARNING
    if replaces_rows and data.val_files and not (own and data.val_files.startswith(own[0])):
        log.warning(
            "config.data.val_files=%r: held-out rows of the configuration, beside "
            "config.data.train_files=%r; hold out rows of these with --config.data.val_files=FILE, "
            "or --config.data.val_files= --config.data.val_fraction=0.1",
            data.val_files,
            shorten(data.train_files),
        )
    return config


def parse_option(name: str, text: str) -> Any:
    """Parse an option's value from the command line; raise `UserError` if it is invalid."""
    option = find_option(name)
    value: Any = text
    if (text == UNSET and name in OPTIONAL) or (text == AUTO and option.facts.is_automatic):
        return None
    if text.lower() in ("null", "none") and text not in (option.facts.choices or ()):
        raise _no_value_error(f"config.{name}={text}")
    if option.value_type in (int, float):
        try:
            value = option.value_type(text)
        except ValueError:
            expected = option.value_type.__name__
            raise UserError(f"config.{name}={text!r}: expected {expected}") from None
    elif option.value_type is bool:
        if text.lower() not in BOOLEANS:
            raise UserError(f"config.{name}={text!r}: expected true or false")
        value = BOOLEANS[text.lower()]
    return _validate_value(f"config.{name}", value, option.value_type, option.facts)


def read_config_file(value: str, command: str = "train") -> "ml_collections.ConfigDict":
    """Return the configuration that a value of `--config` names, completed by the defaults.

    Raise `UserError` if there is no such file, it raised, or the command has no smoke form.
    """
    defaults = default_config()
    values = config_files.call_get_config(value)
    _add_missing_options(values, defaults)
    if config_files.find_config_file(value)[1] == config_files.SMOKE:
        # Supervised training has no small model to start from.
        if command in SUPERVISED:
            raise UserError(f"--config={value}: supervised training has no smoke form")
        _build_section(Config, values, "")  # refuses invalid values before they are replaced
        with values.ignore_type():  # such as lists of files
            config_files.shrink(values, defaults)
    return values


def from_config_dict(
    config: "ml_collections.ConfigDict | Mapping[str, Any]", command: str = "train"
) -> Config:
    """Freeze options, missing ones with their defaults; raise `UserError` unless all are valid."""
    frozen = _build_section(Config, config, "")
    if command == "critic":
        frozen = replace_options(frozen, {"trainer.critic_only": True})
        # Whole returns: with lambda below 1 the targets would contain values of an untrained critic
        # (VC-PPO: Yuan et al. 2025, arXiv 2503.01491).
        if frozen.algorithm.critic_lam is None:
            frozen = replace_options(frozen, {"algorithm.critic_lam": 1.0})
        # Each row has one response, and rows are taken as they are: none is drawn or selected.
        if frozen.learns_from_files:
            rollout = ("rollout.n", "rollout.keep", "rollout.max_staleness", "rollout.exact")
            unread = ("data.train_files", *rollout, "algorithm.filter_groups.enable")
            frozen = replace_options(frozen, _defaults(*unread))
    validation.validate_config(frozen, command)
    if command in COMMANDS and command not in PPO:  # `plan` is for a run of train
        # Only PPO decodes while it learns.
        frozen = replace_options(frozen, {"rollout.mesh.devices": 0})
    return frozen


def _defaults(*names: str) -> dict[str, Any]:
    return {name: options_by_name()[name].default for name in names}


def find_option(name: str) -> Option:
    """Return an option; raise `UserError` with a suggestion if there is none of this name."""
    if name not in options_by_name():
        raise UserError(f"config.{name}: there is no such option. {suggest_option(name)}")
    return options_by_name()[name]


def _no_value_error(setting: str) -> UserError:
    name = setting.removeprefix("config.").partition("=")[0]
    default = UNSET if name in OPTIONAL else repr(find_option(name).default)
    return UserError(f"{setting}: expected a value, or {default} as by default")


def _add_missing_options(
    values: "ml_collections.ConfigDict", defaults: "ml_collections.ConfigDict"
) -> None:
    """Add the options that a configuration lacks, so that they can be overridden."""
    with values.unlocked():
        for name in defaults:
            if name not in values:
                values[name] = defaults[name]
            elif hasattr(defaults[name], "unlocked") and hasattr(values[name], "unlocked"):
                _add_missing_options(values[name], defaults[name])


def _build_section(cls: type, values: Any, prefix: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in values:
        if name not in fields:
            find_option(prefix + name)  # raises
    built = {}
    for name, field in fields.items():
        if name not in values:
            continue  # a configuration written before the option existed means its default
        try:
            value = values[name]  # a ConfigDict resolves references here
        except Exception as error:  # of a required one without a value, or of its computation
            raise UserError(f"config.{prefix}{name}: {error}") from error
        if not dataclasses.is_dataclass(field.type):
            facts = field.metadata["facts"]
            built[name] = _validate_value(f"config.{prefix}{name}", value, field.type, facts)
        elif hasattr(value, "items"):
            section = typing.cast(type, field.type)
            built[name] = _build_section(section, value, f"{prefix}{name}.")
        else:
            raise UserError(f"config.{prefix}{name}: expected a section of options, got {value!r}")
    return cls(**built)


def _validate_value(name: str, value: Any, annotation: Any, facts: Facts) -> Any:
    expected = strip_none(annotation)
    if facts.is_list:
        items = parsing.split_items(value) if parsing.is_bracketed(value) else value
        if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
            value = ",".join(items)
    if facts.is_json and isinstance(value, list | tuple):
        value = json.dumps(list(value))
    if value == AUTO and facts.is_automatic:
        return None
    if value is None:
        if expected is annotation:
            raise _no_value_error(f"{name}={value}")
        return None
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        # An integer beyond the range of floats becomes infinity, which is rejected below.
        value = float(value) if abs(value) <= FLOAT32_MAX else math.inf
    if isinstance(value, str):
        value = facts.aliases.get(value, value)
    # bool is a subclass of int, but True is not a number of prompts.
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise UserError(
            f"{name}={value!r}: expected {expected.__name__}, got {type(value).__name__}"
        )
    # A user-defined function is imported where it is used.
    names_function = facts.is_plugin and isinstance(value, str) and ":" in value
    if facts.choices is not None and value not in facts.choices and not names_function:
        known = ", ".join(map(repr, facts.choices))
        if facts.is_plugin:
            known += " or module:function"
        raise UserError(
            f"{name}={value!r}: expected one of {known}.{did_you_mean(str(value), facts.choices)}"
        )
    if facts.parse is not None:
        try:
            facts.parse(value)
        except ValueError as error:
            raise UserError(f"{name}={value!r}: {error}") from None
    _validate_range(name, value, facts)
    return value


def _validate_range(name: str, value: Any, facts: Facts) -> None:
    # A number neither overflows nor vanishes in 32 bits; this also refuses NaN.
    if isinstance(value, float) and not (value == 0 or FLOAT32_TINY <= abs(value) <= FLOAT32_MAX):
        raise UserError(f"{name}={value!r}: expected a finite number of 32 bits ({facts.doc})")
    # Integers become int32 in compiled programs, where larger ones would wrap around.
    largest = max(facts.at_most or 0, INT32_MAX)
    if isinstance(value, int) and abs(value) > largest:
        number = value if abs(value) < 10**30 else "(more than 30 digits)"
        raise UserError(f"{name}={number}: expected an integer within +-{largest} ({facts.doc})")
    if facts.not_zero and value == 0:
        raise UserError(f"{name}=0: expected -1 or at least 1 ({facts.doc})")
    for bound, (_, words, holds) in BOUNDS.items():
        limit = getattr(facts, bound)
        if limit is not None and not holds(value, limit):
            raise UserError(f"{name}={value!r}: expected {words} {limit} ({facts.doc})")
