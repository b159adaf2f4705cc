"""A run that a device has no memory for ends with what holds it and what takes less."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import tiny
from jax_ppo.errors import UserError
from jax_ppo.memory import memory_check
from jax_ppo.training.networks import Folders

CONFIG = tiny.config()
FOLDERS = Folders(actor=Path("actor"))
SIZE = 1 << 21  # squared, 16 TiB of float32


@jax.jit
def sort_a_huge_table(x):
    return jnp.sort(x * jnp.ones((SIZE, 1)) * jnp.arange(SIZE), axis=0)[0, 0]


@pytest.fixture
def explained(monkeypatch):
    """Return the context for the tiny networks, which need no folders."""
    monkeypatch.setattr(
        memory_check, "read_networks", lambda config, folders: tiny.networks(config)
    )
    run = memory_check.PPOMemory(CONFIG, tiny.networks(CONFIG), tiny.make_mesh(), FOLDERS)
    return memory_check.explain_out_of_memory(run)


def test_what_holds_the_memory_and_what_takes_less_is_said(explained):
    with pytest.raises(UserError) as error, explained:
        jax.block_until_ready(sort_a_huge_table(1.0))
    first, *lines = str(error.value).splitlines()
    assert first.startswith("a device ran out of memory: RESOURCE_EXHAUSTED")
    assert "parameters" in lines[0] and "temporary" in lines[0]
    assert lines[1] == (
        "  less that is temporary: config.model.gradient_checkpointing=auto, chosen by the memory"
    )
    assert any("config.critic.shared_trunk=True saves" in line for line in lines)


def test_other_errors_of_the_devices_are_not_touched(explained):
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), explained:
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
