"""Work directories in a bucket: one run at a time, files uploaded, checkpoints written there."""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucket_server
import tiny
from jax_ppo import command
from jax_ppo.errors import UserError
from jax_ppo.models.hf.hub import resolve_model_folder
from jax_ppo.models.hf.load import load_checkpoint
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.reporting import files
from jax_ppo.runtime import work_directory
from jax_ppo.storage import bucket_lock, remote, staging
from jax_ppo.training.checkpoint import Checkpointer
from waiting import wait_until

HOLDER = """
import sys, time
from jax_ppo.storage.bucket_lock import BucketLock
BucketLock(sys.argv[1]).acquire(print)
print("locked", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def quick(monkeypatch):
    """Shorten the waits for a holder that may be dead."""
    monkeypatch.setattr(bucket_lock, "STALE_SECONDS", 0.3)
    monkeypatch.setattr(bucket_lock, "POLL_SECONDS", 0.05)


def lock_of_another_machine(server, address):
    """Write a lock that no process of this machine can be known to have given up."""
    contents = {"holder": "process 7 on pod", "token": "t", "machine": "m", "pid": 7, "renewed": 1}
    bucket_server.put(server, f"{address}/lock", json.dumps(contents))


def test_a_second_run_is_refused_and_a_killed_one_leaves_no_lock(server, bucket):
    command_line = [sys.executable, "-c", HOLDER, f"{bucket}/run"]
    with subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        holder.send_signal(signal.SIGSTOP)
        waiting = bucket_lock.BucketLock(f"{bucket}/run")
        lines = []

        def renew_and_report(line):
            lines.append(line)
            contents = json.loads(bucket_server.get(*place))
            bucket_server.put(*place, json.dumps(contents | {"renewed": 1}))

        place = (server, f"{bucket}/run/lock")
        with pytest.raises(UserError, match=f"another run uses it: process {holder.pid} on "):
            waiting.acquire(renew_and_report)
        assert "waiting up to 60 s" in lines[0]
        holder.kill()
        holder.wait()
        # It reports a wait: a dead process of this machine is not waited for.
        waiting.acquire(pytest.fail)
        waiting.release()


def test_a_lock_that_is_not_renewed_is_taken_over_and_its_holder_notices(server, bucket, quick):
    lock_of_another_machine(server, bucket)
    new = bucket_lock.BucketLock(bucket)
    lines = []
    new.acquire(lines.append)
    assert lines == [
        f"{bucket} is locked by process 7 on pod: waiting up to 0.3 s to see whether that run is "
        "alive"
    ]
    new.renew()
    new.require_held()
    lock_of_another_machine(server, bucket)
    for notice in (new.renew, new.require_held):
        with pytest.raises(UserError, match="lost its lock, which is now held by process 7 on pod"):
            notice()
    new.release()
    assert bucket_server.names(server, bucket) == ["lock"], "the lock of another run stays"


def test_of_two_runs_that_take_over_a_lock_one_succeeds(server, bucket, quick, monkeypatch):
    lock_of_another_machine(server, bucket)
    one, two = bucket_lock.BucketLock(bucket), bucket_lock.BucketLock(bucket)
    write, taken = bucket_lock.BucketLock._write, []

    def write_after_the_other(self, replaces):
        # Right before the first takes over, the second does.
        if self is one and replaces and not taken:
            taken.append(two)
            two.acquire(print)
        return write(self, replaces)

    monkeypatch.setattr(bucket_lock.BucketLock, "_write", write_after_the_other)
    with pytest.raises(UserError, match="another run uses it"):
        one.acquire(print)
    two.require_held()
    two.release()


def test_a_lost_run_is_described_to_the_next_one(server, bucket, quick):
    lock_of_another_machine(server, bucket)
    for lost in ("the run before, process 7 on pod, ended: without a word (killed?); it last", ""):
        with work_directory.open_work_directory(bucket, print) as folder:
            assert work_directory.lost_run(folder).startswith(lost)
            assert bool(work_directory.lost_run(folder)) == bool(lost)


def test_a_run_whose_local_folder_is_deleted_keeps_its_files_in_the_bucket(server, bucket):
    """Regression: they were taken for removed ones, and deleted."""
    with pytest.raises(UserError, match="deleted while it ran: .*run the same command again"):
        with work_directory.open_work_directory(bucket, print) as folder:
            (folder / "training_metrics.csv").write_text("step\n")
            work_directory.publish(folder)
            shutil.rmtree(folder)
    assert bucket_server.names(server, bucket) == ["training_metrics.csv"]


def test_only_what_the_run_removes_is_removed_from_the_bucket(server, bucket):
    """Regression: a file that was deleted from the local folder alone was lost in the bucket."""
    names = ("rollouts/training_000001.jsonl", "rollouts/training_000002.jsonl")
    for name in (*names, "training_metrics.csv"):
        bucket_server.put(server, f"{bucket}/{name}", "{}\n")
    with work_directory.open_work_directory(bucket, print) as folder:
        work_directory.fetch_folder(folder, "rollouts")
        (folder / "notes.txt").write_text("mine")
        work_directory.publish(folder)
        for name in ("training_metrics.csv", "notes.txt", names[0]):
            (folder / name).unlink()
        files.drop_samples_after(folder, 1)
    assert bucket_server.names(server, bucket) == ["notes.txt", names[0], "training_metrics.csv"]


def test_a_run_holds_the_lock_and_its_files_are_in_the_bucket(server, bucket):
    address = f"{bucket}/runs/a"
    with command.prepared_run(tiny.config(), address) as (_, folder):
        assert (folder / "config.json").exists()
        with pytest.raises(UserError, match="another run uses it: process"):
            command.prepared_run(tiny.config(), address).__enter__()
        (folder / "training_metrics.csv").write_text("step\n1\n")
        (folder / "tensorboard").mkdir()
        (folder / "tensorboard" / "events").write_text("e")
        (folder / "half.csv.tmp").write_text("")
        (folder / ".actor.writing").mkdir()
        (folder / ".actor.writing" / "model.safetensors").write_text("")
        work_directory.publish(folder)
        names = ["config.json", "lock", "tensorboard/events", "training_metrics.csv"]
        assert bucket_server.names(server, address) == names
        (folder / "training_metrics.csv").write_text("step\n1\n2\n")
    names.remove("lock")
    assert bucket_server.names(server, address) == names
    assert bucket_server.get(server, f"{address}/training_metrics.csv") == b"step\n1\n2\n"


def test_an_evaluation_is_not_written_to_a_run_in_a_bucket(server, bucket):
    bucket_server.put(server, f"{bucket}/a/checkpoints/1/x", "x")
    with pytest.raises(UserError, match="a training run has checkpoints there"):
        command.prepared_run(tiny.config(), f"{bucket}/a", evaluates=True).__enter__()
    assert bucket_server.names(server, f"{bucket}/a") == ["checkpoints/1/x"]


def test_a_resumed_run_finds_its_files_and_replaces_its_exports(server, bucket):
    for name in ("training_metrics.csv", "model/config.json", "checkpoints/1/x", "tensorboard/old"):
        bucket_server.put(server, f"{bucket}/{name}", name)
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        bucket_server.put(server, f"{bucket}/actor/{name}", "old")
    with work_directory.open_work_directory(bucket, print) as folder:
        assert (folder / "training_metrics.csv").read_text() == "training_metrics.csv"
        assert (folder / "model" / "config.json").exists()
        assert not (folder / "checkpoints").exists() and not (folder / "actor").exists()
        work_directory.bucket_of(folder / "actor").remove("actor")  # as an export does first
        for name in ("tensorboard/new", "actor/config.json", "actor/model.safetensors"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("new")
    assert bucket_server.names(server, bucket) == [
        "actor/config.json",
        "actor/model.safetensors",
        "checkpoints/1/x",
        "model/config.json",
        "tensorboard/new",
        "tensorboard/old",
        "training_metrics.csv",
    ]


def test_files_are_uploaded_while_the_run_goes_on(server, bucket, monkeypatch):
    monkeypatch.setattr(staging, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(staging, "UPLOAD_SECONDS", 0.1)
    with work_directory.open_work_directory(bucket, print) as folder:
        first = bucket_server.get(server, f"{bucket}/lock")
        (folder / "training_metrics.csv").write_text("step\n")
        wait_until(lambda: "training_metrics.csv" in bucket_server.names(server, bucket))
        wait_until(lambda: bucket_server.get(server, f"{bucket}/lock") != first)  # renewed


def test_a_run_whose_lock_was_taken_saves_and_uploads_nothing(server, bucket):
    with pytest.raises(UserError, match="lost its lock"):
        with work_directory.open_work_directory(bucket, print) as folder:
            (folder / "training_metrics.csv").write_text("step\n")
            lock_of_another_machine(server, bucket)
            work_directory.publish(folder)
    assert bucket_server.names(server, bucket) == ["lock"]


def test_a_run_that_fails_leaves_its_last_files_in_the_bucket(server, bucket):
    with pytest.raises(ZeroDivisionError):
        with work_directory.open_work_directory(bucket, print) as folder:
            (folder / "training_metrics.csv").write_text("step\n")
            raise ZeroDivisionError
    assert bucket_server.names(server, bucket) == ["training_metrics.csv"]


@pytest.mark.parametrize(
    ("workdir", "message"),
    [
        ("s3://bucket/run", "expected a local path or gs://BUCKET/PATH"),
        ("gcs://bucket/run", "Did you mean 'gs://'"),
        ("gs:/bucket/run", "the bucket is missing"),
        ("gs://no-such-bucket/run", "there is no bucket gs://no-such-bucket"),
    ],
)
def test_work_directories_that_cannot_be_are_explained(bucket, workdir, message):
    with pytest.raises(UserError) as caught:
        command.prepared_run(tiny.config(), workdir).__enter__()
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"--workdir='{workdir}': ")


def save(directory, steps, **options):
    lines = []
    with Checkpointer(directory, report=lines.append, **options) as checkpoints:
        for step in steps:
            tree = {"w": jnp.full((4, 3), float(step)), "key": jax.random.key(step)}
            checkpoints.save(step, {"params": tree}, {"step": step}, {"accuracy": -step})
    return lines


def restored(directory):
    lines = []
    shapes = {"w": jax.ShapeDtypeStruct((4, 3), jnp.float32), "key": jax.random.key(0)}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)
    with Checkpointer(directory, report=lines.append) as checkpoints:
        step = checkpoints.latest_step()
        arrays, meta = checkpoints.restore(step, {"params": shapes})
        best = checkpoints.best_step()
    assert meta == {"step": step} and float(arrays["params"]["w"][3, 2]) == step
    return step, best, lines


def test_checkpoints_in_a_bucket_are_kept_restored_and_verified(server, bucket):
    directory = f"{bucket}/run/checkpoints"
    saved = []
    assert save(directory, (1, 2, 3, 4), before_save=lambda: saved.append(1)) == []
    assert len(saved) == 4
    folders = {name.split("/")[0] for name in bucket_server.names(server, directory)}
    assert folders == {"1", "3", "4"}, "the newest two and the best"
    assert restored(directory) == (4, 1, [])

    # Of the same size, so that only the checksum tells.
    meta = f"{directory}/4/meta/metadata"
    bucket_server.put(server, meta, bucket_server.get(server, meta).replace(b"4", b"5"))
    step, _, (line,) = restored(directory)
    assert step == 3
    assert line == (
        f"checkpoint {directory}/4 is damaged (the checksum of meta/metadata differs): renamed to "
        "4.damaged; trying the one of step 3"
    )
    assert "4.damaged/meta/metadata" in bucket_server.names(server, directory)


def test_an_incomplete_checkpoint_in_a_bucket_is_ignored_and_removed(server, bucket):
    directory = f"{bucket}/checkpoints"
    save(directory, (1, 2))
    filesystem = remote.open_filesystem(bucket)
    # Killed before the object that completes it was written, and while an old one was deleted.
    filesystem.rm_file(f"{directory}/2/commit_success.txt")
    save(directory, (3,))
    filesystem.rm_file(f"{directory}/1/meta/metadata")
    step, _, (line,) = restored(directory)
    assert step == 3 and line == f"{directory}/1 is incomplete (meta/metadata is missing): removed"
    assert {name.split("/")[0] for name in bucket_server.names(server, directory)} == {"3"}


def test_an_export_leaves_no_weights_on_the_disk_and_replaces_an_older_one(server, bucket):
    params = tiny.random_params(tiny.ARCHITECTURE, 0, 0, "lm")
    for name in ("config.json", "model-00009-of-00009.safetensors"):
        bucket_server.put(server, f"{bucket}/actor/{name}", "old")
    with work_directory.open_work_directory(bucket, print) as folder:
        export_checkpoint(params, tiny.ARCHITECTURE, folder / "actor", max_shard_bytes=4000)
        # The weights are there before the file that makes the export complete.
        names = bucket_server.names(server, f"{bucket}/actor")
        assert len(names) > 2 and all(name.endswith("safetensors") for name in names)
        assert not list(folder.rglob("*.safetensors"))
        work_directory.publish(folder)
    names = bucket_server.names(server, f"{bucket}/actor")
    assert {"config.json", "model.safetensors.index.json"} <= set(names)
    assert "model-00009-of-00009.safetensors" not in names

    copy = resolve_model_folder(f"{bucket}/actor")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: device, params)
    loaded = load_checkpoint(copy, tiny.ARCHITECTURE, shardings, dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_a_folder_of_another_kind_is_not_replaced_by_an_export(server, bucket):
    bucket_server.put(server, f"{bucket}/actor/notes.txt", "mine")
    params = tiny.random_params(tiny.ARCHITECTURE, 0, 0, "lm")
    with pytest.raises(UserError, match="contains something other than an export"):
        with work_directory.open_work_directory(bucket, print) as folder:
            export_checkpoint(params, tiny.ARCHITECTURE, folder / "actor")
    assert bucket_server.names(server, bucket) == ["actor/notes.txt"]


def test_an_export_is_removed_beginning_with_what_makes_it_complete(monkeypatch):
    files = ("actor/a.safetensors", "actor/config.json", "actor/tokenizer.json")
    listed = {name: types.SimpleNamespace(path=name) for name in files}
    monkeypatch.setattr(staging.remote, "list_files", lambda address, option: listed)
    removed = []
    folder = types.SimpleNamespace(
        address="gs://b/run",
        _uploading=contextlib.nullcontext(),
        _uploaded={},
        _delete=removed.append,
    )
    staging.StagedFolder.remove(folder, "actor")
    assert removed[0] == "actor/config.json" and sorted(removed) == sorted(files)


def test_sharing_a_folder_leaves_files_that_are_still_written_alone(server, bucket):
    """Events are written to a file that stays open, while the run shares the model it made."""
    with work_directory.open_work_directory(bucket, print) as folder:
        (folder / "tensorboard").mkdir()
        with (folder / "tensorboard" / "events").open("w") as events:
            events.write("before, ")
            events.flush()
            (folder / "model").mkdir()
            (folder / "model" / "config.json").write_text("{}")
            work_directory.share_with_all(folder, "model")
            events.write("after")
    assert bucket_server.get(server, f"{bucket}/tensorboard/events") == b"before, after"
