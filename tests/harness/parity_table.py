"""Print how far the numbers of each family are from transformers'; docs/models.md has the largest.

python tests/harness/parity_table.py

It runs comparisons of tests/models/test_families.py, of the first form of each family, with what
transformers computed (tests/expected/), or with `--parity` computes.
"""

import os
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parents[1]
COLUMNS = ("logits", "log-probs", "entropy", "gradients", "decoding", "reward head")
RUNS = {
    "test_logits_logprobs_and_gradients": "gradients",
    "test_cached_decode": "decoding",
    "test_a_critic_is_a_sequence_classifier": "reward head",
}


class Measure:
    """A plugin of pytest that keeps the largest relative difference of each comparison."""

    def __init__(self) -> None:
        """Start with none."""
        self.differences: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the first form of each family, and measure before each comparison."""
        module = items[0].module
        first: dict[str, str] = {}
        for name, (family, _) in module.VARIANTS.items():
            first.setdefault(family, name)
        kept = first.values()
        items[:] = [
            item for item in items if item.originalname in RUNS and item.callspec.id in kept
        ]
        compare = module.assert_close

        def measure(ours, theirs, what=""):
            test, _, name = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2].partition("[")
            family = module.VARIANTS[name.rpartition("]")[0]][0]
            column = what if what in COLUMNS else RUNS[test]
            theirs = np.asarray(theirs)
            difference = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
            row = self.differences[family]
            row[column] = max(row[column], difference)
            compare(ours, theirs, what)

        module.assert_close = measure


if __name__ == "__main__":
    measured = Measure()
    file = str(TESTS / "models" / "test_families.py")
    status = pytest.main([file, "-q", "-m", "", *sys.argv[1:]], plugins=[measured])
    print(f"| `model_type` | {' | '.join(COLUMNS)} |\n|{' --- |' * (len(COLUMNS) + 1)}")
    for family, row in measured.differences.items():
        print(f"| `{family}` | {' | '.join(f'{row[column]:.0e}' for column in COLUMNS)} |")
    sys.exit(status)
