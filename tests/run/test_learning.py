"""The results that the shipped configurations promise, in full runs of minutes."""

import pytest

from real_data import DATA, needs
from whole_run import read_evaluations, read_steps, run_command


def train(monkeypatch, workdir, *arguments):
    """Return a run's evaluations, its rows of training_metrics.csv of steps, and its output."""
    # Unlike in the other tests (conftest.py), training takes minutes, so optimised programs pay
    # off.
    monkeypatch.setenv("XLA_FLAGS", "")
    process = run_command("train", *arguments, f"--workdir={workdir}")
    return read_evaluations(workdir), read_steps(workdir), process.stdout.splitlines()


@pytest.mark.slow
def test_arithmetic_goes_from_hasty_to_right(tmp_path, monkeypatch):
    """Half of the steps; 0.37 and 0.38 were seen before, 0.98 and 0.99 after all 30."""
    evaluations, _, lines = train(
        monkeypatch,
        tmp_path,
        "--config=configs/arithmetic.py",
        "--config.trainer.total_training_steps=15",
    )
    assert evaluations[0]["step"] == 0
    assert 0.30 <= evaluations[0]["accuracy"] <= 0.50
    assert evaluations[-1]["accuracy"] >= 0.90
    # A newcomer reads at most 15 lines before the first step. Those with dots follow 9 seconds of
    # silence: three of them where the whole run takes a minute.
    before = lines[: next(i for i, line in enumerate(lines) if line.startswith("step "))]
    assert len([line for line in before if not line.startswith("... ")]) <= 12, before


@pytest.mark.exhaustive
@needs("tinystories-260k")
def test_tinystories_become_joyful_and_stay_near_the_reference(tmp_path, monkeypatch):
    """Half of the configuration's steps suffice."""
    evaluations, steps, _ = train(
        monkeypatch,
        tmp_path,
        "--config=configs/tinystories.py",
        f"--config.model.path={DATA}/tinystories-260k",
        "--config.trainer.total_training_steps=30",
    )
    assert evaluations[-1]["reward_mean"] >= evaluations[0]["reward_mean"] + 0.5
    assert max(float(row["kl/reference"]) for row in steps) < 0.3  # nats per token
