"""A short form of `chaos.py`, and the differences that its comparison finds."""

import collections
import json
from pathlib import Path

import pytest

import chaos
import chaos_compare
from chaos_variants import Variant

EXAMPLES = {0: {"2 0"}, 1: {"1 3"}}


@pytest.mark.exhaustive
def test_a_disturbed_run_equals_an_undisturbed_one(tmp_path):
    disturber = chaos.Chaos(tmp_path / "chaos", seed=0)
    # A run may end before its fault on a fast machine, but not each of several runs.
    for number in range(5):
        if not disturber.faults:
            disturber.disturb_run("ppo", number, max_faults=3)
    assert disturber.faults and not disturber.failures


def write_run(folder: Path) -> Path:
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "model.safetensors").write_bytes(b"weights")
    (folder / "training_metrics.csv").write_text("step,loss,seconds/step\n1,0.5,3.0\n2,0.25,3.0\n")
    evaluations = [{"step": 2, "reward_mean": 0.5}]
    summary = {"evaluations": evaluations, "steps": 2, "total_steps": 2, "seconds": 7}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def reference(tmp_path):
    return chaos_compare.Reference(
        write_run(tmp_path / "undisturbed"), {}, collections.Counter(), EXAMPLES
    )


def replace(name, old, new):
    def change(folder):
        path = folder / name
        path.write_text(path.read_text().replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace("training_metrics.csv", "0.25", "0.250001"), "step 2, loss: '0.250001'"),
        (replace("training_metrics.csv", "1,0.5,3.0\n", ""), "rows: 1 instead of 2"),
        (replace("summary.json", "0.5", "0.6"), "summary.json"),
        (replace("actor/model.safetensors", "w", "v"), "model.safetensors"),
        (lambda folder: (folder / ".actor.writing").mkdir(), ".actor.writing"),
    ],
)
def test_a_difference_is_found(reference, tmp_path, change, message):
    folder = write_run(tmp_path / "disturbed")
    change(folder)
    with pytest.raises(chaos_compare.Failure, match=message):
        chaos_compare.compare_runs(Variant(), folder, reference, EXAMPLES)


def test_times_may_differ_and_examples_may_not(reference, tmp_path):
    folder = write_run(tmp_path / "disturbed")
    replace("training_metrics.csv", "3.0", "4.0")(folder)
    chaos_compare.compare_runs(Variant(), folder, reference, EXAMPLES)
    # Sampled twice, with other examples the second time.
    with pytest.raises(chaos_compare.Failure, match="examples"):
        chaos_compare.compare_runs(Variant(), folder, reference, EXAMPLES | {1: {"1 3", "3 1"}})


def test_an_example_that_is_repeated_or_left_out_is_found():
    ids = [*range(24)]
    steps = [ids[:8], ids[8:16], ids[16:]]
    chaos_compare.validate_examples({i: {" ".join(map(str, step))} for i, step in enumerate(steps)})
    steps[2] = [0, *ids[17:]]
    with pytest.raises(chaos_compare.Failure, match="an epoch"):
        chaos_compare.validate_examples(
            {i: {" ".join(map(str, step))} for i, step in enumerate(steps)}
        )


def test_one_byte_of_the_newest_checkpoint_is_damaged(tmp_path):
    for step in (9, 10):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "checkpoints" / str(step) / "data").write_bytes(b"content")
    chaos.damage_newest_checkpoint(tmp_path, chaos.random.Random(0))
    older, newest = (tmp_path / "checkpoints" / step / "data" for step in ("9", "10"))
    assert older.read_bytes() == b"content"
    assert sum(a != b for a, b in zip(newest.read_bytes(), b"content", strict=True)) == 1


@pytest.mark.parametrize(
    ("kind", "phase", "codes", "output", "message"),
    [
        ("SIGTERM", "sampling", (143,), "stopped by SIGTERM", None),
        ("SIGTERM", "finishing", (0,), "", None),
        ("SIGTERM", "starting", (-15,), "", None),
        ("SIGINT", "starting", (-2,), "Traceback", None),
        ("file limit", "checkpointing", (1,), "error: the disk is full", None),
        ("file limit", "sampling", (0,), "", None),
        ("kill one", "updating", (-9, 75), "Traceback", None),
        ("kill one", "starting", (1, -9), "", None),
        ("kill one", "updating", (-9, 1), "Traceback", "exit codes"),
        ("SIGTERM", "sampling", (0,), "", "exit codes"),
        ("SIGTERM", "updating", (143, 0), "", "exit codes"),
        ("SIGTERM", "sampling", (-15,), "", "exit codes"),
        ("SIGINT", "sampling", (130,), "Traceback", "a traceback"),
        ("file limit", "checkpointing", (1,), "Traceback", "a traceback"),
        ("file limit", "exporting", (-25,), "", "exit codes"),
    ],
)
def test_how_a_fault_may_end_a_run(kind, phase, codes, output, message):
    fault = chaos.Fault("ppo", kind, phase, codes)
    if message is None:
        chaos.judge_fault(fault, output)
    else:
        with pytest.raises(chaos_compare.Failure, match=message):
            chaos.judge_fault(fault, output)
