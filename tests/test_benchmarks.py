"""The benchmark for accelerators runs without one and without optional GPU machine tools."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ml_collections", "tensorflow_datasets"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.slow
def test_the_accelerators_benchmark_runs_at_toy_sizes(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "accelerator.py"),
        "--tiny",
        "--out",
        str(tmp_path / "out.json"),
    ]
    subprocess.run(
        command, check=True, env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tmp_path)}
    )
    results = json.loads((tmp_path / "out.json").read_text())
    for section in ("decode", "decode_command_buffers", "training", "step", "attention"):
        assert "error" not in results[section], results[section]
    assert (
        list(results["decode"]["programs"]) == ["cpu", "gpu"]
        and results["step"]["phases"]["update"] > 0
    )
    # Six tokens at this small size are dominated by noise: a rate may be below 0.
    assert all(
        min(program["whole_seconds"].values()) > 0
        for program in results["decode"]["programs"].values()
    )
    assert results["attention"]["tpu, one token"]["difference"] < 0.02
    assert all(line["mfu"] > 0 for line in results["training"]["micro_batches"].values())
    assert results["attention"]["xla, packed"]["milliseconds"] > 0 and "skipped" in results["torch"]


@pytest.mark.parametrize("program", ["sample", "score", "score critic", "update", "update critic"])
def test_a_tpus_programs_are_lowered_where_there_is_none(monkeypatch, program):
    """They use a TPU's choice of attention; compile_ahead.py continues from there."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import programs

    monkeypatch.setattr(programs.Step, "platform", "tpu")
    step = programs.Step(
        programs.qwen2(layers=2, hidden=128, vocabulary=64), 8, 64, 64, dtype="bfloat16"
    )
    assert (step.nets.actor.attention, step.decoder.decoding) == ("splash", "tpu")
    text = step.lower(program, ("tpu",)).as_text()
    assert ("tpu_custom_call" in text) == (program != "sample")
