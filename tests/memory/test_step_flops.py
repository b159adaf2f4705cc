"""Model FLOPs of a step, as multiples of the forward passes that it needs."""

import numpy as np
import pytest

import tiny
from jax_ppo.memory.step_flops import count_forward_flops, count_step_flops
from jax_ppo.ppo.step_parts import StepOptions

PROMPTS = np.array([3, 5])
LENGTHS = np.array([4, 6, 8, 5 + 9])  # two responses per prompt


def count(step=0, **changes):
    config = tiny.config(**changes)
    options = StepOptions(config)
    return count_step_flops(options, tiny.networks(config), step, PROMPTS, LENGTHS)


def forward(num_logits=0, lengths=LENGTHS):
    return count_forward_flops(tiny.ARCHITECTURE, lengths, num_logits)


def test_another_epoch_costs_a_forward_and_a_backward_pass_per_role():
    one, two = (
        count(actor__ppo_epochs=epochs, algorithm__use_kl_in_reward=False) for epochs in (1, 2)
    )
    num_logits = 1 + 3 + 3 + 9
    assert two - one == pytest.approx(3 * forward(num_logits) + 3 * forward())


def test_the_actor_rests_during_the_warm_up_of_the_critic():
    resting, learning = (count(step=step, trainer__critic_warmup=1) for step in (0, 1))
    assert learning - resting == pytest.approx(3 * forward(16))


def test_a_prompt_is_read_once_for_all_of_its_responses():
    """Then policy and reference are scored, and the actor is trained; there is no critic."""
    flops = count(
        algorithm__adv_estimator="grpo", rollout__n=2, actor__ppo_epochs=1, trainer__critic_warmup=0
    )
    shared_prompts = forward(lengths=PROMPTS)
    sampling = forward(16) - shared_prompts
    assert flops - sampling == pytest.approx((1 + 1 + 3) * forward(16))
