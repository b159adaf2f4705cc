"""Reads `--config=FILE[:arg] --config.OPTION=VALUE --workdir=FOLDER`, and says plainly what is wrong with it."""

import dataclasses
import difflib
import json
import textwrap
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from jax_ppo.config import loading, schema
from jax_ppo.config.schema import Config
from jax_ppo.errors import UserError

EXAMPLES = {"train": "arithmetic.py", "sft": "hh_rlhf_sft.py", "reward_model": "hh_rlhf_reward.py"}
USAGE = """usage: python -m jax_ppo.{command} --config=FILE[:ARG] [--config.OPTION=VALUE ...] [--workdir=FOLDER]

FILE has a function get_config(ARG) that returns a configuration; configs/ holds some. FOLDER is output/EXPERIMENT_NAME if not
given, and a run goes on from the checkpoint it finds there. The options:
"""


def read_command_line(arguments: list[str], command: str = "train") -> tuple[Config, Path]:
    """The checked configuration and the work directory.

    Args:
      arguments: sys.argv.
      command: whose options are checked: train, sft or reward_model.

    Raises:
      UserError: anything wrong, said in one message.
      SystemExit: after --help.
    """
    if {"--help", "-h", "-help"} & set(arguments[1:]):
        print(USAGE.format(command=command))
        loading.main()
        raise SystemExit(0)
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", None, flag_values=values, sys_argv=arguments)
    flags.DEFINE_string("workdir", None, "folder for everything the run writes", flag_values=values)
    for argument in arguments[1:]:
        _check_argument(argument)
    try:
        rest = values(arguments)[1:]
    except (flags.Error, AttributeError, TypeError, ValueError) as error:
        raise UserError(str(error).replace("\n", " ")) from error
    if rest:
        raise UserError(f"{rest[0]}: not an option; options are written --config.NAME=VALUE")
    if values.config is None:
        raise UserError(
            f"--config: must be given, for example --config=configs/{EXAMPLES[command]}"
        )
    config = loading.from_config_dict(values.config, command)
    if "://" in (values.workdir or ""):
        raise UserError(
            f"--workdir={values.workdir}: must be a folder of this machine or of a disk that it mounts"
        )
    return config, Path(values.workdir or Path("output") / config.experiment_name)


def _check_argument(argument: str) -> None:
    """Names the option and what was expected, which the flag parser's own errors do not."""
    name, given, value = argument.lstrip("-").partition("=")
    if argument.startswith("-") and name == "config":
        _check_file(value)
    if not argument.startswith("--config."):
        return
    name = name.removeprefix("config.")
    types = {known: kind for known, kind, *_ in schema.options()}
    if name not in types:
        raise loading.unknown_option(name)
    if not given and types[name] is not bool:
        raise UserError(f"config.{name}: write --config.{name}=VALUE, with the =")
    if types[name] in (int, float) and given:
        try:
            types[name](value)
        except ValueError:
            raise UserError(f"config.{name}={value!r}: expected {types[name].__name__}") from None
    if types[name] is bool and given and value.lower() not in ("true", "false", "1", "0"):
        raise UserError(f"config.{name}={value!r}: expected true or false")


def _check_file(value: str) -> None:
    path = Path(value.partition(":")[0])
    if path.is_file():
        return
    there = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(str(path), there, n=1) or there[:1]
    raise UserError(
        f"--config={value}: there is no such file" + (f". Did you mean {near[0]}?" if near else "")
    )


def write_resolved_config(config: Config, workdir: Path) -> None:
    """Prints the whole configuration, a paragraph a section, and writes it to WORKDIR/config.json."""
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    sections = {}
    for name, *_ in schema.options():
        section, _, rest = name.rpartition(".")
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        sections.setdefault(section, []).append(f"{rest}={value!r}")
    for section, settings in sections.items():
        print(
            textwrap.fill(
                f"{section or 'config'}: {'  '.join(settings)}",
                118,
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    print(f"work directory: {workdir}", flush=True)
