"""Read `--config=FILE[:ARG] --config.OPTION=VALUE --workdir=FOLDER`.

Errors name the option, its value, the expectation and the nearest valid name.
"""

import json
import re
import shlex
import textwrap
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from jax_ppo.config import config_files, loading, reference
from jax_ppo.config.option import COMMANDS
from jax_ppo.config.schema import Config, all_options, flatten_options, options_by_name
from jax_ppo.config.suggestions import explain_peer_option, suggest_option
from jax_ppo.errors import UserError, counted, did_you_mean, named_file, shorten
from jax_ppo.storage import local_files, remote

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
# Endings of the names of work directories, so that other commands leave the run's unchanged.
_SUFFIXES = {"critic": "-critic", "evaluate": "-evaluation", "score": "-scores"}


def read_command_line(arguments: list[str], command: str = "train") -> tuple[Config, str | Path]:
    """Return the configuration, validated for a command, and the work directory or its address.

    Raise the errors of `read_arguments`, or `UserError` for the first problem of the options in
    combination; `SystemExit` after `--help`.
    """
    # Help comes before any validation: it is for users whose command line is wrong.
    if {"--help", "-h", "-help"} & set(arguments[1:]):
        names = textwrap.fill(", ".join(config_files.shipped_names()), width=96)
        suffix = _SUFFIXES.get(command, "")
        if command not in ("evaluate", "score"):
            suffix += "; a run resumes from a checkpoint in it"
        print(USAGE.format(command=command, names=textwrap.indent(names, "  "), suffix=suffix))
        reference.print_options(command if command in COMMANDS else "train")
        raise SystemExit(0)
    file, workdir_value, overrides = read_arguments(arguments[1:])
    if not file:
        example = EXAMPLES.get(command, "arithmetic")
        raise UserError(f"--config: must be given, for example --config={example}")
    values = loading.read_config_file(file, command)
    config = loading.override_options(values, overrides, command)
    return config, read_workdir(workdir_value or default_workdir(config.experiment_name, command))


def read_arguments(arguments: Iterable[str]) -> tuple[str, str, dict[str, Any]]:
    """Return the values of --config and --workdir, "" without one, and of options by their names.

    Raise `UserError` with all invalid arguments, one per line.
    """
    file = workdir = ""
    overrides: dict[str, Any] = {}  # the last one of each option counts
    problems = []
    words = iter(arguments)
    for word in words:
        if word in ("--workdir", "-workdir"):  # the value is the next word
            word = f"--workdir={next(words, '')}"
        try:
            name, value = _read_argument(word)
        except UserError as error:
            problems.append(str(error))
            continue
        if name == "--config":
            file = value
        elif name == "--workdir":
            workdir = value
        else:
            overrides[name] = value
    if problems:
        # All are reported at once, so that one more start is enough.
        details = "\n".join(f"error: {problem}" for problem in problems[1:])
        raise UserError(problems[0], details=details)
    return file, workdir, overrides


def take_flags(
    words: Iterable[str], switches: tuple[str, ...], valued: tuple[str, ...]
) -> tuple[dict[str, str], list[str]]:
    """Return the values of a command's own flags, "" for `switches`, and the other words.

    Raise `UserError` for a switch with a value, a `valued` flag without one, or a misspelled one.
    """
    flags: dict[str, str] = {}
    others = []
    for word in words:
        name, equals, value = word.partition("=")
        is_other = not name.startswith("--") or name.startswith(("--config", "--workdir"))
        if name in switches and equals:
            raise UserError(f"{word}: {name} takes no value; leave it out to turn it off")
        if name in valued and not value:
            raise UserError(f"{name}: write {name}=VALUE, with the =")
        if name in (*switches, *valued):
            flags[name] = value
        elif is_other or not (hint := did_you_mean(name, (*switches, *valued))):
            others.append(word)
        else:
            raise UserError(f"{word}: no such option.{hint}")
    return flags, others


def read_workdir(workdir: str | Path) -> str | Path:
    """Return a work directory as an address or a path; raise `UserError` for a wrong one."""
    read: str | Path
    # Orbax looks for the parts of a checkpoint with its path as a pattern.
    if remote.is_address(str(workdir)):
        remote.validate_address(str(workdir), "--workdir", schemes=("gs",))
        read, forbidden = re.sub("(?<!:)/+", "/", str(workdir)), "*?[#"  # # would end the path
    else:
        read, forbidden = local_files.expand_local_path(str(workdir), "--workdir"), "*?["
    path = read if isinstance(read, str) else str(read.absolute())
    if wrong := [character for character in forbidden if character in path]:
        raise UserError(
            f"--workdir={shorten(path)!r}: checkpoints below a folder with {wrong[0]!r} in its "
            "name cannot be read again; give another --workdir"
        )
    return read


def default_workdir(experiment_name: str, command: str) -> str:
    """Return the folder that a command writes to unless another is given."""
    return f"output/{experiment_name}{_SUFFIXES.get(command, '')}"


def write_config(options: dict[str, Any], folder: Path) -> None:
    """Write all options, as nested sections, to config.json in the run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    with named_file(path):
        path.write_text(json.dumps(options, indent=2) + "\n")


def print_set_options(options: dict[str, Any], typed: Container[str]) -> None:
    """Print the options that are `typed`, and how many others differ from their defaults.

    config.json has all of them: those of a configuration file would hide what makes this run.
    """
    values = flatten_options(options)
    changed = [option.name for option in all_options() if values[option.name] != option.default]
    shown = [option.name for option in all_options() if option.name in typed]
    if shown:
        texts = (f"{name}={shlex.quote(str(values[name]))}" for name in shown)
        print("options on the command line:", *texts)
    others = counted(len(set(changed) - set(shown)), "other option" if shown else "option")
    print(f"{others} not at the default, see config.json", flush=True)


def _read_argument(word: str) -> tuple[str, Any]:
    """Return "--config", "--workdir" or the name of an option, and its value, which is valid."""
    name, equals, value = word.removeprefix("-").removeprefix("-").partition("=")
    if not word.startswith("-"):
        if equals:  # as in commands of verl
            written = f"{name.lstrip('+').removeprefix('config.')}={value}"
            _refuse_misplaced_option(written.partition("=")[0], written, written)
        raise UserError(f"{word}: not an option; options are written --config.NAME=VALUE")
    if name == "config":
        if not equals:
            raise UserError("--config: write --config=NAME or --config=FILE, with the =")
        config_files.find_config_file(value)
        return "--config", value
    if name == "workdir":
        if not value or value.startswith("-"):
            raise UserError("--workdir: write --workdir=FOLDER")
        return "--workdir", value
    if name.startswith("config."):
        name = name.removeprefix("config.")
        if equals:
            return name, loading.parse_option(name, value)
        if loading.find_option(name).value_type is bool:
            return name, True
        raise UserError(f"config.{name}: write --config.{name}=VALUE, with the =")
    _refuse_misplaced_option(name, f"--{name}", f"{name}=VALUE")
    raise UserError(f"--{name}: expected --config, --config.NAME or --workdir")


def _refuse_misplaced_option(name: str, written: str, expected: str) -> None:
    if name in options_by_name():
        raise UserError(f"{written}: write --config.{expected}")
    if "." in name or explain_peer_option(name) is not None:
        as_written = written.partition("=")[0]
        raise UserError(f"{as_written}: there is no such option. {suggest_option(name)}")
