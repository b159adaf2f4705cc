"""Adapters and a shared trunk, in stages and on parts of rows, have the gradients of one device.

Separate actor and critic are compared in float64 (float64_meshes.py).
"""

import dataclasses

import pytest
import test_adapters
import test_shared_trunk
import test_update

import tiny

LOSS = {"actor__use_kl_loss": True, "actor__kl_loss_coef": 0.1, "actor__kl_loss_type": "full"}
# Rows of 32 tokens in eight parts: prompts of 8 tokens and responses of 10 are longer than a part.
PARTS = {"packing__row_length": 32}
on_meshes = pytest.mark.parametrize(
    ("shape", "options"),
    [({"data": 2, "stage": 2, "fsdp": 2}, {}), ({"data": 1, "context": 8}, PARTS)],
    ids=["stages", "parts of rows"],
)


@pytest.fixture
def two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the tiny models a layer for each of two stages."""
    monkeypatch.setattr(tiny, "ARCHITECTURE", dataclasses.replace(tiny.ARCHITECTURE, num_layers=2))


@pytest.mark.exhaustive
@on_meshes
def test_adapters_on_a_base(two_layers, shape, options):
    config = tiny.config(**LOSS, **test_adapters.LORA, **options)
    expected = test_adapters.gradients(config, tiny.make_mesh(), 8)
    gradients = test_adapters.gradients(config, tiny.make_mesh(8, **shape), 8)
    test_update.assert_close(gradients, expected, tolerance=1e-4)


@pytest.mark.exhaustive
@on_meshes
def test_a_shared_trunk(two_layers, shape, options):
    config = tiny.config(**test_shared_trunk.SHARED, model__gradient_checkpointing=True, **options)
    nets = tiny.networks(config)
    expected, _ = test_shared_trunk.gradients(config, tiny.make_mesh(), None, nets, rows=8)
    mesh = tiny.make_mesh(8, **shape)
    gradients, _ = test_shared_trunk.gradients(config, mesh, None, nets, rows=8)
    test_update.assert_close(gradients, expected, tolerance=1e-4)
