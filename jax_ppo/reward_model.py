"""The command: `python -m jax_ppo.reward_model --config=configs/hh_rlhf_reward.py [--config.OPTION=VALUE ...]
[--workdir=FOLDER]`.

The model of config.model.path gets a scalar head and learns to score the chosen above the rejected response of each pair in
config.data.train_files. It is written to WORKDIR/reward_model, a Hugging Face folder (a sequence classifier of one label) for
config.reward.model_path of jax_ppo.train. A response is scored at the EOS behind it: an actor with the same tokens samples it,
and for others config.reward.model_input=text adds it to prompts that are text. Chats are for actors with the same tokens.
"""

import sys
from pathlib import Path

from jax_ppo import command
from jax_ppo.config import schema


def main(arguments: list[str]) -> None:
    command.run_command(arguments, "reward_model", run)


def run(options: schema.Config, workdir: Path) -> None:
    from jax_ppo.supervised import loop as supervised

    supervised.train(options, workdir, supervised.REWARD_MODEL)


if __name__ == "__main__":
    main(sys.argv)
