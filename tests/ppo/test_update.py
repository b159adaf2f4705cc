"""Invariants of scoring and update: results do not depend on batch cuts; the first ratio is 1."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tiny
from jax_ppo.models import heads
from jax_ppo.models.layer_stack import unroll_params
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo import forward_passes
from jax_ppo.runtime import compiled_programs
from jax_ppo.sampler.decode_loop import SamplingOptions, sampler_program
from jax_ppo.training.state import StateBuilder, TrainState, trained_trees
from jax_ppo.types import NOTHING, Params, Sequences
from tiny_actor import HYBRID
from tiny_update import ALL, HALVES, assert_close, run_gradients, run_update

LOSSES = {"actor__use_kl_loss": True, "actor__kl_loss_coef": 0.1, "actor__entropy_coeff": 0.01}


@pytest.fixture(scope="module")
def undivided():
    """Return gradients and metrics of the undivided, padded mini-batch on one device."""
    config = tiny.config(packing__enabled=False, **LOSSES)
    return run_gradients(config, tiny.make_mesh(), rows=8)


def test_a_tied_head_has_a_gradient(undivided):
    """Token 1 is in no prompt and no response: only the softmax reads its embedding."""
    gradients, _ = undivided
    embedding = gradients[0]["embed"]["embedding"]
    assert "lm_head" not in gradients[0] and np.abs(embedding[1]).max() > 1e-4


@pytest.mark.parametrize(
    ("packed", "rows"),
    [
        (True, 1),
        *(pytest.param(*more, marks=pytest.mark.exhaustive) for more in ((True, 4), (False, 2))),
    ],
)
def test_micro_batches_and_packing_do_not_change_the_gradient(undivided, packed, rows):
    config = tiny.config(packing__enabled=packed, **LOSSES)
    gradients, metrics = run_gradients(config, tiny.make_mesh(), rows)
    assert_close(undivided[0], gradients)
    assert metrics == pytest.approx(undivided[1], rel=1e-4, abs=1e-5)


def test_a_loss_sees_the_tokens_of_the_whole_mini_batch(tmp_path):
    """It leaves out those whose advantages are above the mini-batch's mean."""
    (tmp_path / "mine.py").write_text(
        "import jax.numpy as jnp\n"
        "from jax_ppo.kernels import losses\n"
        "def below_the_mean(batch, clip, mini_batch, to_rows):\n"
        "    policy = losses.clipped_surrogate(batch, clip)\n"
        "    mean = mini_batch.advantages.mean(where=mini_batch.mask)\n"
        "    kept = to_rows(mini_batch.advantages <= mean) > 0\n"
        "    return policy._replace(loss=jnp.where(kept, policy.loss, 0))\n"
    )
    config = tiny.config(actor__policy_loss=f"{tmp_path}/mine.py:below_the_mean")
    whole, some = (
        run_gradients(config, tiny.make_mesh(), rows, roles=("actor",))[0] for rows in (8, 1)
    )
    assert_close(whole, some)
    without, _ = run_gradients(tiny.config(), tiny.make_mesh(), 8, roles=("actor",))
    with pytest.raises(AssertionError):
        assert_close(whole, without, tolerance=1e-3)


@pytest.mark.slow  # the exhaustive suite has other meshes, in float64 (harness/mesh_sweep.py)
def test_devices_do_not_change_the_gradient(undivided):
    mesh = tiny.make_mesh(8, data=2, fsdp=2, model=2)
    gradients, metrics = run_gradients(tiny.config(**LOSSES), mesh, rows=8)
    assert_close(undivided[0], gradients)
    assert metrics == pytest.approx(undivided[1], rel=1e-4, abs=1e-5)


def test_a_vocabulary_that_no_devices_divide_has_the_gradients_of_one(monkeypatch):
    """33 rows on model=2: a token was added to a tokenizer of 32."""
    odd = dataclasses.replace(tiny.ARCHITECTURE, vocab_size=33)
    monkeypatch.setattr(tiny, "ARCHITECTURE", odd)
    config = tiny.config(**LOSSES, actor__kl_loss_type="full")
    expected, _ = run_gradients(config, tiny.make_mesh(), rows=8)
    gradients, _ = run_gradients(config, tiny.make_mesh(8, data=2, fsdp=2, model=2), rows=4)
    assert_close(expected, gradients)


