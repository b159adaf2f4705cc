"""User-defined reward functions that take all responses of a rollout at once.

There are two signatures, distinguished by the names of the arguments: verl's for batches,
f(data_sources=, solution_strs=, ground_truths=, extra_infos=), and TRL's, f(prompts=, completions=,
completion_ids=, **columns), of which it gets what it takes. An `async def` is awaited.
"""

import inspect
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jax_ppo.errors import UserError, did_you_mean, printable_lines
from jax_ppo.rewards.custom import call_and_wait, parse_reward_output
from jax_ppo.rewards.rules import RewardResult
from jax_ppo.rewards.samples import Outcome, RewardRow, ScoringFailure, validate_result

if TYPE_CHECKING:  # `jax_ppo.types` imports jax, which reward workers do not load
    from jax_ppo.types import Example

VERL_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids")
ROW_COLUMNS = ("data_source", "ground_truth")  # that all rows have

_MAX_TRACEBACK = 4000  # characters


class BatchFunction(NamedTuple):
    """A reward function that takes a whole batch.

    Attributes:
      call: takes rows and responses and returns what the user's function returned.
      columns: the columns of the data that the function requires.
    """

    call: Callable[[Sequence[RewardRow], Sequence[str]], Any]
    columns: tuple[str, ...] = ()


def batch_arguments(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the arguments that a batch function requires; `None` for any other function.

    Arguments of TRL's signature that are not TRL_ARGUMENTS are columns of the data.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some built-in callables have no signature
        return None
    if "solution_strs" in parameters:
        return VERL_ARGUMENTS
    if "completions" not in parameters:
        return None
    return tuple(
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )


def wrap_batch_function(function: Callable[..., Any], arguments: tuple[str, ...]) -> BatchFunction:
    """Wrap a user's batch function, whose `batch_arguments` are `arguments`."""
    if arguments == VERL_ARGUMENTS:
        return BatchFunction(
            lambda rows, responses: call_and_wait(
                function,
                data_sources=[row.data_source for row in rows],
                solution_strs=list(responses),
                ground_truths=[row.ground_truth for row in rows],
                extra_infos=[row.extra_info for row in rows],
            )
        )
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    columns = tuple(name for name in arguments if name not in (*TRL_ARGUMENTS, *ROW_COLUMNS))

    def call(rows: Sequence[RewardRow], responses: Sequence[str]) -> Any:
        given = _trl_arguments(rows, responses, columns)
        if not takes_all:
            given = {name: value for name, value in given.items() if name in parameters}
        return call_and_wait(function, **given)

    return BatchFunction(call, columns)


def validate_columns(function: BatchFunction, examples: Sequence["Example"], setting: str) -> None:
    """Raise `UserError`, with the option and its value, if no example has a required column."""
    known = set().union(*(example.extra_info for example in examples))
    for name in function.columns:
        if name not in known:
            given = sorted(known.union(TRL_ARGUMENTS, ROW_COLUMNS))
            raise UserError(
                f"{setting}: its argument {name!r} is no column of the data; expected "
                f"{', '.join(given)}, or a default.{did_you_mean(name, given)}"
            )


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


def _trl_arguments(
    rows: Sequence[RewardRow], responses: Sequence[str], required: tuple[str, ...]
) -> dict[str, Any]:
    """Return prompts, completions and columns of the rows; chats are lists of messages.

    A column that none of these rows has is None in all of them if it is `required`.
    """
    columns: dict[str, list[Any]] = {
        "data_source": [row.data_source for row in rows],
        "ground_truth": [row.ground_truth for row in rows],
    }
    for name in sorted(set(required).union(*(row.extra_info for row in rows))):
        columns[name] = [row.extra_info.get(name) for row in rows]
    prompts: list[Any] = []
    completions: list[Any] = []
    for row, response in zip(rows, responses, strict=True):
        is_text = isinstance(row.prompt, str)
        prompts.append(row.prompt if is_text else list(row.prompt))
        completions.append(response if is_text else [{"role": "assistant", "content": response}])
    return {
        **columns,
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [list(map(int, row.completion_ids)) for row in rows],
    }
