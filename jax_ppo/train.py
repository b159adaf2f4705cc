"""The command: `python -m jax_ppo.train --config=configs/arithmetic.py [--config.OPTION=VALUE ...] [--workdir=FOLDER]`."""

import sys
from pathlib import Path

from jax_ppo import command_line, schema


def run(options: schema.Config, workdir: Path) -> None:
    from jax_ppo import ppo

    ppo.train(options, workdir)


if __name__ == "__main__":
    command_line.main(sys.argv, "train", run)
