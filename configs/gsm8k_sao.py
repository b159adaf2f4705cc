"""GSM8K by SAO, the PPO behind GLM-5.2: one response per prompt and a critic that learns faster.

    python -m jax_ppo.critic --config=gsm8k_sao --config.trainer.total_training_steps=50
    python -m jax_ppo.train --config=gsm8k_sao --config.trainer.critic_warmup=0 \
        --config.critic.path=output/gsm8k_sao-critic/critic

The first command pretrains the critic; without it, train alone and keep critic_warmup. The options
are those of the paper (Hou et al. 2026, arXiv 2607.07508), with the numbers of implementations that
cite it: 128 prompts per step and one optimizer step of the actor. Not run here at this size; its
`:smoke` form was.
"""

from ml_collections import ConfigDict

from jax_ppo.config import read_config_file


def get_config() -> ConfigDict:
    """Return the configuration."""
    config = read_config_file("gsm8k")
    config.experiment_name = "gsm8k_sao"
    config.data.train_batch_size = 128
    config.rollout.n = 1
    # The next batch is sampled while this one is learned from.
    config.rollout.max_staleness = 1
    # -f(r) A log pi: f(r) = r, trainer over sampler, within [1 - 0.3, 1 + 5], and 0 elsewhere.
    config.actor.policy_loss = "reinforce"
    config.actor.ppo_mini_batch_size = 128
    config.algorithm.rollout_is = "token"
    config.algorithm.rollout_is_masks = True
    config.algorithm.rollout_is_lower = 0.7
    config.algorithm.rollout_is_threshold = 6.0
    config.algorithm.use_reference = False
    # GAE over the policy's own tokens: lambda = 1 - 1 / (1.5 length), and 1 for the critic.
    config.algorithm.lam_length_alpha = 1.5
    config.algorithm.critic_lam = 1.0
    config.algorithm.whiten_advantages = False
    # Two critic steps on (V - G)^2 for each actor step.
    config.critic.freeze = "attention"
    config.critic.ppo_epochs = 2
    config.critic.cliprange_value = 0.0
    config.critic.value_loss_coef = 2.0
    config.critic.optim.lr = 5e-6
    config.trainer.critic_warmup = 10
    return config
