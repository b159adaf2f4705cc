"""The main job with data and work directory in a bucket: killed, it resumes bit-equal."""

import csv
import json
import os
import pathlib
import subprocess
import sys

import pytest

import bucket_server
from waiting import RUN_SECONDS, wait_until

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 4
TIMINGS = ("seconds", "perf/", "tokens_per_second", "rollout/samples_per_second")


REWARD = """
import pathlib, time
samples, may_go_on = 0, pathlib.Path(__file__).with_name("may_go_on")

def reward(data_source, solution_str, ground_truth, extra_info):
    global samples
    samples += extra_info.get("split") == "train"
    # The run waits within a step until the test has interrupted it.
    while samples > {samples} and not may_go_on.exists():
        time.sleep(0.02)
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
"""


def write_reward(folder, samples):
    """Write a reward function that waits after this many samples; return its option's value."""
    (folder / "reward.py").write_text(REWARD.format(samples=samples))
    return f"{folder}/reward.py:reward"


def command_line(bucket, workdir, reward):
    options = {
        "reward.function": reward,
        "reward.workers": 0,
        # Machines share compiled programs, which saves time, and nothing else.
        "trainer.compilation_cache": f"{os.environ['XDG_CACHE_HOME']}/bucket_runs",
        "data.train_files": "arithmetic:200",
        "data.val_files": f"{bucket}/val.jsonl[:16]",
        "data.train_batch_size": 16,
        "actor.ppo_mini_batch_size": 16,
        "trainer.critic_warmup": 0,
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": 1,
        "trainer.test_freq": 2,
    }
    return [
        *(sys.executable, "-m", "jax_ppo.train", "--config=arithmetic", f"--workdir={workdir}"),
        *(f"--config.{name}={value}" for name, value in options.items()),
    ]


def start(command, **environment):
    """Start a process, which finds the bucket by the environment of the test."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    output, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 0, output
    return output


def metric_rows(server, workdir):
    """Return the rows of training_metrics.csv without the measured times."""
    text = bucket_server.get(server, f"{workdir}/training_metrics.csv").decode()
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["step"] for row in rows][-1] == str(STEPS)
    return [
        {name: value for name, value in row.items() if not name.startswith(TIMINGS)} for row in rows
    ]


def exported_actor(server, workdir):
    names = bucket_server.names(server, f"{workdir}/actor")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    return {name: bucket_server.get(server, f"{workdir}/actor/{name}") for name in names}


def arithmetic_rows():
    """Return a few problems as lines of JSON."""
    from jax_ppo.demonstration.arithmetic import generate_arithmetic_examples

    rows = [
        {
            "data_source": example.data_source,
            "prompt": [{"role": "user", "content": example.prompt}],
            "reward_model": {"style": "rule", "ground_truth": example.ground_truth},
        }
        for example in generate_arithmetic_examples(20, "heldout")
    ]
    return "\n".join(map(json.dumps, rows))


def wait_for(server, workdir, name, processes):
    """Wait until an object is in the work directory of running processes."""

    def is_there():
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        return name in bucket_server.names(server, workdir)

    wait_until(is_there, RUN_SECONDS)


@pytest.mark.exhaustive
def test_a_killed_run_in_a_bucket_resumes_bit_equal_on_another_machine(server, bucket, tmp_path):
    bucket_server.put(server, f"{bucket}/val.jsonl", arithmetic_rows())

    # Two steps have been scored: the third one waits.
    reward = write_reward(tmp_path, samples=2 * 16)

    def start_on(machine, workdir):
        """Start with a machine's cache: nothing but the bucket is left of the killed run's."""
        command = command_line(bucket, workdir, reward)
        return start(command, XDG_CACHE_HOME=str(tmp_path / machine))

    whole, halves = f"{bucket}/whole", f"{bucket}/halves"
    (tmp_path / "may_go_on").touch()
    finish(start_on("one", whole))

    (tmp_path / "may_go_on").unlink()
    killed = start_on("two", halves)
    wait_for(server, halves, "checkpoints/2/commit_success.txt", [killed])
    killed.kill()
    killed.communicate()
    (tmp_path / "may_go_on").touch()
    assert "run" in bucket_server.names(server, halves)
    assert "summary.json" not in bucket_server.names(server, halves)

    finish(start_on("three", halves))
    assert metric_rows(server, halves) == metric_rows(server, whole)
    assert exported_actor(server, halves) == exported_actor(server, whole)
    names = bucket_server.names(server, halves)
    assert "run" not in names and {"summary.json", "report.html"} <= set(names)
    assert len([name for name in names if name.startswith("tensorboard/")]) == 2
    # Those of the killed process, too: the first step's, and the evaluation before it.
    logged = {name for name in bucket_server.names(server, whole) if name.startswith("rollouts/")}
    assert logged == {name for name in names if name.startswith("rollouts/")} != set()
    report = bucket_server.get(server, f"{halves}/report.html").decode()
    assert '"0 (evaluation)"' in report and '"1 (training)"' in report


EXPORTS = """
import pathlib, sys
import jax
import tiny
from jax_ppo.config import schema
from jax_ppo.models.hf import weight_files
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.runtime import distributed, faults, placement, sharding, work_directory

