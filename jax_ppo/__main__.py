"""`python -m jax_ppo` and the console script `jax-ppo` list the commands and run them."""

import importlib
import sys

import jax_ppo
from jax_ppo.errors import did_you_mean, print_any_text

COMMANDS = {
    "train": "train a language model with PPO",
    "critic": "train a critic on a fixed policy's responses, before PPO",
    "evaluate": "evaluate a model on held-out prompts",
    "score": "value, reward and advantage of each token of given responses",
    "sft": "fine-tune a language model on responses, before PPO",
    "reward_model": "train a reward model on preferences, for PPO",
    "check": "describe data sets, and report whether a run can train on them",
    "plan": "predict memory and time of a training step, without the machine",
    "report": "compare runs in one page",
    "translate": "translate a verl, TRL or OpenRLHF command",
    "config": "print all options",
}
USAGE = """\
jax_ppo {version}: PPO for language models in JAX

usage: {program} COMMAND --config=FILE[:ARG] [--config.OPTION=VALUE ...] [--workdir=FOLDER]

{commands}

{program} COMMAND --help prints the options.

to begin with:
  {program} train --config=arithmetic      PPO in a minute, without a download
  {program} check FILE --config=gsm8k      describe your own data
  {program} train --config=gsm8k:smoke     a recipe with a small model; then without :smoke
"""


def main(arguments: list[str] | None = None) -> None:
    """Run the command that the first argument names, or list all; `None` takes `sys.argv`."""
    print_any_text()
    if arguments is None:
        arguments = sys.argv[1:]
    command, *options = arguments or ["--help"]
    if command in ("--help", "-h", "help"):
        program = "python -m jax_ppo" if sys.argv[0].endswith("__main__.py") else "jax-ppo"
        commands = "\n".join(f"  {name:14s} {text}" for name, text in COMMANDS.items())
        print(USAGE.format(version=jax_ppo.__version__, program=program, commands=commands))
    elif command == "--version":
        print(jax_ppo.__version__)
    elif command in COMMANDS:
        importlib.import_module(f"jax_ppo.{command}").main([command, *options])
    else:
        hint = did_you_mean(command, COMMANDS)
        names = ", ".join(COMMANDS)
        sys.exit(f"error: {command}: no such command; expected one of {names}.{hint}")


if __name__ == "__main__":
    main()