@pytest.mark.parametrize("temperature", [0.6, pytest.param(1.0, marks=pytest.mark.exhaustive)])
def test_first_mini_batch_has_ratio_one_and_kl_zero(temperature):
    config = tiny.config(
        rollout__temperature=temperature, algorithm__use_kl_in_reward=True, actor__ppo_epochs=2
    )
    _, _, metrics = run_update(config, tiny.make_mesh(), HALVES + HALVES, 2)
    assert metrics["actor/first_log_ratio"] < 1e-5
    assert abs(metrics["kl/reference"]) < 1e-6
    # In later mini-batches the policy has moved: the ratio is not 1 by construction.
    assert metrics["actor/log_ratio_max"] > 1e-3


def sample_rollout(config, mesh, state):
    """Return a rollout sampled from the actor, with the sampler's log-probs."""
    prompts = tiny.make_rollout(mesh).prompts
    sampler = sampler_program(
        Transformer(tiny.ARCHITECTURE, jnp.float32, unrolled=True),
        SamplingOptions(tiny.T, config.rollout.temperature, eos_ids=(1,)),
    )
    return sampler(unroll_params(state.actor), prompts, jax.random.key(3))


@pytest.mark.parametrize("temperature", [0.6, pytest.param(1.0, marks=pytest.mark.exhaustive)])
def test_the_samplers_logprobs_are_the_old_ones_in_float32(temperature):
    options = dict(rollout__temperature=temperature, actor__ppo_mini_batch_size=tiny.B // 2)
    recomputing, reusing = (
        tiny.config(rollout__reuse_logprobs=choice, **options) for choice in ("never", "auto")
    )
    mesh = tiny.make_mesh()
    with jax.set_mesh(mesh):
        state = tiny.make_state(reusing, mesh)
        rollout = sample_rollout(reusing, mesh, state)
        recomputed, metrics = tiny.make_experience(recomputing, mesh, state, rollout)
        experience, reused_metrics = tiny.make_experience(reusing, mesh, state, rollout)
        assert np.abs(recomputed.old_logprobs - experience.old_logprobs).max() <= 1e-5
        assert metrics["rollout/logprob_difference"] <= 1e-5
        assert "rollout/logprob_difference" not in reused_metrics
        batches = tiny.pack_batches(reusing, mesh, rollout, HALVES, 2)
        _, metrics = tiny.update_state(reusing, state, experience, batches, batches)
    assert 0 < metrics["actor/first_log_ratio"] <= 1e-4


@pytest.mark.slow
def test_a_single_optimizer_step_has_ratio_one_by_definition():
    """Even if the sampler reports probability 1 for each token, as here."""
    states = {}
    for choice in ("never", "auto"):
        config = tiny.config(rollout__reuse_logprobs=choice, model__dtype="bfloat16")
        _, states[choice], metrics = run_update(config, tiny.make_mesh(), ALL, 4)
        assert (metrics["actor/log_ratio_max"] == 0) or choice == "never"
    assert_close(
        *(jax.tree.map(np.asarray, s.optimizers["actor"]) for s in states.values()), tolerance=0.05
    )


@pytest.mark.parametrize(
    ("choice", "changes", "reuses"),
    [
        ("auto", {"model__dtype": "bfloat16"}, True),
        ("auto", {"model__dtype": "bfloat16", "actor__ppo_epochs": 2}, False),
        ("auto", {"model__dtype": "bfloat16", "algorithm__use_kl_in_reward": True}, False),
        ("auto", {"actor__ppo_epochs": 2}, True),
        ("auto", {"actor__ppo_epochs": 2, "algorithm__use_kl_in_reward": True}, False),
        ("always", {"model__dtype": "bfloat16", "actor__ppo_epochs": 2}, True),
        ("never", {}, False),
    ],
)
def test_where_the_samplers_logprobs_are_reused(choice, changes, reuses):
    config = tiny.config(rollout__reuse_logprobs=choice, **changes)
    assert forward_passes.reuses_logprobs(config) == reuses


def test_each_role_is_trained_with_its_own_optimizer_and_clip():
    """AdamW's first step is lr g / (|g| + eps), where clipping has scaled the gradient g to c."""
    config = tiny.config(
        actor__optim__eps=1e-3,
        critic__optim__eps=0.5,
        critic__optim__lr=1e-3,
        actor__grad_clip=0.2,
        critic__grad_clip=0.3,
        actor__optim__weight_decay=0.0,
        critic__optim__weight_decay=0.0,
    )
    gradients, metrics = run_gradients(config, tiny.make_mesh(), 2, move=1.0)
    before, after, _ = run_update(config, tiny.make_mesh(), ALL, 2)
    for role, grads in zip(("actor", "critic"), gradients, strict=True):
        options = getattr(config, role)
        norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        assert norm > options.grad_clip
        expected = jax.tree.map(
            lambda g, c=options.grad_clip / norm, o=options.optim: (
                -o.lr * c * g / (np.abs(c * g) + o.eps)
            ),
            grads,
        )
        moved = jax.tree.map(np.subtract, after.models[role], before.models[role])
        largest = max(np.abs(x).max() for x in jax.tree.leaves(expected))
        jax.tree.map(
            lambda x, y, scale=largest: np.testing.assert_allclose(x, y, atol=0.02 * scale),
            moved,
            expected,
        )


def test_each_role_rounds_what_it_stores_in_bfloat16_by_separate_random_numbers():
    config = tiny.config(seed=7, critic__optim__param_dtype="bfloat16")
    nets = tiny.networks(config)
    actor, critic = (f(config, nets, None) for f in (tiny.actor_learner, tiny.critic_learner))
    assert (actor.rounding_seed, critic.rounding_seed) == (0, 7)
    assert actor.rounding_stream != critic.rounding_stream


def test_the_critic_averages_as_its_option_says_or_like_the_actor():
    config = tiny.config(actor__loss_agg_mode="seq-mean-token-mean")
    for setting, expected in ((None, "seq-mean-token-mean"), ("token-mean", "token-mean")):
        critic = dataclasses.replace(config.critic, loss_agg_mode=setting)
        changed = dataclasses.replace(config, critic=critic)
        learner = tiny.critic_learner(changed, tiny.networks(config), None)
        assert learner.objective.aggregation == expected


def zero_head(state):
    """Return the state with a critic that predicts 0, as at the start of a run."""
    if "critic" not in state.models:
        return state
    head = jax.tree.map(jnp.zeros_like, state.critic["score"])
    return tiny.with_models(state, critic={**state.critic, "score": head})


GROUPED = {"rollout__n": 4}
ABSOLUTE = {"actor__use_kl_loss": True, "actor__kl_loss_type": "abs"}


@pytest.mark.parametrize(
    ("reward", "changes", "shape"),
    [
        (0.0, {}, {}),
        (0.1, {"algorithm__lam": 1.0}, {}),
        (0.1, {"algorithm__adv_estimator": "grpo", **GROUPED, "actor__use_kl_loss": True}, {}),
        *(
            pytest.param(*more, marks=pytest.mark.slow)
            for more in (
                (0.1, {"algorithm__adv_estimator": "rloo", **GROUPED}, {}),
                (0.1, {"algorithm__adv_estimator": "rloo", **GROUPED, **ABSOLUTE}, {}),
                (0.1, {"algorithm__adv_estimator": "reinforce_plus_plus"}, {}),
                (0.1, {"algorithm__adv_estimator": "reinforce_plus_plus_baseline", **GROUPED}, {}),
                (0.1, {"reward__normalize": "running"}, {}),
                (0.1, {"algorithm__lam": 1.0, "critic__normalize_values": True}, {}),
                (0.0, {"model__dtype": "bfloat16"}, {}),
                (0.0, {}, {"fsdp": 8}),
            )
        ),
    ],
)
def test_equal_rewards_move_no_parameter_of_the_policy(reward, changes, shape):
    """The KL to an equal reference is 0, though the sampler's log-probs, 0 here, are far off."""
    config = tiny.config(
        rollout__reuse_logprobs="auto",
        algorithm__use_kl_in_reward=True,
        actor__ppo_epochs=2,
        actor__optim__weight_decay=0.0,
        critic__optim__weight_decay=0.0,
        **changes,
    )
    rewards = np.full(tiny.B, reward, np.float32)
    mesh = tiny.make_mesh(8 if shape else 1, **shape)
    rows = 8 if shape else 2
    before, after, metrics = run_update(config, mesh, ALL, rows, 0, rewards, prepare=zero_head)
    assert metrics["kl/reference"] == metrics["actor/grad_norm"] == 0
    jax.tree.map(np.testing.assert_array_equal, before.actor, after.actor)
    # A critic learns what equal rewards are, unless that is 0 or normalized to 0.
    if config.has_critic and (reward == 0 or "reward__normalize" in changes):
        jax.tree.map(np.testing.assert_array_equal, before.critic, after.critic)


def test_critic_warmup_is_exactly_n_steps():
    """Of 10 steps, the actor's rate falls over the last 7 and the critic's over all."""
    linear = {
        f"{role}__optim__{name}": value
        for role in ("actor", "critic")
        for name, value in (("lr", 1.0), ("lr_schedule", "linear"), ("lr_warmup_steps", 0))
    }
    config = tiny.config(trainer__critic_warmup=3, actor__target_kl=1.0, **linear)
    for step, rate in ((0, 0), (2, 0), (3, 1), (8, 2 / 7)):
        before, after, metrics = run_update(
            config,
            tiny.make_mesh(),
            ALL,
            4,
            prepare=lambda s, step=step: TrainState(**{**vars(s), "step": jnp.int32(step)}),
            total_steps=10,
        )
        same = jax.tree.map(
            lambda a, b: bool((a == b).all()),
            (before.actor, before.optimizers["actor"]),
            jax.tree.map(np.asarray, (after.actor, after.optimizers["actor"])),
        )
        assert all(jax.tree.leaves(same)) == (rate == 0)
        assert metrics["actor/steps_taken"] == (rate > 0)
        rates = [metrics["actor/lr"], metrics["critic/lr"]]
        np.testing.assert_allclose(rates, [rate, 1 - step / 10], rtol=1e-6)
        assert not np.array_equal(before.critic["norm"]["scale"], after.critic["norm"]["scale"])


@pytest.mark.parametrize(
    ("group", "modules"),
    [
        ("attention", {"attention", "delta_net"}),
        pytest.param("embedding", {"embed"}, marks=pytest.mark.slow),
    ],
)
def test_frozen_parameters_keep_their_bits_and_all_others_move(monkeypatch, group, modules):
    monkeypatch.setattr(tiny, "ARCHITECTURE", HYBRID)
    config = tiny.config(critic__freeze=group)
    before, after, _ = run_update(config, tiny.make_mesh(), HALVES, 4)
    moments = jax.tree_util.tree_leaves_with_path(after.optimizers["critic"])
    leaves = jax.tree_util.tree_leaves_with_path(before.critic)
    for (path, old), new in zip(leaves, jax.tree.leaves(after.critic), strict=True):
        is_frozen = any(key.key in modules for key in path)
        assert np.array_equal(old, new) == is_frozen, path
        of_leaf = [moment for moment, _ in moments if moment[2:] == path]
        assert len(of_leaf) == (0 if is_frozen else 2), path


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted():
    config = tiny.config(actor__target_kl=1.0)
    rewards = np.zeros(tiny.B, np.float32)
    rewards[3] = np.inf
    before, after, metrics = run_update(config, tiny.make_mesh(), ALL, 4, rewards=rewards)
    for name in ("models", "optimizers"):
        jax.tree.map(
            np.testing.assert_array_equal,
            getattr(before, name),
            jax.tree.map(np.asarray, getattr(after, name)),
        )
    assert metrics["actor/skipped"] == metrics["critic/skipped"] == 1
    assert int(after.step) == 1 and metrics["actor/steps_taken"] == 0


def test_score_sits_on_the_last_token_and_returns_are_raw():
    config = tiny.config(algorithm__gamma=1.0, algorithm__lam=1.0)
    mesh = tiny.make_mesh()
    with jax.set_mesh(mesh):
        rollout = tiny.make_rollout(mesh)
        rewards = np.arange(tiny.B, dtype=np.float32) + 0.49  # not truncated to integers
        experience, metrics = tiny.make_experience(
            config, mesh, tiny.make_state(config, mesh), rollout, rewards
        )
    lengths = np.asarray(rollout.lengths)
    mask = np.arange(tiny.T) < lengths[:, None]
    # gamma = lambda = 1: every token's return is the score of its response, independent of the
    # values.
    np.testing.assert_allclose(experience.returns, np.where(mask, rewards[:, None], 0), atol=1e-4)
    advantages = np.asarray(experience.advantages)[mask]
    assert abs(advantages.mean()) < 1e-5 and abs(advantages.std() - 1) < 1e-4
    assert (np.asarray(experience.advantages)[~mask] == 0).all()
    assert float(metrics["reward/mean"]) == pytest.approx(rewards.mean())


def test_a_broken_rollout_leaves_the_adaptive_coefficient_alone():
    config = tiny.config(algorithm__use_kl_in_reward=True, algorithm__kl_ctrl__type="adaptive")

    def broken(state):
        return tiny.with_models(
            state, reference=jax.tree.map(lambda x: x * jnp.nan, state.reference)
        )

    before, after, _ = run_update(config, tiny.make_mesh(), ALL, 4, prepare=broken)
    assert float(after.control.kl_coef) == float(before.control.kl_coef)


def test_a_rollout_that_teaches_nothing_has_no_figures():
    """Regression: minima and maxima were infinite, and an entropy of 0 was taken for a collapse."""
    config, mesh = tiny.config(algorithm__mask_truncated=True), tiny.make_mesh()
    with jax.set_mesh(mesh):
        state, rollout = tiny.make_state(config, mesh), tiny.make_rollout(mesh)
        rollout = dataclasses.replace(rollout, truncated=jnp.ones_like(rollout.truncated))
        experience, _ = tiny.make_experience(config, mesh, state, rollout)
        batches = tiny.pack_batches(config, mesh, rollout, ALL, 4)
        before = np.array(jax.tree.leaves(state.actor)[0])
        after, metrics = tiny.update_state(config, state, experience, batches, batches)
    finite = {name for name, x in metrics.items() if x != NOTHING}
    assert finite == {"actor/lr", "actor/skipped", "critic/lr", "critic/skipped"}
    np.testing.assert_array_equal(jax.tree.leaves(after.actor)[0], before)


@pytest.mark.slow
def test_the_state_keeps_its_places():
    """Regression: the compiler split replicated norms, which forced a recompilation."""
    mesh = tiny.make_mesh(8, data=2, fsdp=2, model=2)
    config = tiny.config()
    with jax.set_mesh(mesh):
        expected = jax.tree.map(lambda x: x.sharding, tiny.make_state(config, mesh))
    _, after, _ = run_update(config, mesh, ALL, 8)
    for name in ("models", "optimizers"):
        jax.tree.map(
            lambda x, s: (
                s.is_equivalent_to(x.sharding, x.ndim) or pytest.fail(f"{x.sharding} is not {s}")
            ),
            getattr(after, name),
            getattr(expected, name),
        )


def test_scoring_is_one_program_for_all_prompt_buckets():
    config, mesh = tiny.config(), tiny.make_mesh()
    with jax.set_mesh(mesh):
        state, rollout = tiny.make_state(config, mesh), tiny.make_rollout(mesh)
        tiny.make_experience(config, mesh, state, rollout)
        before = forward_passes.forward_part.jitted._cache_size()
        wider = dataclasses.replace(
            rollout.prompts, tokens=jnp.pad(rollout.prompts.tokens, ((0, 0), (0, 3)))
        )
        tiny.make_experience(config, mesh, state, dataclasses.replace(rollout, prompts=wider))
    assert forward_passes.forward_part.jitted._cache_size() == before


@pytest.mark.parametrize(
    ("change", "compiles"),
    [
        ({"experiment_name": "another", "trainer__logger": "", "trainer__save_freq": 7}, False),
        ({"rollout__temperature": 0.9}, True),
    ],
)
def test_only_options_that_a_program_reads_compile_it_again(change, compiles):
    mesh, first = tiny.make_mesh(), tiny.config()

    def run_step(config, state, rollout, batches):
        experience, _ = tiny.make_experience(config, mesh, state, rollout)
        tiny.update_state(config, state, experience, batches, batches)

    with jax.set_mesh(mesh):
        # An update donates its state: there is one for each run.
        states = [tiny.make_state(first, mesh) for _ in range(2)]
        rollout = tiny.make_rollout(mesh)
        batches = tiny.pack_batches(first, mesh, rollout, ALL, 4)
        run_step(first, states[0], rollout, batches)
        with compiled_programs.count_compilations() as count:
            run_step(tiny.config(**change), states[1], rollout, batches)
    assert (count.programs > 0) == compiles


def test_joining_leaves_no_gap():
    mesh = tiny.make_mesh()
    rollout = tiny.make_rollout(mesh)
    sequences = forward_passes.join_sequences(rollout, tiny.P + tiny.T)
    for i in range(tiny.B):
        prompt_length, response_length = int(rollout.prompts.lengths[i]), int(rollout.lengths[i])
        prompt = rollout.prompts.tokens[i, :prompt_length].tolist()
        expected = prompt + rollout.responses[i, :response_length].tolist()
        padding = [0] * (tiny.P + tiny.T - len(expected))
        assert sequences.tokens[i].tolist() == expected + padding


@functools.partial(jax.jit, static_argnames="model")
def last_scalars(model: Transformer, params: Params, sequences: Sequences) -> jax.Array:
    """Return the scalar head's output at the last token of each sequence in its own row, [B]."""
    hidden, *_ = model.apply(
        {"params": params},
        sequences.tokens,
        jnp.broadcast_to(jnp.arange(sequences.tokens.shape[1]), sequences.tokens.shape),
    )
    last = sequences.prompt_lengths + sequences.lengths - 1
    return jnp.take_along_axis(heads.compute_scalars(params, hidden), last[:, None], 1)[:, 0]


def test_reward_model_scores_stand_on_the_last_token():
    """Packed rows give the same score at a sequence's end as a separate row for it."""
    config, mesh = tiny.config(), tiny.make_mesh()
    with jax.set_mesh(mesh):
        params, model = tiny.make_state(config, mesh).critic, tiny.networks(config).critic
        rollout = tiny.make_rollout(mesh)
        sequences = forward_passes.join_sequences(rollout, config.sequence_length)
        batch = tiny.pack_batch(config, mesh, rollout, 2)
        scores = forward_passes.reward_model_scores(
            model, params, sequences, (batch.packing, batch.counts), "last_token"
        )
        expected = last_scalars(model, params, sequences)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-4)


