"""Given prompts and responses: the rows of `score.file` as a data set, the others refused."""

import functools
from pathlib import Path

from jax_ppo.config.schema import Config, Reward
from jax_ppo.data.response_rows import GivenResponses, RefusedRow, ResponseReader
from jax_ppo.data.tokenizer import count_ids
from jax_ppo.errors import UserError, counted
from jax_ppo.models.hf.hub import resolve_model_folder
from jax_ppo.models.hf.load import read_architecture
from jax_ppo.reporting import console
from jax_ppo.reporting.files import write_json_lines
from jax_ppo.rewards import reward_functions, row_rules
from jax_ppo.run.run_examples import chat_template, make_parser
from jax_ppo.run.run_models import load_model_tokenizer
from jax_ppo.runtime import distributed, heartbeat
from jax_ppo.storage.paths import expand_local_path
from jax_ppo.types import Example

OPTION = "config.score.file"


def read_given_responses(config: Config, workdir: Path) -> tuple[GivenResponses, int, list[str]]:
    """Read `score.file`; write the rows that cannot be used to refused.jsonl, and report them.

    Returns:
      The rows that can be used; the number of others; and the line about these, if there are any.

    Raises:
      UserError: a file as a whole cannot be read, or no row can be used.
    """
    folder = resolve_model_folder(config.model.path)
    scores_any = config.score.reward_key or config.rewards_by_environment_alone
    scores_any = scores_any or reward_functions.scores_any_row(config.reward)
    tokenizer = load_model_tokenizer(config.model, folder, config.data.date)
    reader = ResponseReader(
        tokenizer=tokenizer,
        parse=make_parser(config.data, config.score.response_key).parse,
        chat_template=chat_template(config.data),
        vocab_size=min(read_architecture(folder).vocab_size, count_ids(tokenizer)),
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        reward_key=config.score.reward_key,
        find_obstacle=functools.partial(_find_obstacle, None if scores_any else config.reward),
    )
    rows, refused = [], list[RefusedRow]()
    with heartbeat.activity("reading rows"):
        for row in reader.read(expand_local_path(config.score.file, OPTION), OPTION):
            if isinstance(row, RefusedRow):
                refused.append(row)
            else:
                rows.append(row)
    if distributed.is_main():
        write_json_lines(workdir / "refused.jsonl", (row._asdict() for row in refused))
    total = counted(len(rows) + len(refused), "row")
    notes = []
    if refused:
        notes.append(
            f"{len(refused)} of {total} refused (refused.jsonl), the first: "
            f"{refused[0].location}: {refused[0].reason}"
        )
        console.print_on_main(f"warning: {notes[-1]}")
    if not rows:
        raise UserError(f"{OPTION}={config.score.file!r}: no row of {total} is usable")
    return GivenResponses.from_rows(rows, reader, OPTION), len(refused), notes


def _find_obstacle(options: Reward | None, example: Example) -> str:
    """Return why no rule can score an example; "" if one can, or `options` is `None`."""
    if options is None:
        return ""
    obstacles = row_rules.find_obstacles([example], options.function, options.terms)
    return next(obstacles, "").removeprefix(f"{example.describe_location(1)}: ")
