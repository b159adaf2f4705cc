"""Shared experts in a plan: what a device stores, gathers and exchanges with `mesh.expert`."""

import json

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.memory import step_plan
from jax_ppo.models import heads
from jax_ppo.models.hf.config_export import to_hf_config
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime.topologies import parse_topology


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a mixture of four experts that is nothing but a config.json."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(to_hf_config(tiny.MIXTURE)))
    return str(path)


def forward_critic(folder, **shape):
    """Return the phase of a plan; each of eight devices has two rows of one sample."""
    changes = {f"mesh__{axis}": size for axis, size in shape.items()}
    changes |= {"rollout__logprob_micro_batch_size_per_device": 2, "rollout__n": 2}
    config = tiny.config(model__path=folder, packing__enabled=False, **changes)
    plan = step_plan.plan_step(config, parse_topology("h100:8"), compiles=False)
    return next(phase for phase in plan.phases if phase.name == "forward_critic")


def test_kernels_of_experts_stay_where_they_are_and_hidden_states_travel(folder):
    """Four devices have one expert each, and a quarter of every other array."""
    gathered, shared = (forward_critic(folder, data=2, **{axis: 4}) for axis in ("fsdp", "expert"))
    assert shared.memory.parameters == gathered.memory.parameters
    model = Transformer(tiny.MIXTURE)
    params = heads.param_shapes(model, "value")
    experts = sum(x.size for x in jax.tree.leaves(params["layers"]["mlp"]["experts"]))
    others = sum(x.size for x in jax.tree.leaves(params)) - experts
    # Three of four parts come from other devices.
    assert gathered.work.link_bytes == pytest.approx(4 * 3 / 4 * (others + experts))
    # Hidden states of three other devices, and sums of theirs, in float32 for two layers.
    tokens = 2 * (tiny.P + tiny.T)
    hidden = 2 * 2 * 3 * tokens * tiny.MIXTURE.hidden_size * np.dtype(np.float32).itemsize
    assert shared.work.link_bytes == pytest.approx(4 * 3 / 4 * others + hidden)


def test_a_plan_counts_the_record_of_replayed_experts(folder):
    """One byte for each of two experts in two layers, of each token of a device's 16 samples."""

    def batches(mode):
        config = tiny.config(model__path=folder, rollout__n=4, actor__router_replay__mode=mode)
        plan = step_plan.plan_step(config, parse_topology("h100:2"), compiles=False)
        return {phase.name: phase.memory.batch for phase in plan.phases}

    record = 16 * (tiny.P + tiny.T) * 2 * 2
    plain, recorded = batches("disabled"), batches("R3")
    assert recorded == {
        # With that of the step before.
        name: value + record * (2 if name == "sample" else 1)
        for name, value in plain.items()
    }


def test_a_devices_experts_have_room_for_all_tokens_of_the_devices_that_share_them(folder):
    """Without a plan of more rows, four times the copies at experts are what grows."""
    alone, shared = forward_critic(folder, data=8), forward_critic(folder, data=2, expert=4)
    a, tokens = tiny.MIXTURE, 2 * (tiny.P + tiny.T)
    copies = a.experts_per_token * (2 * a.hidden_size + 3 * a.intermediate_size)
    grown = 3 * tokens * copies * 4
    # Beside them, layers are gathered.
    assert shared.memory.temporaries - alone.memory.temporaries >= grown
