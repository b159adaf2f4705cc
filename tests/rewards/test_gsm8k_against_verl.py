"""Our GSM8K rule and verl's on generated forms of answers: equal, or different as listed.

Skipped without verl; `pip install --no-deps verl` is enough, its scorer reads no other package.
"""

import importlib.util
import itertools
import random
from pathlib import Path

import pytest

from jax_ppo.rewards.rules import GSM8K_METHODS, score_gsm8k

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
