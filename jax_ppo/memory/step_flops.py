"""Model FLOPs of a PPO step, the numerator of its model FLOPs utilization (MFU)."""

import numpy as np

from jax_ppo.config.schema import Config
from jax_ppo.models.flops import count_forward_flops
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo.forward_passes import ScoringOptions
from jax_ppo.training.networks import Networks


def count_step_flops(
    config: Config, nets: Networks, step: int, prompt_lengths: np.ndarray, lengths: np.ndarray
) -> float:
    """Return the FLOPs that sampling, scoring and update of a step need.

    Recomputed activations do not count, and while sampling a prompt counts once for all of its
    responses. All of `ppo_epochs` count, even if `actor.target_kl` cut them short. A reward model
    with its own tokenizer counts as if its inputs were as long as the samples.

    Args:
      config: all options.
      nets: the roles' models.
      step: the step, from 0.
      prompt_lengths: int [N], tokens of each prompt.
      lengths: int [B], tokens of each prompt and response; those of a prompt are adjacent.
    """
    scoring = ScoringOptions.from_config(config)
    repeated_lengths = np.repeat(prompt_lengths, len(lengths) // len(prompt_lengths))
    num_logits = int((lengths - repeated_lengths).sum())
    policy = nets.actor.architecture
    policy_pass = count_forward_flops(policy, lengths, num_logits)

    # 1. Sampling: a prompt is read once for all of its responses.
    flops = policy_pass
    flops -= count_forward_flops(policy, repeated_lengths)
    flops += count_forward_flops(policy, prompt_lengths)

    # 2. Scoring.
    flops += policy_pass * (scoring.old_logprobs + scoring.reference)
    if scoring.shared_trunk and not scoring.old_logprobs:
        flops += count_forward_flops(policy, lengths)
    critic_pass = 0.0
    if nets.critic is not None:
        critic_pass = count_forward_flops(nets.critic.architecture, lengths)
    flops += critic_pass
    if nets.reward is not None:
        flops += count_forward_flops(nets.reward.architecture, lengths)

    # 3. Update; during the critic's warm-up the actor's parameters stay.
    actor_learns = scoring.shared_trunk or step >= config.trainer.critic_warmup
    if actor_learns:
        flops += config.actor.ppo_epochs * _training_passes(nets.actor) * policy_pass
    if nets.critic is not None:
        epochs = config.critic.ppo_epochs or config.actor.ppo_epochs
        flops += epochs * _training_passes(nets.critic) * critic_pass
    return flops


def _training_passes(model: Transformer) -> int:
    """Return the cost of forward and backward pass in forward passes.

    The backward pass has a product for the gradient of each product's input and, unless only
    adapters are trained, one for that of its weights.
    """
    if model.lora is None:
        return 3
    return 2
