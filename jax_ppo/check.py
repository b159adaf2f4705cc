"""Check data: `python -m jax_ppo.check [FILE ...] [--config=FILE] [--for=COMMAND] [--json]`.

Prints a description of the data and the problems that would keep a run from training on them. The
exit code is 1 if there are any. Without --config only the rules are checked, and tokens are not
counted.
"""

import json
import sys

from jax_ppo.config import command_line, loading
from jax_ppo.config.schema import Config, replace_options
from jax_ppo.errors import UserError, did_you_mean, exit_on_user_error

COMMANDS = ("train", "sft", "reward_model")
USAGE = """\
usage: python -m jax_ppo.check [FILE ...] [--config=FILE[:ARG]] [--config.OPTION=VALUE ...]
       [--for=COMMAND] [--json]

FILE      any value of config.data.train_files: files, hf:, tfds:, arithmetic:COUNT
--config  check the data of this configuration, with its model's tokenizer and its rules; FILEs
          replace its training data
--for     what the data are for: train (by default), sft or reward_model
--json    print the report as JSON

The exit code is 1 if training on the data would fail.
"""


def main(arguments: list[str]) -> None:
    """Run the command; `arguments` are `sys.argv`. Exit with code 1 if training would fail."""
    with exit_on_user_error():
        if {"--help", "-h", "-help"} & set(arguments[1:]):
            print(USAGE)
            return
        config, command = read_check_arguments(arguments)
        from jax_ppo.run import data_check

        report = data_check.check_data(config, command)
    if "--json" in arguments:
        print(json.dumps(report, indent=2))
    else:
        print(data_check.format_report(report))
    sys.exit(1 if report["problems"] else 0)


def read_check_arguments(arguments: list[str]) -> tuple[Config, str]:
    """Return the selected options, and what the data are for; raise `UserError` for wrong ones."""
    program, *given_arguments = arguments
    files = ",".join(word for word in given_arguments if word and not word.startswith("-"))
    flags = ("--json", "--for=")
    options = [word for word in given_arguments if word[:1] == "-" and not word.startswith(flags)]
    known = ("--config", "--noconfig.", "--workdir")
    if unknown := [word for word in options if not word.startswith(known)]:
        hint = did_you_mean(unknown[0], ("--json", "--for", "--config"))
        raise UserError(f"{unknown[0]}: no such option of check.{hint}")
    command = next((word[6:] for word in given_arguments if word.startswith("--for=")), "train")
    if command not in COMMANDS:
        raise UserError(
            f"--for={command}: expected {', '.join(COMMANDS)}.{did_you_mean(command, COMMANDS)}"
        )
    if files:
        options.append(f"--config.data.train_files={files}")
    if any(not word.startswith("--config.") for word in options):
        words = [program, *options]
        return command_line.read_command_line(words, command)[0], command
    if not files:
        raise UserError("check: name the files to check, or a configuration with --config=FILE")
    # The data can be checked without a run's other requirements.
    given = (word.removeprefix("--config.").partition("=") for word in options)
    values = {name: loading.parse_option(name, value) for name, _, value in given}
    return replace_options(Config(), values), command


if __name__ == "__main__":
    main(sys.argv)
