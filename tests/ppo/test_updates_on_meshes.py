"""Adapters and a shared trunk in pipeline stages have the gradients of one device.

Actor and critic of their own are compared in float64 (float64_meshes.py).
"""

import dataclasses

import pytest
import test_adapters
import test_shared_trunk
import test_update

import tiny

LOSS = {"actor__use_kl_loss": True, "actor__kl_loss_coef": 0.1, "actor__kl_loss_type": "full"}


@pytest.fixture
def two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the tiny models a layer for each of two stages."""
    monkeypatch.setattr(tiny, "ARCHITECTURE", dataclasses.replace(tiny.ARCHITECTURE, num_layers=2))


def in_stages():
    return tiny.make_mesh(8, data=2, stage=2, fsdp=2)


@pytest.mark.slow
def test_adapters_on_a_base(two_layers):
    config = tiny.config(**LOSS, **test_adapters.LORA)
    expected = test_adapters.gradients(config, tiny.make_mesh(), 8)
    gradients = test_adapters.gradients(config, in_stages(), 8)
    test_update.assert_close(gradients, expected, tolerance=1e-4)


@pytest.mark.slow
def test_a_shared_trunk(two_layers):
    config = tiny.config(**test_shared_trunk.SHARED, model__gradient_checkpointing=True)
    nets = tiny.networks(config)
    expected, _ = test_shared_trunk.gradients(config, tiny.make_mesh(), None, nets, rows=8)
    gradients, _ = test_shared_trunk.gradients(config, in_stages(), None, nets, rows=8)
    test_update.assert_close(gradients, expected, tolerance=1e-4)
