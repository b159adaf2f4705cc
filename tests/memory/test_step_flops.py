"""FLOPs of a forward pass, and of a step as multiples of the forward passes that it needs."""

import dataclasses

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


def test_logits_cost_the_unembedding():
    a = tiny.ARCHITECTURE
    lengths = np.array([5])
    logits = count_forward_flops(a, lengths, 3) - count_forward_flops(a, lengths)
    assert logits == 2 * a.vocab_size * a.hidden_size * 3


@pytest.mark.parametrize(("window", "pairs"), [(None, 15), (2, 9), (9, 15)])
def test_attention_counts_the_pairs_that_are_seen(window, pairs):
    """Five tokens see 1 + 2 + 3 + 4 + 5 tokens, or in a window of two 1 + 2 + 2 + 2 + 2."""
    a = dataclasses.replace(
        tiny.ARCHITECTURE,
        sliding_window=window,
        local_layers=(window is not None,) * tiny.ARCHITECTURE.num_layers,
    )
    per_pair = 4 * a.num_layers * a.num_heads * a.head_dim
    of_matrices = 5 * (count_forward_flops(a, np.array([1])) - per_pair)
    assert count_forward_flops(a, np.array([5])) == of_matrices + pairs * per_pair
