"""On-policy distillation: the actor learns a teacher's distribution on its own responses."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from enumerate_policy import Enumerated
from jax_ppo.config.schema import Teacher
from jax_ppo.errors import UserError
from jax_ppo.kernels import advantages
from jax_ppo.kernels.losses import Clip, padded_batch
from jax_ppo.memory import step_plan
from jax_ppo.memory.step_flops import count_forward_flops, count_step_flops
from jax_ppo.models import heads
from jax_ppo.models.hf.config_export import to_hf_config
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo.forward_passes import ForwardOutputs
from jax_ppo.ppo.reward_shaping import add_teacher_rewards
from jax_ppo.ppo.step_parts import StepOptions
from jax_ppo.runtime import sharding
from jax_ppo.runtime.topologies import parse_topology
from jax_ppo.training.networks import Folders, Networks
from jax_ppo.training.roles import read_networks
from jax_ppo.training.state import trained_trees
from padded_loss import padded_loss

WORLD = Enumerated(vocabulary=3, longest=3)
THETA, TEACHER = np.random.default_rng(0).normal(0, 0.7, (2, *WORLD.shape))
# A wider model than the actor, with the same vocabulary.
OTHER = dataclasses.replace(tiny.ARCHITECTURE, hidden_size=24)
ALONE = {
    "teacher__path": "a folder",
    "teacher__use_task_rewards": False,
    "algorithm__adv_estimator": "reinforce_plus_plus",
    "algorithm__gamma": 0.0,
    "algorithm__whiten_advantages": False,
    "rollout__temperature": 0.7,
}


def teach(config, mesh, architecture=tiny.ARCHITECTURE, params=None):
    """Return networks and a state with a teacher."""
    nets = tiny.networks(config)
    teacher = nets.actor.clone(architecture=architecture)
    params = params or tiny.random_params(architecture, 5, 0, "lm")
    # Copies, split as the rules say.
    where = sharding.tree_shardings(mesh, params, sharding.TRAIN_RULES)
    params = jax.device_put(jax.tree.map(np.array, params), where)
    state = tiny.make_state(config, mesh)
    return Networks(**nets, teacher=teacher), tiny.with_models(state, teacher=params)


def estimate(config, mesh, nets, state, rollout):
    """Return forward passes, experience and metrics."""
    sequences, outputs = tiny.score_rollout(config, mesh, state, rollout, nets=nets)
    rewards = jnp.linspace(-1, 1, len(rollout.lengths))
    experience, metrics = tiny.estimate_experience(
        config, state.control, sequences, rollout.logprobs, outputs, rewards, None
    )
    return outputs, experience, metrics


@functools.partial(jax.jit, static_argnames="net")
def all_logprobs(net, params, tokens, temperature):
    """Return the log-probs of the whole vocabulary after each token of one sequence."""
    positions = jnp.arange(len(tokens))[None]
    output = net.apply({"params": params}, tokens[None], positions, jnp.zeros_like(positions))
    logits = output.hidden[0].astype(jnp.float32) @ heads.output_embedding(params).T
    return jax.nn.log_softmax(logits / temperature)


def each_sample(experience):
    """Yield index, tokens, and the columns of the response's tokens, of each sample."""
    sequences = jax.device_get(experience.sequences)
    for i, (prompt, length) in enumerate(
        zip(sequences.prompt_lengths, sequences.lengths, strict=True)
    ):
        yield i, sequences.tokens[i, : prompt + length], np.arange(prompt, prompt + length)


