"""The contract between the decode loop and an environment that answers the policy's turns.

A response may be a dialogue: the policy writes a turn, the environment answers with an observation,
the policy writes the next turn. The environment is on the host; `dialogues.py` calls it for many
turns at once and holds the decode loop's state of the dialogues.
"""

from typing import NamedTuple, Protocol

import jax
import numpy as np

# Position under which an environment's random key is derived from its sample's; no token has it.
_ENVIRONMENT_POSITION = 2**31 - 1


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
    """An environment of many dialogues.

    Its hash is its identity: programs are compiled for one object.
    """

    observation_length: int  # O, the most tokens of an observation
    metric_names: tuple[str, ...]  # M names

    def answer(self, turns: Turns) -> Answers:
        """Answer turns, on the host."""


def dialogue_seeds(keys_N: jax.Array) -> jax.Array:
    """Return the seeds of dialogues, uint32 [N]; `keys_N` are those their tokens are drawn with."""
    derive = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    return jax.vmap(jax.random.bits)(derive(keys_N, _ENVIRONMENT_POSITION))
