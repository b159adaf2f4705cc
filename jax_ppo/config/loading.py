"""From a ConfigDict to a checked, frozen Config: names, types and ranges here, the rest in validation.py.

A file under configs/ calls `default_config()`, changes what its experiment is about and returns the ConfigDict; the command
line overrides single options (`--config.actor.clip_ratio=0.1`); `from_config_dict` checks the whole and freezes it.
`python -m jax_ppo.config` prints the table of options.
"""

import dataclasses
import difflib
import os
import sys
import typing

from jax_ppo.config import validation
from jax_ppo.config.schema import Config, options, plain_type
from jax_ppo.errors import UserError, did_you_mean

if typing.TYPE_CHECKING:
    import ml_collections  # else only where a ConfigDict is made: a Config can be built and used without it


def default_config() -> "ml_collections.ConfigDict":
    """All options at their defaults, locked: setting a name that does not exist raises."""
    return _to_config_dict(Config())


def from_config_dict(config: "ml_collections.ConfigDict", command: str = "train") -> Config:
    """Checks names, types, ranges and sizes against each other. Raises UserError for the first thing that is wrong.

    Args:
      command: which one reads the options: train, sft or reward_model.
    """
    frozen = _build(Config, config, "")
    if command == "train":
        validation.validate_train_config(frozen)
    else:
        validation.validate_supervised_config(frozen, command)
    return frozen


def unknown_option(name: str) -> UserError:
    """The error for an option that does not exist, with the nearest name that does."""
    known = [known_name for known_name, *_ in options()]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    leaf = [k for k in known if k.rpartition(".")[2] == name.rpartition(".")[2]]
    return UserError(
        f"config.{name}: there is no such option. Did you mean config.{(leaf or near)[0]}?"
    )


def _to_config_dict(value):
    if not dataclasses.is_dataclass(value):
        return value
    import ml_collections
    from ml_collections import config_dict

    result = ml_collections.ConfigDict()
    for field in dataclasses.fields(value):
        current = getattr(value, field.name)
        if current is None:
            current = config_dict.placeholder(plain_type(field.type))
        result[field.name] = _to_config_dict(current)
    return result.lock()


def _build(cls, values, prefix):
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in values:
        if name not in fields:
            raise unknown_option(prefix + name)
    built = {}
    for name, field in fields.items():
        if name not in values:
            continue  # a configuration written before the option existed means its default
        value = (
            values.get_oneway_ref(name).get() if hasattr(values, "get_oneway_ref") else values[name]
        )
        if dataclasses.is_dataclass(field.type):
            if not hasattr(value, "items"):
                raise UserError(
                    f"config.{prefix}{name}: expected a section of options, got {value!r}"
                )
            built[name] = _build(field.type, value, f"{prefix}{name}.")
        else:
            built[name] = _checked(f"config.{prefix}{name}", value, field)
    return cls(**built)


def _checked(name, value, field):
    expected = plain_type(field.type)
    if value is None:
        if expected is field.type:
            raise UserError(f"{name}: must be set ({field.metadata['doc']})")
        return None
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(value, str):
        value = field.metadata["aliases"].get(value, value)
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        raise UserError(
            f"{name}={value!r}: expected {expected.__name__}, got {type(value).__name__}"
        )
    limits = field.metadata
    if limits["choices"] is not None and value not in limits["choices"]:
        known = ", ".join(map(repr, limits["choices"]))
        raise UserError(
            f"{name}={value!r}: expected one of {known}.{did_you_mean(value, limits['choices'])}"
        )
    in_range = {
        "at_least": "at least",
        "above": "more than",
        "at_most": "at most",
        "below": "less than",
    }
    holds = {
        "at_least": lambda v, b: v >= b,
        "above": lambda v, b: v > b,
        "at_most": lambda v, b: v <= b,
        "below": lambda v, b: v < b,
    }
    for key, words in in_range.items():
        # Written so that NaN fails every range.
        if limits[key] is not None and not holds[key](value, limits[key]):
            raise UserError(f"{name}={value!r}: expected {words} {limits[key]} ({limits['doc']})")
    return value


def main():
    """Prints the table of options."""
    try:
        print(
            "\n".join(f"{name:48s} {default!r:>16}  {doc}" for name, _, default, doc in options()),
            flush=True,
        )
    except BrokenPipeError:  # `--help | head`: who reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
