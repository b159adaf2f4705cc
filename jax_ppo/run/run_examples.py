"""The examples of a run, as `config.data` and `config.score` name them, and their tokens."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_ppo.config.schema import Config, Data
from jax_ppo.data import sources
from jax_ppo.data.chat_templates import ChatTemplate
from jax_ppo.data.columns import Columns
from jax_ppo.data.messages import PLACEHOLDER, join_contents, shape_prompt
from jax_ppo.data.response_rows import GivenResponses, RefusedRow, ResponseReader
from jax_ppo.data.responses import ResponseDataset, tokenize_responses, validate_responses
from jax_ppo.data.row_formats import parse_row
from jax_ppo.data.tokenize_prompts import PromptDataset, PromptEncoding, tokenize_prompts
from jax_ppo.data.tokenizer import count_ids
from jax_ppo.errors import UserError, counted, shorten
from jax_ppo.models.hf.load import read_architecture
from jax_ppo.models.hf.model_folders import resolve_model_folder
from jax_ppo.reporting import console
from jax_ppo.reporting.files import write_json_lines
from jax_ppo.rewards import reward_functions, row_rules
from jax_ppo.run.run_models import load_model_tokenizer
from jax_ppo.runtime import distributed, heartbeat, signals
from jax_ppo.storage.local_files import expand_local_path
from jax_ppo.types import Example

_SCORE_FILE = "config.score.file"
_HELD_OUT_SEED = 0  # of the draw of held-out rows: runs with any seed are compared on the same ones

log = logging.getLogger(__name__)


def load_examples(
    data: Data, seed: int, response_key: str | None = None, trains: bool = True
) -> tuple[list[Example], list[Example]]:
    """Return the training and the held-out examples.

    There are none of the first without `trains`, and none of the second without `data.val_files`
    and `data.val_fraction`. `response_key` is the column of the responses, "" by the names of
    columns; `None` if they are not read. Raise `UserError` if a source does not exist, or has rows
    of an unknown form.
    """
    columns, template = _columns(data, response_key), read_template(data.prompt_template)
    chat_template(data)  # refuses wrong variables before anything is read

    def read(files: str, option: str) -> list[Example]:
        if not files:
            return []
        return sources.read_examples(
            files, columns=columns, instruction=data.instruction, seed=seed, option=option
        )

    def shape(examples: list[Example], option: str) -> list[Example]:
        first = [e.prompt[0] for e in examples if not isinstance(e.prompt, str)]
        systems = [message["content"] for message in first if message["role"] == "system"]
        replaced = sum(content != data.system_prompt for content in systems)
        if replaced and data.system_prompt:
            log.warning(
                "%s: config.data.system_prompt replaces the system messages of %d of %d prompts",
                option,
                replaced,
                len(examples),
            )
        return [
            _shape(example, data, template, example.describe_location(row, option))
            for row, example in enumerate(examples, 1)
        ]

    if sources.source_weights(data.val_files, "config.data.val_files"):
        raise UserError(
            f"config.data.val_files={data.val_files!r}: weights mix training data; held-out data "
            "are read once"
        )
    training: list[Example] = []
    if trains or data.val_fraction:
        training = read(data.train_files, "config.data.train_files")
    held_out = read(data.val_files, "config.data.val_files")
    if data.val_fraction:
        training, held_out = split_examples(training, data.val_fraction)
    training = draw_examples(training if trains else [], data.train_max_samples, seed)
    held_out = draw_examples(held_out, data.val_max_samples, _HELD_OUT_SEED)
    return shape(training, "config.data.train_files"), shape(held_out, data.held_out_option)


def split_examples(
    examples: Sequence[Example], fraction: float
) -> tuple[list[Example], list[Example]]:
    """Return the examples to train on and those to hold out, both in their order.

    `fraction` of the different prompts, at least one, are held out. Hashes draw them, so that no
    seed or command makes one run train on what another one holds out. Raise `UserError` unless
    there are two prompts.
    """
    prompts = {join_contents(example.prompt) for example in examples}
    if len(prompts) < 2:
        raise UserError(
            f"config.data.val_fraction={fraction}: the training data have one prompt, which cannot "
            "be divided; use more data, or set config.data.val_files"
        )
    drawn = sorted(prompts, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())
    held_out = set(drawn[: min(max(round(fraction * len(drawn)), 1), len(drawn) - 1)])
    parts: tuple[list[Example], list[Example]] = ([], [])
    for example in examples:
        parts[join_contents(example.prompt) in held_out].append(example)
    return parts


def draw_examples(examples: list[Example], count: int | None, seed: int) -> list[Example]:
    """Return `count` examples, drawn by the seed, in their order; all if there are no more."""
    if count is None or count >= len(examples):
        return examples
    rows = np.random.default_rng(seed).choice(len(examples), count, replace=False)
    return [examples[row] for row in np.sort(rows)]


def _shape(example: Example, data: Data, template: str, location: str) -> Example:
    prompt = shape_prompt(example.prompt, data.system_prompt, template, location)
    return dataclasses.replace(example, prompt=prompt)


def _columns(data: Data, response_key: str | None) -> Columns:
    # PPO samples its responses: it reads no column of them.
    return Columns(
        prompt=data.prompt_key,
        response=response_key or "",
        ground_truth=data.ground_truth_key,
        reads_responses=response_key is not None,
    )


def read_template(option: str) -> str:
    """Return the text of `data.prompt_template`, read from its file if it is `@FILE`.

    Raise `UserError` if there is no such file, or the text lacks the placeholder.
    """
    text = option
    if option.startswith("@"):
        path: Path = expand_local_path(option[1:], "config.data.prompt_template")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"config.data.prompt_template={option!r}: cannot be read as text: {error}"
            ) from error
    if text and PLACEHOLDER not in text:
        raise UserError(
            f"config.data.prompt_template={shorten(option)!r}: expected text with {PLACEHOLDER}, "
            "or @FILE with such text"
        )
    return text


def chat_template(data: Data) -> ChatTemplate:
    """Return whether a chat template renders prompts, or the variables that the options set in it.

    Raise `UserError` unless these are a JSON object, and set with the template.
    """
    text = data.chat_template_kwargs
    if not text:
        return data.chat_template
    option = f"config.data.chat_template_kwargs={text!r}"
    try:
        variables = json.loads(text)
    except ValueError:
        variables = None
    if not isinstance(variables, dict):
        raise UserError(f'{option}: expected a JSON object, such as {{"enable_thinking": false}}')
    if not data.chat_template:
        raise UserError(f"{option}: config.data.chat_template is False; no template reads them")
    return variables


def make_encoding(data: Data) -> PromptEncoding:
    """Return the conversion of prompts to tokens; raise `UserError` as `chat_template` does."""
    return PromptEncoding(
        max_prompt_length=data.max_prompt_length,
        filter_overlong_prompts=data.filter_overlong_prompts,
        truncation=data.truncation,
        chat_template=chat_template(data),
    )


def fingerprint_data(data: Data, training: PromptDataset) -> dict[str, Any]:
    """Return facts that JSON can hold and that differ if training rows or their order do."""
    weights = sources.source_weights(data.train_files, "config.data.train_files")
    return {**training.fingerprint, "weights": weights and list(weights)}


def tokenize_run_prompts(
    data: Data, tokenizer: Any, examples: list[Example], held_out_examples: list[Example]
) -> tuple[PromptDataset, PromptDataset | None]:
    """Return training and held-out prompts as tokens; raise `UserError` if none can be encoded."""
    encoding = make_encoding(data)

    def tokenize(examples: list[Example], option: str) -> PromptDataset:
        report_count = console.make_count_reporter("tokenizing", "prompt")

        def on_progress(tokenized: int, total: int) -> None:
            report_count(tokenized, total)
            signals.raise_if_stopped(console.print_on_main)

        return tokenize_prompts(examples, tokenizer, encoding, option, on_progress)

    training = PromptDataset((), (), data.max_prompt_length)
    if examples:
        training = tokenize(examples, "config.data.train_files")
    held_out = tokenize(held_out_examples, data.held_out_option) if held_out_examples else None
    return training, held_out


def validate_run_responses(
    data: Data,
    response_key: str,
    fields: tuple[str, ...],
    training: Sequence[Example],
    held_out: Sequence[Example],
) -> None:
    """Raise `UserError` for the first training or held-out example that lacks one of the fields."""
    validate_responses(training, fields, "config.data.train_files", response_key)
    validate_responses(held_out, fields, data.held_out_option, response_key)


def tokenize_run_responses(
    data: Data,
    tokenizer: Any,
    fields: tuple[str, ...],
    training: Sequence[Example],
    held_out: Sequence[Example],
) -> tuple[ResponseDataset, ResponseDataset | None]:
    """Return training and held-out examples as tokens; raise `UserError` if none can be used."""

    def tokenize(examples: Sequence[Example], option: str) -> ResponseDataset:
        encoding, longest = make_encoding(data), data.max_response_length
        return tokenize_responses(examples, tokenizer, fields, encoding, longest, option)

    dataset = tokenize(training, "config.data.train_files")
    return dataset, tokenize(held_out, data.held_out_option) if held_out else None


def read_given_responses(config: Config, workdir: Path) -> tuple[GivenResponses, int, list[str]]:
    """Read `score.file`; write the rows that cannot be used to refused.jsonl, and report them.

    Return the others, the number of refused rows, and lines about these. Raise `UserError` if a
    file as a whole cannot be read, or no row can be used.
    """
    folder = resolve_model_folder(config.model.path)
    scores_any = config.score.reward_key or config.rewards_by_environment_alone
    scores_any = scores_any or reward_functions.scores_any_row(config.reward)
    tokenizer = load_model_tokenizer(config.model, folder, config.data.date)

    columns = _columns(config.data, config.score.response_key)
    template = read_template(config.data.prompt_template)

    def parse(row: dict[str, Any], location: str) -> Example:
        example = parse_row(row, location, columns, config.data.instruction)
        return _shape(example, config.data, template, location)

    def find_obstacle(example: Example) -> str:
        """Return why no rule can score an example; "" if one can."""
        if scores_any:
            return ""
        obstacles = row_rules.find_obstacles([example], config.reward)
        return next(obstacles, "").removeprefix(f"{example.describe_location(1)}: ")

    reader = ResponseReader(
        tokenizer=tokenizer,
        parse=parse,
        chat_template=chat_template(config.data),
        vocab_size=min(read_architecture(folder).vocab_size, count_ids(tokenizer)),
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        reward_key=config.score.reward_key,
        find_obstacle=find_obstacle,
    )
    rows, refused = [], list[RefusedRow]()
    with heartbeat.activity("reading rows"):
        for row in reader.read(expand_local_path(config.score.file, _SCORE_FILE), _SCORE_FILE):
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
        raise UserError(f"{_SCORE_FILE}={config.score.file!r}: no row of {total} is usable")
    lengths = (reader.max_prompt_length, reader.max_response_length)
    return GivenResponses.from_rows(rows, *lengths, _SCORE_FILE), len(refused), notes
