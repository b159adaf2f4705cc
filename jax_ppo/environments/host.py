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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.data.tokenizer import encode_text
from jax_ppo.environments.protocol import TextEnvironment
from jax_ppo.environments.timed_threads import CallResult, CallTimeout, TimedThreads
from jax_ppo.errors import UserError, printable_lines, shorten
from jax_ppo.runtime.parallelism.rows import call_host
from jax_ppo.sampler.environment import Answers, DialogueAddresses
from jax_ppo.types import Example

log = logging.getLogger(__name__)

THREADS = 16  # dialogues that are stepped concurrently
# Of an observation that will be cut off, no more is encoded; few tokens have as many characters.
CHARACTERS_PER_TOKEN = 256
# If as many turns of a batch time out before any is answered, no further turns are tried.
MAX_UNANSWERED_TURNS = 4 * THREADS


class HostState(NamedTuple):
    """Addresses of dialogues whose states are on the host; int32 [N], seeds uint32 [N].

    Attributes:
      rows: index of the dialogue's example.
      samples: index of the sample, which identifies the dialogue on the host.
      seeds: seed of the dialogue's randomness.
      turns: number of turns that have been answered.
    """

    rows: jax.Array
    samples: jax.Array
    seeds: jax.Array
    turns: jax.Array


class HostEnvironment:
    """`Environment` of dialogues whose states are objects on the host.

    A dialogue whose environment raises an exception or takes too long ends with a reward of 0.
    """

    def __init__(
        self,
        environment_class: Callable[[], TextEnvironment],
        tokenizer: Any,
        examples: Sequence[Example],
        observation_length: int,
        timeout: float,
    ) -> None:
        """Create the environment and its threads.

        Args:
          environment_class: constructs the environment of one dialogue.
          tokenizer: the policy's.
          examples: the rows of the data; dialogues refer to them by index.
          observation_length: O; longer observations are cut off.
          timeout: seconds that a `step` may take; the first one includes `reset`.
        """
        self.observation_length = observation_length
        self._class = environment_class
        self._tokenizer = tokenizer
        self._examples = examples
        # By the index of the sample, so that the next batch's dialogues replace the last one's.
        self._dialogues: dict[int, CallResult] = {}
        self._threads = TimedThreads(THREADS, timeout)
        self._reset_counts()

    def _reset_counts(self) -> None:
        self._steps = 0
        self._failures = 0
        self._timeouts = 0
        self._first_failure = ""

    def reset(self, addresses: DialogueAddresses) -> HostState:
        """Return the addresses; the host resets a dialogue at its first turn."""
        return HostState(
            rows=addresses.rows,
            samples=addresses.samples.astype(jnp.int32),
            seeds=jax.vmap(jax.random.bits)(addresses.keys),
            turns=jnp.zeros_like(addresses.rows),
        )

    def step(self, state: HostState, turns: jax.Array, lengths: jax.Array) -> Answers:
        """Answer turns on the host. See `Environment.step`."""
        B = len(lengths)
        shapes = (
            jax.ShapeDtypeStruct((B, self.observation_length), jnp.int32),
            jax.ShapeDtypeStruct((B,), jnp.int32),
            jax.ShapeDtypeStruct((B,), jnp.float32),
            jax.ShapeDtypeStruct((B,), jnp.bool_),
        )
        answers = call_host(self._answer, shapes, *state, turns, lengths)
        return Answers(state._replace(turns=state.turns + 1), *answers)

    def raise_if_all_failed(self) -> None:
        """Raise if all of this process's turns since the last call failed.

        Raises:
          UserError: with the first failure.
        """
        steps = self._steps
        failures = self._failures
        cause = self._first_failure
        self._reset_counts()
        if steps and failures == steps:
            raise UserError(
                f"config.rollout.multi_turn.environment: {self._class.__name__} failed at every "
                f"turn of a batch, {failures} times. The first failure was",
                details=cause,
            )

    def _answer(self, *arrays: jax.Array) -> tuple[np.ndarray, ...]:
        """Answer the turns of a call, with the same arguments as `step`.

        Turns of length 0 are ignored.
        """
        rows, samples, seeds, answered, turns, lengths = (np.asarray(x) for x in arrays)
        B = len(lengths)
        observations = np.zeros((B, self.observation_length), np.int32)
        observed = np.zeros(B, np.int32)
        rewards = np.zeros(B, np.float32)
        has_ended = np.ones(B, bool)
        (waiting,) = np.nonzero(lengths)
        texts = self._tokenizer.batch_decode(
            [turns[b, : lengths[b]] for b in waiting], skip_special_tokens=True
        )
        # Constructed in order, before the threads step them. Examples may be read from a disk.
        examples = {}
        for b in waiting[answered[waiting] == 0]:
            self._dialogues[int(samples[b])] = self._construct_dialogue()
            # A copy: an environment that changes its example changes no other dialogue.
            examples[int(b)] = copy.deepcopy(self._examples[int(rows[b])])

        def step(b: int, text: str) -> tuple[list[int], float, bool]:
            self._give_up_if_none_answers()
            dialogue: TextEnvironment = self._dialogues[int(samples[b])].result()
            if answered[b] == 0:
                dialogue.reset(examples[b], int(seeds[b]))
            observation, reward, ends = dialogue.step(text)
            _validate_answer(observation, reward, ends)
            text = observation[: CHARACTERS_PER_TOKEN * self.observation_length]
            tokens = encode_text(self._tokenizer, text, special=False)
            return tokens[: self.observation_length], float(reward), bool(ends)

        calls = [
            functools.partial(step, int(b), text) for b, text in zip(waiting, texts, strict=True)
        ]
        for b, result in zip(waiting, self._threads.call_all(calls), strict=True):
            self._steps += 1
            try:
                tokens, rewards[b], has_ended[b] = result.result()
            except (Exception, SystemExit) as error:
                self._count_failure(error, int(rows[b]))
                continue
            observed[b] = len(tokens)
            observations[b, : len(tokens)] = tokens
        return observations, observed, rewards, has_ended

    def _construct_dialogue(self) -> CallResult:
        dialogue: CallResult = concurrent.futures.Future()
        try:
            dialogue.set_result(self._class())
        except (Exception, SystemExit) as error:
            dialogue.set_exception(error)
        return dialogue

    def _give_up_if_none_answers(self) -> None:
        if MAX_UNANSWERED_TURNS <= self._timeouts == self._steps:
            raise CallTimeout(f"none of the first {self._steps} turns was answered in time")

    def _count_failure(self, error: BaseException, row: int) -> None:
        self._failures += 1
        self._timeouts += isinstance(error, CallTimeout)
        if not self._first_failure:
            prompt = _last_message(self._examples[row])
            # The exception may quote what the policy wrote.
            self._first_failure = printable_lines(
                f"prompt {shorten(prompt)!r}: {_describe_failure(error)}"
            )
            log.warning(
                "%s failed; the dialogue ends with a reward of 0. The first failure of each batch "
                "is logged: %s",
                self._class.__name__,
                self._first_failure,
            )


