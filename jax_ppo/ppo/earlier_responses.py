"""The last responses to each prompt, on the host: drafts for when the prompt comes again.

The random numbers of a prompt's first responses are taken again for all later ones: with others,
hardly a token of a draft could be kept. docs/scaling.md says what that costs.
"""

import dataclasses
from typing import Any

import numpy as np

from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.sampler.continuation import begin_responses
from jax_ppo.types import Prompts, Rollout


def step_addresses(step: int, count: int) -> np.ndarray:
    """Return what identifies the random numbers of a step's samples, int32 [N = `count`, 2].

    It is the step, and the sample's index in its batch.
    """
    return np.stack([np.full(count, step), np.arange(count)], axis=1).astype(np.int32)


class EarlierResponses:
    """The last n responses to each prompt of the data that was sampled, the same in all processes.

    They take 4 bytes per token.
    """

    def __init__(self, n: int) -> None:
        """Start without a response."""
        self.n = n
        # By the row of the data: responses, int32 [length] each, and addresses, int32 [n, 2].
        self._tokens: dict[int, list[np.ndarray]] = {}
        self._addresses: dict[int, np.ndarray] = {}

    def find(
        self, batch: PromptBatch, step: int, longest: int
    ) -> tuple[Rollout | None, np.ndarray]:
        """Return drafts of the N responses to a batch, on the host, and their addresses [N, 2].

        Drafts have up to `longest` tokens; `None` if no prompt is known. The other prompts, and the
        second of two equal ones, have drafts that cannot be kept and addresses of this step.
        """
        prompts = (batch.prompts.tokens, batch.prompts.lengths)
        drafts = begin_responses(Prompts(*(np.repeat(x, self.n, axis=0) for x in prompts)), longest)
        drafts.responses[:, 0], drafts.lengths[:] = -1, 1  # such a token is never drawn
        addresses = step_addresses(step, len(drafts.lengths))
        rows, places = np.unique(batch.indices, return_index=True)
        known = np.isin(rows, list(self._tokens))
        for row, place in zip(rows[known].tolist(), places[known] * self.n, strict=True):
            addresses[place : place + self.n] = self._addresses[row]
            for index, tokens in enumerate(self._tokens[row], place):
                drafts.lengths[index] = min(len(tokens), longest)
                drafts.responses[index, : len(tokens)] = tokens[:longest]
        return dataclasses.replace(drafts, versions=None) if known.any() else None, addresses

    def replace(
        self, rows: np.ndarray, responses: np.ndarray, lengths: np.ndarray, addresses: np.ndarray
    ) -> None:
        """Replace the responses to the prompts in these rows of the data, int [G], by N others.

        Of a row that is there twice, the last responses and addresses are kept.
        """
        each = zip(responses, lengths, strict=True)
        self._set(rows, [tokens[:length].copy() for tokens, length in each], addresses)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what a checkpoint holds; there must be a response."""
        tokens = [response for responses in self._tokens.values() for response in responses]
        return {
            "rows": np.array(list(self._tokens), np.int32),
            "tokens": np.concatenate(tokens),
            "lengths": np.array([len(response) for response in tokens], np.int32),
            "addresses": np.concatenate(list(self._addresses.values())),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, Any]) -> "EarlierResponses":
        """Return the object whose `arrays` these are."""
        earlier = cls(len(arrays["lengths"]) // len(arrays["rows"]))
        tokens = np.split(arrays["tokens"], np.cumsum(arrays["lengths"])[:-1])
        # Copies: a view of one response would keep all of them in memory.
        earlier._set(arrays["rows"], [x.copy() for x in tokens], arrays["addresses"])
        return earlier

    def _set(self, rows: np.ndarray, tokens: list[np.ndarray], addresses: np.ndarray) -> None:
        for row, first in zip(rows.tolist(), range(0, len(tokens), self.n), strict=True):
            self._tokens[row] = tokens[first : first + self.n]
            self._addresses[row] = addresses[first : first + self.n]
