"""A full disk: one line with the folder, the size and the free space; a save can be tried again."""

import errno
import logging
import pathlib
import shutil
import types

import jax
import jax.numpy as jnp
import pytest

from jax_ppo import command
from jax_ppo.errors import UserError
from jax_ppo.models.hf.weight_files import write_weights
from jax_ppo.storage import local_files
from jax_ppo.training import checkpoint
from jax_ppo.training.checkpoint import Checkpointer

TREE = {"actor": {"w": jnp.zeros(1_000_000)}}


@pytest.fixture
def little_space(monkeypatch):
    usage = types.SimpleNamespace(free=3_500_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    return usage


def test_a_checkpoint_that_does_not_fit_is_named_and_can_be_saved_later(tmp_path, little_space):
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(UserError) as error:
            checkpoints.save(3, TREE, {})
        assert str(error.value) == (
            f"{tmp_path}: the disk is full: the checkpoint of step 3 needs 4.0 MB; 3.5 MB are free."
            " Make room, or raise the limit on files (`ulimit -f`), then the same command resumes "
            "from the newest checkpoint"
        )
        little_space.free = 4_000_000
        checkpoints.save(3, TREE, {})
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 3


def test_an_export_that_does_not_fit_is_named(tmp_path, little_space):
    (tmp_path / "actor").mkdir()
    row = types.SimpleNamespace(full_shape=(1000, 1000), is_exact=False)
    with pytest.raises(UserError, match="an export of the weights needs 4.0 MB; 3.5 MB are free"):
        write_weights(tmp_path / "actor", {("w",): row}, {}, "float32")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("RESOURCE_EXHAUSTED: Error writing 'x'\nmany lines"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_a_disk_that_fills_up_during_the_save_is_one_line(tmp_path, monkeypatch, error):
    def fail():
        raise error

    with pytest.raises(UserError) as caught, Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, TREE, {})
        monkeypatch.setattr(checkpoints._manager, "wait_until_finished", fail)
        checkpoints.wait()
    assert "the checkpoint of step 3 needs 4.0 MB" in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.__suppress_context__


def test_orbax_logs_nothing_of_a_full_disk_and_all_else():
    def shown(text, error=None):
        info = (type(error), error, None) if error else None
        return checkpoint._is_worth_showing(
            logging.LogRecord("absl", logging.ERROR, "", 0, text, (), info)
        )

    assert not shown("thread raised: RESOURCE_EXHAUSTED: Error writing")
    assert not shown("Failed to commit", ValueError("RESOURCE_EXHAUSTED"))
    assert shown("Failed to commit", ValueError("another reason")) and shown("hello")


def test_an_error_of_the_run_is_raised_in_place_of_that_of_a_save(tmp_path, monkeypatch):
    def fail():
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="row 7"), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, TREE, {})
        jax.block_until_ready(TREE)
        monkeypatch.setattr(checkpoints._manager, "wait_until_finished", fail)
        raise UserError("row 7 of the data")


def test_any_file_of_the_run_that_does_not_fit_is_one_line(tmp_path, monkeypatch):
    import tiny

    with (
        pytest.raises(UserError, match=f"{tmp_path}: the disk is full: a file of the run did not"),
        command.prepared_run(tiny.config(), tmp_path),
        pathlib.Path("/dev/full").open("w") as file,
    ):
        file.write("metrics")
        file.flush()
    monkeypatch.chdir(tmp_path.parent)  # as output/NAME, where Orbax names files by whole paths
    name = tmp_path.name
    gone = f"--workdir={name}: y cannot be written or read: No such file or directory; restore"
    with pytest.raises(UserError, match=gone), command.prepared_run(tiny.config(), name):
        shutil.rmtree(tmp_path)
        (tmp_path / "y").write_text("")
    for arguments in ((), (errno.ENOENT, "", 7), (errno.ENOENT, "", b"x")):
        with pytest.raises(FileNotFoundError), command.prepared_run(tiny.config(), tmp_path):
            raise FileNotFoundError(*arguments)


def test_causes_and_limits_on_the_size_of_files_are_as_a_full_disk():
    error, other = RuntimeError("failed"), RuntimeError("failed")
    error.__cause__ = OSError(errno.EDQUOT, "Disk quota exceeded")
    limit = ValueError("OUT_OF_RANGE: Error writing local file 'x': File too large")
    assert list(map(local_files.is_disk_full, (error, limit, other))) == [True, True, False]


def test_only_what_follows_from_a_failed_save_is_not_shown(monkeypatch):
    shown = []
    monkeypatch.setattr(checkpoint, "_show_uncaught", shown.append)
    for text in ("Event loop is closed", "another"):
        report = types.SimpleNamespace(exc_value=RuntimeError(text))
        checkpoint._show_unless_of_closed_loop(report)
    assert [str(report.exc_value) for report in shown] == ["another"]
