"""The interface of user-defined reward functions: their arguments and return values.

A function takes one response, with REWARD_ARGUMENTS, or all responses of a rollout at once, with
one of two signatures, distinguished by the names of the arguments: verl's for batches,
f(data_sources=, solution_strs=, ground_truths=, extra_infos=), and TRL's, f(prompts=, completions=,
completion_ids=, **columns), of which only the arguments that it has are passed. An `async def` is
awaited.
"""

import asyncio
import bisect
import contextlib
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jax_ppo.errors import UserError, did_you_mean, shorten
from jax_ppo.rewards.samples import (
    Outcome,
    RewardFunction,
    RewardResult,
    RewardRow,
    failure_of,
    validate_result,
)

if TYPE_CHECKING:  # `jax_ppo.types` imports jax, which reward workers do not load
    from jax_ppo.types import Example

# A reward function is called with these keyword arguments, as in verl.
REWARD_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
VERL_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids")
ROW_COLUMNS = ("data_source", "ground_truth")  # that all rows have

_RESERVED_KEYS = ("score", "acc", "step_rewards", "pred")
_MAX_QUOTED = 200  # characters


class _EventLoop:
    """An event loop that ends with its thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def __del__(self) -> None:
        if not self.loop.is_running():  # it runs in a thread that the end of the process stops
            self.loop.close()


# The loop of each thread: clients that a function keeps are bound to one.
_of_thread = threading.local()


def call_and_wait(function: Callable[..., Any], **arguments: Any) -> Any:
    """Return what a function returns, or what its coroutine does."""
    value = function(**arguments)
    if not inspect.isawaitable(value):
        return value
    if not hasattr(_of_thread, "events"):
        _of_thread.events = _EventLoop()
    return _of_thread.events.loop.run_until_complete(value)


def as_float(value: Any) -> float | None:
    """Return a real number, or the only element of an array or tensor; `None` for others."""
    with contextlib.suppress(Exception):  # such as OverflowError of an integer
        if math.prod(getattr(value, "shape", ())) == 1 and not np.ma.is_masked(value):
            if hasattr(value, "item"):
                value = value.item()
            if hasattr(value, "__float__"):  # unlike text, which `float` would convert
                return float(value)
    return None


def describe_value(value: Any) -> str:
    """Return a value as text for an error message, cut to one line."""
    try:
        return shorten(" ".join(repr(value).split()), _MAX_QUOTED)
    except Exception:  # of an integer of thousands of digits, or a function's own class
        return f"a value of the type {type(value).__name__}"


def parse_reward_output(value: Any) -> RewardResult:
    """Convert the return value of a reward function to a RewardResult.

    Args:
      value: a number (also an array or tensor with one element) is the score. A dict must hold
        "score". It may hold "acc", which means correct from 0.5 on; "step_rewards", pairs of
        (characters up to the end of a step, reward); "pred", the answer extracted from the
        response; and other numbers to report. The names of other entries are in `ignored`.

    Raises:
      UserError: the value has another type, a dict has no "score", a number is text or too large
        for a float, or the steps are not pairs of numbers.
    """
    if not isinstance(value, dict):
        return RewardResult(score=_require_number(value, "the score"))
    if "score" not in value:
        raise UserError("expected 'score' among its names")
    accuracy = math.nan if value.get("acc") is None else _require_number(value["acc"], "acc")
    step_rewards = value.get("step_rewards")
    try:
        pairs = () if step_rewards is None else tuple(step_rewards)
    except TypeError:  # a number, or an array of no dimensions
        pairs = (step_rewards,)
    answer = value.get("pred")
    others = {str(name): item for name, item in value.items() if name not in _RESERVED_KEYS}
    numbers = {name: as_float(item) for name, item in others.items()}
    return RewardResult(
        score=_require_number(value["score"], "the score"),
        correct=None if math.isnan(accuracy) else accuracy >= 0.5,
        extra={name: number for name, number in numbers.items() if number is not None},
        step_rewards=tuple(map(_parse_step_reward, pairs)),
        answer=None if answer is None else str(answer),
        ignored=tuple(
            name for name, item in others.items() if numbers[name] is None and item is not None
        ),
    )


def read_reward_output(value: Any, response: str, source: str) -> RewardResult:
    """Return what `source` returned for a response; raise `UserError` if it is invalid."""
    try:
        return validate_result(parse_reward_output(value), response)
    except UserError as error:
        raise UserError(f"{source} returned {describe_value(value)}: {error}") from None


def _parse_step_reward(pair: Any) -> tuple[int, float]:
    with contextlib.suppress(TypeError, ValueError):  # not two numbers
        end, reward = map(as_float, pair)
        if end is not None and end.is_integer() and reward is not None:
            return int(end), reward
    raise UserError(f"step_rewards has {describe_value(pair)}; expected (characters, reward)")


def _require_number(value: Any, name: str) -> float:
    number = as_float(value)
    if number is None:
        kind = type(value).__name__
        raise UserError(f"{name} is of the type {kind}; expected a number that a float32 can hold")
    return number


def assign_step_rewards(
    steps: Sequence[tuple[int, float]],
    tokens: Sequence[int],
    decode: Callable[[Sequence[int]], str],
    longest: int,
) -> np.ndarray:
    """Return a reward per token: each step's reward at the token that completes the step's text.

    `steps` are (end, reward): `end` counts the characters of the response's text, 0..len(text).
    `decode` returns the text of a prefix of `tokens`, at least one; a longer prefix must not have a
    shorter text, except for an incomplete last character (U+FFFD). Return float32 [T], T =
    `longest`; rewards of steps that end in the same token are summed.
    """
    rewards = np.zeros(longest, np.float32)
    token_counts = range(1, len(tokens))
    for end, reward in steps:
        last_token = bisect.bisect_left(
            token_counts, end, key=lambda count: len(decode(tokens[:count]).rstrip("\ufffd"))
        )
        rewards[last_token] += reward
    return rewards


class BatchFunction(NamedTuple):
    """A reward function that takes a whole batch."""

    name: str  # as the option has it
    # Takes rows and responses and returns what the user's function returned.
    call: Callable[[Sequence[RewardRow], Sequence[str]], Any]
    columns: tuple[str, ...] = ()  # the columns of the data that the function requires


def batch_arguments(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the arguments, columns included, that a batch function requires, else `None`."""
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


