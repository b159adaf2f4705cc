"""An environment of tests, whose answers are a function of the turn."""

import numpy as np

from jax_ppo.sampler.engine import Answers, Turns


class Answering:
    """Answers a turn with the tokens that `observe(tokens)` returns; the turn `last` ends it."""

    metric_names = ()

    def __init__(self, observe, observation_length, last=None):
        self.observe, self.observation_length, self.last = observe, observation_length, last

    def answer(self, turns):
        """Return the answers. See `Environment.answer`."""
        B = len(turns.lengths)
        answers = Answers(
            observations=np.zeros((B, self.observation_length), np.int32),
            lengths=np.zeros(B, np.int32),
            rewards=np.zeros(B, np.float32),
            done=turns.answered + 1 == self.last if self.last else np.zeros(B, bool),
            figures=np.zeros((B, 0), np.float32),
        )
        for b, length in enumerate(turns.lengths):
            observed = self.observe(turns.tokens[b, :length].tolist()) if length else []
            answers.observations[b, : len(observed)] = observed
            answers.lengths[b] = len(observed)
        return answers


def answer_text(environment, rows, text, turn=0):
    """Return the answers to one turn of each row's dialogue, whose seed is row + 100."""
    rows = np.array(rows)
    state = (rows, np.arange(len(rows)), rows + 100, np.full(len(rows), turn))
    turns = np.tile([*map(ord, text)], (len(rows), 1))
    return environment.answer(Turns(*state, turns, np.full(len(rows), len(text))))


def observed(answers):
    """Return the texts of the observations of tokens that are characters."""
    return ["".join(map(chr, row[:n])) for row, n in zip(*answers[:2], strict=True)]
