"""Translate: `python -m jax_ppo.translate verl 'python3 -m verl.trainer.main_ppo ...'`.

Prints the jax_ppo.train command that corresponds to a command of verl, TRL (`trl`) or OpenRLHF
(`openrlhf`), and what changes results unless the user acts, also for their SFT and reward models. A
shell script, or a Python script with TRL's classes, may be named instead. Without a second argument
the command is read from the standard input.
"""

import shlex
import sys

from jax_ppo.errors import exit_on_user_error
from jax_ppo.migrating import translation

USAGE = (
    "usage: python -m jax_ppo.translate verl|trl|openrlhf ['COMMAND' | SCRIPT.sh | SCRIPT.py | "
    "< COMMAND]"
)


def main(arguments: list[str]) -> None:
    """Run the command; `arguments` are `sys.argv`."""
    words = arguments[1:]
    if not words or {"--help", "-h"} & set(words[:2]):
        print(USAGE)
        return
    framework, *rest = words
    text = rest[0] if len(rest) == 1 else shlex.join(rest) if rest else sys.stdin.read()
    with exit_on_user_error():
        translated = translation.translate(framework, text)
    print(translated.command())
    for title, lines in (
        ("Results will differ unless you act", translated.notes),
        ("Nothing to do", translated.remarks),
    ):
        if lines:
            print(f"\n{title}:", *lines, sep="\n- ")


if __name__ == "__main__":
    main(sys.argv)
