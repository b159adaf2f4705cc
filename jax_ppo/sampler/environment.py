"""The contract between the decode loop and an environment that answers the policy's turns.

A response may be a dialogue: the policy writes a turn, the environment answers with an observation,
the policy writes the next turn. `dialogues.py` holds the decode loop's state of it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

# Position under which an environment's random key is derived from its sample's; no token has it.
_ENVIRONMENT_POSITION = 2**31 - 1


class DialogueAddresses(NamedTuple):
    """Addresses of N samples, the same whichever slots decode them."""

    rows: jax.Array  # int32 [N], the row of the data that the sample's prompt is from
    # int32 [N], the sample's index, unique among those that are decoded together.
    samples: jax.Array
    keys: jax.Array  # one random key per sample, used for no token


class Answers(NamedTuple):
    """The environment's answers to B turns."""

    state: Any  # the state of each dialogue after the turn
    observations: jax.Array  # int32 [B, O], tokens to insert, each row's from column 0
    lengths: jax.Array  # int32 [B], number of these tokens, 0..O
    rewards: jax.Array  # float32 [B], rewards of the turns
    done: jax.Array  # bool [B], whether the dialogue has ended; its observation is then not read


class Environment(Protocol):
    """An environment of many dialogues; its methods are traced into the decode loop.

    Its hash is its identity: programs are compiled for one object.
    """

    observation_length: int  # O, the most tokens of an observation

    def reset(self, addresses: DialogueAddresses) -> Any:
        """Return the first states of N dialogues: a pytree of arrays with N rows."""

    def step(self, state: Any, turns: jax.Array, lengths: jax.Array) -> Answers:
        """Answer B turns.

        Args:
          state: the states of the dialogues.
          turns: int32 [B, U], the tokens of each turn from column 0, with the EOS that ended it;
            0 past its length.
          lengths: int32 [B]; 0 where there is nothing to answer and the answer is not read.
        """

    def metrics(self, state: Any) -> dict[str, jax.Array]:
        """Return figures of N dialogues by name, float32 [N]; NaN where a dialogue has none.

        Args:
          state: the states of the dialogues after their last turns.
        """


class PerDialogue:
    """`Environment` from functions of one dialogue, which JAX maps over all of them."""

    def __init__(
        self,
        reset: Callable[[jax.Array, jax.Array], Any],
        step: Callable[[Any, jax.Array, jax.Array], tuple[Any, ...]],
        observation_length: int,
        metrics: Callable[[Any], dict[str, jax.Array]] | None = None,
    ) -> None:
        """Store the functions.

        Args:
          reset: (row, key) -> the first state, a pytree of arrays.
          step: (state, turn, length) -> (state, observation, its length, reward, whether the
            dialogue has ended), where turn and observation are int32 [U] and int32 [O].
          observation_length: O, to which a longer observation is cut.
          metrics: last state -> numbers by name.
        """
        self._reset = reset
        self._step = step
        self._metrics = metrics
        self.observation_length = observation_length

    def reset(self, addresses: DialogueAddresses) -> Any:
        """Return the first states. See `Environment.reset`."""
        return jax.vmap(self._reset)(addresses.rows, addresses.keys)

    def step(self, state: Any, turns: jax.Array, lengths: jax.Array) -> Answers:
        """Answer turns. See `Environment.step`."""
        answers = Answers(*jax.vmap(self._step)(state, turns, lengths))
        return answers._replace(
            observations=answers.observations.astype(jnp.int32),
            lengths=jnp.clip(jnp.asarray(answers.lengths, jnp.int32), 0, self.observation_length),
            rewards=jnp.asarray(answers.rewards, jnp.float32),
            done=jnp.asarray(answers.done, bool),
        )

    def metrics(self, state: Any) -> dict[str, jax.Array]:
        """Return figures of dialogues. See `Environment.metrics`."""
        if self._metrics is None:
            return {}
        figures = jax.vmap(self._metrics)(state)
        return {name: jnp.asarray(values, jnp.float32) for name, values in figures.items()}


def address_dialogues(
    keys_N: jax.Array, rows_N: jax.Array, samples_N: jax.Array
) -> DialogueAddresses:
    """Return the addresses of samples; `keys_N` are those that their tokens are drawn with."""
    derive = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    return DialogueAddresses(
        rows=rows_N, samples=samples_N, keys=derive(keys_N, _ENVIRONMENT_POSITION)
    )
