"""What is allowed and may not be meant. What is refused is in test_config.py, by the whole way from a ConfigDict."""

from jax_ppo import config, consistency


def checked(**changes):
    values = config.default_config()
    values.data.train_files = "arithmetic:8"
    values.update_from_flattened_dict({name.replace("__", "."): value for name, value in changes.items()})
    return config.from_config_dict(values)


def test_what_may_not_be_meant_is_noted():
    assert consistency.notes(checked()) == []
    noted = " ".join(consistency.notes(checked(
        algorithm__adv_estimator="grpo", rollout__n=4, algorithm__lam=0.9, actor__policy_loss="gspo", rollout__top_p=0.9,
        algorithm__use_kl_in_reward=True, algorithm__kl_penalty="abs", reward__normalize_samples=8)))
    for name in ("algorithm.lam=0.9", "actor.policy_loss='gspo'", "top_p", "algorithm.kl_penalty='abs'", "normalize_samples=8"):
        assert f"{name}" in noted, name
    assert "critic_lam" not in noted
    assert "the actor never learns" in consistency.notes(checked(trainer__critic_warmup=3, trainer__total_training_steps=3))[0]
