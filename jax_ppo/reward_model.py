"""Train a reward model: `python -m jax_ppo.reward_model --config=FILE [--config.OPTION=VALUE ...]`.

The model of config.model.path gets a scalar head and is trained to score the chosen response of
each pair in config.data.train_files above the rejected one. The result is WORKDIR/reward_model, a
Hugging Face folder (a sequence classifier with one label) for the config.reward.model_path of
jax_ppo.train. `--config=hh_rlhf_reward` is an example.

A response is scored at the EOS that follows it. An actor with the same tokens samples that EOS;
for other actors config.reward.model_input=text appends it to prompts that are text. Chats are only
supported for actors with the same tokens.
"""

import functools
import sys

from jax_ppo import command

main = functools.partial(command.run_command, command="reward_model")

if __name__ == "__main__":
    main(sys.argv)
