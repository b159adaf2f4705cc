"""The user's functions are tried on shapes before any weights are loaded."""

import re

import pytest

import tiny
from jax_ppo.errors import UserError
from jax_ppo.ppo import plugin_trials

LOSS = """
import jax, jax.numpy as jnp
from jax_ppo.kernels import policy_losses
def loss(batch, clip):
    policy = policy_losses.clipped_surrogate(batch, clip)
    {body}
"""

OPTIONS = {
    "actor.policy_loss": LOSS,
    "algorithm.adv_estimator": "def loss(rewards, mask, n):\n    {body}\n",
    "algorithm.kl_penalty": "def loss(log_ratio):\n    {body}\n",
    "actor.kl_loss_type": "def loss(log_ratio):\n    {body}\n",
}


def try_body(tmp_path, option, body, **options):
    file = tmp_path / f"mine_{abs(hash(body))}.py"
    file.write_text(OPTIONS[option].format(body=body))
    options[option.replace(".", "__")] = f"{file}:loss"
    config = tiny.config(**options)
    plugin_trials.try_plugins(config.algorithm, config.actor, config.rollout.n)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_failing_function_is_refused_with_its_line(tmp_path, option):
    with pytest.raises(UserError) as error:
        try_body(tmp_path, option, "return missing")
    assert re.fullmatch(
        rf"config\.{option}='.*:loss': failed on arrays of [^:]*: NameError: name 'missing' .*"
        r" \(.*mine_\d+\.py, line \d\)",
        str(error.value),
    )


def test_a_condition_on_values_is_refused_with_the_way(tmp_path):
    with pytest.raises(UserError, match=r"line 2\)\. Values are not known .* use jnp\.where"):
        try_body(
            tmp_path, "algorithm.adv_estimator", "return rewards if rewards.sum() > 0 else mask"
        )


def test_a_loss_names_its_metrics(tmp_path):
    body = "return policy, {'kept': 1 - policy.clipped, 'a/b': policy.ratio}"
    file = tmp_path / "named.py"
    file.write_text(LOSS.format(body=body))
    actor = tiny.config(actor__policy_loss=f"{file}:loss").actor
    assert plugin_trials.policy_loss_metrics(actor) == ("actor/kept", "actor/a/b")


@pytest.mark.parametrize(
    ("option", "body", "message"),
    [
        ("actor.policy_loss", "return policy, {'loss': policy.loss}", "another"),
        ("actor.policy_loss", "return policy, {'grad_norm': policy.loss}", "another"),
        (
            "actor.policy_loss",
            "return policy, {'mine': policy.loss.sum()}",
            r"its metric 'mine' has shape \(\); expected one number per token",
        ),
        (
            "actor.policy_loss",
            "return batch.logprobs",
            "returned an array of shape .*; expected a kernels.losses.PolicyLoss",
        ),
        (
            "actor.policy_loss",
            "return policy._replace(loss=policy.loss.mean())",
            r"its loss has shape \(\)",
        ),
        ("algorithm.adv_estimator", "return rewards, {'mine': rewards}", "expected a scalar"),
        ("algorithm.adv_estimator", "return rewards, {'std': 1.0}", "another name than mean"),
        ("algorithm.kl_penalty", "return log_ratio.sum()", r"array of shape \(\); expected one"),
    ],
)
def test_a_wrong_result_or_metric_is_refused(tmp_path, option, body, message):
    with pytest.raises(UserError, match=message):
        try_body(tmp_path, option, body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "returned None; expected one number per response"),
        ("return 1.0", "returned a float; expected"),
        # Regression: with n = 2 there were as many responses as tokens, and the sum was accepted.
        ("return rewards.sum(axis=0)", r"returned an array of shape \(5,\); expected"),
    ],
)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_wrong_result_of_an_estimator_is_described(tmp_path, body, message, n):
    with pytest.raises(UserError, match=message):
        try_body(tmp_path, "algorithm.adv_estimator", body, rollout__n=n)
