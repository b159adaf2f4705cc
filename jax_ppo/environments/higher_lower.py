"""A game in JAX: guess the digit that answers a word problem, with a hint after each wrong guess.

    policy       4
    environment  +     the digit is larger
    policy       7     right: the dialogue ends

A right guess earns 1, a wrong one -0.25; the fifth is the last. The rules are traced into the
decode loop, so the host is not involved. Guesses are turns of one token:
`rollout.multi_turn.max_turn_length=1`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.types import Example

MISS = -0.25  # reward of a wrong guess
GUESSES = 5
NO_DIGIT = -1


class HigherLower:
    """A `TokenEnvironment` for prompts whose `ground_truth` is a digit."""

    observation_length = 1

    def __init__(self, tokenizer: Any, examples: Sequence[Example]) -> None:
        """Look up the digits of tokens and of the examples."""
        texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        self._digits = np.array([_read_digit(text) for text in texts], np.int32)
        self._secrets = np.array([_read_digit(x.ground_truth) for x in examples], np.int32)
        self._higher = tokenizer.encode("+", add_special_tokens=False)[0]
        self._lower = tokenizer.encode("-", add_special_tokens=False)[0]

    def reset(self, row: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the digit to guess and the number of guesses; nothing is random."""
        return jnp.asarray(self._secrets)[row], jnp.int32(0)

    def step(
        self, state: tuple[jax.Array, jax.Array], turn: jax.Array, length: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array, jax.Array, jax.Array]:
        """Answer a guess. See `TokenEnvironment.step`."""
        secret, guesses = state
        # A vocabulary may be rounded up beyond the tokenizer's tokens; those are not digits.
        guess = jnp.asarray(self._digits).at[turn[0]].get(mode="fill", fill_value=NO_DIGIT)
        is_right = guess == secret
        sign = jnp.where(guess < secret, self._higher, self._lower)
        # A turn that is not a guess gets no answer.
        observed = (guess != NO_DIGIT).astype(jnp.int32)
        reward = jnp.where(is_right, 1.0, MISS)
        # Ending the game after the last guess keeps the response from counting as truncated.
        ends = is_right | (guesses + 1 == GUESSES)
        return (secret, guesses + 1), sign[None], observed, reward, ends


def _read_digit(text: str) -> int:
    text = text.strip()
    if len(text) == 1 and text in "0123456789":
        return int(text)
    return NO_DIGIT
