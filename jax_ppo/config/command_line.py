"""Read `--config=FILE[:ARG] --config.OPTION=VALUE --workdir=FOLDER`.

Errors name the option, its value, what was expected and the nearest valid name.
"""

import dataclasses
import json
import textwrap
from pathlib import Path

import ml_collections
from absl import flags
from ml_collections import config_flags

from jax_ppo.config import config_files, loading, reference
from jax_ppo.config.schema import Config, all_options, option_value
from jax_ppo.errors import UserError

EXAMPLES = {"train": "arithmetic", "sft": "hh_rlhf_sft", "reward_model": "hh_rlhf_reward"}
USAGE = """\
usage: python -m jax_ppo.{command} --config=FILE[:ARG]
           [--config.OPTION=VALUE ...] [--workdir=FOLDER]

FILE is a Python file with a function get_config(ARG) that returns a configuration, or the name of a
shipped one: {names}. FOLDER defaults to output/EXPERIMENT_NAME; a run resumes
from the checkpoint that it finds there. The options:
"""


def read_command_line(arguments: list[str], command: str = "train") -> tuple[Config, Path]:
    """Return the validated configuration and the work directory.

    Args:
      arguments: `sys.argv`.
      command: The command whose options are validated: train, sft or reward_model.

    Raises:
      UserError: The first problem, in one message.
      SystemExit: After `--help`.
    """
    # Before any validation: help is for those whose command line is wrong.
    if {"--help", "-h", "-help"} & set(arguments[1:]):
        print(USAGE.format(command=command, names=", ".join(config_files.shipped_names())))
        reference.print_options()
        raise SystemExit(0)
    config_values = []
    others = [arguments[0]]
    for argument in arguments[1:]:
        config_value = _validate_argument(argument)
        if config_value is None:
            others.append(argument)
        else:
            config_values.append(config_value)
    if not config_values:
        raise UserError(f"--config: must be given, for example --config={EXAMPLES[command]}")
    values = _parse_flags(others, loading.read_config_file(config_values[-1]))
    config = loading.from_config_dict(values.config, command)
    # A work directory is locked and its files are renamed, which object stores cannot do.
    if "://" in (values.workdir or ""):
        raise UserError(
            f"--workdir={values.workdir}: must be a folder of this machine or of a disk that it "
            "mounts"
        )
    return config, Path(values.workdir or Path("output") / config.experiment_name)


def write_resolved_config(config: Config, workdir: Path) -> None:
    """Print all options, one paragraph per section, and write them to WORKDIR/config.json."""
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    # On the console options are grouped by section, to be read at a glance.
    settings: dict[str, list[str]] = {}
    for option in all_options():
        section, _, name = option.name.rpartition(".")
        value = option_value(config, option.name)
        settings.setdefault(section or "config", []).append(f"{name}={value!r}")
    for section, texts in settings.items():
        paragraph = textwrap.fill(
            f"{section}: {'  '.join(texts)}",
            width=118,
            subsequent_indent="    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        print(paragraph)
    print(f"work directory: {workdir}", flush=True)


def _parse_flags(arguments: list[str], defaults: ml_collections.ConfigDict) -> flags.FlagValues:
    """Return the values of the flags; `defaults` are those of the configuration file."""
    # Flags of this call only: absl's global flags would remember an earlier call.
    values = flags.FlagValues()
    flags.DEFINE_string("workdir", None, "folder for everything the run writes", flag_values=values)
    try:
        config_flags.DEFINE_config_dict("config", defaults, flag_values=values, sys_argv=arguments)
        positional = values(arguments)[1:]
    except (flags.Error, AttributeError, TypeError, ValueError) as error:
        raise UserError(str(error).replace("\n", " ")) from error
    if positional:
        raise UserError(f"{positional[0]}: not an option; options are written --config.NAME=VALUE")
    return values


def _validate_argument(argument: str) -> str | None:
    """Return the value of an argument `--config=VALUE`; `None` for any other argument.

    Raises:
      UserError: Names the option and the expected value, which the flag parser's errors do not.
    """
    name, equals, value = argument.lstrip("-").partition("=")
    if argument.startswith("-") and name == "config":
        config_files.find_config_file(value)
        return value
    if argument.startswith("--config."):
        _validate_override(name.removeprefix("config."), value, has_value=bool(equals))
    return None


def _validate_override(name: str, value: str, *, has_value: bool) -> None:
    types = {option.name: option.value_type for option in all_options()}
    if name not in types:
        raise loading.unknown_option_error(name)
    value_type = types[name]
    if not has_value:
        if value_type is not bool:
            raise UserError(f"config.{name}: write --config.{name}=VALUE, with the =")
        return
    # The flag parser's own errors name neither the option nor the expected type.
    if value_type in (int, float):
        try:
            value_type(value)
        except ValueError:
            raise UserError(f"config.{name}={value!r}: expected {value_type.__name__}") from None
    if value_type is bool and value.lower() not in ("true", "false", "1", "0"):
        raise UserError(f"config.{name}={value!r}: expected true or false")
