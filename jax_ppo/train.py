"""Run PPO: `python -m jax_ppo.train --config=FILE [--config.OPTION=VALUE ...] [--workdir=DIR]`."""

import functools
import sys

from jax_ppo import command

main = functools.partial(command.run_command, command="train")

if __name__ == "__main__":
    main(sys.argv)
