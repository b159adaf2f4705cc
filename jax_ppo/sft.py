"""Fine-tune: `python -m jax_ppo.sft --config=FILE [--config.OPTION=VALUE ...] [--workdir=FOLDER]`.

Supervised fine-tuning: the language model of config.model.path is trained on the responses of
config.data.train_files; the loss excludes the prompts. The result is WORKDIR/actor, a Hugging Face
folder for the config.model.path of jax_ppo.train. `--config=hh_rlhf_sft` is an example.
"""

import functools
import sys

from jax_ppo import command

main = functools.partial(command.run_command, command="sft")

if __name__ == "__main__":
    main(sys.argv)
