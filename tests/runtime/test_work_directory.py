"""One run per work directory, on a disk that all processes of the run see."""

import os
import pathlib
import signal
import socket
import subprocess
import sys

import pytest

from jax_ppo import command
from jax_ppo.errors import UserError
from jax_ppo.runtime import distributed, work_directory
from whole_run import finish, start_processes

ROOT = pathlib.Path(__file__).parents[2]
HOLDER = """
import pathlib, sys, time
from jax_ppo.runtime import work_directory
with work_directory.open_work_directory(pathlib.Path(sys.argv[1]), print):
    print("locked", flush=True)
    time.sleep(3600)
"""

FORKING_HOLDER = """
import os, pathlib, sys, time
from jax_ppo.runtime import work_directory
with work_directory.open_work_directory(pathlib.Path(sys.argv[1]), print):
    if os.fork() == 0:
        os.write(1, b"%d\\n" % os.getpid())
    time.sleep(3600)
"""


def open_once(workdir, report=print):
    with work_directory.open_work_directory(workdir, report):
        pass


def test_a_second_run_names_the_holder_and_a_killed_holder_leaves_no_lock(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match="another run uses it") as error:
            open_once(tmp_path)
        assert f"process {holder.pid} on {socket.gethostname()}, started 2" in str(error.value)
        assert "\n" not in str(error.value)
        holder.kill()
    open_once(tmp_path)
    lost = work_directory.lost_run(tmp_path)
    assert lost.startswith(f"the run before, process {holder.pid} on ")
    assert "ended: without a word (killed?); it last wrote at 2" in lost
    open_once(tmp_path)  # and a run that ended leaves none either
    assert not work_directory.lost_run(tmp_path)


def test_a_run_that_a_signal_ended_before_a_step_has_left_why(tmp_path):
    handled = "signals.handle_stop_signals(ends_process=True)"
    holder = HOLDER.replace("import work", "import signals, work")
    holder = holder.replace("with ", f"with {handled}, ")
    with subprocess.Popen(
        [sys.executable, "-c", holder, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "locked\n"
        process.terminate()
    assert process.returncode == 143
    open_once(tmp_path)
    expected = "ended: stopped by SIGTERM before a step could be saved; it last wrote at 2"
    assert expected in work_directory.lost_run(tmp_path)


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_run(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", FORKING_HOLDER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE
    ) as holder:
        child = int(holder.stdout.readline())
        try:
            holder.kill()
            holder.wait()
            open_once(tmp_path)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_disk_without_locks_is_reported(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(work_directory.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(work_directory.fcntl, "flock", flock)
    lines = []
    open_once(tmp_path, lines.append)
    assert "without file locks" in lines[0]


def test_a_read_only_work_directory_is_named(tmp_path, monkeypatch):
    open_once(tmp_path / "earlier")  # imports read files, too

    def refuse(self, *arguments, **options):
        raise OSError(work_directory.errno.EROFS, "Read-only file system")

    monkeypatch.setattr(pathlib.Path, "open", refuse)  # root may write to any folder
    with pytest.raises(UserError, match="cannot be written to: Read-only file system"):
        open_once(tmp_path)


def test_commands_and_the_api_hold_the_lock_while_they_run(tmp_path):
    import tiny

    with command.prepared_run(tiny.config(), tmp_path):
        assert (tmp_path / "config.json").exists()
        with pytest.raises(UserError, match=f"another run uses it: process {os.getpid()} on "):
            command.prepared_run(tiny.config(), tmp_path).__enter__()


def test_processes_with_other_options_are_refused(tmp_path, monkeypatch):
    """Regression: each updated its own copy of the weights by its own learning rate."""
    import tiny

    other = {"config.seed": 5}
    monkeypatch.setattr(distributed, "allgather_json", lambda own: [own, own | other])
    with pytest.raises(UserError, match="^config.seed: process 1 has 5, process 0 0; give all"):
        command.prepared_run(tiny.config(seed=0), tmp_path).__enter__()


PROCESSES = """
import pathlib, sys
from jax_ppo.config import schema
from jax_ppo.errors import UserError
from jax_ppo.runtime import distributed, faults, work_directory

def main():
    work_directory.VISIBLE_SECONDS = 1.0
    try:
        with work_directory.open_work_directory(pathlib.Path(sys.argv[1]), print):
            print("shared", flush=True)
            distributed.barrier("end")
    except UserError as error:
        print(error, flush=True)
        distributed.barrier("end")

distributed.initialize(schema.Distributed())
faults.run_or_abort(main)
"""


def run_two(folders, coordinator_address):
    own = [[folder] for folder in folders]
    processes = start_processes("-c", PROCESSES, own=own, address=coordinator_address)
    lines = [output.splitlines() for output in finish(processes)]
    return [[line for line in own if not line.startswith("[Gloo]")] for own in lines]


def test_an_evaluation_does_not_write_to_the_folder_of_a_training_run(tmp_path, monkeypatch):
    """Regression: it replaced the run's metrics and deleted its responses."""
    import tiny

    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    with pytest.raises(UserError, match="a training run has checkpoints there, and an evaluation"):
        with command.prepared_run(tiny.config(), tmp_path, evaluates=True):
            pytest.fail("it was prepared")
    assert not (tmp_path / "config.json").exists()
    monkeypatch.setenv("HOME", str(tmp_path))  # a shell leaves --workdir=~/evaluation as it is
    with command.prepared_run(tiny.config(), "~/evaluation", evaluates=True) as (_, folder):
        assert folder == tmp_path / "evaluation"


@pytest.mark.slow
def test_two_processes_share_one_directory(tmp_path, coordinator_address):
    assert run_two([tmp_path, tmp_path], coordinator_address) == [["shared"], ["shared"]]
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.slow
def test_separate_local_disks_are_named_in_every_process(tmp_path, coordinator_address):
    for (line,) in run_two([tmp_path / "a", tmp_path / "b"], coordinator_address):
        assert "process 1 of 2 cannot see what process 0 writes there" in line
        assert "a disk that all hosts share" in line


@pytest.mark.slow
def test_an_error_of_process_0_ends_all(tmp_path, coordinator_address):
    (tmp_path / "file").write_text("")
    for (line,) in run_two([tmp_path / "file", tmp_path / "file"], coordinator_address):
        assert "is a file, or a link to nothing; expected a folder" in line


NO_FOLDER = "odd: is a file, or a link to nothing; expected a folder"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("link", NO_FOLDER),
        ("file", NO_FOLDER),
        ("inside a file", "odd/inside: cannot be written to: Not a directory"),
        ("model", "odd: holds a config.json that is not a run's"),
        ("program", "odd: holds a config.json that is not a run's"),
    ],
)
def test_what_cannot_be_a_work_directory_is_named(kind, message, tmp_path):
    path = tmp_path / "odd"
    if kind == "link":
        path.symlink_to(tmp_path / "nowhere")
    elif kind in ("model", "program"):
        path.mkdir()
        (path / "config.json").write_text('{"model_type": "llama"}' if kind == "model" else "[1]")
    else:
        path.touch()
    with pytest.raises(UserError, match=message):
        open_once(path / "inside" if kind == "inside a file" else path)
