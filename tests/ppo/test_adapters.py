"""Actor and critic as adapters on the reference: one base, of which nothing is learned."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.models.layer_stack import unroll_params
from jax_ppo.models.lora import merge_kernel
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo import forward_passes
from jax_ppo.sampler.decode_loop import SamplingOptions, sampler_program
from jax_ppo.training.networks import Folders, full_parameters
from jax_ppo.training.state import StateBuilder, trained_trees
from tiny_update import HALVES, assert_close, run_gradients, run_update

LORA = {"model__lora__rank": 4, "model__lora__alpha": 8.0}


def move_adapters(state):
    """Return the state with adapters that contain no zero matrix."""

    def move(tree):
        return jax.tree.map(
            lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size), x.shape), tree
        )

    return tiny.with_models(state, actor=move(state.actor), critic=move(state.critic))


def names(tree):
    return {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(tree)}


def test_four_roles_share_one_base():
    """Which exists once, in the data type of the computation; adapters and a head are trained."""
    config = tiny.config(model__dtype="bfloat16", **LORA)
    mesh = tiny.make_mesh(8, data=2, fsdp=2, model=2)
    nets = tiny.networks(config)
    shapes = StateBuilder(config, nets, mesh).shapes()
    assert names(shapes.actor) == {"lora_a", "lora_b"}
    assert names(shapes.critic) == {"lora_a", "lora_b", "kernel"}
    assert {str(x.dtype) for x in jax.tree.leaves((shapes.actor, shapes.critic))} == {"float32"}
    assert {str(x.dtype) for x in jax.tree.leaves(shapes.reference)} == {"bfloat16"}
    with jax.set_mesh(mesh):
        state = tiny.make_state(config, mesh)
    assert jax.tree.map(jnp.shape, shapes.reference) == jax.tree.map(jnp.shape, state.reference)
    trained, shapes = trained_trees(state), StateBuilder(config, nets, mesh).trained_shapes()
    assert jax.tree.map(jnp.shape, trained) == jax.tree.map(jnp.shape, shapes)
    # r (in + out): q, o; k, v; gate, up; down.
    per_layer = 4 * (2 * (16 + 16) + 2 * (16 + 8) + 2 * (16 + 32) + (32 + 16))
    sizes = {
        role: sum(x.size for x in jax.tree.leaves(trained[role])) for role in ("actor", "critic")
    }
    assert tiny.ARCHITECTURE.num_layers == 1
    assert sizes == {"actor": per_layer, "critic": per_layer + 16}
    moments = sum(x.size for x in jax.tree.leaves(trained["optimizer"]))
    assert moments == 2 * (sum(sizes.values()) + 1)
    joined = full_parameters(nets.critic, state.critic, state.reference)
    kernel, base = (x["layers"]["mlp"]["up_proj"]["kernel"] for x in (joined, state.reference))
    assert kernel is base


@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.exhaustive), "bfloat16"]
)
def test_the_first_policy_is_the_reference_to_the_bit(dtype):
    config = tiny.config(
        model__dtype=dtype, actor__ppo_epochs=2, algorithm__use_kl_in_reward=True, **LORA
    )
    mesh = tiny.make_mesh()
    before, after, metrics = run_update(config, mesh, HALVES + HALVES, 2)
    with jax.set_mesh(mesh):
        state, rollout = tiny.make_state(config, mesh), tiny.make_rollout(mesh)
        experience, _ = tiny.make_experience(config, mesh, state, rollout)
    np.testing.assert_array_equal(experience.old_logprobs, experience.ref_logprobs)
    assert metrics["kl/reference"] == 0
    if dtype == "float32":
        assert metrics["actor/first_log_ratio"] < 1e-5 < 1e-3 < metrics["actor/log_ratio_max"]
    jax.tree.map(np.testing.assert_array_equal, after.reference, before.reference)
    for role in ("actor", "critic"):
        same = jax.tree.map(
            lambda a, b: np.array_equal(a, b), getattr(before, role), getattr(after, role)
        )
        assert not any(jax.tree.leaves(same)), role


@pytest.mark.parametrize(
    ("rows", "shape", "options"),
    [
        pytest.param(1, {}, {}, marks=pytest.mark.slow),
        pytest.param(8, {"stage": 2, "fsdp": 2, "model": 2}, {}, marks=pytest.mark.exhaustive),
        # Prompts of 8 tokens and responses of 10 are longer than a part of a row.
        pytest.param(8, {"context": 8}, {"packing__row_length": 32}, marks=pytest.mark.exhaustive),
    ],
)
def test_cuts_and_devices_do_not_change_the_gradient(monkeypatch, rows, shape, options):
    """Of two layers, one for each of two stages."""
    monkeypatch.setattr(tiny, "ARCHITECTURE", dataclasses.replace(tiny.ARCHITECTURE, num_layers=2))
    loss = {"actor__use_kl_loss": True, "actor__kl_loss_coef": 0.1, "actor__kl_loss_type": "full"}
    gradients = functools.partial(run_gradients, move=1.05, prepare=move_adapters)
    padded = tiny.config(packing__enabled=False, **LORA, **loss)
    whole, _ = gradients(padded, tiny.make_mesh(), 8)
    mesh = tiny.make_mesh(math.prod(shape.values()), data=1, **shape)
    ours, _ = gradients(tiny.config(**LORA, **loss, **options), mesh, rows)
    assert_close(ours, whole, tolerance=1e-4)


def test_the_sampler_draws_from_the_policy_that_is_scored():
    config, mesh = tiny.config(**LORA), tiny.make_mesh()
    nets = tiny.networks(config)
    with jax.set_mesh(mesh):
        state = move_adapters(tiny.make_state(config, mesh))
        sampler = sampler_program(
            Transformer(tiny.ARCHITECTURE, jnp.float32, unrolled=True, lora=nets.actor.lora),
            SamplingOptions(tiny.T, 1.0, eos_ids=(1,)),
        )
        policy = unroll_params(full_parameters(nets.actor, state.actor, state.reference))
        rollout = sampler(policy, tiny.make_rollout(mesh).prompts, jax.random.key(3))
        experience, metrics = tiny.make_experience(config, mesh, state, rollout)
    assert metrics["rollout/logprob_difference"] <= 1e-5
    assert abs(float(metrics["kl/reference"])) > 1e-2
    np.testing.assert_allclose(experience.old_logprobs, rollout.logprobs, atol=1e-5)


def test_a_reward_model_may_stand_on_the_base_too():
    config, mesh = tiny.config(**LORA), tiny.make_mesh()
    nets = tiny.networks(config)
    with jax.set_mesh(mesh):
        state, rollout = move_adapters(tiny.make_state(config, mesh)), tiny.make_rollout(mesh)
        sequences = forward_passes.join_sequences(rollout, config.sequence_length)
        batch = tiny.pack_batch(config, mesh, rollout, 4)
        packed_rows = batch.packing, batch.counts
        params = full_parameters(nets.critic, state.critic, state.reference)
        scores = forward_passes.reward_model_scores(
            nets.critic, params, sequences, packed_rows, "auto"
        )
        merge = functools.partial(_merged, params, nets.critic.lora.scale)
        whole = jax.tree_util.tree_map_with_path(merge, state.reference)
        bare = tiny.networks(tiny.config()).critic
        expected = forward_passes.reward_model_scores(
            bare, whole | {"score": state.critic["score"]}, sequences, packed_rows, "auto"
        )
    assert np.std(scores) > 0.02
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


def _merged(params, scale, path, kernel):
    """Return a parameter of the base after merging the adapter of the same layer into it."""
    layer_params = functools.reduce(lambda tree, key: tree[key.key], path[:-1], params)
    if path[-1].key != "kernel" or "lora_a" not in layer_params:
        return kernel
    return merge_kernel(kernel, layer_params["lora_a"], layer_params["lora_b"], scale)


@pytest.mark.slow
def test_a_state_from_a_checkpoint_is_the_one_that_was_saved(tmp_path):
    """The base is read from the model's folder, the adapters and optimizers from the checkpoint."""
    from jax_ppo.models.hf.save import export_checkpoint

    config, mesh = tiny.config(**LORA), tiny.make_mesh(8, data=2, fsdp=2, model=2)
    with jax.set_mesh(mesh):
        before = move_adapters(tiny.make_state(config, mesh))
        export_checkpoint(before.reference, tiny.ARCHITECTURE, tmp_path / "base")
        folders, loaded = Folders(actor=tmp_path / "base", critic=tmp_path / "base"), []
        nets = tiny.networks(config)

        def progress(name):
            loaded.append(name)

        states = StateBuilder(config, nets, mesh)
        after = states.create(folders, progress, trained_trees(before), 7)
        first = states.create(folders, progress)
    assert int(after.step) == 7 and loaded == ["base", "base"]
    for name in ("models", "optimizers"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, name), getattr(before, name))
    assert not any(
        np.any(x)
        for path, x in jax.tree_util.tree_leaves_with_path((first.actor, first.critic))
        if path[-1].key != "lora_a"
    )
    a, b = (state["layers"]["mlp"]["up_proj"]["lora_a"] for state in (first.actor, first.critic))
    assert np.any(a) and not np.array_equal(a, b)
