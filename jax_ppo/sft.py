"""The command: `python -m jax_ppo.sft --config=configs/hh_rlhf_sft.py [--config.OPTION=VALUE ...] [--workdir=FOLDER]`.

Supervised fine-tuning: the language model of config.model.path learns the responses of config.data.train_files, the prompts
masked. It is written to WORKDIR/actor, a Hugging Face folder for config.model.path of jax_ppo.train.
"""

import sys
from pathlib import Path

from jax_ppo import command
from jax_ppo.config import schema


def main(arguments: list[str]) -> None:
    command.run_command(arguments, "sft", run)


def run(options: schema.Config, workdir: Path) -> None:
    from jax_ppo.supervised import loop as supervised

    supervised.train(options, workdir, supervised.SFT)


if __name__ == "__main__":
    main(sys.argv)
