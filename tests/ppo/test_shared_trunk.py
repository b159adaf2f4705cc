"""A critic head on the actor's trunk: one pass and one optimizer for the sum of both losses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.training import forward
from jax_ppo.training.networks import Networks
from jax_ppo.training.state import StateBuilder, trained_trees
from tiny_update import HALVES, assert_close, run_gradients

SHARED = {"critic__shared_trunk": True, "critic__value_loss_coef": 0.3}
LORA = {"model__lora__rank": 4}


def gradients(config, mesh, role, nets):
    """Return gradients and metrics of one mini-batch; parameters moved since the rollout."""
    with jax.set_mesh(mesh):
        state, rollout = tiny.make_state(config, mesh), tiny.make_rollout(mesh)
        experience, _ = tiny.make_experience(config, mesh, state, rollout, rows=4)
        batch = tiny.pack_batch(config, mesh, rollout, 4)

        def run(params, reference, experience, batch):
            learner = tiny.actor_learner(config, nets, experience, reference)
            if role == "actor":
                options = dataclasses.replace(learner.objective.options, shares_trunk=False)
                objective = dataclasses.replace(learner.objective, options=options)
                learner = dataclasses.replace(learner, objective=objective)
            elif role == "critic":
                learner = tiny.critic_learner(config, nets, experience, reference)
            return learner.gradients(params, batch)

        params = jax.tree.map(lambda x: x * 1.02 + 0.01, state.actor)
        return jax.tree.map(np.asarray, jax.jit(run)(params, state.reference, experience, batch))


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, LORA])
def test_the_gradient_is_the_sum_of_both(options):
    config, mesh = tiny.config(**SHARED, **options), tiny.make_mesh()
    nets = tiny.networks(config)
    joint_gradient, metrics = gradients(config, mesh, None, nets)
    actor_gradient, actor_metrics = gradients(config, mesh, "actor", nets)
    critic_networks = Networks(actor=nets.actor, critic=nets.actor)
    critic_gradient, critic_metrics = gradients(config, mesh, "critic", critic_networks)
    both = jax.tree.map(np.add, actor_gradient, critic_gradient)
    assert_close(joint_gradient, both, tolerance=1e-4)
    for name, value in (actor_metrics | critic_metrics).items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-5, abs=1e-6), name
    assert not np.any(actor_gradient["score"]["kernel"])
    assert np.any(critic_gradient["score"]["kernel"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"stage": 2, "fsdp": 2, "model": 2}, {}),
        # Prompts of 8 tokens and responses of 10 are longer than a part of a row.
        ({"context": 8}, {"packing__row_length": 32}),
    ],
    ids=["stages", "parts of rows"],
)
def test_devices_do_not_change_the_gradient(monkeypatch, shape, options):
    """Of two layers, one for each of two stages."""
    monkeypatch.setattr(tiny, "ARCHITECTURE", dataclasses.replace(tiny.ARCHITECTURE, num_layers=2))
    config = tiny.config(**SHARED, model__gradient_checkpointing=True, **options)
    expected, ours = (
        run_gradients(config, mesh, 8, roles=("actor",))[0]
        for mesh in (tiny.make_mesh(), tiny.make_mesh(8, data=1, **shape))
    )
    assert_close(ours, expected, tolerance=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, LORA])
def test_one_pass_serves_both(options, monkeypatch):
    """The trunk is traced three times: for scoring the policy, the reference, and both losses."""
    config = tiny.config(actor__ppo_epochs=2, algorithm__lam=0.95, **SHARED, **options)
    mesh = tiny.make_mesh()
    traces, run = [], forward.run_decoder

    def count_traces(model, params, *rows, **options):
        traces.append("score" in params)
        return run(model, params, *rows, **options)

    monkeypatch.setattr(forward, "run_decoder", count_traces)
    jax.clear_caches()
    with jax.set_mesh(mesh):
        state, rollout = tiny.make_state(config, mesh), tiny.make_rollout(mesh)
        experience, _ = tiny.make_experience(config, mesh, state, rollout)
        assert sorted(traces) == [False, True]
        batches = tiny.pack_batches(config, mesh, rollout, HALVES + HALVES, 2)
        before = jax.tree.map(np.array, state.actor)
        traces.clear()
        state, metrics = tiny.update_state(config, state, experience, batches, None)
    assert traces == [True]
    assert state.critic is None and "critic" not in state.optimizers
    assert set(trained_trees(state)) == {"actor", "optimizer", "control"}
    assert not np.array_equal(state.actor["score"]["kernel"], before["score"]["kernel"])
    assert float(metrics["actor/first_log_ratio"]) < 1e-5 < float(metrics["actor/log_ratio_max"])


def test_its_shapes_are_foreseen():
    config, mesh = tiny.config(**SHARED), tiny.make_mesh()
    with jax.set_mesh(mesh):
        state = tiny.make_state(config, mesh)
    states = StateBuilder(config, tiny.networks(config), mesh)
    shapes = states.trained_shapes()
    assert jax.tree.map(jnp.shape, trained_trees(state)) == jax.tree.map(jnp.shape, shapes)
    assert "score" not in states.shapes().reference
