"""Read `--config=FILE[:ARG] --config.OPTION=VALUE --workdir=FOLDER`.

Errors name the option, its value, the expectation and the nearest valid name.
"""

import json
import shlex
import textwrap
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from jax_ppo.config import config_files, loading, parsing, reference
from jax_ppo.config.option import COMMANDS
from jax_ppo.config.schema import Config, all_options, flatten_options, options_by_name
from jax_ppo.config.suggestions import suggest_option
from jax_ppo.errors import UserError
from jax_ppo.migrating.tables import explain_peer_option
from jax_ppo.storage import remote

OWN_FLAGS = ("workdir", "help")
EXAMPLES = {"sft": "hh_rlhf_sft", "reward_model": "hh_rlhf_reward"}  # of others: arithmetic
USAGE = """\
usage: python -m jax_ppo.{command} --config=FILE[:ARG]
           [--config.OPTION=VALUE ...] [--workdir=FOLDER]

FILE is a Python file with a function get_config(ARG) that returns a configuration, or the name of a
shipped one:

{names}

FOLDER defaults to output/EXPERIMENT_NAME{suffix}
The options:
"""
# What follows the name of an experiment in the names of folders: the run's own stays unchanged.
_SUFFIXES = {"critic": "-critic", "evaluate": "-evaluation", "score": "-scores"}


def read_command_line(arguments: list[str], command: str = "train") -> tuple[Config, str | Path]:
    """Return the configuration, validated for a command, and the work directory or its address.

    Raises:
      UserError: all invalid arguments, one per line; or the first problem of the options in
        combination.
      SystemExit: after `--help`.
    """
    # Help comes before any validation: it is for users whose command line is wrong.
    if {"--help", "-h", "-help"} & set(arguments[1:]):
        names = textwrap.fill(", ".join(config_files.shipped_names()), width=96)
        suffix = _SUFFIXES.get(command, "")
        suffix += (
            "" if command in ("evaluate", "score") else "; a run resumes from a checkpoint in it"
        )
        print(USAGE.format(command=command, names=textwrap.indent(names, "  "), suffix=suffix))
        reference.print_options(command if command in COMMANDS else "train")
        raise SystemExit(0)
    config_values = []
    unset: dict[str, None] = {}
    other_arguments = [arguments[0]]
    problems = []
    for argument in arguments[1:]:
        try:
            config_value = _validate_argument(argument)
        except UserError as error:
            problems.append(str(error))
            continue
        name, _, value = argument.removeprefix("--config.").partition("=")
        if config_value is not None:
            config_values.append(config_value)
        elif value == loading.UNSET and name in loading.OPTIONAL:
            unset[name] = None
        else:
            unset.pop(name, None)  # the last one counts, as for flags
            other_arguments.append(argument)
    if problems:
        # All are reported at once, so that one more start is enough.
        details = "\n".join(f"error: {problem}" for problem in problems[1:])
        raise UserError(problems[0], details=details)
    if not config_values:
        example = EXAMPLES.get(command, "arithmetic")
        raise UserError(f"--config: must be given, for example --config={example}")
    values = _parse_flags(other_arguments, loading.read_config_file(config_values[-1], command))
    with values.config.ignore_type():
        values.config.update_from_flattened_dict(unset)
    overridden = [a.removeprefix("--config.").partition("=")[0] for a in other_arguments]
    loading.replace_epochs(values.config, overridden)
    config = loading.from_config_dict(values.config, command)
    name = config.experiment_name + _SUFFIXES.get(command, "")
    workdir: str | Path = values.workdir or Path("output") / name
    if values.workdir and remote.is_address(values.workdir):
        remote.validate_address(values.workdir, "--workdir", schemes=("gs",))
    else:
        workdir = Path(workdir)
    return config, workdir


