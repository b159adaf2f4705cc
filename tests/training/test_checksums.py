"""Damaged checkpoints are detected, set aside, and replaced by the next older one."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.errors import UserError
from jax_ppo.training import checksums
from jax_ppo.training.checkpoint import Checkpointer

SHAPES = {
    "actor": {
        "w": jax.ShapeDtypeStruct(
            (64,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
        )
    }
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of steps 1, 2 and 3; the first is the best."""
    folder = tmp_path_factory.mktemp("saved")
    with Checkpointer(folder, max_to_keep=2) as checkpoints:
        for step in (1, 2, 3):
            arrays = {"actor": {"w": jnp.full(64, float(step))}}
            checkpoints.save(step, arrays, {"step": step}, {"accuracy": 1 / step})
    return folder


@pytest.fixture
def directory(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def largest_data_file(folder):
    return max(folder.glob("actor/**/d/*"), key=lambda path: path.stat().st_size)


def flip_bit(folder):
    path = largest_data_file(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(folder):
    path = largest_data_file(folder)
    path.write_bytes(path.read_bytes()[:-1])


def empty_metadata(folder):
    (folder / "_CHECKPOINT_METADATA").write_bytes(b"")


def empty_meta(folder):
    (folder / "meta" / "metadata").write_bytes(b"")


def empty_folder(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def remove_file(folder):
    largest_data_file(folder).unlink()


def spoil_checksums(folder):
    (folder / checksums.CHECKSUMS).write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_bit, "the checksum of actor/"),
        (truncate, "bytes instead of"),
        (empty_metadata, "_CHECKPOINT_METADATA has 0 bytes"),
        (empty_meta, "meta/metadata has 0 bytes"),
        (empty_folder, "checksums.json is missing"),
        (remove_file, "is missing"),
        (spoil_checksums, "checksums.json is unreadable"),
    ],
)
def test_the_next_older_checkpoint_replaces_a_damaged_one(directory, damage, message):
    damage(directory / "3")
    lines = []
    with Checkpointer(directory, max_to_keep=2, report=lines.append) as checkpoints:
        assert checkpoints.latest_step() == 2
        arrays, meta = checkpoints.restore(2, SHAPES)
        assert meta == {"step": 2}
        np.testing.assert_array_equal(arrays["actor"]["w"], np.full(64, 2.0))
        checkpoints.save(3, {"actor": {"w": jnp.zeros(64)}}, {})
        checkpoints.wait()
        # The damaged one takes nobody's place: two recent ones and the best are kept.
        assert sorted(path.name for path in directory.iterdir()) == ["1", "2", "3", "3.damaged"]
    (line,) = lines
    assert message in line and "renamed to 3.damaged; trying the one of step 2" in line
    assert "\n" not in line


def test_without_an_intact_one_the_run_starts_again(directory):
    for step in "123":
        truncate(directory / step)
    lines = []
    with Checkpointer(directory, report=lines.append) as checkpoints:
        assert checkpoints.latest_step() is None
    assert len(lines) == 3 and "the run starts again from step 0" in lines[-1]


def test_a_deletion_that_was_interrupted_is_completed(directory):
    remove_file(directory / "1")
    lines = []
    with Checkpointer(directory, report=lines.append) as checkpoints:
        assert (checkpoints.latest_step(), checkpoints.best_step()) == (3, 2)
    assert not (directory / "1").exists() and "is incomplete" in lines[0]


def test_an_older_one_is_verified_when_it_is_read(directory):
    # Opening compares only sizes and small files of older ones.
    names = json.loads((directory / "1" / checksums.CHECKSUMS).read_text())
    with Checkpointer(directory) as checkpoints:
        flip_bit(directory / "1")
        with pytest.raises(UserError, match=r"checkpoint .*/1 is damaged: the checksum of actor/"):
            checkpoints.restore(1, SHAPES)
    assert "_CHECKPOINT_METADATA" in names and "metrics/metrics" in names


def test_every_flipped_bit_of_a_checkpoint_is_detected(directory):
    folder = directory / "3"
    for path in folder.rglob("*"):
        # Nobody reads the text that Orbax writes after the checksums.
        is_note = path == folder / "commit_success.txt"
        if not path.is_file() or path.name == checksums.CHECKSUMS or is_note:
            continue
        content = path.read_bytes()
        for position in range(0, len(content), 37):
            changed = bytearray(content)
            changed[position] ^= 1 << position % 8
            path.write_bytes(changed)
            assert "the checksum of" in checksums.find_damage(folder), (path, position)
        path.write_bytes(content)
    assert checksums.find_damage(folder) is None
