"""Run PPO: `python -m jax_ppo.train --config=FILE [--config.OPTION=VALUE ...] [--workdir=DIR]`.

The function of this name is the Python API's. `jax_ppo` imports it first, so that the name stays
bound to it when this module, which is the command, is imported later.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax_ppo.config.schema import Config


def train(config: "Config", workdir: str | Path | None = None) -> dict[str, Any]:
    """Train with PPO, as `python -m jax_ppo.train` does.

    Args:
      config: the options, from `load_config`.
      workdir: folder or gs:// address for everything that the run writes; `None`:
        output/EXPERIMENT_NAME. A run resumes from the newest checkpoint in it.

    Returns:
      The contents of WORKDIR/summary.json.

    Raises:
      UserError: options or input files are invalid; the message names the option.
      KeyboardInterrupt: Ctrl-C stopped the run; during training, after the step was saved.
      SystemExit: SIGTERM stopped the run in the same way; the code is 143.
    """
    # Late: they load JAX.
    from jax_ppo import command
    from jax_ppo.config import validation
    from jax_ppo.run import ppo_training

    validation.validate_config(config, "train")
    workdir = workdir or Path("output") / config.experiment_name
    with command.prepared_run(config, workdir) as (resolved, folder):
        return ppo_training.train_ppo(resolved, folder)


def main(arguments: list[str]) -> None:
    """Parse `arguments` (`sys.argv`), then call `jax_ppo.run.ppo_training.train_ppo`."""
    from jax_ppo import command

    command.run_command(arguments, "train")
