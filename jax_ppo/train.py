"""Run PPO: `python -m jax_ppo.train --config=FILE [--config.OPTION=VALUE ...] [--workdir=DIR]`."""

import sys
import types
from pathlib import Path
from typing import Any

from jax_ppo import command
from jax_ppo.config import schema


def main(arguments: list[str]) -> None:
    """Parse `arguments` (`sys.argv`), then call `jax_ppo.run.ppo_training.train_ppo`."""
    command.run_command(arguments, "train")


class _CallableModule(types.ModuleType):
    """A module, which is the command, that can also be called, as the function `jax_ppo.api.train`.

    Importing a submodule binds its name in the package, so that `from jax_ppo import train` cannot
    be relied on to return a function of the same name.
    """

    def __call__(self, config: schema.Config, workdir: str | Path | None = None) -> dict[str, Any]:
        """See `jax_ppo.api.train`."""
        from jax_ppo import api

        return api.train(config, workdir)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    main(sys.argv)
