"""The guessing game answers guesses by its rules."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.environments.higher_lower import HigherLower
from jax_ppo.types import Example


class Characters:
    """A tokenizer whose tokens are `TEXT`'s characters."""

    TEXT = "0123456789+-ab"

    def __len__(self):
        return len(self.TEXT)

    def batch_decode(self, rows):
        return ["".join(self.TEXT[token] for token in row) for row in rows]

    def encode(self, text, add_special_tokens):
        return [self.TEXT.index(character) for character in text]


@pytest.mark.parametrize(
    ("guess", "answer", "reward", "done"),
    [("4", "+", -0.25, False), ("9", "-", -0.25, False), ("7", None, 1.0, True)],
)
def test_a_guess_is_answered_by_where_the_digit_lies(guess, answer, reward, done):
    tokenizer = Characters()
    examples = [Example("prompt", "arithmetic", "3"), Example("prompt", "arithmetic", "7")]
    game = HigherLower(tokenizer, examples)
    state = game.reset(jnp.int32(1), None)
    turn = jnp.array([tokenizer.TEXT.index(guess), 0])
    _, observation, length, earned, ended = game.step(state, turn, jnp.int32(1))
    assert (float(earned), bool(ended)) == (reward, done)
    if answer:
        assert tokenizer.TEXT[int(observation[0])] == answer and int(length) == 1


def test_what_is_no_digit_is_a_miss_without_an_answer():
    game = HigherLower(Characters(), [Example("prompt", "arithmetic", "3")])
    state = game.reset(jnp.int32(0), None)
    for token in (12, 10, 99):  # a letter, a sign, and a token that the tokenizer does not have
        _, _, length, reward, done = game.step(state, np.array([token]), jnp.int32(1))
        assert (int(length), float(reward), bool(done)) == (0, -0.25, False)


def test_the_game_ends_with_the_fifth_guess():
    game = HigherLower(Characters(), [Example("prompt", "arithmetic", "3")])
    state = game.reset(jnp.int32(0), None)
    ends = []
    for _ in range(5):
        state, *_, done = game.step(state, jnp.array([9]), jnp.int32(1))
        ends.append(bool(done))
    assert ends == [False] * 4 + [True]
