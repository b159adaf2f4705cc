"""What a replay refuses; tests of whole runs replay a step of them."""

import dataclasses
import json

import pytest

import tiny
from jax_ppo import replay
from jax_ppo.errors import UserError
from jax_ppo.run import replay as run_replay
from jax_ppo.training.step_hashes import HashLog, hash_options


@pytest.fixture
def workdir(tmp_path):
    """A run of three steps that has saved nothing; a resume changed its options after step 2."""
    options = dataclasses.asdict(tiny.config())
    (tmp_path / "config.json").write_text(json.dumps(options))
    log = HashLog(tmp_path, 0)
    for step, seen in ((1, "f00d"), (2, "f00d"), (3, hash_options(options))):
        log.write(step, "train", {"tokens": "a", "values": "b"}, seen, {"jax": "0"})
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step=1"], "--workdir: must be given"),
        (["--workdir={}"], "--step: must be given"),
        (["--workdir={}", "--step=0"], "--step=0: expected the number of a step, from 1"),
        (["--workdir={}", "--stap=1"], "--stap=1: expected .* Did you mean '--step'"),
        (["--workdir={}", "--step=1", "--verify=yes"], "--verify=yes: expected"),
        (["--workdir={}", "--step=1", "--config.seed=1"], "seed=1: a step is computed with the op"),
        (["--workdir={}", "--step=1", "--config.mesh.data=x"], "config.mesh.data='x': expected in"),
        (["--workdir={}", "--step=9"], "--step=9: the run has recorded the steps 1 to 3"),
        (["--workdir={}/none", "--step=1"], "none: holds no run: there is no config.json"),
        (["--workdir=gs://bucket/run", "--step=1"], "gs:/.*: expected a folder of this machine"),
    ],
)
def test_wrong_arguments_are_told(workdir, arguments, message):
    words = ["replay", *(word.format(workdir) for word in arguments)]
    with pytest.raises(UserError, match=message):
        replay._make_job(*replay.read_replay_arguments(words))


def test_a_step_that_is_missing_among_others_is_named(workdir):
    """Regression: step 3 was refused as none of steps 1 to 3."""
    log = HashLog(workdir, 0)
    for step in (1, 3):
        log.write(step, "train", {"tokens": "a"}, "f00d", {})
    with pytest.raises(UserError, match="--step=3: .* recorded the steps 1 to 3, without 2"):
        run_replay.read_run(workdir, 3, {})


def test_a_run_without_hashes_is_told(workdir):
    (workdir / "hashes.jsonl").unlink()
    with pytest.raises(UserError, match=r"has written no hashes\.jsonl.*older versions have none"):
        run_replay.read_run(workdir, 1, {})


def test_the_options_are_the_run_s_but_for_the_mesh_and_what_a_replay_does_not_write(workdir):
    run = tiny.config()
    options = hash_options(dataclasses.asdict(run))
    HashLog(workdir, 0).write(1, "train", {"tokens": "a"}, options, {})
    words = ["replay", f"--workdir={workdir}", "--step=1", "--verify", "--config.mesh.fsdp=2"]
    job = replay._make_job(*replay.read_replay_arguments(words))
    assert job.options.mesh == dataclasses.replace(run.mesh, fsdp=2)
    assert job.options.actor == run.actor and not job.options.trainer.export
    assert job.options.model.path == str(workdir / "model")
    assert job.arguments["cycle"].keywords["verifies"]
    assert job.workdir == workdir.with_name(f"{workdir.name}-replay-1")


def test_steps_with_other_options_are_not_computed_with_the_newest(workdir):
    with pytest.raises(UserError, match="step 1 was computed with other options, and no checkpoi"):
        run_replay.read_run(workdir, 3, {})
    with pytest.raises(UserError, match="neither config.json nor a checkpoint has the options"):
        run_replay.read_run(workdir, 2, {})
    # A checkpoint after step 2 makes step 3 one of the newest options alone, and has its own.
    meta = workdir / "checkpoints" / "2" / "meta"
    meta.mkdir(parents=True)
    options = dataclasses.asdict(tiny.config(seed=7))
    (meta / "metadata").write_text(json.dumps({"config": options}))
    assert run_replay.read_run(workdir, 3, {})[0].seed == 0
    log = HashLog(workdir, 0)
    log.write(1, "train", {"tokens": "a"}, hash_options(options), {"jax": "0"})
    assert run_replay.read_run(workdir, 1, {})[0].seed == 7


def test_the_first_quantity_that_differs_is_named(workdir, tmp_path, capsys):
    ours = tmp_path / "ours"
    ours.mkdir()
    log = HashLog(ours, 0)
    log.write(2, "train", {"tokens": "a", "values": "b"}, "f00d", {})
    run_replay._compare(workdir, ours, range(2, 3))
    printed = capsys.readouterr().out
    assert "note: jax was 0 in the run, and is" in printed
    assert "verified step 2: equal in tokens, values" in printed
    log.write(3, "train", {"tokens": "a", "values": "c"}, "f00d", {})
    with pytest.raises(
        UserError, match=r"step 3: values \(the critic's values\) differs: hash b in"
    ):
        run_replay._compare(workdir, ours, range(2, 4))
