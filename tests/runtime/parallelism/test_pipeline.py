"""Layers split over stages: same values, gradients and parameters as on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from hlo import read_collectives
from jax_ppo.errors import UserError
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import meshes, sharding
from jax_ppo.runtime.parallelism import pipeline
from layers_on_mesh import ARCHITECTURE, EXPERTS, T, compiled_on_mesh, gradient, inputs

# Global and local layers in turn: a stage must know which are its own.
MIXED = dataclasses.replace(
    ARCHITECTURE, sliding_window=3, local_layers=(True, False, False, True), local_rope_theta=100.0
)
ALL_AXES = (("stage", 2), ("fsdp", 2), ("model", 2))
STAGES_AND_DATA = (("stage", 4), ("data", 2))


@functools.cache
def on_one_device(architecture):
    model = Transformer(architecture, router_loss=bool(architecture.num_experts))
    return jax.device_get(jax.jit(functools.partial(gradient, model=model))(*inputs(architecture)))


@pytest.mark.parametrize(
    ("shape", "architecture", "options"),
    [
        pytest.param(ALL_AXES, MIXED, {"remat": True}, id="all_axes", marks=pytest.mark.slow),
        # Shares its program with the test of what stages exchange.
        pytest.param(STAGES_AND_DATA, ARCHITECTURE, {"attention": "cudnn"}, id="four_stages"),
        *(
            pytest.param(tuple(shape.items()), *more, id=str(shape), marks=pytest.mark.exhaustive)
            for shape, *more in (
                ({"stage": 2, "data": 2, "fsdp": 2}, EXPERTS, {"router_loss": True}),
                ({"stage": 2, "data": 2, "model": 2}, MIXED, {"attention": "cudnn"}),
                ({"stage": 4, "fsdp": 2}, ARCHITECTURE, {"remat": True, "attention": "cudnn"}),
            )
        ),
    ],
)
def test_stages_change_no_hidden_state_and_no_gradient(
    cudnn_anywhere, shape, architecture, options
):
    compiled, arguments = compiled_on_mesh(shape, architecture, **options)
    gradients, hidden = jax.device_get(compiled(*arguments))
    expected_gradients, expected = on_one_device(architecture)
    np.testing.assert_allclose(hidden, expected, rtol=0, atol=1e-4)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max() + 1e-6),
        gradients,
        expected_gradients,
    )


def test_stages_exchange_hidden_states_and_no_layers(cudnn_anywhere):
    compiled, _ = compiled_on_mesh(STAGES_AND_DATA, ARCHITECTURE, attention="cudnn")
    collectives = read_collectives(compiled.as_text())
    # Forward and backward: one row of hidden states in each tick, and nothing else.
    in_ticks = [(c.kind, c.shapes) for c in collectives if c.loops]
    assert in_ticks == [("collective-permute", ((1, T, 16),))] * 2
    # Before and after: rows of hidden states and tokens' places; and sums of gradients.
    outside = [c for c in collectives if not c.loops and c.kind != "all-reduce"]
    assert {c.kind for c in outside} >= {"all-gather", "all-to-all"}
    assert all(T in shape for c in outside for shape in c.shapes), outside


def test_what_cannot_be_split_into_stages_is_refused():
    mesh = tiny.make_mesh(8, stage=8)
    with pytest.raises(UserError, match=r"mesh.stage=8: must divide .* number of layers \(4\)"):
        meshes.validate_architecture(mesh, ARCHITECTURE)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="4 rows cannot be split into 8"):
        pipeline.run_stages(lambda layers, x, rows: (x, {}), {}, jnp.zeros((4, T, 16)), ())


def test_the_layers_of_encoders_stay_together():
    mesh = tiny.make_mesh(8, stage=2)
    layers = {"layers": {"attention": {"q_proj": {"kernel": jnp.zeros((2, 4, 4))}}}}
    split, whole = (
        sharding.tree_shardings(mesh, layers, rules)["layers"]["attention"]["q_proj"]["kernel"]
        for rules in (sharding.TRAIN_RULES, sharding.ENCODER_RULES)
    )
    assert split.shard_shape((2, 4, 4))[0] == 1 and whole.shard_shape((2, 4, 4))[0] == 2