OTHER_LOSSES = dict(
    actor__policy_loss="gspo",
    actor__use_kl_loss=True,
    actor__kl_loss_type="full",
    actor__kl_loss_coef=0.1,
    actor__loss_agg_mode="seq-mean-token-sum-norm",
)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "devices"), [(1, 1), (8, 8)])
def test_losses_of_whole_responses_do_not_depend_on_cuts_either(rows, devices):
    padded = tiny.config(packing__enabled=False, **OTHER_LOSSES)
    expected, expected_metrics = run_gradients(padded, tiny.make_mesh(), rows=8)
    gradients, metrics = run_gradients(tiny.config(**OTHER_LOSSES), tiny.make_mesh(devices), rows)
    assert_close(expected, gradients)
    assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)


def test_a_kl_in_the_loss_of_ones_own_has_the_gradient_of_the_same_built_in_one(tmp_path):
    (tmp_path / "mine.py").write_text("def k2(log_ratio):\n    return log_ratio**2 / 2\n")
    gradients = []
    for kind in ("k2", f"{tmp_path}/mine.py:k2"):
        config = tiny.config(
            actor__use_kl_loss=True, actor__kl_loss_coef=0.5, actor__kl_loss_type=kind
        )
        gradients.append(run_gradients(config, tiny.make_mesh(), 4, roles=("actor",))[0][0])
    assert_close(*gradients)


