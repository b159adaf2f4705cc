"""Check data: `python -m jax_ppo.check [FILE ...] [--config=FILE] [--for=COMMAND] [--json]`.

Prints a description of the data and the problems that would keep a run from training on them. The
exit code is 1 if there are any. Without --config only the rules are checked, and tokens are not
counted. With --samples=N the model responds to N of the prompts.
"""

import json
import re
import sys

from jax_ppo.config import command_line, loading
from jax_ppo.config.schema import Config, replace_options
from jax_ppo.errors import UserError, did_you_mean, exit_on_user_error

COMMANDS = ("train", "sft", "reward_model")
USAGE = """\
usage: python -m jax_ppo.check [FILE ...] [--config=FILE[:ARG]] [--config.OPTION=VALUE ...]
       [--for=COMMAND] [--samples=N] [--json]

FILE      any value of config.data.train_files: files, hf:, tfds:, arithmetic:COUNT
--config  check the data of this configuration, with its model's tokenizer and its rules; FILEs
          replace its training data
--for     what the data are for: train (by default), sft or reward_model
--samples also sample and score responses of the model to N training prompts
--json    print the report as JSON

The exit code is 1 if training on the data would fail.
"""


def main(arguments: list[str]) -> None:
    """Run the command; `arguments` are `sys.argv`. Exit with code 1 if training would fail."""
    with exit_on_user_error():
        if {"--help", "-h", "-help"} & set(arguments[1:]):
            print(USAGE)
            return
        config, command, samples = read_check_arguments(arguments)
        from jax_ppo.run import data_check, standalone_evaluation

        report = data_check.check_data(config, command)
        table = "no samples were drawn, since there are problems" if samples else ""
        if samples and not report["problems"]:
            try:
                report["samples"], table = standalone_evaluation.try_policy(config, samples)
            except UserError as error:
                report["problems"].append(f"sampling from the model: {error}")
        text = "\n\n".join(filter(None, (data_check.format_report(report), table)))
    print(json.dumps(report, indent=2) if "--json" in arguments else text)
    sys.exit(1 if report["problems"] else 0)


def read_check_arguments(arguments: list[str]) -> tuple[Config, str, int]:
    """Return the selected options, what the data are for, and the number of samples.

    Raise `UserError` for wrong arguments.
    """
    flags, words = command_line.take_flags(arguments[1:], ("--json",), ("--for", "--samples"))
    command, samples = flags.get("--for", "train"), flags.get("--samples", "0")
    if command not in COMMANDS:
        raise UserError(
            f"--for={command}: expected {', '.join(COMMANDS)}.{did_you_mean(command, COMMANDS)}"
        )
    if not re.fullmatch(r"\d{1,2}", samples):
        raise UserError(f"--samples={samples}: expected a number of prompts, at most 99")
    if int(samples) and command != "train":
        raise UserError(f"--samples={samples}: {command} samples no responses")
    files = ",".join(word for word in words if word and not word.startswith("-"))
    file, _, values = command_line.read_arguments(word for word in words if word[:1] == "-")
    if files:
        values["data.train_files"] = loading.parse_option("data.train_files", files)
    if file:
        options = loading.read_config_file(file, command)
        return loading.override_options(options, values, command), command, int(samples)
    if not files:
        raise UserError("check: name the files to check, or a configuration with --config=FILE")
    if int(samples) and not values.get("model.path"):
        raise UserError(f"--samples={samples}: name the model with --config.model.path=FOLDER")
    # The data can be checked without a run's other requirements.
    return replace_options(Config(), values), command, int(samples)


if __name__ == "__main__":
    main(sys.argv)