@pytest.mark.parametrize(("gamma", "whole_responses"), [(1.0, True), (0.0, False)])
def test_its_rewards_follow_the_reverse_kl(gamma, whole_responses):
    """Of responses with gamma = 1; with gamma = 0 of each token, whatever prefixes are reached."""
    with jax.enable_x64(True):
        outputs = ForwardOutputs(teacher_logprobs=WORLD.logprobs(TEACHER))
        rewards, metrics = add_teacher_rewards(
            Teacher(path="a folder", reward_coef=2.0, use_task_rewards=False),
            jnp.full(WORLD.mask.shape, 5.0),
            WORLD.logprobs(THETA),
            outputs,
            WORLD.mask == 1,
        )
        to_go = jax.vmap(lambda r, m: advantages.reward_to_go(r, m, gamma))(rewards, WORLD.mask)

        def loss(theta):
            batch = padded_batch(WORLD.logprobs(theta), WORLD.logprobs(THETA), to_go, WORLD.mask)
            return padded_loss("vanilla", batch, Clip(0.999, 1e9)).loss

        def kl(theta):
            log_p, log_q = jax.nn.log_softmax(theta), jax.nn.log_softmax(TEACHER)
            visits = WORLD.visits(THETA)
            if whole_responses:
                ratios = jnp.log(WORLD.probabilities(theta) / WORLD.probabilities(TEACHER))
                return WORLD.expect(theta, ratios)
            return visits @ jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)

        expected = 2 * jax.grad(kl)(THETA)
        assert np.abs(expected).max() > 1e-2
        gradient = WORLD.expected_gradient(THETA, loss)
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-8)
        assert np.isfinite(metrics["teacher/kl"])


@pytest.mark.slow
def test_its_logprobs_are_of_the_sampled_tokens_at_the_sampling_temperature():
    config, mesh = tiny.config(**ALONE), tiny.make_mesh()
    with jax.set_mesh(mesh):
        nets, state = teach(config, mesh, OTHER)
        rollout = tiny.make_rollout(mesh)
        outputs, experience, metrics = estimate(config, mesh, nets, state, rollout)
        seen = jax.device_get(outputs.teacher_logprobs)
        for i, tokens, columns in each_sample(experience):
            logprobs = all_logprobs(nets["teacher"], state.models["teacher"], tokens, 0.7)
            expected = logprobs[columns - 1, tokens[columns]]
            np.testing.assert_allclose(seen[i, : len(columns)], expected, atol=2e-5)
    # Alone, with gamma = 0 and without whitening, the advantages are its rewards.
    log_ratios = np.where(rollout.action_mask, experience.old_logprobs - seen, 0)
    np.testing.assert_allclose(experience.advantages, -log_ratios, atol=1e-6)
    mean = log_ratios.sum() / np.asarray(rollout.action_mask).sum()
    assert float(metrics["teacher/kl"]) == pytest.approx(mean, rel=1e-5)
    assert float(metrics["reward/max"]) == 1  # what rules give is still reported


def gradient(config, mesh, nets, state):
    """Return the gradient of the actor's loss and its metrics, over the whole rollout."""
    rollout = tiny.make_rollout(mesh)
    experience = estimate(config, mesh, nets, state, rollout)[1]
    experience = dataclasses.replace(experience, advantages=0 * experience.advantages)
    teacher = (nets["teacher"], state.models["teacher"])
    learner = tiny.actor_learner(config, nets, experience, state.reference, teacher)
    batch = tiny.pack_batch(config, mesh, rollout, 2)
    return experience, *jax.jit(learner.gradients)(state.actor, batch)


LOSS = ALONE | {"teacher__loss_coef": 0.5, "teacher__reward_coef": 0.0}


@pytest.mark.slow
def test_the_loss_is_the_kl_over_the_vocabulary_to_a_teacher_of_another_width():
    config, mesh = tiny.config(**LOSS), tiny.make_mesh()
    with jax.set_mesh(mesh):
        nets, state = teach(config, mesh, OTHER)
        experience, gradients, metrics = gradient(config, mesh, nets, state)

        def mean_kl(actor):
            total = count = 0
            for i, tokens, columns in each_sample(experience):
                log_p = all_logprobs(nets.actor, actor, tokens, 0.7)[columns - 1]
                teacher = state.models["teacher"]
                log_q = all_logprobs(nets["teacher"], teacher, tokens, 0.7)[columns - 1]
                mask = np.asarray(experience.action_mask)[i, : len(columns)]
                total += jnp.sum(mask[:, None] * jnp.exp(log_p) * (log_p - log_q))
                count += mask.sum()
            return total / count

        kl, expected = jax.value_and_grad(mean_kl)(state.actor)
        assert float(metrics["actor/teacher_kl"]) == pytest.approx(float(kl), rel=1e-4)
        assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected)) > 1e-3
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, 0.5 * y, atol=2e-5), gradients, expected
        )


