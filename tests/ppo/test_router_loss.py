"""The loss of routers in the update of mixtures of experts, and gradients on meshes."""

import dataclasses

import jax
import pytest

import hlo
import tiny
from jax_ppo.errors import UserError
from jax_ppo.models.transformer import Transformer
from jax_ppo.training.networks import refuse_without_experts
from tiny_update import assert_close, run_gradients

LOSS = {"actor__router_aux_loss_coef": 0.5, "critic__router_aux_loss_coef": 0.5}
EVERYWHERE = {"data": 1, "fsdp": 2, "expert": 2, "model": 2}


@pytest.fixture(scope="module", autouse=True)
def mixture():
    """Make every role of this module a mixture of experts."""
    patch = pytest.MonkeyPatch()
    patch.setattr(tiny, "ARCHITECTURE", tiny.MIXTURE)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def undivided():
    """Return the actor's gradients and metrics of the undivided, padded mini-batch."""
    config = tiny.config(packing__enabled=False, **LOSS)
    return run_gradients(config, tiny.make_mesh(), rows=8, roles=("actor",))


@pytest.mark.slow
def test_micro_batches_and_packing_do_not_change_the_routers_loss(undivided):
    gradients, metrics = run_gradients(tiny.config(**LOSS), tiny.make_mesh(), 1, roles=("actor",))
    assert_close(undivided[0], gradients, tolerance=4e-5)  # an AMD EPYC reaches 2.13e-5
    assert metrics == pytest.approx(undivided[1], rel=1e-4, abs=1e-5)
    # 2 experts of 4, used unevenly; the share in the loss is half of it.
    assert 2 < metrics["actor/router_loss"] < 4
    rest = metrics["actor/pg_loss"]
    assert metrics["actor/loss"] - rest == pytest.approx(metrics["actor/router_loss"] / 2, rel=1e-4)


@pytest.mark.exhaustive
def test_devices_do_not_change_the_gradient_of_experts(undivided):
    config = tiny.config(packing__enabled=False, **LOSS)
    gradients, metrics = run_gradients(
        config, tiny.make_mesh(8, **EVERYWHERE), rows=8, roles=("actor",)
    )
    assert_close(undivided[0], gradients, tolerance=4e-5)  # jax 0.12 reaches 2.04e-5
    assert metrics == pytest.approx(undivided[1], rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_no_device_gathers_the_kernels_of_all_experts():
    """Two of four experts are a device's own: it gathers their rows over fsdp, and tokens."""
    config, mesh = tiny.config(**LOSS), tiny.make_mesh(8, data=1, fsdp=4, expert=2)
    with jax.set_mesh(mesh):
        state, rollout = tiny.make_state(config, mesh), tiny.make_rollout(mesh)
        experience = tiny.make_experience(config, mesh, state, rollout, rows=8)[0]
        batches = tiny.pack_batches(config, mesh, rollout, [range(8)], 8)
        (program, arguments), *_ = tiny.update_programs(
            config, state, experience, batches, None, 10
        )
        text = program.lower(*arguments).compile().as_text()
    collectives = hlo.read_collectives(text)
    gathered = {shape for one in collectives if one.kind == "all-gather" for shape in one.shapes}
    E, D, F = 4, tiny.MIXTURE.hidden_size, tiny.MIXTURE.intermediate_size
    kernels = {shape for shape in gathered if sorted(shape[-2:]) == [D, F]}
    assert any(E // 2 in shape for shape in kernels), gathered
    assert not any(E in shape[:-2] for shape in kernels), kernels
    assert "reduce-scatter" in {one.kind for one in collectives}


@pytest.mark.slow
def test_a_critics_routers_have_the_same_loss_and_by_default_there_is_none():
    one, many = (
        run_gradients(tiny.config(**LOSS), tiny.make_mesh(), rows, roles=("critic",))
        for rows in (8, 1)
    )
    assert_close(one[0], many[0])
    assert 2 < one[1]["critic/router_loss"] < 4
    _, metrics = run_gradients(tiny.config(), tiny.make_mesh(), 8, roles=("critic",))
    assert "critic/router_loss" not in metrics
    share = one[1]["critic/loss"] - metrics["critic/loss"]
    assert share == pytest.approx(one[1]["critic/router_loss"] / 2, rel=1e-4)


def test_a_model_without_experts_refuses_what_reads_them():
    option = "actor.router_aux_loss_coef"
    dense = Transformer(dataclasses.replace(tiny.MIXTURE, num_experts=0))
    refuse_without_experts(option, 0.1, 0, Transformer(tiny.MIXTURE))
    refuse_without_experts(option, 0.0, 0, dense)
    with pytest.raises(UserError, match=r"config\.actor\.router_aux_loss_coef=0\.1: must be 0"):
        refuse_without_experts(option, 0.1, 0, dense)
