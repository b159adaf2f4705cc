"""Losses, gradients and metrics of masked responses against a token-by-token reference.

In these responses the policy chose only some of the tokens. The reference runs each sequence
unpacked, collects the action tokens of a response in a list and computes everything with NumPy on
these lists. Only the losses use `jax.numpy`, because they are differentiated.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.models import heads
from jax_ppo.ppo.reward_shaping import last_actions, move_to_actions
from jax_ppo.runtime import placement, sharding
from jax_ppo.training.state import TrainState
from jax_ppo.types import NOTHING, Params, Rollout
from tiny_update import assert_close

GAMMA, LAM, KL_COEF, KL_LOSS_COEF, ENTROPY_COEF = 0.9, 0.8, 0.3, 0.2, 0.05
CLIP, DUAL_CLIP, VALUE_CLIP = 0.1, 1.5, 0.05
OPTIONS = dict(
    actor__clip_ratio=CLIP,
    actor__clip_ratio_c=DUAL_CLIP,
    actor__entropy_coeff=ENTROPY_COEF,
    actor__kl_loss_coef=KL_LOSS_COEF,
    actor__kl_loss_type="k2",
    actor__loss_agg_mode="seq-mean-token-mean",
    actor__use_kl_loss=True,
    algorithm__bootstrap_truncated=True,
    algorithm__gamma=GAMMA,
    algorithm__kl_ctrl__kl_coef=KL_COEF,
    algorithm__kl_penalty="k1",
    algorithm__lam=LAM,
    algorithm__rollout_is="token",
    algorithm__use_kl_in_reward=True,
    critic__cliprange_value=VALUE_CLIP,
    critic__loss_agg_mode="token-mean",
    reward__length_penalty=0.01,
    rollout__temperature=0.7,
)
REWARDS = np.linspace(-1, 1, tiny.B).astype(np.float32)


def make_rollout(mesh: jax.sharding.Mesh) -> Rollout:
    """Return a random rollout whose responses contain tokens of the environment.

    Sample 0 has one token, an action. Sample 1 fills T (it is truncated) and ends with tokens of
    the environment, sample 2 starts with one, sample 3 has no action token, and the others lose
    tokens at random.
    """
    rollout = jax.device_get(tiny.make_rollout(mesh))
    random = np.random.default_rng(5)
    mask = rollout.action_mask & (random.random((tiny.B, tiny.T)) < 0.6)
    mask[0, 0] = True
    mask[1] = [True, True, False, False, True, True, False, True, False, False]
    mask[2, :2] = [False, True]
    mask[3] = False
    logprobs = -random.random((tiny.B, tiny.T)).astype(np.float32) * rollout.action_mask
    rollout = dataclasses.replace(rollout, action_mask=mask, logprobs=logprobs)
    return placement.place(rollout, sharding.rows(mesh))


@dataclasses.dataclass
class Reference:
    """A rollout with one sequence per row, and the quantities that NumPy computes from it.

    Each list holds one array per sample with the values at its action tokens.
    """

    tokens: np.ndarray
    starts: np.ndarray
    rollout: object
    old: list
    values: list
    advantages: list
    returns: list
    importance: list
    metrics: dict


def action_entries(x, rollout):
    """Return the entries of an array [B, T] at the action tokens, as a list of B arrays."""
    return [np.asarray(row)[mask] for row, mask in zip(x, rollout.action_mask, strict=True)]


@functools.partial(jax.jit, static_argnames=("head", "temperature"))
def forward_unpacked(params, head, tokens, starts, temperature):
    """Return log-probs and entropies, or values, [B, T], of the position before each token."""
    model = tiny.networks(tiny.config()).actor
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = model.apply({"params": params}, tokens, positions).hidden
    # The position that predicts response token t, and the token itself.
    places = jnp.minimum(starts[:, None] + jnp.arange(tiny.T + 1) - 1, tokens.shape[1] - 1)
    if head == "value":
        return jnp.take_along_axis(heads.compute_scalars(params, hidden), places, 1)
    targets = jnp.take_along_axis(tokens, places[:, 1:], 1)
    logits = heads.compute_logits(model.architecture, params, hidden) / temperature
    logits = jnp.take_along_axis(logits, places[:, :-1, None], 1)
    logprobs = jax.nn.log_softmax(logits)
    entropies = -(jnp.exp(logprobs) * logprobs).sum(-1)
    return jnp.take_along_axis(logprobs, targets[..., None], 2)[..., 0], entropies


def compute_reference(state, rollout) -> Reference:
    """Estimate advantages response by response and token by token."""
    rollout = jax.device_get(rollout)
    starts = rollout.prompts.lengths
    tokens = np.zeros((tiny.B, tiny.P + tiny.T), np.int32)
    for b, (start, length) in enumerate(zip(starts, rollout.lengths, strict=True)):
        tokens[b, :start] = rollout.prompts.tokens[b, :start]
        tokens[b, start : start + length] = rollout.responses[b, :length]
    logprobs, _ = forward_unpacked(state.actor, "lm", tokens, starts, 0.7)
    ref_logprobs, _ = forward_unpacked(state.reference, "lm", tokens, starts, 0.7)
    values_after = np.asarray(forward_unpacked(state.critic, "value", tokens, starts, None))
    old, ref, sampled, values = (
        action_entries(x, rollout)
        for x in (logprobs, ref_logprobs, rollout.logprobs, values_after[:, :-1])
    )
    kl = [a - b for a, b in zip(old, ref, strict=True)]
    advantages, returns, shaped = [], [], []
    for b in range(tiny.B):
        rewards = -KL_COEF * kl[b]
        if len(rewards):
            # The length penalty counts the whole response.
            rewards[-1] += REWARDS[b] - 0.01 * rollout.lengths[b]
        shaped.append(rewards.sum())
        # After the last action the state contains all tokens, also the environment's.
        value_after = values_after[b, rollout.lengths[b]] if rollout.truncated[b] else 0.0
        advantage = 0.0
        backwards = []
        for reward, value in zip(rewards[::-1], values[b][::-1], strict=True):
            advantage = reward + GAMMA * value_after - value + GAMMA * LAM * advantage
            value_after = value
            backwards.append(advantage)
        advantages.append(np.array(backwards[::-1], np.float32))
        returns.append(advantages[b] + values[b])
    flat = np.concatenate(advantages)
    mean, std = flat.mean(), flat.std()
    importance = [np.minimum(np.exp(a - b), 2.0) for a, b in zip(old, sampled, strict=True)]
    flat_returns = np.concatenate(returns)
    residual = flat_returns - np.concatenate(values)
    metrics = {
        "advantages/mean": mean,
        "advantages/std": std,
        "critic/explained_variance": 1 - residual.var() / flat_returns.var(),
        "critic/returns_mean": flat_returns.mean(),
        "critic/returns_std": flat_returns.std(),
        "critic/values_mean": np.concatenate(values).mean(),
        "kl/reference": np.concatenate(kl).mean(),
        "reward/shaped_mean": np.mean(shaped),
        "rollout/importance_mean": np.concatenate(importance).mean(),
        "rollout/logprob_difference": np.abs(np.concatenate(old) - np.concatenate(sampled)).mean(),
        "response_length/mean": rollout.lengths.mean(),
    }
    whitened = [(x - mean) / np.sqrt(std**2 + 1e-8) for x in advantages]
    return Reference(tokens, starts, rollout, old, values, whitened, returns, importance, metrics)


def actor_reference(params, expected_rollout: Reference, ref_params, policy_loss):
    """Return the actor's loss and metrics, a sum over lists of action tokens."""
    logprobs_BxT, entropies_BxT = forward_unpacked(
        params, "lm", expected_rollout.tokens, expected_rollout.starts, 0.7
    )
    ref_BxT, _ = forward_unpacked(
        ref_params, "lm", expected_rollout.tokens, expected_rollout.starts, 0.7
    )
    samples = sum(len(x) > 0 for x in expected_rollout.old)
    tokens = sum(map(len, expected_rollout.old))
    totals = dict.fromkeys(("pg_loss", "kl_loss", "bonus"), 0.0)
    entropy, k3, ratios, clipped = [], [], [], []
    for b in range(tiny.B):
        positions = np.flatnonzero(expected_rollout.rollout.action_mask[b])
        if not len(positions):
            continue
        weight = 1 / (len(positions) * samples)
        logprobs, entropies = logprobs_BxT[b, positions], entropies_BxT[b, positions]
        log_ratio = logprobs - expected_rollout.old[b]
        ratio = jnp.exp(log_ratio)
        if policy_loss == "gspo":
            # GSPO-token: the value is that of the response's mean, the gradient that of each
            # token's own log-ratio.
            own_gradient = log_ratio - jax.lax.stop_gradient(log_ratio)
            ratio = jnp.exp(jax.lax.stop_gradient(log_ratio.mean()) + own_gradient)
        advantages = expected_rollout.advantages[b]
        unclipped_loss = -ratio * advantages
        clipped_loss = -jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages
        loss = jnp.maximum(unclipped_loss, clipped_loss)
        loss = jnp.where(advantages < 0, jnp.minimum(loss, -DUAL_CLIP * advantages), loss)
        totals["pg_loss"] += weight * (expected_rollout.importance[b] * loss).sum()
        totals["kl_loss"] += weight * (0.5 * (logprobs - ref_BxT[b, positions]) ** 2).sum()
        totals["bonus"] += weight * entropies.sum()
        entropy.append(entropies)
        k3.append(jnp.exp(log_ratio) - 1 - log_ratio)
        ratios.append(ratio)
        clipped.append(clipped_loss > unclipped_loss)
    loss = totals["pg_loss"] + KL_LOSS_COEF * totals["kl_loss"] - ENTROPY_COEF * totals["bonus"]
    ratios = jnp.concatenate(ratios)
    return loss, {
        "actor/loss": loss,
        "actor/pg_loss": totals["pg_loss"],
        "actor/kl_loss": totals["kl_loss"],
        "actor/entropy": jnp.concatenate(entropy).sum() / tokens,
        "actor/approx_kl": jnp.concatenate(k3).sum() / tokens,
        "actor/ratio_mean": ratios.mean(),
        "actor/ratio_min": ratios.min(),
        "actor/ratio_max": ratios.max(),
        "actor/clip_fraction": jnp.concatenate(clipped).mean(),
    }


