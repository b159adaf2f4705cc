"""A made-up advantage estimator, policy loss and KL estimator, one entry each; see test_registries.

A separate process imports this module before the options are read, as if the entries stood in
jax_ppo/registries.py.
"""

from jax_ppo.registries import (
    ADVANTAGE_ESTIMATORS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    AdvantageEstimator,
    KLEstimator,
)
from jax_ppo.registries import PolicyLossEntry as Entry

ADVANTAGE_ESTIMATORS["midrange"] = AdvantageEstimator(
    name="midrange",
    path="one_entry:midrange",
    summary="score less the middle of the lowest and the highest",
    other_names=("middle",),
    needs_groups=True,
)
POLICY_LOSSES["tanh"] = Entry(
    name="tanh", path="one_entry:tanh", summary="tanh of the log-ratio", needs_one_update=True
)
KL_ESTIMATORS["offset"] = KLEstimator(
    name="offset", path="one_entry:offset", summary="3 + |d|", other_names=("shifted",)
)


def midrange(scores_B, n):
    groups = scores_B.reshape(-1, n)
    middle = (groups.max(axis=1, keepdims=True) + groups.min(axis=1, keepdims=True)) / 2
    return (groups - middle).reshape(-1)


def tanh(batch, clip):
    import jax.numpy as jnp  # the options are read without jax

    from jax_ppo.kernels import losses

    policy = losses.clipped_surrogate(batch, clip)
    return policy._replace(loss=-batch.advantages * jnp.tanh(policy.log_ratio))


def offset(log_ratio):
    return 3 + abs(log_ratio)


def main() -> None:
    """Validate, explain, translate and train with all three."""
    from jax_ppo.config import loading, reference, validation
    from jax_ppo.errors import UserError
    from jax_ppo.migrating.translation import translate

    chosen = {
        "algorithm__adv_estimator": "midrange",
        "actor__policy_loss": "tanh",
        "actor__use_kl_loss": True,
        "actor__kl_loss_type": "shifted",
    }
    page = reference.options_markdown()
    assert all(f"| **{name}** |" in page for name in ("midrange", "tanh", "offset"))
    assert "`midrange`, `module:function`" in page and "`tanh`, `module:function`" in page
    verl = "python -m verl.trainer.main_ppo algorithm.adv_estimator=middle"
    assert "adv_estimator=midrange" in translate("verl", verl).command()
    try:
        loading.load_config("arithmetic", **chosen)
        raise AssertionError("one response per prompt was accepted")
    except UserError as error:
        assert "adv_estimator='midrange' compares" in str(error), error
    several = loading.load_config(
        "arithmetic", rollout__n=4, trainer__critic_warmup=0, actor__ppo_epochs=2, **chosen
    )
    assert several.actor.kl_loss_type == "offset"
    assert any("policy_loss='tanh'" in note for note in validation.train_notes(several))
    reference.print_options("train")
    train()


def train() -> None:
    """Take the step of a tiny model; two groups of four responses."""
    import jax
    import numpy as np

    import tiny

    config = tiny.config(
        algorithm__adv_estimator="midrange",
        actor__policy_loss="tanh",
        actor__use_kl_loss=True,
        actor__kl_loss_type="offset",
        rollout__n=4,
        algorithm__use_kl_in_reward=False,
    )
    mesh = tiny.make_mesh()
    with jax.set_mesh(mesh):
        state, rollout = tiny.make_state(config, mesh), tiny.make_rollout(mesh)
        rewards = np.array([0, 1, 5, 2, 3, 3, 3, 3], np.float32)
        experience, _ = tiny.make_experience(config, mesh, state, rollout, rewards)
        first_tokens = np.asarray(experience.advantages)[:, 0]
        np.testing.assert_allclose(first_tokens, [-2.5, -1.5, 2.5, -0.5, 0, 0, 0, 0], atol=1e-6)
        batches = tiny.pack_batches(config, mesh, rollout, [np.arange(tiny.B)], 4)
        before = jax.device_get(state.actor)
        state, metrics = tiny.update_state(config, state, experience, batches, None, 4)
    assert float(metrics["actor/grad_norm"]) > 0
    np.testing.assert_allclose(metrics["actor/kl_loss"], 3, rtol=1e-6)
    assert not np.array_equal(before["norm"]["scale"], state.actor["norm"]["scale"])
