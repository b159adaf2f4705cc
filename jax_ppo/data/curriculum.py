"""Draw prompts that are sometimes solved more often than those that always or never are.

At a solve rate of p, the variance of correctness is p (1 - p): largest where half of the responses
are correct, and 0 where comparing them teaches nothing.
"""

from collections.abc import Iterator

import numpy as np

from jax_ppo.data.prompt_batches import PromptBatch, make_batch
from jax_ppo.data.prompts import PromptDataset
from jax_ppo.errors import UserError

# Solve rates by the row of the data set, as text, so that a checkpoint's JSON holds them.
SolveRates = dict[str, float]

_MEMORY = 0.5  # the weight of what was known before, against the newest responses
_LEAST_WEIGHT = 0.05  # of a prompt that is always or never solved; it may become useful again


class CurriculumBatches:
    """Endless iterator over training batches, drawn by the solve rates seen so far.

    A batch follows from seed, position and solve rates alone, and has no prompt twice.

    Attributes:
      position: prompts drawn so far.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        batch_size: int,
        seed: int,
        position: int,
        solve_rates: SolveRates,
    ) -> None:
        """Start at a saved position with the solve rates there, which are updated in place.

        The data set has at least `batch_size` prompts.
        """
        self.position = position
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._solve_rates = solve_rates

    def __iter__(self) -> Iterator[PromptBatch]:
        return self

    def __next__(self) -> PromptBatch:
        weights = solve_rate_weights(self._solve_rates, len(self._dataset))
        rng = np.random.default_rng([self._seed, self.position])
        indices = rng.choice(len(weights), self._batch_size, replace=False, p=weights)
        self.position += self._batch_size
        return make_batch(self._dataset, indices, self._batch_size)

    def observe(self, indices: np.ndarray, correct_B: np.ndarray) -> None:
        """Update the solve rates.

        Args:
          indices: int [G], the rows of the prompts.
          correct_B: [B], 1 or 0, in groups of responses to each prompt; NaN where it is undefined.

        Raises:
          UserError: the rule does not define correctness.
        """
        if np.isnan(correct_B).all():
            raise UserError(
                "config.data.curriculum='solve_rate': the rule does not define correctness; set "
                "it to 'none'"
            )
        for index, group in zip(indices, correct_B.reshape(len(indices), -1), strict=True):
            known = group[~np.isnan(group)]
            if not len(known):
                continue
            row = str(index)
            rate = float(known.mean())
            before = self._solve_rates.get(row)
            if before is not None:
                rate = _MEMORY * before + (1 - _MEMORY) * rate
            self._solve_rates[row] = rate


def solve_rate_weights(solve_rates: SolveRates, rows: int) -> np.ndarray:
    """Return the probability of each row, [rows]; a row that was never drawn has the highest."""
    weights = np.ones(rows)
    for row, rate in solve_rates.items():
        weights[int(row)] = max(4 * rate * (1 - rate), _LEAST_WEIGHT)
    return weights / weights.sum()
