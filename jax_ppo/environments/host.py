"""Environments on the host, called by the decode loop.

The loop calls the host once for all turns that await an answer, and continues decoding with the
answers. Threads step the dialogues of a call concurrently, since environments mostly wait for other
services; this does not affect the answers, unless a step exceeds the time limit.
"""

import concurrent.futures
import copy
import functools
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_ppo.data.chat_templates import CHARACTERS_PER_TOKEN, MessageFrame
from jax_ppo.data.messages import prompt_texts
from jax_ppo.data.tokenizer import decode_texts, encode_text
from jax_ppo.environments.protocol import FAILED, FAILURES, EnvironmentLost, TextEnvironment
from jax_ppo.errors import UserError, did_you_mean, printable_lines, shorten
from jax_ppo.http_client import RequestFault
from jax_ppo.rewards.custom import as_float, describe_value
from jax_ppo.runtime import faults
from jax_ppo.sampler.engine import Answers, Turns
from jax_ppo.timed_threads import CallResult, CallTimeout, TimedThreads
from jax_ppo.types import NOTHING, Example

log = logging.getLogger(__name__)

THREADS = 16  # dialogues that are stepped concurrently
MAX_UNANSWERED_TURNS = 4 * THREADS  # time-outs of a batch, before any answer, that end it


class WrongAnswer(Exception):
    """An environment's answer that cannot be read; the message says what was expected."""


class _Answer(NamedTuple):
    """The answer to one turn, with the tokens of its observation."""

    tokens: list[int]
    reward: float
    has_ended: bool
    figures: dict[str, float]


class HostEnvironment:
    """`Environment` of dialogues of a class; one that fails or takes too long gets reward 0."""

    def __init__(
        self,
        environment_class: Callable[[], TextEnvironment],
        tokenizer: Any,
        examples: Sequence[Example],
        observation_length: int,
        timeout: float,
        metric_names: Sequence[str] = (),
        frame: MessageFrame | None = None,
    ) -> None:
        """Create the environment and its threads.

        `environment_class` constructs the environment of one dialogue; dialogues refer to examples
        by index. Observations are cut to `observation_length` tokens and inserted unchanged, or
        within the frame. A `step` may take `timeout` seconds; the first one includes `reset`.
        """
        self.observation_length = observation_length
        self._class = environment_class
        self._tokenizer = tokenizer
        self._examples = examples
        self.metric_names = (*dict.fromkeys(metric_names), FAILED)
        self._name = getattr(environment_class, "__name__", str(environment_class))
        self._frame = frame
        self._lost = ""  # why no dialogue can go on
        # By the index of the sample, so that the next batch's dialogues replace the last one's.
        self._dialogues: dict[int, CallResult] = {}
        self._threads, self._timeout = TimedThreads(THREADS), timeout
        self._reset_counts()

    def _reset_counts(self) -> None:
        self._steps = self._failures = self._timeouts = 0
        self._first_failure = ""

    def raise_if_all_failed(self) -> None:
        """Raise `UserError` if all turns here since the last call failed, or none can succeed."""
        if self._lost:
            raise UserError(f"config.rollout.multi_turn.environment: {self._lost}")
        steps, failures, cause = self._steps, self._failures, self._first_failure
        self._reset_counts()
        if steps and failures == steps:
            raise UserError(
                f"config.rollout.multi_turn.environment: {self._name} failed at every "
                f"turn of a batch, {failures} times. The first failure was",
                details=cause,
            )

    def raise_if_given_up(self) -> None:
        """Raise as `raise_if_all_failed` does if this process tries no further turns.

        Called before dialogues are saved: untried ones did not fail by the policy's doing.
        """
        if self._lost or self._has_none_answered():
            self.raise_if_all_failed()

    def answer(self, turns: Turns) -> Answers:
        """Answer turns; those of length 0 are ignored. See `Environment.answer`."""
        rows, samples, seeds, answered, tokens, lengths = turns
        B = len(lengths)
        answers = Answers(
            observations=np.zeros((B, self.observation_length), np.int32),
            lengths=np.zeros(B, np.int32),
            rewards=np.zeros(B, np.float32),
            done=np.ones(B, bool),
            figures=np.full((B, len(self.metric_names)), NOTHING, np.float32),
        )
        (waiting,) = np.nonzero(lengths)
        texts = decode_texts(self._tokenizer, [tokens[b, : lengths[b]] for b in waiting])
        calls = []
        for b, text in zip(waiting, texts, strict=True):
            sample, beginning = int(samples[b]), None
            # Before the threads: dialogues are made in order, examples perhaps read from a disk.
            if answered[b] == 0:
                replaced = self._dialogues.pop(sample, None)
                # A copy: an environment that changes its example changes no other dialogue.
                beginning = replaced, copy.deepcopy(self._examples[int(rows[b])]), int(seeds[b])
                self._dialogues[sample] = self._make_dialogue()
            last = int(tokens[b, lengths[b] - 1])
            dialogue = self._dialogues[sample]
            calls.append(functools.partial(self._step, dialogue, beginning, text, last))
        for b, result in zip(waiting, self._threads.call_all(calls, self._timeout), strict=True):
            faults.report_progress()
            self._steps += 1
            try:
                answer: _Answer = result.result()
            except FAILURES as error:
                self._count_failure(error, int(rows[b]))
                answers.figures[b, -1] = 1
                if isinstance(error, CallTimeout):
                    del self._dialogues[int(samples[b])]  # its thread may still be in it
                continue
            if answer.has_ended:
                del self._dialogues[int(samples[b])]
            answers.rewards[b] = answer.reward
            answers.done[b] = answer.has_ended
            answers.lengths[b] = len(answer.tokens)
            answers.observations[b, : len(answer.tokens)] = answer.tokens
            for name, value in answer.figures.items():
                answers.figures[b, self.metric_names.index(name)] = value
            answers.figures[b, -1] = 0
        return answers

    def _step(
        self,
        dialogue: CallResult,
        beginning: tuple[CallResult | None, Example, int] | None,
        text: str,
        last: int,
    ) -> _Answer:
        """Answer a turn; the first has a `beginning`: dialogue to replace, example and seed."""
        if self._lost:
            raise EnvironmentLost(self._lost)
        if self._has_none_answered():
            raise CallTimeout(f"none of the first {self._steps} turns was answered in time")
        if beginning is not None:
            replaced, example, seed = beginning
            self._close(replaced)
            dialogue.result().reset(example, seed)
        answer = dialogue.result().step(text)
        if not isinstance(answer, (tuple, list)) or len(answer) not in (3, 4):
            raise WrongAnswer(
                f"the answer to a turn is {_quote(answer)}; expected (observation, reward, whether "
                "the dialogue has ended) or these and metrics"
            )
        observation, reward, ends, reported = (*answer, None)[:4]
        _validate_answer(observation, ends, takes_several=self._frame is not None)
        reward = _read_number(reward, "the reward of a turn")
        if ends:
            self._close(dialogue)
        figures = _read_figures(reported, self.metric_names[:-1])
        return _Answer(self._encode(observation, last), reward, bool(ends), figures)

    def _encode(self, observation: str | tuple[str, ...], last: int) -> list[int]:
        if self._frame is not None:
            contents = (observation,) if isinstance(observation, str) else observation
            return self._frame.encode(contents, last, self.observation_length)
        assert isinstance(observation, str)
        text = observation[: CHARACTERS_PER_TOKEN * self.observation_length]
        return encode_text(self._tokenizer, text, special=False)[: self.observation_length]

    def _make_dialogue(self) -> CallResult:
        environment: CallResult = concurrent.futures.Future()
        try:
            environment.set_result(self._class())
        except FAILURES as error:
            environment.set_exception(error)
        return environment

    def _close(self, environment: CallResult | None) -> None:
        if environment is None or environment.exception():
            return
        try:
            getattr(environment.result(), "close", lambda: None)()
        except FAILURES as error:
            log.warning("%s could not be closed: %s", self._name, printable_lines(repr(error)))

    def _has_none_answered(self) -> bool:
        return MAX_UNANSWERED_TURNS <= self._timeouts == self._steps

    def _count_failure(self, error: BaseException, row: int) -> None:
        self._failures += 1
        self._timeouts += isinstance(error, CallTimeout)
        if isinstance(error, EnvironmentLost):
            self._lost = str(error)
        if not self._first_failure:
            prompt = prompt_texts(self._examples[row].prompt)[-1]
            # A traceback of the environment's own lines, or the message of a fault outside them.
            cause = str(error)
            if isinstance(error, CallTimeout):
                cause += " (config.rollout.multi_turn.timeout)"
            elif not isinstance(error, RequestFault | EnvironmentLost | WrongAnswer):
                cause = "\n" + "".join(traceback.format_exception(error, limit=-4))
            # The exception may quote what the policy wrote.
            self._first_failure = printable_lines(f"prompt {shorten(prompt)!r}: {cause}")
            log.warning(
                "%s failed; the dialogue ends with a reward of 0. The first failure of each batch "
                "is logged: %s",
                self._name,
                self._first_failure,
            )


