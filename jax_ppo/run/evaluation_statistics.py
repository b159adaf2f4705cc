"""Statistics of several responses to each held-out prompt: pass@k, maj@k, best of k, intervals.

The k responses are a random subset of the N sampled ones, k 1..N. Averages over all subsets are
computed exactly, so that choosing subsets adds no noise. Arrays `correct_...` have 1 or 0.
"""

import collections
import math

import numpy as np

RESAMPLES = 1000
LEVEL = 0.95
_ROWS_AT_ONCE = 50


def subset_sizes(n: int) -> list[int]:
    """Return the k that are reported for n responses per prompt: powers of two, and n."""
    return sorted({2**power for power in range(1, n.bit_length()) if 2**power <= n} | {n} - {1})


def pass_at_k(correct_PxN: np.ndarray, k: int) -> np.ndarray:
    """Return the probability [P] that one of k is right (Chen et al. 2021, 2107.03374)."""
    n = correct_PxN.shape[1]
    wrong = n - correct_PxN.sum(1).astype(int)
    return np.array([1 - math.comb(w, k) / math.comb(n, k) for w in wrong.tolist()])


def best_of_k(scores_PxN: np.ndarray, k: int) -> np.ndarray:
    """Return the expected largest score [P] of k responses; negate twice for the smallest."""
    n = scores_PxN.shape[1]
    # The i-th smallest of n is the largest of k if the others come from the i below it.
    chances = np.array([math.comb(i, k - 1) / math.comb(n, k) for i in range(n)])
    return np.sort(scores_PxN, axis=1) @ chances


def majority_at_k(correct_N: np.ndarray, answers_N: np.ndarray, k: int) -> float:
    """Return the probability that the most frequent answer of k responses is right.

    Right responses agree, and wrong ones do where their answers are equal texts. Responses without
    an answer do not vote. Of equally frequent answers each is as likely to be chosen. (Wang et al.
    2022, 2203.11171; there k responses are sampled, here all subsets count.) Of N responses to one
    prompt, `answers_N` are the answers, `None` for none.
    """
    right = int(correct_N.sum())
    wrong = [answer for answer, is_right in zip(answers_N, correct_N, strict=True) if not is_right]
    wrong_votes = collections.Counter(answer for answer in wrong if answer is not None)
    silent = len(wrong) - wrong_votes.total()
    wins = 0.0
    for votes in range(1, min(right, k) + 1):
        ways = _ways_to_lose(list(wrong_votes.values()), votes, k)
        for ties, others in zip(*np.nonzero(ways[:, : k - votes + 1]), strict=True):
            silent_ways = math.comb(silent, k - votes - int(others))
            wins += math.comb(right, votes) * ways[ties, others] * silent_ways / (ties + 1)
    return wins / math.comb(len(correct_N), k)


def _ways_to_lose(counts: list[int], votes: int, largest: int) -> np.ndarray:
    """Count the choices of n <= largest wrong responses, `counts` of each wrong answer.

    Return their numbers, [ties, n]: exactly `ties` wrong answers have as many votes as the right
    one, `votes`, and none has more.
    """
    ways = np.zeros((1 + largest // votes, 1 + largest))
    ways[0, 0] = 1
    for count in counts:
        added = np.zeros_like(ways)
        for chosen in range(min(count, votes, largest) + 1):
            tied = int(chosen == votes)
            ways_before = ways[: len(ways) - tied, : 1 + largest - chosen]
            added[tied:, chosen:] += math.comb(count, chosen) * ways_before
        ways = added
    return ways


def bootstrap_interval(values_P: np.ndarray) -> tuple[float, float]:
    """Return the percentile interval of the mean at `LEVEL`, with prompts resampled."""
    generator = np.random.default_rng(0)
    size = len(values_P)
    means = [
        values_P[generator.integers(0, size, (_ROWS_AT_ONCE, size))].mean(1)
        for _ in range(RESAMPLES // _ROWS_AT_ONCE)
    ]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def describe_prompts(
    scores_PxN: np.ndarray, correct_PxN: np.ndarray, answers_PxN: np.ndarray, sources: list[str]
) -> dict[str, float]:
    """Return the statistics that a mean over all responses leaves out, by name.

    These are the interval of the accuracy, or of the reward if all correctness is undefined (NaN);
    for N > 1 responses per prompt pass@k, best@k, worst@k and, if the rules read answers (`None`:
    none), maj@k; for data from several `sources`, one per prompt, all of these for each source.
    """
    figures = _describe_group(scores_PxN, correct_PxN, answers_PxN)
    names = sorted(set(sources))
    if len(names) == 1:
        return figures
    for name in names:
        rows = np.array([source == name for source in sources])
        group = {"reward_mean": float(scores_PxN[rows].mean())}
        correct = correct_PxN[rows]
        if len(defined := correct[~np.isnan(correct)]):
            group["accuracy"] = float(defined.mean())
        group |= _describe_group(scores_PxN[rows], correct, answers_PxN[rows])
        figures |= {f"{name}/{figure}": value for figure, value in group.items()}
    return figures


def _describe_group(
    scores_PxN: np.ndarray, correct_PxN: np.ndarray, answers_PxN: np.ndarray
) -> dict[str, float]:
    # Responses without correctness, such as those that the rule failed on, count in none of its
    # figures; a prompt counts for each k that its other responses reach.
    known_PxN = ~np.isnan(correct_PxN)
    rows = zip(correct_PxN, answers_PxN, known_PxN, strict=True)
    graded = [(correct[known], votes[known]) for correct, votes, known in rows if known.any()]
    sizes = subset_sizes(scores_PxN.shape[1])
    enough = {k: [row for row in graded if len(row[0]) >= k] for k in sizes}
    name, means_P = "reward_mean", scores_PxN.mean(1)
    if graded:
        name, means_P = "accuracy", np.array([correct.mean() for correct, _ in graded])
    low, high = bootstrap_interval(means_P)
    figures = {f"{name}_low": low, f"{name}_high": high}
    if (answers_PxN[known_PxN] != np.array(None)).any():
        for k in filter(enough.get, sizes):
            figures[f"maj@{k}"] = float(np.mean([majority_at_k(*row, k) for row in enough[k]]))
    for k in sizes:
        if enough[k]:
            passed = [pass_at_k(correct[None], k)[0] for correct, _ in enough[k]]
            figures[f"pass@{k}"] = float(np.mean(passed))
        figures[f"best@{k}"] = float(best_of_k(scores_PxN, k).mean())
        figures[f"worst@{k}"] = 0.0 - float(best_of_k(-scores_PxN, k).mean())  # not -0.0
    return figures
