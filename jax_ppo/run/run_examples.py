"""The examples of a run, as `config.data` names them, and how they become tokens."""

import json
import logging
from typing import Any

from jax_ppo.config.schema import Data
from jax_ppo.data import prompt_shaping, sources
from jax_ppo.data.chat_templates import ChatTemplate
from jax_ppo.data.columns import Columns
from jax_ppo.data.prompt_shaping import RowParser
from jax_ppo.data.tokenize_prompts import PromptDataset, PromptEncoding
from jax_ppo.errors import UserError
from jax_ppo.types import Example

log = logging.getLogger(__name__)


def load_examples(
    data: Data, seed: int, response_key: str | None = None
) -> tuple[list[Example], list[Example]]:
    """Return the training and the held-out examples (none without `data.val_files`).

    `response_key` is the column of the responses, "" by the names of columns; `None` if they are
    not read.

    Raises:
      UserError: a source does not exist, or has rows of an unknown form.
    """
    parser = make_parser(data, response_key)
    chat_template(data)  # refuses wrong variables before anything is read

    def load(files: str, option: str, max_samples: int | None) -> list[Example]:
        if not files:
            return []
        examples = sources.read_examples(
            files, columns=parser.columns, instruction=parser.instruction, seed=seed, option=option
        )
        examples = examples[:max_samples]
        replaced = prompt_shaping.count_system_messages(examples, parser.system_prompt)
        if replaced:
            log.warning(
                "%s: config.data.system_prompt replaces the system messages of %d of %d prompts",
                option,
                replaced,
                len(examples),
            )
        return prompt_shaping.shape_prompts(examples, parser.system_prompt, parser.template, option)

    if sources.source_weights(data.val_files, "config.data.val_files"):
        raise UserError(
            f"config.data.val_files={data.val_files!r}: weights mix training data; held-out data "
            "are read once"
        )
    training = load(data.train_files, "config.data.train_files", data.train_max_samples)
    return training, load(data.val_files, "config.data.val_files", data.val_max_samples)


def make_parser(data: Data, response_key: str | None = None) -> RowParser:
    """Return how rows become examples, by the options.

    Reads `response_key` as `load_examples` does.

    Raises:
      UserError: the template cannot be read.
    """
    # PPO samples its responses: it reads no column of them.
    columns = Columns(
        prompt=data.prompt_key,
        response=response_key or "",
        ground_truth=data.ground_truth_key,
        reads_responses=response_key is not None,
    )
    template = prompt_shaping.read_template(data.prompt_template)
    return RowParser(columns, data.instruction, data.system_prompt, template)


def chat_template(data: Data) -> ChatTemplate:
    """Return whether a chat template renders prompts, or the variables that the options set in it.

    Raises:
      UserError: `data.chat_template_kwargs` is not a JSON object, or is set without the template.
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