def test_a_loss_of_ones_own(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from jax_ppo.kernels import policy_losses\n"
        "def halved(batch, clip):\n"
        "    policy = policy_losses.clipped_surrogate(batch, clip)\n"
        "    return policy._replace(loss=policy.loss / 2), {'twice': 2 * policy.ratio}\n"
    )
    halved = tiny.config(actor__policy_loss=f"{tmp_path}/mine.py:halved")
    (vanilla, _), (custom, metrics) = (
        run_gradients(config, tiny.make_mesh(), 4, roles=("actor",))
        for config in (tiny.config(), halved)
    )
    assert_close(jax.tree.map(lambda x: x / 2, vanilla[0]), custom[0])
    assert metrics["actor/twice"] == pytest.approx(2 * metrics["actor/ratio_mean"])


def test_masked_responses_teach_nothing():
    """The gradients do not depend on the tokens or rewards of the truncated response."""
    config = tiny.config(algorithm__mask_truncated=True, algorithm__whiten_advantages=False)

    def change_masked(experience):
        unmasked = experience.sample_mask[:, None]
        assert 0 < int(experience.sample_mask.sum()) < tiny.B
        return dataclasses.replace(
            experience,
            advantages=jnp.where(unmasked, experience.advantages, 1e3),
            returns=jnp.where(unmasked, experience.returns, 1e3),
        )

    plain = run_gradients(config, tiny.make_mesh(), 4)
    changed = run_gradients(config, tiny.make_mesh(), 4, change_masked)
    assert_close(plain[0], changed[0])


