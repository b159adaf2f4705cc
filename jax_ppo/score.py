"""Score: `python -m jax_ppo.score --config=FILE --config.model.path=MODEL --config.score.file=F`.

Each token of the responses in F gets its log-prob under actor and reference, KL, entropy, value,
reward, advantage and return, computed as a training step computes them. MODEL is a Hugging Face
folder or hub name, the work directory of a run that has exported its models, or one of its
checkpoints (RUN/checkpoints/STEP). F is a file of prompts and responses, or one of a run's
rollouts/. tokens.jsonl or tokens.parquet, refused.jsonl and report.html are written to the work
directory.
"""

import sys
from pathlib import Path

from jax_ppo import command
from jax_ppo.config import schema
from jax_ppo.data.response_rows import find_response_files
from jax_ppo.storage.paths import expand_local_path


def main(arguments: list[str]) -> None:
    """Run the command; `arguments` are `sys.argv`."""
    command.run_command(arguments, "score", run_score, validate=validate_file)


def validate_file(options: schema.Config) -> None:
    """Raise `UserError` unless `score.file` names files that can be read."""
    option = "config.score.file"
    find_response_files(expand_local_path(options.score.file, option), option)


def run_score(options: schema.Config, workdir: Path) -> None:
    """Score with validated options."""
    from jax_ppo.run import token_scores

    token_scores.score_file(options, workdir)


if __name__ == "__main__":
    main(sys.argv)