def write_config(options: dict[str, Any], folder: Path) -> None:
    """Write all options, as nested sections, to config.json in the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(options, indent=2) + "\n")


def print_set_options(options: dict[str, Any], workdir: str, computation: str) -> None:
    """Print the work directory, the computation in words, and which of all options were set."""
    print(f"work directory: {workdir} (all options: config.json); {computation}")
    # Most options are rarely set: showing all would hide those that make this run.
    settings: dict[str, list[str]] = {}
    values = flatten_options(options)
    for option in all_options():
        value = values[option.name]
        if value != option.default:
            section, _, name = option.name.rpartition(".")
            settings.setdefault(section, []).append(f"{name}={shlex.quote(str(value))}")
    sections = [
        f"{section}: {' '.join(texts)}".removeprefix(": ") for section, texts in settings.items()
    ]
    paragraph = textwrap.fill(
        f"options that were set: {'; '.join(sections) or 'none'}",
        width=118,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    print(paragraph, flush=True)


def _parse_flags(arguments: list[str], defaults: ml_collections.ConfigDict) -> flags.FlagValues:
    """Return the values of the flags; `defaults` come from the configuration file."""
    # A separate object, since absl's global flags would remember an earlier call.
    values = flags.FlagValues()
    flags.DEFINE_string(
        "workdir", None, "folder or gs:// address of everything the run writes", flag_values=values
    )
    try:
        config_flags.DEFINE_config_dict("config", defaults, flag_values=values, sys_argv=arguments)
        positional = values(arguments)[1:]
    except flags.UnrecognizedFlagError as error:
        raise UserError(
            f"--{error.flagname}: expected --config, --config.NAME or --workdir"
        ) from error
    except (flags.Error, AttributeError, TypeError, ValueError) as error:
        raise UserError(str(error).replace("\n", " ")) from error
    if positional:
        raise UserError(f"{positional[0]}: not an option; options are written --config.NAME=VALUE")
    return values


def _validate_argument(argument: str) -> str | None:
    """Return the value of an argument `--config=VALUE`; `None` for any other argument.

    Raises:
      UserError: names the option and the expected value, which the flag parser's errors do not.
    """
    name, equals, value = argument.lstrip("-").partition("=")
    if argument.startswith("-") and name == "config":
        if not equals:
            raise UserError("--config: write --config=NAME or --config=FILE, with the =")
        config_files.find_config_file(value)
        return value
    if argument.startswith("--config."):
        _validate_override(name.removeprefix("config."), value, has_value=bool(equals))
    elif argument.startswith("--") and name not in OWN_FLAGS:
        # absl also reads --noNAME of a boolean.
        if not (name.startswith("no") and name[2:].removeprefix("config.") in options_by_name()):
            _refuse_misplaced_option(name, f"--{name}", f"{name}=VALUE")
    elif equals and not argument.startswith("-"):
        # As in commands of verl.
        name = name.lstrip("+").removeprefix("config.")
        written = f"{name}={value}"
        _refuse_misplaced_option(name, written, written)
    return None


def _refuse_misplaced_option(name: str, written: str, expected: str) -> None:
    """Raise `UserError` for an option without `--config.`, ours or another framework's."""
    if name in options_by_name():
        raise UserError(f"{written}: write --config.{expected}")
    if "." in name or explain_peer_option(name) is not None:
        as_written = written.partition("=")[0]
        raise UserError(f"{as_written}: there is no such option. {suggest_option(name)}")


def _validate_override(name: str, value: str, *, has_value: bool) -> None:
    option = loading.find_option(name)
    takes_list = option.facts.is_list or option.facts.is_json
    if option.value_type is str and not takes_list and parsing.is_bracketed(value):
        items = parsing.split_items(value)
        raise UserError(
            f"config.{name}={value!r}: lists are written as one text, "
            f"--config.{name}={','.join(items)}"
        )
    if not has_value:
        if option.value_type is not bool:
            raise UserError(f"config.{name}: write --config.{name}=VALUE, with the =")
        return
    # The flag parser's own errors name neither the option nor the expected type.
    loading.parse_option(name, value)