def test_without_a_critic_there_is_none():
    config = tiny.config(
        algorithm__adv_estimator="rloo",
        rollout__n=2,
        data__train_batch_size=4,
        data__val_batch_size=4,
        actor__ppo_mini_batch_size=4,
    )
    before, after, metrics = run_update(config, tiny.make_mesh(), ALL, 4)
    assert after.critic is None and "critic" not in after.optimizers
    assert not any(name.startswith("critic/") for name in metrics)
    assert not np.array_equal(before.actor["norm"]["scale"], after.actor["norm"]["scale"])
    nets = tiny.networks(config)
    shapes = StateBuilder(config, nets, tiny.make_mesh()).trained_shapes()
    assert shapes.keys() == {"actor", "optimizer", "control"}
    assert trained_trees(after)["optimizer"].keys() == {"actor"}


def test_target_kl_stops_the_actor_and_not_the_critic():
    """The second mini-batch measures the KL of the first step; the third is not taken."""
    thrice = ALL * 3
    plain, stopped = tiny.config(), tiny.config(actor__target_kl=1e-9)
    _, after_one, _ = run_update(plain, tiny.make_mesh(), ALL, 4)
    _, after_three, unbounded = run_update(plain, tiny.make_mesh(), thrice, 4)
    _, after_stop, metrics = run_update(stopped, tiny.make_mesh(), thrice, 4)
    assert metrics["actor/steps_taken"] == 1 and "actor/steps_taken" not in unbounded
    assert metrics["actor/approx_kl"] > 1e-9 and metrics["actor/ratio_min"] > 0
    jax.tree.map(np.testing.assert_array_equal, after_stop.actor, after_one.actor)
    jax.tree.map(np.testing.assert_array_equal, after_stop.critic, after_three.critic)