def critic_reference(params, expected_rollout: Reference):
    """Return the critic's loss and metrics, a mean over the list of all action tokens."""
    values_BxT = forward_unpacked(
        params, "value", expected_rollout.tokens, expected_rollout.starts, None
    )
    losses, clipped = [], []
    for b in range(tiny.B):
        positions = np.flatnonzero(expected_rollout.rollout.action_mask[b])
        values, old = values_BxT[b, positions], expected_rollout.values[b]
        unclipped_loss = 0.5 * (values - expected_rollout.returns[b]) ** 2
        clipped_values = jnp.clip(values, old - VALUE_CLIP, old + VALUE_CLIP)
        clipped_loss = 0.5 * (clipped_values - expected_rollout.returns[b]) ** 2
        losses.append(jnp.maximum(unclipped_loss, clipped_loss))
        clipped.append(clipped_loss > unclipped_loss)
    loss = jnp.concatenate(losses).mean()
    return loss, {"critic/loss": loss, "critic/clip_fraction": jnp.concatenate(clipped).mean()}


def assert_equal_metrics(ours, expected):
    for name, value in expected.items():
        assert float(ours[name]) == pytest.approx(float(value), rel=2e-4, abs=2e-5), name


def make_state(config, mesh) -> TrainState:
    """Return a state whose reference differs from the actor, so that its KL is not 0."""
    state = tiny.make_state(config, mesh)
    return tiny.with_models(state, reference=jax.tree.map(lambda x: x * 0.9, state.reference))