def main():
    params = tiny.random_params(tiny.ARCHITECTURE, 0, 0, "lm")
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    params = jax.tree.map(lambda x: placement.place(x, sharding.replicated(mesh)), params)
    for workdir in sys.argv[1:]:
        with work_directory.open_work_directory(workdir, print) as folder:
            weight_files.MAX_SHARD_BYTES = 1000
            export_checkpoint(params, tiny.ARCHITECTURE, folder / "actor", dtype="bfloat16")
            distributed.run_on_main(lambda: work_directory.publish(folder))
            work_directory.fetch_folder(folder, "actor")
            print("sees", (folder / "actor" / "config.json").exists(), flush=True)

distributed.initialize(schema.Distributed())
faults.run_or_abort(main)
"""


def start_two(command, coordinator_address, caches):
    """Start two processes of one run with separate caches, as if on separate machines."""
    return [
        start(
            command,
            JAX_PLATFORMS="cpu",
            JAX_COORDINATOR_ADDRESS=coordinator_address,
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(process),
            PYTHONPATH=str(ROOT / "tests" / "harness"),
            XDG_CACHE_HOME=str(cache),
        )
        for process, cache in enumerate(caches)
    ]


@pytest.mark.slow
def test_two_processes_write_an_export_together(server, bucket, tmp_path, coordinator_address):
    """To a bucket without a shared disk, and to a shared disk: the same files."""
    from jax_ppo.storage.downloads import download_folder

    command = [sys.executable, "-c", EXPORTS, f"{bucket}/run", str(tmp_path / "run")]
    caches = (tmp_path / "one", tmp_path / "two")
    for process in start_two(command, coordinator_address, caches):
        assert finish(process).count("sees True") == 2
    local = {path.name: path.read_bytes() for path in (tmp_path / "run" / "actor").iterdir()}
    assert len([name for name in local if name.endswith(".safetensors")]) >= 2
    copy = download_folder(f"{bucket}/run/actor", "option", ["*"])
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == local


@pytest.mark.exhaustive
def test_two_processes_without_a_shared_disk_train_and_resume(
    server, bucket, tmp_path, coordinator_address
):
    bucket_server.put(server, f"{bucket}/val.jsonl", arithmetic_rows())
    # Each process has scored its half of one step: the second one waits.
    command = command_line(bucket, f"{bucket}/run", write_reward(tmp_path, samples=8))
    caches = [tmp_path / name for name in ("one", "two", "three", "four")]
    stopped = start_two(command, coordinator_address, caches[:2])
    wait_for(server, f"{bucket}/run", "checkpoints/1/commit_success.txt", stopped)
    stopped[1].terminate()
    (tmp_path / "may_go_on").touch()
    for process in stopped:
        output, _ = process.communicate(timeout=RUN_SECONDS)
        assert process.returncode == 143, output
    names = bucket_server.names(server, f"{bucket}/run")
    assert "run" not in names and "summary.json" in names
    # The new machines have nothing but the bucket.
    for process in start_two(command, coordinator_address, caches[2:]):
        finish(process)
    assert [row["step"] for row in metric_rows(server, f"{bucket}/run")] == list("01234")
    exported_actor(server, f"{bucket}/run")