@pytest.mark.slow
def test_after_the_stop_nothing_is_learned():
    """Later mini-batches are not learned even if the policy looks close to the old one again."""
    mesh, stopped = tiny.make_mesh(), tiny.config(actor__target_kl=1e-9)
    after_one = {
        tuple(half): 2 * run_update(stopped, mesh, [HALVES[0], half], 2)[2]["actor/approx_kl"]
        for half in HALVES
    }
    (near_half, least), (far_half, most) = sorted(after_one.items(), key=lambda item: item[1])
    between = tiny.config(actor__target_kl=float(np.sqrt(least * most)) / 1.5)
    _, _, metrics = run_update(between, mesh, [HALVES[0], far_half, near_half, near_half], 2)
    assert most > 1.1 * least and metrics["actor/steps_taken"] == 1


def test_roles_can_take_different_mini_batches():
    config, mesh = tiny.config(), tiny.make_mesh()
    with jax.set_mesh(mesh):
        state, rollout = tiny.make_state(config, mesh), tiny.make_rollout(mesh)
        experience, _ = tiny.make_experience(config, mesh, state, rollout)
        after, _ = tiny.update_state(
            config,
            state,
            experience,
            tiny.pack_batches(config, mesh, rollout, ALL, 4),
            tiny.pack_batches(config, mesh, rollout, HALVES + HALVES, 2),
        )
    counts = [int(optax.tree.get(after.optimizers[role], "count")) for role in ("actor", "critic")]
    assert counts == [1, 4]


