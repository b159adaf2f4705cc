"""Our GSM8K rule and verl's on generated forms of answers: equal, or different as listed.

Skipped without verl; `pip install --no-deps verl` is enough, its scorer reads no other package.
"""

import collections
import importlib.util
import itertools
import json
import os
import random
from pathlib import Path

import pytest

from jax_ppo.rewards.number_rules import GSM8K_METHODS, score_gsm8k

DATA = Path(os.environ.get("JAX_PPO_DATA", Path(__file__).parents[3] / "shared" / "data"))

# How the right answer is written: (ours strict, verl's strict, ours flexible, verl's flexible) give
# a reward. docs/data-and-rewards.md lists the differences.
FORMS = {
    "#### {n}": (1, 1, 1, 1),
    "so {n}\n#### {n}\n": (1, 1, 1, 1),
    "#### {other}\n#### {n}": (1, 1, 1, 1),
    "#### {n}\n#### {other}": (0, 0, 0, 0),
    "#### {n:,}": (1, 1, 1, 0),
    "#### {n}.": (1, 0, 1, 0),
    "#### {n}.0": (1, 0, 1, 0),
    "#### {n}.00": (1, 0, 1, 0),
    "#### 0{n}": (1, 0, 1, 0),
    "#### ${n}": (0, 0, 1, 1),
    "#### **{n}**": (0, 0, 1, 1),
    "####{n}": (0, 0, 1, 1),
    "#### {n} pens": (1, 1, 1, 1),
    "#### {n} pens, {other} in all": (1, 1, 0, 0),
    "The answer is {n}": (0, 0, 1, 1),
    "The answer is {n}.": (0, 0, 1, 0),
    "It is {n}, as shown": (0, 0, 1, 0),
    "{n} {other}": (0, 0, 0, 0),
    "#### {other}": (0, 0, 0, 0),
    "{other}-{n}": (0, 0, 1, 0),
    "#### -{n}": (0, 0, 0, 0),
    "#### {n}/997": (0, 1, 0, 0),
    "#### {n}e3": (0, 1, 0, 0),
    "#### {n}+991": (0, 1, 0, 0),
    "<answer>{n}</answer>": (1, 0, 1, 1),
    "#### {n}</think>": (0, 1, 0, 1),
    "<think>#### {other}</think>#### {n}": (1, 1, 1, 1),
    "no number": (0, 0, 0, 0),
    "{n}{filler}": (0, 0, 0, 0),
    "{filler}\n#### {n}": (1, 1, 1, 1),
}


@pytest.fixture(scope="module")
def verl_score():
    """Return verl's function, loaded from its own file: the package itself imports much more."""
    package = importlib.util.find_spec("verl")
    if package is None:
        pytest.skip("needs verl: pip install --no-deps verl")
    (folder,) = package.submodule_search_locations
    path = Path(folder, "utils", "reward_score", "gsm8k.py")
    spec = importlib.util.spec_from_file_location("verl_gsm8k", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.compute_score


@pytest.mark.parametrize("form", FORMS)
def test_rewards_differ_from_verls_only_as_listed(form, verl_score):
    generator = random.Random(form)
    seen = set()
    for _ in range(200):
        n = generator.randrange(1000, 10**7)
        if ":," not in form and generator.random() < 0.5:
            n = generator.randrange(1, 100)
        text = form.format(n=n, other=n + generator.randrange(1, 999), filler=" word" * 80)
        rewards = [
            (score_gsm8k(text, str(n), method).score, verl_score(text, str(n), method))
            for method in GSM8K_METHODS
        ]
        seen.add(tuple(itertools.chain(*rewards)))
    assert seen == {FORMS[form]}


def test_of_the_real_solutions_verls_flexible_rule_rejects_those_with_commas(verl_score):
    """All others are accepted by both, and by both strict rules."""
    files = [DATA / "gsm8k" / f"{split}.jsonl" for split in ("train", "test")]
    if not all(file.exists() for file in files):
        pytest.skip(f"needs gsm8k in {DATA} (JAX_PPO_DATA)")
    counts = collections.Counter()
    for line in "".join(file.read_text() for file in files).strip().split("\n"):
        text = json.loads(line)["answer"]
        written = text.rpartition("#### ")[2]
        truth = written.replace(",", "")
        rewards = [
            (score_gsm8k(text, truth, method).score, verl_score(text, truth, method))
            for method in GSM8K_METHODS
        ]
        counts["," in written, tuple(itertools.chain(*rewards))] += 1
    assert counts == {(True, (1, 1, 1, 0)): 93, (False, (1, 1, 1, 1)): 8699}