def move_params(state: TrainState) -> tuple[Params, Params]:
    """Return the parameters of actor and critic as they may be later in an update."""
    return jax.tree.map(lambda x: x * 1.1, (state.actor, state.critic))


@functools.cache
def compute_expected(policy_loss: str):
    """Return the rollout, and gradients and metrics of actor and critic, however they are cut."""
    config, mesh = tiny.config(**OPTIONS), tiny.make_mesh()
    with jax.set_mesh(mesh):
        state = make_state(config, mesh)
        rollout = compute_reference(state, make_rollout(mesh))
        moved_actor, moved_critic = move_params(state)
        actor_loss = functools.partial(
            actor_reference,
            expected_rollout=rollout,
            ref_params=state.reference,
            policy_loss=policy_loss,
        )
        critic_loss = functools.partial(critic_reference, expected_rollout=rollout)
        return (
            rollout,
            jax.jit(jax.grad(actor_loss, has_aux=True))(moved_actor),
            jax.jit(jax.grad(critic_loss, has_aux=True))(moved_critic),
        )


@pytest.mark.parametrize(
    ("policy_loss", "packed", "rows"),
    [
        pytest.param("vanilla", True, 1, marks=pytest.mark.slow),
        pytest.param("gspo", True, 4, marks=pytest.mark.slow),
        pytest.param("vanilla", True, 4, marks=pytest.mark.exhaustive),
        pytest.param("vanilla", False, 8, marks=pytest.mark.exhaustive),
    ],
)
def test_packed_losses_equal_those_computed_token_by_token(policy_loss, packed, rows):
    config = tiny.config(actor__policy_loss=policy_loss, packing__enabled=packed, **OPTIONS)
    mesh = tiny.make_mesh()
    expected_rollout, expected_actor, expected_critic = compute_expected(policy_loss)
    with jax.set_mesh(mesh):
        state, rollout = make_state(config, mesh), make_rollout(mesh)
        moved_actor, moved_critic = move_params(state)
        experience, metrics = tiny.make_experience(config, mesh, state, rollout, REWARDS, rows)
        batch = tiny.pack_batch(config, mesh, rollout, rows)
        actor_gradient, actor_metrics = tiny.actor_gradients(
            config, moved_actor, state.reference, experience, batch
        )
        critic_gradient, critic_metrics = tiny.critic_gradients(
            config, moved_critic, None, experience, batch
        )
    for ours, expected in (
        (experience.old_logprobs, expected_rollout.old),
        (experience.values, expected_rollout.values),
        (experience.advantages, expected_rollout.advantages),
        (experience.returns, expected_rollout.returns),
        (experience.importance, expected_rollout.importance),
    ):
        assert not np.asarray(ours)[~expected_rollout.rollout.action_mask].any()
        for row, expected_row in zip(
            action_entries(ours, expected_rollout.rollout), expected, strict=True
        ):
            np.testing.assert_allclose(row, expected_row, rtol=1e-4, atol=1e-4)
    assert_equal_metrics(metrics, expected_rollout.metrics)
    assert 0 < float(actor_metrics["actor/clip_fraction"]) < 1
    assert 0 < float(critic_metrics["critic/clip_fraction"]) < 1
    assert_equal_metrics(actor_metrics, expected_actor[1])
    assert_equal_metrics(critic_metrics, expected_critic[1])
    assert_close(actor_gradient, expected_actor[0], tolerance=1e-4)
    assert_close(critic_gradient, expected_critic[0], tolerance=1e-4)


