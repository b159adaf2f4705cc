"""Notes about options that are allowed but may not be what the user meant."""

import dataclasses

from jax_ppo.config.schema import Config, CriticOptim, options
from jax_ppo.config.validation import option_value

PPO_ALONE = (
    "actor.",
    "critic.",
    "algorithm.",
    "rollout.",
    "reward.",
    "model.create.",
    "model.lora.",
    "trainer.critic_warmup",
    "trainer.best_metric",
    "trainer.log_samples",
    "trainer.warn_",
)  # options that no other command reads


def supervised_notes(config: Config, command: str) -> list[str]:
    """Options that are set and that the commands which learn from given responses do not read."""
    others = dict.fromkeys(PPO_ALONE, "train") | (
        {"supervised.response_key": "sft"} if command == "reward_model" else {}
    )
    return [
        f"config.{name}={option_value(config, name)!r} is not read: it belongs to jax_ppo.{other}"
        for name, _, default, _ in options()
        if option_value(config, name) != default
        for start, other in others.items()
        if name.startswith(start)
    ]


def train_notes(config: Config) -> list[str]:
    """What is allowed and may not be meant: options that nothing reads beside others, and biases that are easily missed."""
    algorithm, actor, default = config.algorithm, config.actor, Config()
    found = []
    if config.rollout.top_k > 0 or config.rollout.top_p < 1:
        found.append(
            "config.rollout.top_k and top_p cut the distribution that is sampled, while log-probs and ratios are of "
            "the whole one: what is learned is off-policy by that much"
        )
    if algorithm.use_kl_in_reward and algorithm.kl_penalty != "k1":
        found.append(
            f"config.algorithm.kl_penalty={algorithm.kl_penalty!r}: in the reward k1 alone follows the KL's gradient; "
            "kernels/kl.py says what the others do"
        )
    if actor.use_kl_loss and actor.kl_loss_type == "k1":
        found.append(
            "config.actor.kl_loss_type='k1': its expected gradient is 0, so it restrains nothing; k2 does"
        )
    if (
        actor.policy_loss == "gspo"
        and actor.clip_ratio_low is None
        and actor.clip_ratio_high is None
    ):
        found.append(
            f"config.actor.policy_loss='gspo': the ratio of a sequence hardly ever reaches config.actor.clip_ratio="
            f"{actor.clip_ratio}; its authors take clip_ratio_low=3e-4 and clip_ratio_high=4e-4"
        )
    if actor.policy_loss == "reinforce" and not config.updates_once:
        found.append(
            "config.actor.policy_loss='reinforce': is biased once the policy has moved; it is meant for one optimizer "
            "step a rollout"
        )
    if config.model.lora.path and (algorithm.use_kl_in_reward or actor.use_kl_loss):
        found.append(
            f"config.model.lora.path={config.model.lora.path!r}: the reference is the bare base, not the policy that "
            "training starts from; merge those adapters into config.model.path if the KL is to be measured to them"
        )
    unread = (
        {
            "actor.target_kl": config.updates_once,
            "actor.loss_scale_factor": "norm" not in actor.loss_agg_mode,
            "algorithm.norm_adv_by_std_in_grpo": algorithm.adv_estimator != "grpo",
            "algorithm.whiten_shift_mean": not config.whitens_advantages,
            "algorithm.bootstrap_truncated": algorithm.mask_truncated,
            "model.lora.alpha": not config.has_adapters,
            "model.lora.targets": not config.has_adapters,
            "algorithm.gamma": algorithm.adv_estimator
            in ("grpo", "rloo", "reinforce_plus_plus_baseline"),
            "reward.normalize_shift": config.reward.normalize == "none",
            "reward.normalize_samples": config.reward.normalize != "reference",
        }
        | {
            name: not config.has_critic
            for name in (
                "algorithm.lam",
                "algorithm.lam_length_alpha",
                "algorithm.critic_lam",
                "algorithm.critic_gamma",
                "critic.ppo_epochs",
                "critic.ppo_mini_batch_size",
                "critic.huber_delta",
            )
        }
        | {
            f"critic.{name}": config.shares_trunk
            for name in (
                "grad_clip",
                *(f"optim.{field.name}" for field in dataclasses.fields(CriticOptim)),
            )
        }
    )
    for name, unused in unread.items():
        value = option_value(config, name)
        if unused and value != option_value(default, name):
            found.append(f"config.{name}={value!r} changes nothing beside the other options")
    found += [
        f"config.{name}={option_value(config, name)!r} is not read: it belongs to jax_ppo.sft and jax_ppo.reward_model"
        for name, _, default, _ in options()
        if name.startswith("supervised.") and option_value(config, name) != default
    ]
    steps = config.trainer.total_training_steps
    if steps and config.trainer.critic_warmup >= steps:
        found.append(
            f"config.trainer.critic_warmup={config.trainer.critic_warmup}: the actor never learns in {steps} steps"
        )
    return found
