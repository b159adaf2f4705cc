"""The command: `python -m jax_ppo.train --config=configs/arithmetic.py [--config.OPTION=VALUE ...] [--workdir=FOLDER]`.

Options are read and checked before anything heavy is imported, so that a mistake costs a second.
"""

import sys
from pathlib import Path

from jax_ppo import command_line, schema
from jax_ppo.errors import UserError


def main(arguments: list[str]) -> None:
    try:
        options, workdir = command_line.read(arguments)
        from jax_ppo import distributed

        distributed.initialize(options.distributed)
    except UserError as error:
        sys.exit(f"error: {error}")
    distributed.run_or_abort(lambda: run(options, workdir))


def run(options: schema.Config, workdir: Path) -> None:
    """Writes the resolved configuration, trains, and ends with one line on an error that the user can mend."""
    from jax_ppo import compilation, distributed, metrics, ppo

    compilation.keep(options.trainer.compilation_cache, metrics.say)
    if distributed.is_main():
        command_line.write_resolved(options, workdir)
    try:
        ppo.train(options, workdir)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv)