def wrap_batch_function(
    function: Callable[..., Any], arguments: tuple[str, ...], name: str
) -> BatchFunction:
    """Wrap a user's batch function, whose `batch_arguments` are `arguments`."""
    if arguments == VERL_ARGUMENTS:
        return BatchFunction(
            name,
            lambda rows, responses: call_and_wait(
                function,
                data_sources=[row.data_source for row in rows],
                solution_strs=list(responses),
                ground_truths=[row.ground_truth for row in rows],
                extra_infos=[row.extra_info for row in rows],
            ),
        )
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    required = tuple(name for name in arguments if name not in (*TRL_ARGUMENTS, *ROW_COLUMNS))

    def call(rows: Sequence[RewardRow], responses: Sequence[str]) -> Any:
        # A column that none of these rows has is None in all of them if it is required.
        columns = sorted(set(required).union(*(row.extra_info for row in rows)))
        given: dict[str, list[Any]] = {
            "data_source": [row.data_source for row in rows],
            "ground_truth": [row.ground_truth for row in rows],
            **{name: [row.extra_info.get(name) for row in rows] for name in columns},
            "prompts": [],
            "completions": [],
            "completion_ids": [list(map(int, row.completion_ids)) for row in rows],
        }
        for row, response in zip(rows, responses, strict=True):
            is_text = isinstance(row.prompt, str)
            message = {"role": "assistant", "content": response}
            given["prompts"].append(row.prompt if is_text else list(row.prompt))
            given["completions"].append(response if is_text else [message])
        if not takes_all:
            given = {name: value for name, value in given.items() if name in parameters}
        return call_and_wait(function, **given)

    return BatchFunction(name, call, required)


def validate_columns(
    function: RewardFunction | BatchFunction, examples: Sequence["Example"]
) -> None:
    """Raise `UserError` if no example has a column that a batch function requires."""
    if not isinstance(function, BatchFunction):
        return
    known = set().union(*(example.extra_info for example in examples))
    for name in function.columns:
        if name not in known:
            given = sorted(known.union(TRL_ARGUMENTS, ROW_COLUMNS))
            raise UserError(
                f"config.reward.function={function.name!r}: its argument {name!r} is not a column "
                f"of the data; expected {', '.join(given)}, or a default."
                f"{did_you_mean(name, given)}"
            )


def score_whole_batch(
    function: BatchFunction, rows: Sequence[RewardRow], responses: Sequence[str]
) -> list[Outcome]:
    """Return the outcome of each response; all of them fail if the function fails."""
    if not responses:
        return []
    try:
        returned = function.call(rows, responses)
        # A dict or a set has the rewards in no order, text has characters, an array of no
        # dimensions has one number.
        is_list = isinstance(returned, Iterable) and getattr(returned, "shape", None) != ()
        if not is_list or isinstance(returned, (Mapping, Set, str, bytes)):
            raise UserError(
                f"{function.name} returned {describe_value(returned)}; expected a list of "
                f"{len(responses)} rewards"
            )
        values = list(returned)
        if len(values) != len(responses):
            raise UserError(
                f"{function.name} returned {len(values)} rewards for {len(responses)} responses"
            )
    except KeyboardInterrupt:
        raise
    # This includes SystemExit: a reward function must not end the run as if it had succeeded.
    except BaseException as error:
        return [failure_of(error)] * len(responses)
    outcomes: list[Outcome] = []
    for value, response in zip(values, responses, strict=True):
        outcome: Outcome = RewardResult(score=0.0, is_missing=True)
        if value is not None:
            try:
                outcome = read_reward_output(value, response, function.name)
            except Exception as error:
                outcome = failure_of(error)
        outcomes.append(outcome)
    return outcomes
