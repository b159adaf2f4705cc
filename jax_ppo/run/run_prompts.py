"""The prompts of a run: read, from a cache, and numbered for an environment."""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from jax_ppo.config.schema import Data, MultiTurn, Reward
from jax_ppo.data.prompt_cache import cache_prompts, representative_examples
from jax_ppo.data.prompts import PromptDataset, PromptEncoding, tokenize_prompts
from jax_ppo.data.sources import locate_parquet
from jax_ppo.data.tokenizer import ChatTemplate
from jax_ppo.environments.loading import ENVIRONMENT_OPTION, make_environment
from jax_ppo.errors import UserError
from jax_ppo.ppo import plugin_trials
from jax_ppo.reporting import console
from jax_ppo.rewards import reward_functions, row_validation
from jax_ppo.run.run_examples import load_examples, make_encoding, make_parser
from jax_ppo.runtime import signals
from jax_ppo.sampler.environment import Environment, PerDialogue
from jax_ppo.storage import paths
from jax_ppo.types import Example

_TRAIN_FILES = "config.data.train_files"


def load_run_examples(data: Data, seed: int, trains: bool) -> tuple[list[Example], list[Example]]:
    """Return training and held-out examples; of training data in a cache one per `data_source`.

    Raise `UserError` for a source that does not exist, or has rows of an unknown form or none.
    """
    if trains and not data.cache_dir:
        return load_examples(data, seed)
    _, held_out = load_examples(dataclasses.replace(data, train_files=""), seed)
    if not trains:
        return [], held_out
    located = locate_parquet(data.train_files, _TRAIN_FILES)
    # Rules and workers depend on nothing else.
    training = list(representative_examples(located, make_parser(data)))
    if not training:
        raise UserError(f"{_TRAIN_FILES}={data.train_files!r}: the files hold no rows")
    return training, held_out


def tokenize_run_prompts(
    data: Data,
    tokenizer: Any,
    tokenizer_path: str,
    validate: functools.partial[None],
    examples: list[Example],
    held_out_examples: list[Example],
) -> tuple[PromptDataset, PromptDataset | None]:
    """Return training prompts as tokens, from a cache if there is one, and held-out prompts.

    Worker processes load the tokenizer again from `tokenizer_path`, for what the cache lacks.
    Raise `UserError` for rows that cannot be used, and if no prompt is left; `validate` raises it
    for examples that the reward cannot score.
    """
    training = PromptDataset((), (), data.max_prompt_length)
    encoding = make_encoding(data)
    if examples and data.cache_dir:
        training = _read_cache(data, encoding, tokenizer_path, validate)
    elif examples:
        training = tokenize_prompts(examples, tokenizer, encoding)
    if not held_out_examples:
        return training, None
    option = "config.data.val_files"
    return training, tokenize_prompts(held_out_examples, tokenizer, encoding, option)


def _read_cache(
    data: Data, encoding: PromptEncoding, tokenizer_path: str, validate: functools.partial[None]
) -> PromptDataset:
    report_count = console.make_count_reporter("tokenizing", "prompt")

    def on_progress(tokenized: int, total: int) -> None:
        report_count(tokenized, total)
        signals.raise_if_stopped(console.print_on_main)

    return cache_prompts(
        paths.expand_local_path(data.cache_dir, "config.data.cache_dir"),
        locate_parquet(data.train_files, _TRAIN_FILES),
        make_parser(data),
        encoding,
        tokenizer_path,
        validate,
        max_samples=data.train_max_samples,
        on_progress=on_progress,
    )


def make_row_validation(options: Reward, by_environment: bool) -> functools.partial[None]:
    """Return what raises `UserError` for examples that the reward cannot score.

    An environment alone scores any.
    """
    if by_environment or reward_functions.scores_any_row(options):
        return functools.partial(_accept)
    return functools.partial(
        row_validation.validate_data_sources, function=options.function, terms=options.terms
    )


def _accept(examples: object) -> None:
    """Accept all examples."""


class ConcatenatedExamples(Sequence[Example]):
    """Examples of several sequences, which are not copied: they may be on a disk."""

    def __init__(self, parts: Sequence[Sequence[Example]]) -> None:
        """Refer to the sequences."""
        self._parts = parts
        self._ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __iter__(self) -> Iterator[Example]:
        return itertools.chain.from_iterable(self._parts)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        rows = range(len(self))
        if isinstance(index, slice):
            return [self[row] for row in rows[index]]
        row = rows[index]
        part = bisect.bisect_right(self._ends, row)
        return self._parts[part][row - self._ends[part] + len(self._parts[part])]


def build_environment(
    environment_class: Callable[..., Any],
    options: MultiTurn,
    tokenizer: Any,
    training: PromptDataset,
    held_out: PromptDataset | None,
    chat_template: ChatTemplate = True,
    *,
    max_response_length: int,
) -> tuple[PromptDataset, PromptDataset | None, Environment]:
    """Return the prompts with rows that are numbered throughout, and the environment of these rows.

    `environment_class` is the result of `load_environment_class`. If it is a user's, in JAX, try a
    turn, which is of `max_response_length` unless the options limit it.
    """
    training = dataclasses.replace(training, first_row=0)
    parts = [training.examples]
    if held_out is not None:
        held_out = dataclasses.replace(held_out, first_row=len(training))
        parts.append(held_out.examples)
    examples = ConcatenatedExamples(parts)
    environment = make_environment(environment_class, options, tokenizer, examples, chat_template)
    if isinstance(environment, PerDialogue):
        turn = options.max_turn_length or max_response_length
        plugin_trials.try_environment(
            ENVIRONMENT_OPTION, options.environment, environment, turn, options.max_contexts
        )
    return training, held_out, environment