def test_a_mini_batch_in_which_all_was_cut_off_moves_nothing():
    """Neither by weight decay or momentum. The second mini-batch is the response that fills T."""
    config = tiny.config(algorithm__mask_truncated=True, actor__optim__weight_decay=0.5)
    mesh = tiny.make_mesh()
    after = []
    with jax.set_mesh(mesh):
        for groups in ([[0, 2]], [[0, 2], [1, 1]]):
            state, rollout = tiny.make_state(config, mesh), tiny.make_rollout(mesh)
            experience, _ = tiny.make_experience(config, mesh, state, rollout)
            assert experience.sample_mask[:3].tolist() == [True, False, True]
            batches = tiny.pack_batches(config, mesh, rollout, groups, 2)
            after.append(tiny.update_state(config, state, experience, batches, batches))
    (after_one, metrics), (after_two, metrics_after_two) = jax.device_get(after)
    # A step would move them by 1e-2.
    assert_close((after_one.actor, after_one.critic), (after_two.actor, after_two.critic))
    for state in (after_one, after_two):
        assert int(optax.tree.get(state.optimizers["critic"], "count")) == 1
    assert 0 < metrics["actor/entropy"] == pytest.approx(metrics_after_two["actor/entropy"])


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.exhaustive), 8])
def test_the_value_after_the_last_token(devices):
    """Packed rows give the same value at a sequence's end as a separate row for it."""
    config, mesh = tiny.config(algorithm__bootstrap_truncated=True), tiny.make_mesh(devices)
    with jax.set_mesh(mesh):
        state, rollout = tiny.make_state(config, mesh), tiny.make_rollout(mesh)
        sequences, scores = tiny.score_rollout(config, mesh, state, rollout, rows=8)
    model, alone = tiny.networks(config).critic, jax.device_get((state.critic, sequences))
    expected = last_scalars(model, *alone)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(scores.last_values, expected, rtol=0, atol=1e-4)


MOVED = dict(
    actor__use_kl_loss=True, actor__kl_loss_coef=1.0, actor__loss_agg_mode="seq-mean-token-sum-norm"
)


@pytest.fixture(scope="module")
def moved_gradients():
    """Return gradients far from the old policy, where clipping is active."""
    return run_gradients(tiny.config(**MOVED), tiny.make_mesh(), 4, move=1.3)[0]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        # test_masked_losses.py computes what the other options do.
        ("critic__value_loss_coef", 0.5),
        ("actor__loss_scale_factor", 3),
        ("actor__kl_loss_type", "k3+"),
        ("actor__kl_loss_type", "clamped"),
    ],
)
def test_options_reach_the_gradients(moved_gradients, option, value):
    role = option.partition("__")[0]
    other, _ = run_gradients(
        tiny.config(**MOVED | {option: value}), tiny.make_mesh(), 4, move=1.3, roles=(role,)
    )
    pairs = zip(
        jax.tree.leaves(moved_gradients[("actor", "critic").index(role)]),
        jax.tree.leaves(other[0]),
        strict=True,
    )
    assert not all(np.allclose(a, b, rtol=1e-3, atol=0) for a, b in pairs)
