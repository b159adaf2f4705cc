"""Evaluate: `python -m jax_ppo.evaluate --config=FILE --config.model.path=MODEL [--workdir=DIR]`.

Responses to the held-out prompts of config.data.val_files are sampled with
config.rollout.val_kwargs and scored as in training. MODEL is a Hugging Face folder or hub name, the
work directory of a run that has exported its model, or one of its checkpoints
(RUN/checkpoints/STEP). summary.json, report.html and, in rollouts/, every response with its score
are written to the work directory.
"""

import functools
import sys

from jax_ppo import command

main = functools.partial(command.run_command, command="evaluate")

if __name__ == "__main__":
    main(sys.argv)
