"""The code that the benchmarks share, and turns of our sides of them."""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from waiting import is_running, wait_until

ROOT = pathlib.Path(__file__).parents[1]
# A benchmark with one worker that never ends its turn.
HANGING_BENCHMARK = """
import sys, time
import harness
harness.__file__ = sys.argv[1]  # workers are in the same folder
worker = harness.Worker("hangs", "hangs.py", {})
print(worker.versions["process_id"], flush=True)
worker.turn()
"""
HANGING_WORKER = """
import json, os, time
print(json.dumps({"versions": {"process_id": os.getpid()}}), flush=True)
time.sleep(3600)
"""


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import harness

    return harness


@pytest.mark.skipif(sys.platform != "linux", reason="uses a feature of Linux")
def test_a_killed_benchmark_leaves_no_workers(tmp_path):
    """SIGKILL cannot be handled, so the system itself must end the workers."""
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "hangs.py").write_text(HANGING_WORKER)
    launcher = ROOT / "benchmarks" / "end_with_parent.py"
    (tmp_path / launcher.name).write_text(launcher.read_text())
    with subprocess.Popen(
        [sys.executable, "-c", HANGING_BENCHMARK, str(tmp_path / "harness.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")},
        stdout=subprocess.PIPE,
        text=True,
    ) as benchmark:
        worker = int(benchmark.stdout.readline())
        assert is_running(worker)
        benchmark.kill()
    wait_until(lambda: not is_running(worker))


def test_spread_contains_the_interquartile_range(harness):
    figures = harness.spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (figures["quartile_1"], figures["median"], figures["quartile_3"]) == (2, 3, 4)
    assert harness.format_spread(figures, ".1f") == "3.0 (2.0-4.0)"


def test_a_split_that_does_not_add_up_is_reported(harness, capsys):
    import ppo_step

    def turn(seconds, **phases):
        figures = {"seconds": seconds, "cpu_seconds": seconds, "peak_gib": 1.0, "tokens": 10}
        return figures | {"phases": phases}

    plain = [turn(2.4), turn(2.4), turn(2.4)]
    # Half a second is outside the phases, and these turns took 2.0 s instead of 2.4 s.
    faster = [turn(2.0, rollout=0.5, update=1.0)] * 3
    side = ppo_step.summarize(plain, faster)
    assert side["phases"]["other"]["median"] == 0.5
    assert side["split_error"] == pytest.approx(2.0 / 2.4 - 1)
    assert ppo_step.report_splits({"torch": side}) == 1
    assert "torch -16.7%" in capsys.readouterr().err
    same_speed = ppo_step.summarize(plain, [turn(2.3, rollout=0.5, update=1.4)] * 3)
    assert ppo_step.report_splits({"torch": same_speed}) == 0


def test_the_search_combines_the_best_size_of_each_setting(harness, monkeypatch, tmp_path):
    import ppo_step

    # Milliseconds per token by rows: training is fastest with 8, the rest of TRL's step with 16.
    update, forward = {4: 3, 8: 1, 16: 2, 32: 4}, {4: 9, 8: 6, 16: 5, 32: 7}

    def measure_candidate(side, settings, args, candidate):
        rows = candidate["train_rows"]
        phases = {"update": update[rows], "rollout": forward[rows], "values": 1}
        return {"milliseconds_per_token": sum(phases.values()), "phases": phases}

    monkeypatch.setattr(ppo_step, "measure_candidate", measure_candidate)
    args = argparse.Namespace(micro_batch=None, sizes_from=None, search_turns=1, search_rows=None)
    settings = {"samples": 32, "equal_lengths": True}
    search = ppo_step.search_micro_batches("trl", settings, args)
    assert search["chosen"] == {"train_rows": 8, "forward_rows": 16}
    assert len(search["tried"]) == 4

    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({"search": {"torch": {"chosen": {"train_rows": 2}}}}))
    args.sizes_from = earlier
    assert ppo_step.search_micro_batches("torch", settings, args)["chosen"] == {"train_rows": 2}
    assert ppo_step.search_micro_batches("trl", settings, args) == search


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", ["ppo_step", "decode", "time_to_reward"])
def test_our_side_of_a_benchmark_takes_a_turn(harness, monkeypatch, tmp_path, benchmark):
    """Our workers use the package's parts, which change; peers are not installed here."""
    monkeypatch.setenv("ADDITION_MAX_STEPS", "1")
    folder = tmp_path / "worker"
    folder.mkdir()
    if benchmark == "ppo_step":
        import ppo_step

        args = argparse.Namespace(
            lengths="forced",
            reward="model",
            response=4,
            samples=4,
            size="small",
            platform="cpu",
            dtype="float32",
            lora=2,
            sides=["ours"],
            set=[],
            eager=False,
        )
        worker = ppo_step.start_worker("ours", ppo_step.make_settings(args, folder), args, {})
        phases = worker.turn(split=True)["phases"]
        assert set(phases) == {"rollout", "scoring", "reward", "advantages", "update"}
        assert all(seconds > 0 for seconds in phases.values())
    elif benchmark == "decode":
        import decode
        import workload

        case = decode.Case(prompts=4, rows=2, response=4)
        model = workload.make_model(folder / "model", case.chance)
        settings = dataclasses.asdict(case) | {"model": str(model), "prompt": decode.PROMPT}
        worker = harness.Worker("ours", "ours_decode.py", settings | {"side": "ours"})
        assert worker.turn()["tokens"] == 16
    else:
        import addition
        import time_to_reward

        if not addition.FOLDER.is_dir():
            pytest.skip(f"{addition.FOLDER} is missing")
        (worker,) = time_to_reward.start_workers(["ours, shared trunk"], sys.executable)
        assert worker.turn()["steps"] == addition.EVAL_EVERY
    worker.close()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["sample", "score", "score critic", "update", "update critic"])
def test_a_tpus_programs_are_lowered_where_there_is_none(monkeypatch, program):
    """They use a TPU's choice of attention; `python -m jax_ppo.plan` compiles them."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import programs

    monkeypatch.setattr(programs.Step, "platform", "tpu")
    step = programs.Step(
        programs.qwen2(layers=2, hidden=128, vocabulary=64), samples=8, dtype="bfloat16"
    )
    assert (step.nets.actor.attention, step.decoder.decoding) == ("splash", "tpu")
    text = step.lower(program, ("tpu",)).as_text()
    assert ("tpu_custom_call" in text) == (program != "sample")
