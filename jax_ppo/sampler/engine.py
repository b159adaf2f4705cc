"""The contracts of whatever generates responses, and of the environments that answer in them.

A response may be a dialogue: the policy writes a turn, the environment, on the host, answers with
an observation, the policy writes the next turn (`dialogues.py`).
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import jax
import numpy as np

from jax_ppo.sampler.filters import Filters
from jax_ppo.sampler.text_search import TextSearch
from jax_ppo.types import Params, Prompts, Rollout


class Turns(NamedTuple):
    """B turns to be answered, with the addresses of their dialogues."""

    rows: np.ndarray  # int32 [B], the row of the data that the dialogue's prompt is from
    # int32 [B], the sample's index, unique among the dialogues that are decoded together.
    samples: np.ndarray
    seeds: np.ndarray  # uint32 [B], the seed of the dialogue's randomness
    answered: np.ndarray  # int32 [B], turns of the dialogue that have been answered
    # int32 [B, U], each turn's from column 0, with the EOS that ended it; 0 past its length.
    tokens: np.ndarray
    lengths: np.ndarray  # int32 [B]; 0 where there is nothing to answer and the answer is not read


class Answers(NamedTuple):
    """The environment's answers to B turns."""

    observations: np.ndarray  # int32 [B, O], tokens to insert, each row's from column 0
    lengths: np.ndarray  # int32 [B], number of these tokens, 0..O
    rewards: np.ndarray  # float32 [B], rewards of the turns
    done: np.ndarray  # bool [B], whether the dialogue has ended; its observation is then not read
    # float32 [B, M], the metrics of the dialogues so far; `NOTHING` where a turn reports none.
    figures: np.ndarray


class Environment(Protocol):
    """An environment of many dialogues; programs are compiled for one object, by its identity."""

    observation_length: int  # O, the most tokens of an observation
    metric_names: tuple[str, ...]  # M names

    def answer(self, turns: Turns) -> Answers:
        """Answer turns, on the host."""


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """Options of sampling. Hashable, because an engine may compile one program per value."""

    max_response_length: int  # T, tokens, at least 1
    temperature: float  # 0 is greedy
    top_k: int = -1  # draw among the k likeliest tokens; -1 draws among all
    # Draw among the likeliest tokens that together hold this probability, in (0, 1].
    top_p: float = 1.0
    # Draw among the tokens at least this fraction as likely as the likeliest, in [0, 1].
    min_p: float = 0.0
    n: int = 1  # responses per prompt
    eos_ids: tuple[int, ...] = ()  # tokens that end a response; the response includes it
    # B, the most samples decoded together, per device that rows are split over; `None`: no limit.
    slots: int | None = None
    partial_length: int | None = None  # tokens that a call of `continue_responses` draws at most
    min_new_tokens: int = 0  # before which no EOS is drawn, and in which no `stop` is searched for
    # Strings that end a response as an EOS does; the token that completes one is its last.
    stop: TextSearch | None = None
    environment: Environment | None = None  # answers the policy's turns; `None`: a single turn
    max_turns: int | None = None  # of the policy, after which a response ends
    max_turn_length: int | None = None  # tokens of a turn after which it ends without an EOS
    returns_routed_experts: bool = False  # the rollout holds the experts that tokens used

    @property
    def filters(self) -> Filters:
        """Return how a token is drawn from its logits."""
        return Filters(self.temperature, self.top_k, self.top_p, self.min_p)


class RolloutEngine(Protocol):
    """Generates responses with the actor's current weights.

    A run calls `start`, then any number of rounds of `update_weights`, one or more `generate` and
    `release_weights`, then `stop`. A subclass that needs nothing at `start`, `release_weights` or
    `stop` leaves it out.
    """

    def start(self) -> None:
        """Acquire what the engine needs for the whole run, such as processes or connections."""
        return

    def update_weights(self, params: Params) -> None:
        """Take over the actor's parameters, with stacked layers split over the training's mesh.

        The engine makes its own copy in the type and layout that it decodes with: the arrays passed
        in may be donated to the next update after this call. It must not block on the device.
        """

    def generate(
        self,
        prompts: Prompts,
        key: jax.Array,
        options: SamplingOptions,
        first_sample_index: int | None = None,
    ) -> Rollout:
        """Return `options.n` responses per prompt, sampled with the weights of the last update.

        Sample i answers prompt i // n. What is drawn for it depends only on the weights, the key,
        its prompt and its index `first_sample_index + i`. Need not wait for the result.

        Args:
          prompts: [B / n, P], rows split over the mesh.
          key: the base key of this batch's random numbers.
          options: how to sample; calls with different options use the same weights.
          first_sample_index: index of the first sample; `None` means 0.

        Returns:
          The rollout, [B, ...], rows split over the mesh.
        """

    def release_weights(self) -> None:
        """Free the memory that only generation needs; `update_weights` precedes the next call."""
        return

    def stop(self) -> None:
        """Release everything that the engine holds. Called once, after an error too."""
        return


@contextlib.contextmanager
def running(engine: RolloutEngine) -> Iterator[RolloutEngine]:
    """Start the engine, and stop it at the end of the context."""
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