def _validate_answer(observation: Any, reward: Any, ends: Any) -> None:
    """Raise `TypeError` or `ValueError` for an answer that would be read as something else."""
    if not isinstance(observation, str):
        raise TypeError(f"the observation of a turn is {_quote(observation)}; expected text")
    # Python would read a number in text, and every text but "" as true.
    if isinstance(reward, (str, bytes)):
        raise TypeError(f"the reward of a turn is {_quote(reward)}; expected a number")
    # Written so that NaN fails too.
    if not abs(float(reward)) <= np.finfo(np.float32).max:
        raise ValueError(f"the reward of a turn is {reward}; expected a finite float32")
    if ends not in (0, 1):
        raise TypeError(f"whether the dialogue has ended is {_quote(ends)}; expected True or False")


def _quote(value: Any) -> str:
    return f"{shorten(repr(value))} of type {type(value).__name__}"


def _last_message(example: Example) -> str:
    """Return a prompt of text, or the last message of a chat."""
    if isinstance(example.prompt, str):
        return example.prompt
    return example.prompt[-1]["content"]


def _describe_failure(error: BaseException) -> str:
    """Return a traceback of the environment's own lines, or the message of a timeout."""
    if isinstance(error, CallTimeout):
        return f"{error} (config.rollout.multi_turn.timeout)"
    return "\n" + "".join(traceback.format_exception(error, limit=-4))
