"""Checkpoints are restored bit for bit, onto other meshes, and after SIGKILL."""

import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ppo.errors import UserError
from jax_ppo.training.checkpoint import Checkpointer

ROOT = pathlib.Path(__file__).parents[2]


def make_mesh(*shape):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, ("fsdp", "model")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


def params(mesh, seed=0):
    """Return parameters sharded over the mesh."""

    def init(key):
        return {"layers": {"kernel": jax.random.normal(key, (2, 8, 16))}, "norm": jnp.ones(8)}

    shardings = {
        "layers": {"kernel": NamedSharding(mesh, P(None, *mesh.axis_names))},
        "norm": NamedSharding(mesh, P()),
    }
    return jax.jit(init, out_shardings=shardings)(jax.random.key(seed))


def state(mesh, seed=0):
    """Return actor, critic and optimizer states in several kinds of containers."""
    actor, critic = params(mesh, seed), params(mesh, seed + 1)
    matrices = jax.tree.map(lambda x: x.ndim > 1, actor)
    transform = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3), mask=matrices)
    )
    optimizers = {
        name: jax.jit(transform.init)(tree) for name, tree in (("actor", actor), ("critic", critic))
    }
    return {"actor": actor, "critic": critic, "optimizer": optimizers}


def shapes_of_tree(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert a.dtype == b.dtype and a.sharding == b.sharding


def small_tree(value):
    return {"actor": {"w": jnp.full(4, float(value))}}


def test_what_was_saved_comes_back(tmp_path):
    saved = state(make_mesh(2))
    meta = {
        "position": 12,
        "evaluations": [{"step": 0, "accuracy": 0.25}],
        "config": {"seed": None, "name": "é"},
    }
    with Checkpointer(tmp_path / "new/folder") as checkpoints:
        assert checkpoints.latest_step() is None and checkpoints.best_step() is None
        checkpoints.save(3, saved, meta)
    with Checkpointer(tmp_path / "new/folder") as checkpoints:
        assert checkpoints.latest_step() == 3
        arrays, read = checkpoints.restore(3, shapes_of_tree(saved))
        assert read == meta
        assert_same(arrays, saved)
        critic = {"critic": saved["critic"]}
        assert_same(checkpoints.restore(3, shapes_of_tree(critic)).arrays, critic)
        assert checkpoints.restore(3, {}) == ({}, meta)


@pytest.mark.parametrize(
    ("meta", "reader"),
    [
        ({"position": 24, "config": {}}, "1, which version 0.1.0"),  # as that version wrote it
        ({"format": 3, "run": {}}, "3, which a later version"),
    ],
)
def test_a_checkpoint_of_another_format_is_refused_with_the_version_that_reads_it(
    tmp_path, meta, reader
):
    with Checkpointer(tmp_path) as checkpoints:
        actor = ocp.args.StandardSave(small_tree(1)["actor"])
        items = ocp.args.Composite(actor=actor, meta=ocp.args.JsonSave(meta))
        checkpoints._manager.save(3, args=items)
    with Checkpointer(tmp_path) as checkpoints, pytest.raises(UserError) as error:
        checkpoints.restore(3, {})
    assert str(error.value) == (
        f"checkpoint 3 in {tmp_path} has format {reader} of jax_ppo reads: continue with that, or "
        "give another --workdir"
    )


def test_the_arrays_may_change_as_soon_as_save_returns(tmp_path):
    change = jax.jit(lambda x: x + 1, donate_argnums=0)
    tree = {"w": jnp.zeros(1000)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"actor": tree}, {})
        for _ in range(5):
            tree = {"w": change(tree["w"])}
        read = checkpoints.restore(1, {"actor": shapes_of_tree(tree)}).arrays["actor"]
    assert float(jnp.abs(read["w"]).sum()) == 0


@pytest.mark.parametrize("shape", [(1,), (8,), (4, 2), (2, 4)])
def test_another_mesh_reads_the_same_bits(tmp_path, shape):
    saved = params(make_mesh(2, 2))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"actor": saved}, {})
        expected = shapes_of_tree(params(make_mesh(*shape)))
        read = checkpoints.restore(1, {"actor": expected}).arrays["actor"]
    assert jax.tree.map(lambda x: x.sharding, read) == jax.tree.map(lambda x: x.sharding, expected)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), read, saved
    )


def test_another_dtype_is_cast_and_typed_keys_are_kept(tmp_path):
    saved = {"w": jnp.arange(4.0), "key": jax.random.key(7)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"actor": saved}, {})
        expected = shapes_of_tree(saved)
        expected["w"] = jax.ShapeDtypeStruct((4,), jnp.bfloat16, sharding=saved["w"].sharding)
        read = checkpoints.restore(1, {"actor": expected}).arrays["actor"]
    assert read["w"].dtype == jnp.bfloat16
    assert read["key"] == saved["key"] and read["key"].dtype == saved["key"].dtype


