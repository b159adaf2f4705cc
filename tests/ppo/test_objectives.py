"""Each role's loss compares with the policy and critic of the rollout and with the reference."""

import dataclasses

import numpy as np
import pytest

import tiny
from tiny_update import run_gradients


def metrics_of(role, change, **options):
    """Return a role's metrics for one mini-batch, at the policy and critic of the rollout."""
    config, mesh = tiny.config(**options), tiny.make_mesh()
    return run_gradients(config, mesh, 4, change, move=1.0, roles=(role,))[1]


def test_the_ratio_is_to_the_old_policy_and_the_kl_to_the_reference():
    metrics = metrics_of(
        "actor",
        lambda x: dataclasses.replace(x, ref_logprobs=x.old_logprobs - 2),
        actor__use_kl_loss=True,
        actor__kl_loss_type="k1",
    )
    assert metrics["actor/log_ratio_max"] < 1e-5
    assert metrics["actor/kl_loss"] == pytest.approx(2, rel=1e-5)


@pytest.mark.parametrize("moved", [-1.0, 1.0])
def test_the_approximate_kl_is_never_negative(moved):
    """Every token is one nat more or less likely than in the rollout: e - 1 - 1 and 1/e - 1 + 1."""
    metrics = metrics_of(
        "actor", lambda x: dataclasses.replace(x, old_logprobs=x.old_logprobs - moved)
    )
    assert metrics["actor/approx_kl"] == pytest.approx(np.exp(moved) - 1 - moved, rel=1e-4)


@pytest.mark.parametrize("role", ["critic", "actor"])
def test_only_values_of_the_mask_are_learned_and_counted(role):
    """Errors of 3 on every third token; elsewhere the targets are far off. In packed rows."""

    def change(experience):
        mask = experience.action_mask & (np.arange(tiny.T) % 3 == 0)
        return dataclasses.replace(
            experience,
            value_mask=mask,
            returns=np.where(mask, np.asarray(experience.values) + 3, 1e6).astype(np.float32),
        )

    # The actor's loss includes that of a critic on its trunk.
    metrics = metrics_of(
        role, change, critic__cliprange_value=0.0, critic__shared_trunk=role == "actor"
    )
    assert metrics["critic/loss"] == pytest.approx(3**2 / 2, rel=1e-3)


def test_the_value_loss_is_clipped_around_the_values_of_the_rollout():
    """The error is 9.5 though the values are the returns: old ones, 10 lower, may move by 0.5."""
    metrics = metrics_of(
        "critic",
        lambda x: dataclasses.replace(x, values=x.values - 10, returns=x.values),
        critic__cliprange_value=0.5,
    )
    assert metrics["critic/clip_fraction"] == pytest.approx(1)
    assert metrics["critic/loss"] == pytest.approx(9.5**2 / 2, rel=1e-4)