def test_a_response_without_actions_counts_in_no_mean():
    """If it is alone in a mini-batch, nothing moves: it has no token to learn from."""
    config, mesh = tiny.config(), tiny.make_mesh()
    nets = tiny.networks(config)
    with jax.set_mesh(mesh), jax.debug_nans(True):
        state, rollout = tiny.make_state(config, mesh), make_rollout(mesh)
        experience, _ = tiny.make_experience(config, mesh, state, rollout)
        batches = tiny.pack_batches(config, mesh, rollout, [[3, 3]], 2)
        before = jax.device_get(state.actor)
        learner = tiny.actor_learner(config, nets, experience, state.reference)
        params, _, metrics = jax.jit(learner.scan_mini_batches)(
            state.actor, state.optimizers["actor"], 1e-2, True, batches
        )
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(params))
    assert metrics["actor/loss"] == NOTHING and metrics["actor/skipped"] == 0


def test_the_score_stands_on_the_last_action():
    mask = jnp.array([[1, 0, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]], bool)
    assert last_actions(mask).tolist() == [
        [False, False, True, False],
        [False, False, False, True],
        [False] * 4,
        [True, False, False, False],
    ]


def test_rewards_earned_on_other_tokens_move_to_the_action_before():
    mask = jnp.array([[0, 1, 0, 0, 1], [1, 1, 1, 1, 1], [1, 0, 1, 0, 0]], bool)
    rewards = jnp.array([[1.0, 2.0, 4.0, 8.0, 16.0], [1.0, 2.0, 3.0, 4.0, 5.0], [1, 2, 4, 8, 16]])
    assert move_to_actions(rewards, mask).tolist() == [
        [0.0, 15.0, 0.0, 0.0, 16.0],
        [1.0, 2.0, 3.0, 4.0, 5.0],
        [3.0, 0.0, 28.0, 0.0, 0.0],
    ]
