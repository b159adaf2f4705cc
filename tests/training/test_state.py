"""The contents of a training state, at first and when a run resumes."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import tiny
from jax_ppo.errors import UserError
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.transformer import Transformer
from jax_ppo.training.networks import Folders
from jax_ppo.training.roles import read_networks
from jax_ppo.training.state import StateBuilder, trained_trees


def test_a_state_from_a_checkpoint_is_the_one_that_was_saved():
    """Parameters, optimizers and the step are restored."""
    config, mesh = tiny.config(algorithm__use_reference=False), tiny.make_mesh()
    with jax.set_mesh(mesh):
        before = tiny.make_state(config, mesh)
        before = dataclasses.replace(before, step=jnp.int32(7))
        folders = Folders()
        states = StateBuilder(config, tiny.networks(config), mesh)
        after = states.create(folders, None, trained_trees(before), 7)
    assert int(after.step) == 7
    trees = (trained_trees(state) for state in (after, before))
    jax.tree.map(np.testing.assert_array_equal, *trees)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write an actor, and a reward model with its own head."""
    folder, net = tmp_path_factory.mktemp("roles"), Transformer(tiny.ARCHITECTURE)
    export_checkpoint(
        tiny.init_params(net, jax.random.key(0), "lm"), tiny.ARCHITECTURE, folder / "actor"
    )
    padded = dataclasses.replace(tiny.ARCHITECTURE, pad_id=1)  # regression: a reference of its own
    export_checkpoint(tiny.init_params(net, jax.random.key(3), "lm"), padded, folder / "other")
    params = tiny.init_params(net, jax.random.key(1), "scalar")
    params["score"]["kernel"] = jax.random.normal(
        jax.random.key(2), params["score"]["kernel"].shape
    )
    export_checkpoint(params, tiny.ARCHITECTURE, folder / "reward")
    return folder


@pytest.mark.parametrize(
    ("options", "critic", "head"),
    [
        ({}, "actor", "zero"),
        ({"critic__path": "x"}, "reward", "zero"),
        ({"critic__path": "x", "critic__keep_head": True}, "reward", "kept"),
        ({"critic__shared_trunk": True}, "", "shared"),
    ],
)
def test_where_a_critic_starts(folders, options, critic, head):
    config, mesh = tiny.config(algorithm__use_reference=False, **options), tiny.make_mesh()
    places = Folders(actor=folders / "actor", **({"critic": folders / critic} if critic else {}))
    with jax.set_mesh(mesh):
        nets = read_networks(config, places)
        state = StateBuilder(config, nets, mesh).create(places, lambda role: None)
    if head == "shared":
        assert state.critic is None and not np.any(state.actor["score"]["kernel"])
        return
    source = load_file(folders / critic / "model.safetensors")
    np.testing.assert_array_equal(
        state.critic["embed"]["embedding"], source["model.embed_tokens.weight"]
    )
    expected = source["score.weight"].T if head == "kept" else np.zeros((16, 1))
    np.testing.assert_array_equal(state.critic["score"]["kernel"], expected)


def test_a_head_that_is_not_there_can_not_be_kept(folders):
    config = tiny.config(critic__path="x", critic__keep_head=True)
    with pytest.raises(UserError, match=r"there is no score\.weight in it"):
        read_networks(config, Folders(actor=folders / "actor", critic=folders / "actor"))


def test_the_reference_may_be_another_model(folders):
    config, mesh = tiny.config(reference__path="x"), tiny.make_mesh()
    places = Folders(actor=folders / "actor", critic=folders / "actor", reference=folders / "other")
    with jax.set_mesh(mesh):
        nets = read_networks(config, places)
        state = StateBuilder(config, nets, mesh).create(places, lambda role: None)
    for tree, folder in ((state.actor, "actor"), (state.reference, "other")):
        source = load_file(folders / folder / "model.safetensors")
        np.testing.assert_array_equal(
            tree["embed"]["embedding"], source["model.embed_tokens.weight"]
        )


def test_a_reference_of_another_architecture_is_refused(folders, tmp_path):
    shutil.copytree(folders / "actor", tmp_path / "other")
    config_file = tmp_path / "other" / "config.json"
    fields = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(fields | {"rms_norm_eps": 0.125}))
    places = Folders(actor=folders / "actor", reference=tmp_path / "other")
    with pytest.raises(UserError, match=r"reference\.path='x': expected .*0\.125 instead of"):
        read_networks(tiny.config(reference__path="x"), places)
    (tmp_path / "other" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"reference\.path='x': holds adapters"):
        read_networks(tiny.config(reference__path="x"), places)
