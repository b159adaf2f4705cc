"""The command: `python -m jax_ppo.train --config=configs/arithmetic.py [--config.OPTION=VALUE ...] [--workdir=FOLDER]`."""

import sys
from pathlib import Path

from jax_ppo import command
from jax_ppo.config import schema


def main(arguments: list[str]) -> None:
    command.run_command(arguments, "train", run)


def run(options: schema.Config, workdir: Path) -> None:
    from jax_ppo.ppo import loop as ppo

    ppo.train(options, workdir)


if __name__ == "__main__":
    main(sys.argv)
