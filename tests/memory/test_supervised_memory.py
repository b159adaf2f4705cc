"""Supervised training that cannot fit its devices is refused before weights are loaded."""

import jax
import jax.numpy as jnp
import pytest

import tiny
from jax_ppo.errors import UserError
from jax_ppo.memory import memory_check
from jax_ppo.memory.memory_check import SupervisedMemory, validate_memory
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime.devices import bytes_per_device
from jax_ppo.training.supervised_step import trained_shapes

CONFIG = tiny.config()
MODEL = Transformer(tiny.ARCHITECTURE, jnp.float32)


def measure(**shape):
    return SupervisedMemory(CONFIG, MODEL, "lm", tiny.make_mesh(8, **shape)).measure()


def test_parameters_two_moments_and_gradients_are_counted():
    alone = measure(data=8)
    assert alone.parameters == alone.gradients
    # Two moments and a counter.
    assert 0 < alone.optimizer - 2 * alone.parameters <= 16
    assert measure(fsdp=8).parameters < 0.2 * alone.parameters


def test_the_shapes_have_the_layout_of_training():
    mesh = tiny.make_mesh(8, fsdp=8)
    shapes = trained_shapes(CONFIG.supervised, MODEL, "scalar", mesh)
    assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(shapes))
    assert "score" in shapes["params"] and bytes_per_device(shapes) > 0


@pytest.mark.parametrize(("share", "fits"), [(1.0, True), (0.99, False)])
def test_a_run_that_cannot_fit_is_refused_with_what_would_save_most(share, fits, monkeypatch):
    mesh = tiny.make_mesh(8, data=8)
    limit = share * measure(data=8).peak
    monkeypatch.setattr(memory_check, "read_memory_limit", lambda: limit)
    if fits:
        validate_memory(SupervisedMemory(CONFIG, MODEL, "lm", mesh))
        return
    with pytest.raises(UserError, match="config.mesh: a device needs at least") as refusal:
        validate_memory(SupervisedMemory(CONFIG, MODEL, "lm", mesh))
    message = str(refusal.value)
    split = message.index("config.mesh.data=1 with config.mesh.fsdp=8 needs at least")
    # An eighth beats half of the bytes.
    assert split < message.index("config.supervised.optim.param_dtype=bfloat16")


def test_a_platform_that_reports_no_memory_is_not_checked(monkeypatch):
    monkeypatch.setattr(memory_check, "read_memory_limit", lambda: None)
    validate_memory(SupervisedMemory(CONFIG, MODEL, "lm", tiny.make_mesh(8, data=8)))
