"""One entry of the table of roles is all that a further role needs, frozen or trained."""

import dataclasses

import jax
import numpy as np
import pytest

import tiny
from jax_ppo.errors import UserError
from jax_ppo.memory.memory_check import PPOMemory
from jax_ppo.memory.remedies import PossibleChanges
from jax_ppo.models.hf.load import read_architecture
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.transformer import Transformer
from jax_ppo.run.export import refuse_foreign_exports
from jax_ppo.runtime.devices import bytes_per_device
from jax_ppo.training import roles
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.decoders import build_decoder
from jax_ppo.training.roles import (
    Export,
    ModelRole,
    read_networks,
    resolve_role_folders,
    resolve_roles,
)
from jax_ppo.training.state import StateBuilder, trained_trees


def read_net(reader):
    architecture = read_architecture(reader.folders["adviser"], reader.needs_weights)
    return build_decoder(architecture, reader.config.model, 64)


# Options that nothing else reads below: there are no texts, no reference and no critic.
FROZEN = ModelRole(
    name="adviser",
    title="adviser",
    is_used=lambda config: True,
    path_option="model.tokenizer_path",
    read_net=read_net,
    head="lm",
    param_offload="algorithm.reference_offload",
)
TRAINED = dataclasses.replace(
    FROZEN,
    param_offload="",
    section="critic",
    is_trained=lambda config: True,
    export=Export(adapter_folder="adviser", left_out="score"),
)


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a run without critic and reference from two checkpoints."""
    net = Transformer(tiny.ARCHITECTURE)
    for number, name in enumerate(("actor", "adviser")):
        params = tiny.init_params(net, jax.random.key(number), "lm")
        export_checkpoint(params, tiny.ARCHITECTURE, tmp_path / name)
    config = tiny.config(
        model__path=str(tmp_path / "actor"),
        model__tokenizer_path=str(tmp_path / "adviser"),
        algorithm__adv_estimator="reinforce_plus_plus",
        algorithm__use_reference=False,
        mesh__fsdp=2,
    )

    def start_run(mesh, trained=None):
        folders = resolve_role_folders(resolve_roles(config), config.model)
        nets = read_networks(config, folders)
        states = StateBuilder(config, nets, mesh)
        return nets, states.create(folders, lambda name: None, trained)

    return config, start_run


def foreign_folder(tmp_path):
    """Return a work directory in which something else has the name of the role."""
    (tmp_path / "run" / "adviser").mkdir(parents=True)
    (tmp_path / "run" / "adviser" / "notes.txt").write_text("foreign")
    return tmp_path / "run"


def test_a_frozen_role_is_loaded_split_counted_and_not_saved(start, monkeypatch, tmp_path):
    config, start_run = start
    mesh = tiny.make_mesh(2, fsdp=2)
    with jax.set_mesh(mesh):
        without = PPOMemory(config, start_run(mesh)[0], mesh).measure()
        monkeypatch.setattr(roles, "ROLES", (*roles.ROLES, FROZEN))
        nets, state = start_run(mesh)
        adviser, own = state.models["adviser"], state.models["actor"]
        table = adviser["embed"]["embedding"]
        assert np.any(np.asarray(table) != np.asarray(own["embed"]["embedding"]))
        assert table.sharding.shard_shape(table.shape) != table.shape
        shapes = StateBuilder(config, nets, mesh).shapes()
        assert jax.tree.map(lambda x: (x.shape, x.sharding), state) == jax.tree.map(
            lambda x: (x.shape, x.sharding), shapes
        )
        assert PPOMemory(config, nets, mesh).measure().frozen == bytes_per_device(adviser)
    assert without.frozen == 0
    assert "adviser" not in trained_trees(state)
    # No export has its name.
    refuse_foreign_exports(resolve_roles(config), foreign_folder(tmp_path))
    monkeypatch.setattr("jax_ppo.memory.remedies.target_platform", lambda: "gpu")
    words = [words for words, _ in PossibleChanges(config, mesh)._all()]
    assert any("config.algorithm.reference_offload=True" in text for text in words)


def test_a_trained_role_gets_an_optimizer_a_place_in_checkpoints_and_an_export(
    start, monkeypatch, tmp_path
):
    config, start_run = start
    monkeypatch.setattr(roles, "ROLES", (*roles.ROLES, TRAINED))
    mesh = tiny.make_mesh(2, fsdp=2)
    with jax.set_mesh(mesh):
        nets, state = start_run(mesh)
        trees = jax.tree.map(lambda x: x + 1, trained_trees(state))
        assert {"actor", "adviser"} == trees["optimizer"].keys()
        with Checkpointer(tmp_path / "checkpoints", 1, "reward_mean", print) as checkpoints:
            checkpoints.save(1, trees, {}, None)
            checkpoints.wait()
            shapes = StateBuilder(config, nets, mesh).trained_shapes()
            saved = checkpoints.restore(1, shapes).arrays
        restored = start_run(mesh, saved)[1]
        jax.tree.map(
            np.testing.assert_array_equal,
            restored.models,
            {name: trees[name] for name in ("actor", "adviser")},
        )
        least = PPOMemory(config, nets, mesh).measure()
        assert least.parameters == bytes_per_device(state.models)
        assert least.optimizer == bytes_per_device(state.optimizers)
    with pytest.raises(UserError, match="adviser"):
        refuse_foreign_exports(resolve_roles(config), foreign_folder(tmp_path))
