"""Pipeline stages in a plan: the bubble, the work of a stage and the memory of its layers."""

import dataclasses
import json

import jax
import pytest

import tiny
from jax_ppo.memory import step_plan
from jax_ppo.memory.step_work import StageSchedule, schedule_rows
from jax_ppo.models import heads
from jax_ppo.models.hf.config_export import to_hf_config
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime.topologies import parse_topology

# Two rows per device: with two stages four micro-batches of one row, and five ticks.
TWO_ROWS = {
    "rollout__logprob_micro_batch_size_per_device": 2,
    "actor__ppo_micro_batch_size_per_device": 2,
    "packing__enabled": False,
    "rollout__n": 2,
}
SLOWDOWN = 5 / 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model of two layers that is nothing but a config.json."""
    path = tmp_path_factory.mktemp("model")
    architecture = dataclasses.replace(tiny.ARCHITECTURE, num_layers=2)
    (path / "config.json").write_text(json.dumps(to_hf_config(architecture)))
    return str(path)


def estimate(folder, **shape):
    changes = TWO_ROWS | {f"mesh__{axis}": size for axis, size in shape.items()}
    config = tiny.config(model__path=folder, **changes)
    return step_plan.plan_step(config, parse_topology("h100:8"), compiles=False)


def phase(plan, name):
    return next(phase for phase in plan.phases if phase.name == name)


def test_a_schedule_by_hand():
    """Sixteen rows on eight devices are two for each: four micro-batches for two stages."""
    mesh = tiny.make_mesh(8, stage=2)
    assert schedule_rows(mesh, 16) == StageSchedule(stages=2, micro_batches=4)
    assert schedule_rows(mesh, 16).ticks == 5
    assert schedule_rows(mesh, 16).slowdown == pytest.approx(SLOWDOWN)
    assert schedule_rows(tiny.make_mesh(8), 16).slowdown == 1


def test_a_plan_states_the_bubble_and_counts_it(folder):
    plain, staged = estimate(folder, data=8), estimate(folder, stage=2, data=4)
    text = step_plan.format_plan(staged)
    assert "mesh stage 2 x data 4 x fsdp 1 x model 1" in text
    assert "forward, critic 20.0%" in text and "update, actor 20.0%" in text
    assert "stages wait" not in step_plan.format_plan(plain)
    names = ("forward_critic", "update_critic")
    for name in names:  # which have no logits
        ratio = phase(staged, name).work.flops / phase(plain, name).work.flops
        assert ratio == pytest.approx(SLOWDOWN)
    # Four rows from each device to all and back, and one in each of five ticks.
    hidden = (tiny.P + tiny.T) * tiny.ARCHITECTURE.hidden_size * 4
    assert phase(plain, "forward_critic").work.link_bytes == 0
    assert phase(staged, "forward_critic").work.link_bytes == (5 + 2 * 4) * hidden


def test_a_stage_holds_its_own_layers(folder):
    plain, staged = estimate(folder, data=8), estimate(folder, stage=2, data=4)
    model = Transformer(tiny.ARCHITECTURE)
    params = heads.param_shapes(model, "lm")
    layer = 4 * sum(x.size for x in jax.tree.leaves(params["layers"]))
    saved = phase(plain, "sample").memory.parameters - phase(staged, "sample").memory.parameters
    assert saved == 2 * layer  # of actor and critic