class TestKeeping:
    def test_the_last_and_the_best_stay_through_a_restart(self, tmp_path):
        with Checkpointer(tmp_path, 2, "accuracy") as checkpoints:
            for step, accuracy in ((1, 0.2), (2, 0.9), (3, 0.3)):
                checkpoints.save(
                    step, small_tree(step), {}, {"accuracy": accuracy, "reward_mean": -accuracy}
                )
            assert checkpoints.best_step() == 2
        with Checkpointer(tmp_path, 2, "accuracy") as checkpoints:
            checkpoints.save(4, small_tree(4), {}, {"accuracy": 0.4})
            checkpoints.save(5, small_tree(5), {}, None)
            checkpoints.wait()
            assert saved_steps(tmp_path) == [2, 4, 5]
            assert (checkpoints.best_step(), checkpoints.latest_step()) == (2, 5)
            checkpoints.save(6, small_tree(6), {}, {"accuracy": 0.9})
            assert checkpoints.best_step() == 6  # the newest of equal ones
            checkpoints.save(7, small_tree(7), {})
        assert saved_steps(tmp_path) == [6, 7]
        with Checkpointer(tmp_path, 2, "reward_mean") as checkpoints:
            assert checkpoints.best_step() is None  # neither checkpoint has this metric

    def test_without_a_figure_there_is_no_best(self, tmp_path):
        useless = {"accuracy": float("nan")}, {"accuracy": None}, {"reward_mean": 1.0}, None
        with Checkpointer(tmp_path, 1, "accuracy") as checkpoints:
            for step, metrics in enumerate(useless):
                checkpoints.save(step, small_tree(step), {}, metrics)
            assert checkpoints.best_step() is None
        assert saved_steps(tmp_path) == [3]

    def test_a_figure_that_is_not_finite_never_wins(self, tmp_path):
        with Checkpointer(tmp_path, 1, "accuracy") as checkpoints:
            for step, accuracy in enumerate((0.2, 0.9, float("nan"), 0.3)):
                checkpoints.save(step, small_tree(step), {}, {"accuracy": accuracy})
            assert checkpoints.best_step() == 1
        assert saved_steps(tmp_path) == [1, 3]


def saved_steps(directory):
    return sorted(int(path.name) for path in directory.iterdir())


class TestErrors:
    def test_a_changed_model_is_named_with_both_shapes(self, tmp_path):
        saved = {"layers": {"kernel": jnp.zeros((2, 3)), "old": jnp.zeros(1)}, "same": jnp.zeros(1)}
        expected = {
            "layers": {"kernel": jnp.zeros((2, 5)), "new": jnp.zeros(4)},
            "same": jnp.zeros(1),
        }
        with Checkpointer(tmp_path) as checkpoints:
            checkpoints.save(1, {"actor": saved}, {})
            with pytest.raises(UserError) as error:
                checkpoints.restore(1, {"actor": shapes_of_tree(expected)})
            message = str(error.value)
            assert "actor/layers/kernel: (2, 3) in the checkpoint, (2, 5) in the model" in message
            assert "actor/layers/new: absent in the checkpoint, (4,) in the model" in message
            assert "actor/layers/old: (1,) in the checkpoint, absent in the model" in message
            assert "same" not in message
            many = {f"layer_{i}": jnp.zeros(1) for i in range(20)}
            with pytest.raises(UserError, match="and 18 more"):
                checkpoints.restore(1, {"actor": shapes_of_tree(many)})
            with pytest.raises(UserError, match="holds no 'critic'"):
                checkpoints.restore(1, {"critic": shapes_of_tree(saved)})

    def test_a_step_that_is_not_there(self, tmp_path):
        with Checkpointer(tmp_path) as checkpoints:
            checkpoints.save(1, small_tree(1), {})
            with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 2, only of \[1\]"):
                checkpoints.restore(2, shapes_of_tree(small_tree(1)))

    def test_another_run_s_step_is_not_taken_for_this_one_s(self, tmp_path):
        with Checkpointer(tmp_path) as checkpoints:
            checkpoints.save(1, small_tree(1), {})
        with (
            Checkpointer(tmp_path) as checkpoints,
            pytest.raises(ValueError, match="already exists"),
        ):
            checkpoints.save(1, small_tree(2), {})


KILLED = """
import sys, jax, jax.numpy as jnp
from jax_ppo.training.checkpoint import Checkpointer
checkpoints = Checkpointer(sys.argv[1], 1)
for step in range(1, 1000):
    tree = {f"w{i}": jax.random.normal(jax.random.key(step * 10 + i), (512, 512)) for i in range(8)}
    checkpoints.save(step, {"actor": jax.block_until_ready(tree)}, {"step": step})
    print(step, flush=True)
"""


@pytest.mark.parametrize(
    "pause",
    [pytest.param(0.0, marks=pytest.mark.exhaustive), pytest.param(0.02, marks=pytest.mark.slow)],
)
def test_killed_while_saving_the_last_whole_one_is_there(tmp_path, pause):
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with child:
        while child.stdout.readline() != "3\n":
            assert child.poll() is None
        time.sleep(pause)  # the third is being written
        child.kill()
    with Checkpointer(tmp_path) as checkpoints:
        step = checkpoints.latest_step()
        assert step >= 2
        expected = {
            f"w{i}": jax.random.normal(jax.random.key(step * 10 + i), (512, 512)) for i in range(8)
        }
        arrays, meta = checkpoints.restore(step, {"actor": shapes_of_tree(expected)})
        assert meta == {"step": step}
        assert_same(arrays["actor"], expected)
        checkpoints.save(step + 1, {"actor": expected}, {})
    assert saved_steps(tmp_path) == [step, step + 1]  # the incomplete checkpoint is gone
