"""The rows of the data as an environment numbers them: training data first, then held-out data."""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, overload

from jax_ppo.config.schema import MultiTurn
from jax_ppo.data.prompts import PromptDataset
from jax_ppo.environments.loading import make_environment
from jax_ppo.sampler.environment import Environment
from jax_ppo.types import Example


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
) -> RunPrompts:
    """Return the prompts with rows that are numbered throughout, and the environment of these rows.

    Args:
      environment_class: the result of `load_environment_class`.
      options: `config.rollout.multi_turn`.
      tokenizer: the policy's.
      prompts: the prompts without an environment.
    """
    training = dataclasses.replace(prompts.training, first_row=0)
    parts = [training.examples]
    held_out = None
    if prompts.held_out is not None:
        held_out = dataclasses.replace(prompts.held_out, first_row=len(training))
        parts.append(held_out.examples)
    examples = ConcatenatedExamples(parts)
    environment = make_environment(environment_class, options, tokenizer, examples)
    return RunPrompts(training, held_out, environment)
