"""Score: `python -m jax_ppo.score --config=FILE --config.model.path=MODEL --config.score.file=F`.

Each token of the responses in F gets its log-prob under actor and reference, KL, entropy, value,
reward, advantage and return, computed as a training step computes them. MODEL is a Hugging Face
folder or hub name, the work directory of a run that has exported its models, or one of its
checkpoints (RUN/checkpoints/STEP). F is a file of prompts and responses, or one of a run's
rollouts/. tokens.jsonl, refused.jsonl and report.html are written to the work
directory.
"""

import functools
import sys

from jax_ppo import command

main = functools.partial(command.run_command, command="score")

if __name__ == "__main__":
    main(sys.argv)
