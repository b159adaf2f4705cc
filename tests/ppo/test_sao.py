"""`gsm8k_sao` is SAO (Hou et al. 2026, arXiv 2607.07508), written out in plain Python loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.config.loading import load_config
from jax_ppo.config.schema import flatten_options
from jax_ppo.ppo.mini_batches import RolloutPacker

SHIPPED = load_config("gsm8k_sao")
SIZES = ("actor.ppo_mini_batch_size", "actor.optim.lr", "critic.optim.lr")
CONFIG = tiny.config(  # small sizes, and all that the configuration sets for the algorithm
    **{
        name.replace(".", "__"): value
        for name, value in flatten_options(dataclasses.asdict(SHIPPED)).items()
        if name.startswith(("algorithm.", "actor.", "critic.", "rollout.")) and name not in SIZES
    }
)


def enumerate_targets(values, rewards, mask):
    """Return each token's advantage and return."""
    advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for b in range(len(mask)):
        tokens = [t for t in range(mask.shape[1]) if mask[b, t]]  # observations are skipped
        lam = max(0.0, 1 - 1 / (1.5 * len(tokens)))
        advantage = following = 0.0
        for t in reversed(tokens):
            reward = rewards[b] if t == tokens[-1] else 0.0
            advantage = reward + following - values[b, t] + lam * advantage
            following = values[b, t]
            # With lambda = 1 and gamma = 1 a return is the sum of the rewards to come.
            advantages[b, t], returns[b, t] = advantage, rewards[b]
    return advantages, returns


def test_the_objective_is_the_papers_by_enumeration():
    mesh, rewards = tiny.make_mesh(), np.linspace(-1, 2, tiny.B, dtype=np.float32)
    with jax.set_mesh(mesh):
        state, rollout = tiny.make_state(CONFIG, mesh), tiny.make_rollout(mesh)
        # Tokens 2 to 4 of each response are an observation.
        mask = np.asarray(rollout.action_mask) & ~np.isin(np.arange(tiny.T), (2, 3, 4))
        rollout = dataclasses.replace(rollout, action_mask=jnp.asarray(mask))
        trainer, _ = tiny.make_experience(CONFIG, mesh, state, rollout)
        # Trainer over sampler, of which [1 - 0.3, 1 + 5] is kept.
        ratios = np.resize((1.0, 0.69, 0.71, 1.3, 5.99, 6.01, 0.2, 9.0, 2.0), mask.shape)
        rollout = dataclasses.replace(rollout, logprobs=trainer.old_logprobs - np.log(ratios))
        experience, _ = tiny.make_experience(CONFIG, mesh, state, rollout, rewards)
        # The second of two steps: a clip would keep values near those of the first.
        moved = tiny.with_models(state, critic=jax.tree.map(lambda x: 1.5 * x, state.critic))
        values = np.asarray(tiny.make_experience(CONFIG, mesh, moved, rollout)[0].values)
        batch = tiny.pack_batch(CONFIG, mesh, rollout, 4)
        arguments = (state.reference, experience, batch)
        _, actor = tiny.actor_gradients(CONFIG, state.actor, *arguments)
        _, critic = tiny.critic_gradients(CONFIG, moved.critic, *arguments)
    advantages, returns = enumerate_targets(np.asarray(trainer.values), rewards, mask)
    np.testing.assert_allclose(experience.advantages, advantages, atol=1e-4)
    np.testing.assert_allclose(experience.returns, np.where(mask, returns, 0), atol=1e-4)
    policy_loss = value_loss = 0.0
    for b, t in np.argwhere(mask):
        if 1 - 0.3 <= ratios[b, t] <= 1 + 5:
            policy_loss -= ratios[b, t] * advantages[b, t] * float(trainer.old_logprobs[b, t])
        value_loss += (values[b, t] - returns[b, t]) ** 2
    assert float(actor["actor/loss"]) == pytest.approx(policy_loss / mask.sum(), rel=1e-4)
    assert float(critic["critic/loss"]) == pytest.approx(value_loss / mask.sum(), rel=1e-4)


def test_the_critic_takes_two_steps_for_each_of_the_actor():
    """And it learns alone at first, from one response per prompt."""
    packed = RolloutPacker(CONFIG, tiny.make_mesh(), has_critic=True).pack(0, np.full(tiny.B, 9))
    assert [len(packed.mini_batches[role].counts) for role in ("actor", "critic")] == [1, 2]
    assert SHIPPED.updates_once and SHIPPED.rollout.n == 1 and SHIPPED.trainer.critic_warmup == 10
    assert CONFIG.critic.freeze == "attention"