@pytest.mark.exhaustive
def test_its_rewards_and_its_loss_are_the_same_on_any_mesh():
    config = tiny.config(**LOSS | {"teacher__reward_coef": 1.0})
    results = []
    for shape in ({}, {"fsdp": 2, "model": 2}):
        mesh = tiny.make_mesh(4 if shape else 1, **shape)
        with jax.set_mesh(mesh):
            nets, state = teach(config, mesh, OTHER)
            _, gradients, metrics = gradient(config, mesh, nets, state)
            outputs = estimate(config, mesh, nets, state, tiny.make_rollout(mesh))[0]
        kl = float(metrics["actor/teacher_kl"])
        results.append(jax.device_get((outputs.teacher_logprobs, gradients, kl)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-4), *results)


def test_a_teacher_that_is_the_actor_teaches_nothing():
    config, mesh = tiny.config(**LOSS), tiny.make_mesh()
    with jax.set_mesh(mesh):
        own = tiny.make_state(config, mesh).actor
        nets, state = teach(config, mesh, params=own)
        _, gradients, metrics = gradient(config, mesh, nets, state)
    assert float(metrics["actor/teacher_kl"]) == pytest.approx(0, abs=1e-12)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradients)) < 1e-6
    assert "teacher" not in trained_trees(state)


def test_a_teacher_that_nothing_reads_is_refused():
    with pytest.raises(UserError, match=r"config\.teacher\.reward_coef=0\.0: .*loss_coef"):
        tiny.config(teacher__path="a folder", teacher__reward_coef=0.0)
    with pytest.raises(UserError, match=r"teacher\.loss_coef=1\.0: .*config\.teacher\.path"):
        tiny.config(teacher__loss_coef=1.0)


def test_a_sum_over_the_vocabulary_needs_the_same_vocabulary(tmp_path):
    sizes = {"actor": tiny.ARCHITECTURE, "teacher": dataclasses.replace(OTHER, vocab_size=40)}
    for name, architecture in sizes.items():
        params = tiny.init_params(Transformer(architecture), jax.random.key(0), "lm")
        export_checkpoint(params, architecture, tmp_path / name)
    folders = Folders(**{name: tmp_path / name for name in sizes})
    # Rows of the embedding that belong to no token do not matter to log-probs.
    nets = read_networks(tiny.config(**ALONE), folders)
    assert nets["teacher"].architecture.vocab_size == 40
    with pytest.raises(UserError, match=r"config\.teacher\.path=.*vocab_size is 40"):
        read_networks(tiny.config(**LOSS), folders)


def test_a_plan_and_the_flops_count_the_teacher(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(tiny.ARCHITECTURE)))
    base = {"model__path": str(tmp_path), "algorithm__use_reference": False}
    teacher = {"teacher__path": str(tmp_path)}
    both = teacher | {"teacher__loss_coef": 1.0}
    configs = [tiny.config(**base | changes) for changes in ({}, teacher, both)]
    device = parse_topology("v5e:1x1")
    plans = [step_plan.plan_step(config, device, compiles=False) for config in configs]
    alone, rewarding, losing = [{x.name: x for x in plan.programs} for plan in plans]
    assert rewarding.keys() - alone.keys() == {"forward_teacher"}
    forward = rewarding["forward_teacher"]
    assert forward.memory.frozen > alone["update_actor"].memory.frozen == 0
    # The loss runs the teacher on the same rows, in every epoch.
    before, after = rewarding["update_actor"], losing["update_actor"]
    assert after.memory.temporaries > before.memory.temporaries
    epochs = configs[0].actor.ppo_epochs
    assert after.flops - before.flops == pytest.approx(epochs * forward.flops)
    net = tiny.networks(configs[0])
    nets, lengths = Networks(**net, teacher=net.actor), np.full(8, 10)
    counts = [count_step_flops(StepOptions(x), nets, 0, lengths - 4, lengths) for x in configs]
    one_pass = count_forward_flops(tiny.ARCHITECTURE, lengths, 4 * 8)
    assert np.diff(counts) == pytest.approx([one_pass, epochs * one_pass])