def _validate_answer(observation: Any, ends: Any, takes_several: bool) -> None:
    """Raise `WrongAnswer` if it would be misread; `takes_several` permits a tuple of messages."""
    contents = observation if takes_several and isinstance(observation, tuple) else (observation,)
    if not contents or not all(isinstance(content, str) for content in contents):
        raise WrongAnswer(f"the observation of a turn is {_quote(observation)}; expected text")
    try:
        "".join(contents).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which no tokenizer takes
        raise WrongAnswer(f"the observation of a turn: {error}") from None
    # Python would read every text but "" as true.
    if as_float(ends) not in (0, 1):
        raise WrongAnswer(
            f"whether the dialogue has ended is {_quote(ends)}; expected True or False"
        )


def _read_figures(figures: Any, names: Sequence[str]) -> dict[str, float]:
    """Return a turn's metrics; raise `WrongAnswer` unless declared and finite in float32."""
    numbers: dict[str, float] = {}
    if figures is None:
        return numbers
    if not isinstance(figures, Mapping):
        raise WrongAnswer(f"the metrics of a turn are {_quote(figures)}; expected numbers by name")
    for name, value in figures.items():
        if name not in names:
            raise WrongAnswer(
                f"the turn reports the metric {shorten(repr(name))}; metric_names declares "
                f"{', '.join(names) or 'none'}.{did_you_mean(str(name), names)}"
            )
        numbers[name] = _read_number(value, f"the metric {name!r} of a turn")
    return numbers


def _read_number(value: Any, what: str) -> float:
    number = as_float(value)
    # Written so that NaN fails too.
    if number is None or not abs(number) <= float(np.finfo(np.float32).max):
        raise WrongAnswer(f"{what} is {_quote(value)}; expected a finite float32")
    return number


def _quote(value: Any) -> str:
    return f"{describe_value(value)} of type {type(value).__name__}"
