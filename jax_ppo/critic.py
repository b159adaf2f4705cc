"""Train a critic alone: `python -m jax_ppo.critic --config=FILE [--config.OPTION=VALUE ...]`.

The actor samples responses and stays as it is; the critic learns their returns, with the steps,
checkpoints, evaluations and reports of PPO. With `--config.score.file=FILES` it learns from the
responses in files, such as a run's rollouts/, and nothing is sampled for training. WORKDIR/critic
can then start a PPO run, as `--config.critic.path=WORKDIR/critic`.
"""

import functools
import sys

from jax_ppo import command

main = functools.partial(command.run_command, command="critic")

if __name__ == "__main__":
    main(sys.argv)
