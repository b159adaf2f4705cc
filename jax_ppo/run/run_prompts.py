"""The prompts of a run: read, from a cache, and numbered for an environment."""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, overload

from jax_ppo.config.schema import Data, MultiTurn, Reward
from jax_ppo.data.prompt_cache import cache_prompts, representative_examples
from jax_ppo.data.prompts import PromptDataset
from jax_ppo.data.sources import locate_parquet
from jax_ppo.data.tokenizer import ChatTemplate
from jax_ppo.environments.loading import make_environment
from jax_ppo.errors import UserError
from jax_ppo.reporting import console
from jax_ppo.rewards import registry, row_validation
from jax_ppo.runtime import signals
from jax_ppo.sampler.environment import Environment
from jax_ppo.storage import paths
from jax_ppo.training.setup import load_examples, make_encoding, make_parser
from jax_ppo.types import Example

_TRAIN_FILES = "config.data.train_files"


def load_run_examples(data: Data, seed: int, trains: bool) -> tuple[list[Example], list[Example]]:
    """Return training and held-out examples; of training data in a cache one per `data_source`.

    Raises:
      UserError: a source does not exist, or has rows of an unknown form.
    """
    if trains and not data.cache_dir:
        return load_examples(data, seed)
    _, held_out = load_examples(dataclasses.replace(data, train_files=""), seed)
    return _find_representatives(data) if trains else [], held_out


def _find_representatives(data: Data) -> list[Example]:
    """Return a training example of each `data_source`; rules and workers depend on nothing else.

    Raises:
      UserError: the files do not exist, are not Parquet, or have rows of an unknown form.
    """
    located = locate_parquet(data.train_files, _TRAIN_FILES)
    examples = list(representative_examples(located, make_parser(data)))
    if not examples:
        raise UserError(f"{_TRAIN_FILES}={data.train_files!r}: the files hold no rows")
    return examples


def cache_training_prompts(
    data: Data, tokenizer: str, validate: functools.partial[None]
) -> PromptDataset:
    """Return the training prompts, tokenized by worker processes unless the cache has them.

    `tokenizer` is its folder, or the name of its model; `validate` raises `UserError` for examples
    that the reward cannot score.

    Raises:
      UserError: a row cannot be used or scored, or no prompt is left.
    """
    report_count = console.make_count_reporter("tokenizing", "prompt")

    def on_progress(tokenized: int, total: int) -> None:
        report_count(tokenized, total)
        signals.raise_if_stopped(console.print_on_main)

    return cache_prompts(
        paths.expand_local_path(data.cache_dir, "config.data.cache_dir"),
        locate_parquet(data.train_files, _TRAIN_FILES),
        make_parser(data),
        make_encoding(data),
        tokenizer,
        validate,
        max_samples=data.train_max_samples,
        on_progress=on_progress,
        name=_TRAIN_FILES,
    )


def make_row_validation(options: Reward, by_environment: bool) -> functools.partial[None]:
    """Return the check that the reward can score examples; an environment alone scores any."""
    if by_environment or registry.scores_any_row(options):
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


class RunPrompts(NamedTuple):
    """The prompts of a run, and what answers the policy's turns.

    Attributes:
      training: the training prompts.
      held_out: the held-out prompts; `None` without validation files.
      environment: `None` if responses are one turn.
    """

    training: PromptDataset
    held_out: PromptDataset | None
    environment: Environment | None = None


def set_up_environment(
    environment_class: Callable[..., Any],
    options: MultiTurn,
    tokenizer: Any,
    prompts: RunPrompts,
    chat_template: ChatTemplate = True,
) -> RunPrompts:
    """Return the prompts with rows that are numbered throughout, and the environment of these rows.

    `environment_class` is the result of `load_environment_class`.
    """
    training = dataclasses.replace(prompts.training, first_row=0)
    parts = [training.examples]
    held_out = None
    if prompts.held_out is not None:
        held_out = dataclasses.replace(prompts.held_out, first_row=len(training))
        parts.append(held_out.examples)
    examples = ConcatenatedExamples(parts)
    environment = make_environment(environment_class, options, tokenizer, examples, chat_template)
    return RunPrompts(training, held_out, environment)
