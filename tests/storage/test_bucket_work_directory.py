"""Work directories in a bucket: one run at a time, files uploaded, checkpoints written there."""

import contextlib
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bucket_server
import tiny
from jax_ppo import command
from jax_ppo.errors import UserError
from jax_ppo.models.hf import weight_files
from jax_ppo.models.hf.load import load_checkpoint
from jax_ppo.models.hf.model_folders import resolve_model_folder
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.reporting import files
from jax_ppo.runtime import work_directory
from jax_ppo.storage import bucket_folder, remote
from jax_ppo.storage.bucket_folder import BucketFolder
from jax_ppo.training.checkpoint import Checkpointer
from waiting import wait_until


def test_a_run_that_was_killed_is_described_to_the_one_that_resumes_it(server, bucket):
    BucketFolder(bucket, 0).claim("process 7 on pod")
    for lost in ("the run before, process 7 on pod, did not end by itself (killed?)", ""):
        with work_directory.open_work_directory(bucket, print) as folder:
            assert work_directory.lost_run(folder).startswith(lost)
            assert bool(work_directory.lost_run(folder)) == bool(lost)
    assert bucket_server.names(server, bucket) == []


def test_of_two_runs_that_start_together_one_is_refused(server, bucket, monkeypatch):
    one, two = BucketFolder(bucket, 0), BucketFolder(bucket, 0)
    read = one._read_claim

    def read_before_the_other_writes():
        monkeypatch.setattr(one, "_read_claim", read)
        before = read()
        two.claim("process 2 on pod")
        return before

    monkeypatch.setattr(one, "_read_claim", read_before_the_other_writes)
    with pytest.raises(UserError, match="another run has just started there: process 2 on pod"):
        one.claim("process 1 on pod")
    two.folder.mkdir(parents=True)
    two.upload()


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_run_that_another_has_replaced_saves_and_uploads_nothing(server, bucket, is_replaced):
    cause = "is now that of process 8 on pod" if is_replaced else "was removed"
    with pytest.raises(UserError, match=f"the object 'run' of this run {cause}"):
        with work_directory.open_work_directory(bucket, print) as folder:
            (folder / "training_metrics.csv").write_text("step\n")
            if is_replaced:
                BucketFolder(bucket, 1).claim("process 8 on pod")
            else:
                remote.open_filesystem(bucket).rm_file(f"{bucket}/run")
            work_directory.publish(folder)
    # The other run's object stays.
    assert bucket_server.names(server, bucket) == ["run"] * is_replaced


def test_a_run_whose_local_folder_is_deleted_keeps_its_files_in_the_bucket(server, bucket):
    """Regression: they were taken for removed ones, and deleted."""
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


def test_the_files_of_a_run_are_in_the_bucket(server, bucket):
    address = f"{bucket}/runs/a"
    with command.prepared_run(tiny.config(), address) as (_, folder):
        assert (folder / "config.json").exists()
        (folder / "training_metrics.csv").write_text("step\n1\n")
        (folder / "tensorboard").mkdir()
        (folder / "tensorboard" / "events").write_text("e")
        (folder / "half.csv.tmp").write_text("")
        (folder / ".actor.writing").mkdir()
        (folder / ".actor.writing" / "model.safetensors").write_text("")
        work_directory.publish(folder)
        names = ["config.json", "run", "tensorboard/events", "training_metrics.csv"]
        assert bucket_server.names(server, address) == names
        (folder / "training_metrics.csv").write_text("step\n1\n2\n")
    names.remove("run")
    assert bucket_server.names(server, address) == names
    assert bucket_server.get(server, f"{address}/training_metrics.csv") == b"step\n1\n2\n"


def test_an_evaluation_is_not_written_to_a_run_in_a_bucket(server, bucket):
    bucket_server.put(server, f"{bucket}/a/checkpoints/1/x", "x")
    with pytest.raises(UserError, match="a training run has checkpoints there"):
        command.prepared_run(tiny.config(), f"{bucket}/a", evaluates=True).__enter__()
    assert bucket_server.names(server, f"{bucket}/a") == ["checkpoints/1/x"]


def test_a_resumed_run_finds_its_files_and_replaces_its_exports(server, bucket):
    for name in ("training_metrics.csv", "checkpoints/1/x", "tensorboard/old"):
        bucket_server.put(server, f"{bucket}/{name}", name)
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        bucket_server.put(server, f"{bucket}/actor/{name}", "old")
    with work_directory.open_work_directory(bucket, print) as folder:
        assert (folder / "training_metrics.csv").read_text() == "training_metrics.csv"
        assert not (folder / "checkpoints").exists() and not (folder / "actor").exists()
        work_directory.bucket_of(folder / "actor").remove_export("actor")  # as an export does first
        for name in ("tensorboard/new", "actor/config.json", "actor/model.safetensors"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("new")
    assert bucket_server.names(server, bucket) == [
        "actor/config.json",
        "actor/model.safetensors",
        "checkpoints/1/x",
        "tensorboard/new",
        "tensorboard/old",
        "training_metrics.csv",
    ]


def test_files_are_uploaded_while_the_run_goes_on(server, bucket, monkeypatch):
    monkeypatch.setattr(bucket_folder, "UPLOAD_SECONDS", 0.1)
    with work_directory.open_work_directory(bucket, print) as folder:
        (folder / "training_metrics.csv").write_text("step\n")
        wait_until(lambda: "training_metrics.csv" in bucket_server.names(server, bucket))


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
        ("gs://no-such-bucket/run", "there is no bucket gs://no-such-bucket"),
        ("gs://bucket/run#1", "checkpoints below a folder with '#' in its name cannot be read"),
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
    tree = {"w": jnp.zeros((4, 3)), "key": jax.random.key(0)}
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree)
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


def test_an_export_leaves_no_weights_on_the_disk_and_replaces_an_older_one(
    server, bucket, monkeypatch
):
    monkeypatch.setattr(weight_files, "MAX_SHARD_BYTES", 4000)
    params = tiny.random_params(tiny.ARCHITECTURE, 0, 0, "lm")
    for name in ("config.json", "model-00009-of-00009.safetensors"):
        bucket_server.put(server, f"{bucket}/actor/{name}", "old")
    with work_directory.open_work_directory(bucket, print) as folder:
        export_checkpoint(params, tiny.ARCHITECTURE, folder / "actor")
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
    monkeypatch.setattr(bucket_folder.remote, "list_files", lambda address, option: listed)
    removed = []
    folder = types.SimpleNamespace(
        address="gs://b/run",
        _uploading=contextlib.nullcontext(),
        _uploaded={},
        _delete=removed.append,
    )
    BucketFolder.remove_export(folder, "actor")
    assert removed[0] == "actor/config.json" and sorted(removed) == sorted(files)
