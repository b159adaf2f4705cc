"""Local checkpoints: which one a run resumes from, and that it is read bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tiny
from jax_ppo.errors import UserError
from jax_ppo.runtime import placement
from jax_ppo.training.checkpoint import RUN_ID, Checkpointer
from jax_ppo.training.local_checkpoints import LocalCheckpoints

NOT_USED = "local checkpoints are not used: no step is whole on every process, with the run's mesh"


def make_state(mesh):
    """Return arrays that the mesh splits, repeats, or has as a scalar, in two types."""

    def place(x, *axes):
        return jax.device_put(x, NamedSharding(mesh, P(*axes)))

    return {
        "actor": {
            "kernel": place(jax.random.normal(jax.random.key(0), (8, 6)), "fsdp", "model"),
            "norm": place(jnp.arange(4, dtype=jnp.bfloat16)),
        },
        "optimizer": (place(jnp.int32(7)), None),
    }


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


@pytest.fixture
def mesh():
    return tiny.make_mesh(4, fsdp=2, model=2)


@pytest.fixture
def saved(mesh, tmp_path):
    """Return a folder with the states of steps 3 and 5, and the state."""
    state = make_state(mesh)
    checkpoints = open_checkpoints(tmp_path, mesh)
    for step in (3, 5):
        checkpoints.save(step, state, {"position": 10 * step})
    checkpoints.close(shared_step=2)
    return tmp_path, state


def open_checkpoints(folder, mesh, shared_step=None, lines=None, run_id="run"):
    report = [].append if lines is None else lines.append
    return LocalCheckpoints(str(folder), run_id, mesh, shared_step, report)


def test_a_state_is_restored_bit_for_bit(saved, mesh):
    folder, state = saved
    checkpoints = open_checkpoints(folder, mesh, shared_step=4)
    assert checkpoints.step == 5
    assert checkpoints.saved_shapes("actor") == {"kernel": (8, 6), "norm": (4,)}
    assert checkpoints.saved_shapes("critic") is None
    arrays, meta = checkpoints.restore(abstract(state))
    assert meta == {"position": 50}
    jax.tree.map(np.testing.assert_array_equal, arrays, state)
    jax.tree.map(lambda x, y: x.sharding == y.sharding or pytest.fail(str(x)), arrays, state)
    assert arrays["actor"]["norm"].dtype == jnp.bfloat16


@pytest.mark.parametrize("saved_in", ["device", placement.PINNED_HOST])
@pytest.mark.parametrize("restored_in", ["device", placement.PINNED_HOST])
def test_a_state_is_restored_to_the_memory_where_it_belongs(mesh, tmp_path, saved_in, restored_in):
    """Optimizer states may be offloaded, or no longer, from one start to the next."""

    def shapes(memory):
        return placement.in_memory(abstract(make_state(mesh)), memory)

    state = jax.tree.map(
        lambda x, shape: jax.device_put(x, shape.sharding), make_state(mesh), shapes(saved_in)
    )
    checkpoints = open_checkpoints(tmp_path, mesh)
    checkpoints.save(1, state, {})
    checkpoints.close(shared_step=None)
    arrays, _ = open_checkpoints(tmp_path, mesh).restore(shapes(restored_in))
    assert {x.sharding.memory_kind for x in jax.tree.leaves(arrays)} == {restored_in}
    jax.tree.map(np.testing.assert_array_equal, arrays, state)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_are_restored(mesh, tmp_path, impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), 4)
    state = {"keys": {"split": jax.device_put(keys, NamedSharding(mesh, P("fsdp")))}}
    checkpoints = open_checkpoints(tmp_path, mesh)
    checkpoints.save(1, state, {})
    checkpoints.close(shared_step=None)
    arrays, _ = open_checkpoints(tmp_path, mesh).restore(abstract(state))
    restored = arrays["keys"]["split"]
    assert (restored.dtype, restored.sharding) == (keys.dtype, state["keys"]["split"].sharding)
    data = jax.random.key_data(restored)
    np.testing.assert_array_equal(data, jax.random.key_data(keys))


def test_a_mismatch_names_the_local_checkpoint(mesh, tmp_path):
    state = make_state(mesh)
    local = tmp_path / "local"
    for _ in range(2):
        with Checkpointer(tmp_path / "shared") as checkpoints:
            checkpoints.keep_local(str(local), mesh)
            if checkpoints.latest_step() is None:
                checkpoints.save_local(1, state, {})
                continue
            checkpoints.restore(1, abstract(state))
            wider = jax.ShapeDtypeStruct((9,), jnp.float32, sharding=NamedSharding(mesh, P()))
            with pytest.raises(UserError) as error:
                checkpoints.restore(1, {"actor": {"kernel": wider, "norm": wider}})
            with pytest.raises(UserError, match="holds no 'critic'"):
                checkpoints.restore(1, {"critic": abstract(state["actor"])})
    assert "actor/kernel: (8, 6) in the checkpoint, (9,) in the model" in str(error.value)
    path = next(local.glob("*/process_0")) / "1"
    assert str(error.value).startswith(f"local checkpoint {path} is of another model")


def test_only_the_one_that_the_run_resumes_from_is_kept(saved, mesh):
    folder, _ = saved
    open_checkpoints(folder, mesh)
    assert [path.name for path in (folder / "run/process_0").iterdir()] == ["5"]


def test_the_work_directory_is_used_if_it_is_newer(saved, mesh):
    folder, _ = saved
    assert open_checkpoints(folder, mesh, shared_step=6).step is None


def test_another_run_and_another_mesh_have_none(saved, mesh):
    folder, _ = saved
    assert open_checkpoints(folder, mesh, run_id="another").step is None
    lines = []
    assert open_checkpoints(folder, tiny.make_mesh(4, fsdp=4), lines=lines).step is None
    assert lines == [NOT_USED]


@pytest.mark.parametrize("file", ["0.bin", "manifest.json"])
def test_the_one_before_a_damaged_one_is_used(saved, mesh, file):
    folder, _ = saved
    path = folder / "run/process_0/5" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert open_checkpoints(folder, mesh).step == 3


def test_one_that_some_processes_lack_is_not_used(saved, mesh, monkeypatch):
    folder, _ = saved
    lines = []
    another = {"saved": [2, 4], "usable": [4]}
    monkeypatch.setattr(
        "jax_ppo.runtime.distributed.allgather_json", lambda answer: [answer, another]
    )
    assert open_checkpoints(folder, mesh, lines=lines).step is None
    assert lines == [NOT_USED]


def test_a_layout_that_changed_otherwise_is_refused(saved, mesh):
    folder, state = saved
    checkpoints = open_checkpoints(folder, mesh)
    whole = NamedSharding(mesh, P())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), state)
    with pytest.raises(UserError, match="local checkpoint of step 5 is of another layout"):
        checkpoints.restore(shapes)


def test_a_run_that_is_complete_in_its_work_directory_leaves_nothing(saved, mesh):
    folder, _ = saved
    open_checkpoints(folder, mesh).close(shared_step=6)
    assert not any(folder.iterdir())


def test_another_process_may_remove_the_folder_of_the_run_first(saved, mesh, monkeypatch):
    folder, _ = saved
    checkpoints = open_checkpoints(folder, mesh)

    def list_removed_folder(path):
        path.rmdir()
        raise FileNotFoundError(path)

    monkeypatch.setattr("pathlib.Path.iterdir", list_removed_folder)
    checkpoints.close(shared_step=6)
    assert not (folder / "run").exists()


def test_an_empty_name_of_the_run_is_written_again(mesh, tmp_path):
    """A run that was killed while writing it leaves one; all such runs would share checkpoints."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN_ID).touch()
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.keep_local(str(tmp_path / "local"), mesh)
        name = (tmp_path / "run" / RUN_ID).read_text()
        assert name and (tmp_path / "local" / name / "process_0").is_dir()


def test_a_folder_that_cannot_be_used_is_named(mesh, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"config.trainer.local_dir: .*file"):
        open_checkpoints(tmp_path / "file", mesh)
    with pytest.raises(UserError, match="local_dir='gs://bucket': expected a local folder"):
        LocalCheckpoints("gs://bucket", "run", mesh, None, print)
