"""User-defined reward functions that take all responses of a rollout at once.

There are two signatures, distinguished by the names of the arguments: verl's for batches,
f(data_sources=, solution_strs=, ground_truths=, extra_infos=), and TRL's, f(prompts=, completions=,
**columns).
"""

import inspect
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax_ppo.errors import printable_lines
from jax_ppo.rewards.custom import parse_reward_output
from jax_ppo.rewards.rules import RewardResult
from jax_ppo.rewards.samples import Outcome, RewardRow, ScoringFailure, validate_result

VERL_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
TRL_ARGUMENTS = ("prompts", "completions")

_MAX_TRACEBACK = 4000  # characters


class BatchFunction(NamedTuple):
    """A reward function that takes a whole batch.

    Attributes:
      call: takes rows and responses and returns what the user's function returned.
    """

    call: Callable[[Sequence[RewardRow], Sequence[str]], Any]


def batch_arguments(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the arguments that a batch function is called with; `None` for any other function.

    A function with TRL's signature also gets the columns of the data that it requires by name.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some built-in callables have no signature
        return None
    if "solution_strs" in parameters:
        return VERL_ARGUMENTS
    if "completions" not in parameters:
        return None
    columns = (
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )
    return tuple(dict.fromkeys((*TRL_ARGUMENTS, *columns)))


def wrap_batch_function(function: Callable[..., Any], arguments: tuple[str, ...]) -> BatchFunction:
    """Wrap a user's batch function, whose `batch_arguments` are `arguments`."""
    if arguments == VERL_ARGUMENTS:
        return BatchFunction(lambda rows, responses: function(**_verl_arguments(rows, responses)))
    return BatchFunction(lambda rows, responses: function(**_trl_arguments(rows, responses)))


def score_whole_batch(
    function: BatchFunction, rows: Sequence[RewardRow], responses: Sequence[str]
) -> list[Outcome]:
    """Return the outcome of each response; all of them fail if the function fails."""
    if not responses:
        return []
    try:
        values = list(function.call(rows, responses))
        if len(values) != len(responses):
            raise ValueError(
                f"the reward function returned {len(values)} rewards for {len(responses)} responses"
            )
    except KeyboardInterrupt:
        raise
    # This includes SystemExit: a reward function must not end the run as if it had succeeded.
    except BaseException:
        failure = ScoringFailure(printable_lines(traceback.format_exc())[-_MAX_TRACEBACK:])
        return [failure] * len(responses)
    return [_parse(value, response) for value, response in zip(values, responses, strict=True)]


def _parse(value: Any, response: str) -> Outcome:
    # TRL's functions return None for samples that they do not apply to.
    if value is None:
        return RewardResult(score=0.0)
    try:
        return validate_result(parse_reward_output(value), response)
    except Exception as error:
        return ScoringFailure(printable_lines(f"{type(error).__name__}: {error}"))


def _verl_arguments(rows: Sequence[RewardRow], responses: Sequence[str]) -> dict[str, Any]:
    return {
        "data_sources": [row.data_source for row in rows],
        "solution_strs": list(responses),
        "ground_truths": [row.ground_truth for row in rows],
        "extra_infos": [row.extra_info for row in rows],
    }


def _trl_arguments(rows: Sequence[RewardRow], responses: Sequence[str]) -> dict[str, Any]:
    """Return prompts, completions and columns of the rows; chats are lists of messages."""
    columns: dict[str, list[Any]] = {
        "data_source": [row.data_source for row in rows],
        "ground_truth": [row.ground_truth for row in rows],
    }
    for name in sorted(set().union(*(row.extra_info for row in rows))):
        columns[name] = [row.extra_info.get(name) for row in rows]
    return {
        **columns,
        "prompts": [_trl_prompt(row) for row in rows],
        "completions": [
            _trl_completion(row, response) for row, response in zip(rows, responses, strict=True)
        ],
    }


def _trl_prompt(row: RewardRow) -> str | list[dict[str, str]]:
    if isinstance(row.prompt, str):
        return row.prompt
    return list(row.prompt)


def _trl_completion(row: RewardRow, response: str) -> str | list[dict[str, str]]:
    if isinstance(row.prompt, str):
        return response
    return [{"role": "assistant", "content": response}]
