"""The prompts of a run: read, tokenized, and numbered for an environment."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_ppo.config.rollout_options import MultiTurn
from jax_ppo.config.schema import Data
from jax_ppo.data.chat_templates import ChatTemplate
from jax_ppo.data.tokenize_prompts import PromptDataset, tokenize_prompts
from jax_ppo.environments.host import HostEnvironment
from jax_ppo.environments.loading import make_environment
from jax_ppo.reporting import console
from jax_ppo.run.run_examples import load_examples, make_encoding
from jax_ppo.runtime import signals
from jax_ppo.types import Example


def load_run_examples(data: Data, seed: int, trains: bool) -> tuple[list[Example], list[Example]]:
    """Return training examples, none unless the run `trains`, and held-out examples.

    Raise `UserError` for a source that does not exist, or has rows of an unknown form or none.
    """
    return load_examples(data if trains else dataclasses.replace(data, train_files=""), seed)


def tokenize_run_prompts(
    data: Data, tokenizer: Any, examples: list[Example], held_out_examples: list[Example]
) -> tuple[PromptDataset, PromptDataset | None]:
    """Return training prompts and held-out prompts as tokens.

    Raise `UserError` for prompts that cannot be encoded, and if none is left.
    """
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
    held_out = tokenize(held_out_examples, "config.data.val_files") if held_out_examples else None
    return training, held_out


def build_environment(
    environment_class: Callable[..., Any],
    options: MultiTurn,
    tokenizer: Any,
    training: PromptDataset,
    held_out: PromptDataset | None,
    chat_template: ChatTemplate = True,
) -> tuple[PromptDataset, PromptDataset | None, HostEnvironment]:
    """Return the prompts with rows that are numbered throughout, and the environment of these rows.

    `environment_class` is the result of `load_environment_class`.
    """
    training = dataclasses.replace(training, first_row=0)
    examples = list(training.examples)
    if held_out is not None:
        held_out = dataclasses.replace(held_out, first_row=len(training))
        examples += held_out.examples
    environment = make_environment(environment_class, options, tokenizer, examples, chat_template)
    return training, held_out, environment
