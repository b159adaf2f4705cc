"""Statistics of several responses to each held-out prompt: pass@k, best and worst of k, intervals.

k responses are a random subset of the n that were sampled, and averages over all subsets are
computed exactly, so that they have no noise of their own.
"""

import math

import numpy as np

RESAMPLES = 1000
LEVEL = 0.95
_ROWS_AT_ONCE = 50


def subset_sizes(n: int) -> list[int]:
    """Return the k that are reported for n responses per prompt: powers of two, and n."""
    return sorted({2**power for power in range(1, n.bit_length()) if 2**power <= n} | {n} - {1})


def pass_at_k(correct_PxN: np.ndarray, k: int) -> np.ndarray:
    """Return the probability [P] that one of k responses is right (Chen et al. 2021, 2107.03374).

    Args:
      correct_PxN: 1 or 0.
      k: 1..N.
    """
    n = correct_PxN.shape[1]
    wrong = n - correct_PxN.sum(1).astype(int)
    return np.array([1 - math.comb(w, k) / math.comb(n, k) for w in wrong.tolist()])


def best_of_k(scores_PxN: np.ndarray, k: int) -> np.ndarray:
    """Return the expected largest score [P] of k responses; negate twice for the smallest.

    Args:
      scores_PxN: scores.
      k: 1..N.
    """
    n = scores_PxN.shape[1]
    # The i-th smallest is the largest of the subset if the others come from the i below it.
    weights = np.array([math.comb(i, k - 1) / math.comb(n, k) for i in range(n)])
    return np.sort(scores_PxN, axis=1) @ weights


def bootstrap_interval(values_P: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return the percentile interval of the mean at `LEVEL`, with prompts drawn anew.

    Args:
      values_P: one value per prompt.
      seed: of the draws; the interval of the same values is always the same.
    """
    generator = np.random.default_rng(seed)
    size = len(values_P)
    means = [
        values_P[generator.integers(0, size, (_ROWS_AT_ONCE, size))].mean(1)
        for _ in range(RESAMPLES // _ROWS_AT_ONCE)
    ]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def describe_prompts(
    scores_PxN: np.ndarray, correct_PxN: np.ndarray, sources: list[str]
) -> dict[str, float]:
    """Return the statistics that a mean over all responses leaves out, by name.

    They are the interval of the accuracy, or of the reward where correctness is undefined; for
    several responses per prompt pass@k, best@k and worst@k; and, for data from several sources, all
    of them by source.

    Args:
      scores_PxN: N scores per prompt.
      correct_PxN: 1 or 0, NaN where correctness is undefined.
      sources: the data source of each prompt.
    """
    figures = _describe_group(scores_PxN, correct_PxN)
    names = sorted(set(sources))
    if len(names) == 1:
        return figures
    for name in names:
        rows = np.array([source == name for source in sources])
        group = {"reward_mean": float(scores_PxN[rows].mean())}
        defined = correct_PxN[rows]
        if not np.isnan(defined).any():
            group["accuracy"] = float(defined.mean())
        group |= _describe_group(scores_PxN[rows], defined)
        figures |= {f"{name}/{figure}": value for figure, value in group.items()}
    return figures


def _describe_group(scores_PxN: np.ndarray, correct_PxN: np.ndarray) -> dict[str, float]:
    """Return the statistics of one group of prompts."""
    # Prompts whose rule does not define correctness have no share in accuracy and pass@k.
    graded_PxN = correct_PxN[~np.isnan(correct_PxN).any(1)]
    figures = {}
    if len(graded_PxN):
        name, values = "accuracy", graded_PxN.mean(1)
    else:
        name, values = "reward_mean", scores_PxN.mean(1)
    figures[f"{name}_low"], figures[f"{name}_high"] = bootstrap_interval(values)
    for k in subset_sizes(scores_PxN.shape[1]):
        if len(graded_PxN):
            figures[f"pass@{k}"] = float(pass_at_k(graded_PxN, k).mean())
        figures[f"best@{k}"] = float(best_of_k(scores_PxN, k).mean())
        figures[f"worst@{k}"] = float(-best_of_k(-scores_PxN, k).mean())
    return figures
