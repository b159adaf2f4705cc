"""The protocols of environments; `rollout.multi_turn.environment` names a class of one of them."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from jax_ppo.types import Example


class TextEnvironment(Protocol):
    """One dialogue, on the host. The class is constructed without arguments, once per dialogue."""

    def reset(self, example: Example, seed: int) -> None:
        """Begin the dialogue.

        Args:
          example: the row of the data with the prompt of the dialogue.
          seed: 0..2^32 - 1, for all randomness; it depends only on the run's seed, the step and the
            sample, so that a run can be repeated.
        """

    def step(self, text: str) -> tuple[str, float, bool]:
        """Answer a turn.

        Args:
          text: the turn, without special tokens such as the EOS that ended it.

        Returns:
          The observation, which becomes part of the response unchanged; the reward of the turn; and
          whether the dialogue has ended, in which case the observation is ignored.
        """


class TokenEnvironment(Protocol):
    """All dialogues, in JAX: the methods are traced, and the host is not involved in decoding.

    The class has an attribute `observation_length`, which distinguishes it from a
    `TextEnvironment`. The methods handle one dialogue; `jax.vmap` maps them over all dialogues.

    Attributes:
      observation_length: O, the maximum number of tokens of an observation.
    """

    observation_length: int

    def __init__(self, tokenizer: Any, examples: Sequence[Example]) -> None:
        """Prepare what the traced methods look up, such as tables of tokens.

        Args:
          tokenizer: the policy's.
          examples: the rows of the training data, then of the held-out data. Iterate over them
            once: with `data.cache_dir` they are read from a disk.
        """

    def reset(self, row: jax.Array, key: jax.Array) -> Any:
        """Return the first state, a pytree of arrays.

        Args:
          row: int32, index of the dialogue's example.
          key: the key for all randomness of the dialogue.
        """

    def step(
        self, state: Any, turn: jax.Array, length: jax.Array
    ) -> tuple[Any, jax.Array, jax.Array, jax.Array, jax.Array]:
        """Answer a turn.

        Args:
          state: the state of the dialogue.
          turn: int32 [U], the tokens of the turn, with the EOS that ended it; 0 past its length.
          length: int32, the number of these tokens.

        Returns:
          The next state; the observation, int32 [O]; its number of tokens; the reward of the turn;
          and whether the dialogue has ended.
        """
