"""The bias and variance that each lambda and gamma of a grid would have had on some responses.

From the rewards r and values V of their tokens, the advantages of GAE(lambda, gamma) are compared
with the Monte-Carlo advantage M_t = G_t - V_t, where G_t is the sum of the rewards from token t on,
discounted by the configured gamma: the objective of the run. M has no bias from the critic.

The bias E[A - M | s, a] of single states and actions cannot be seen in one response each. Its root
mean square lies between two numbers that can:

    bias_low   the mean of A - M over the tokens of each tenth of the responses; then the root of
               the mean of its square, weighted by the tenths' tokens. What does not cancel
    bias_high  the root of the mean square of A - M over all tokens, which contains the variance of
               the rewards to come
    deviation  the standard deviation of A over all tokens, the root of its variance
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

HEADER = ("lambda", "gamma", "bias_low", "bias_high", "deviation", "")
LAMBDAS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 1.0)
GAMMAS = (0.98, 0.99, 0.995, 1.0)
PARTS = 10


class Tokens(NamedTuple):
    """The tokens that the policy chose, B responses, each from column 0 on, then zeros."""

    rewards: np.ndarray  # float [B, T]
    values: np.ndarray  # float [B, T], in units of reward
    lengths: np.ndarray  # int [B]


def collect_tokens(records: Iterable[Mapping[str, Any]]) -> Tokens | None:
    """Return the tokens of logged responses; `None` if they have no rewards or no values."""
    rewards, values = [], []
    for record in records:
        if not {"rewards", "values"} <= record.keys():
            return None
        chosen = np.array(record.get("action_mask", [1] * len(record["rewards"])), bool)
        # A number that is not finite is null in a file.
        rewards.append(np.nan_to_num(np.array(record["rewards"], float))[chosen])
        values.append(np.nan_to_num(np.array(record["values"], float))[chosen])
    lengths = np.array([len(row) for row in rewards], int)
    if not lengths.sum():
        return None
    shape = (len(lengths), lengths.max())
    padded = Tokens(np.zeros(shape), np.zeros(shape), lengths)
    places = np.arange(shape[1]) < lengths[:, None]
    padded.rewards[places] = np.concatenate(rewards)
    padded.values[places] = np.concatenate(values)
    return padded


def compare_lambdas(tokens: Tokens, lam: float, gamma: float) -> list[dict[str, Any]]:
    """Return a row for each lambda and gamma of the grid, to which the configured ones are added.

    A row has `lambda`, `gamma`, `bias_low`, `bias_high`, `deviation`, and `configured`, which marks
    the configured pair.
    """
    columns = np.arange(tokens.rewards.shape[1])
    places = columns < tokens.lengths[:, None]
    tenths = (PARTS * columns // np.maximum(tokens.lengths, 1)[:, None])[places]
    counts = np.bincount(tenths, minlength=PARTS)
    monte_carlo = estimate_gae(tokens, 1.0, gamma)[places]
    rows: list[dict[str, Any]] = []
    for each_gamma in sorted({*GAMMAS, gamma}):
        for each_lam in sorted({*LAMBDAS, lam}):
            estimates = estimate_gae(tokens, each_lam, each_gamma)[places]
            differences = estimates - monte_carlo
            sums = np.bincount(tenths, weights=differences, minlength=PARTS)
            low = np.sqrt(np.sum(sums**2 / np.maximum(counts, 1)) / counts.sum())
            rows.append(
                {
                    "lambda": each_lam,
                    "gamma": each_gamma,
                    "bias_low": float(low),
                    "bias_high": float(np.sqrt(np.mean(differences**2))),
                    "deviation": float(estimates.std()),
                    "configured": (each_lam, each_gamma) == (lam, gamma),
                }
            )
    return rows


def estimate_gae(tokens: Tokens, lam: float, gamma: float) -> np.ndarray:
    """Return the advantages [B, T] of GAE, 0 after the end of a response.

    On the host, where another lambda compiles no program; equals `kernels.advantages.gae`.
    """
    advantages = np.zeros(tokens.rewards.shape)
    next_advantage = next_value = np.zeros(len(tokens.lengths))
    for column in range(tokens.rewards.shape[1])[::-1]:
        value = tokens.values[:, column]
        delta = tokens.rewards[:, column] + gamma * next_value - value
        # Zeros after the end leave both at 0 up to a response's last token.
        next_advantage = delta + gamma * lam * next_advantage
        next_value = value
        advantages[:, column] = next_advantage
    return advantages


def format_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows as the texts of a table's cells."""
    return [
        [
            *(f"{row[name]:.4g}" for name in HEADER if name),
            "configured" if row["configured"] else "",
        ]
        for row in rows
    ]
