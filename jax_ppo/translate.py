"""Translate: `python -m jax_ppo.translate verl 'python3 -m verl.trainer.main_ppo ...'`.

Prints the jax_ppo.train command that corresponds to a command of verl, TRL (`trl`) or OpenRLHF
(`openrlhf`), and the settings without a counterpart. Without a second argument the command is read
from the standard input.
"""

import sys

from jax_ppo.config import translation
from jax_ppo.errors import UserError, print_any_text

USAGE = "usage: python -m jax_ppo.translate verl|trl|openrlhf ['COMMAND']   (or COMMAND as input)"


def main(arguments: list[str]) -> None:
    """Run the command; `arguments` are `sys.argv`."""
    print_any_text()
    words = arguments[1:]
    if not words or {"--help", "-h"} & set(words[:1]):
        print(USAGE)
        return
    framework, *rest = words
    text = " ".join(rest) if rest else sys.stdin.read()
    try:
        translated = translation.translate(framework, text)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(translated.command(translation.BASE_CONFIGS[framework]))
    if translated.notes:
        print("\nTo look at:")
        for note in translated.notes:
            print(f"- {note}")


if __name__ == "__main__":
    main(sys.argv)
