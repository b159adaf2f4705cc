"""The code that the benchmarks share, and turns of our sides of them."""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jax_ppo.runtime import backends

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import harness

    return harness


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


def test_a_clock_stands_during_evaluations_and_ends_a_run_at_its_limits(harness, monkeypatch):
    import clock

    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(harness, "cpu_seconds", lambda: 2 * now[0])

    def passing(seconds, result=None):
        now[0] += seconds
        return result

    watch = clock.Clock(target=0.5, max_steps=9, max_cpu_seconds=50, first=2)
    passing(10)
    assert not watch.measure(1, pytest.fail)  # before the first evaluation
    passing(5)
    assert not watch.measure(2, lambda: passing(100, 0.25))
    passing(3)
    assert watch.measure(3, lambda: 0.5)
    assert watch.figures()["curve"] == [[2, 15.0, 0.25, 30.0], [3, 18.0, 0.5, 36.0]]
    assert watch.measure(9, lambda: 0.0)
    passing(7)
    assert watch.measure(4, lambda: 0.0)  # 50 processor seconds


def test_steps_that_compile_count_as_the_median_of_the_others(harness):
    import critic_study

    before = {"cpu_seconds": [30.0] + [1.0] * 9, "seconds/compile": [9.0] + [0.0] * 9}
    figures = {"cpu_seconds": [40.0, 2.0, 8.0, 4.0], "seconds/compile": [9.0, 0.0, 5.0, 0.0]}
    assert critic_study.processor_seconds(figures, 3) == 3 + 2 + 3
    assert critic_study.processor_seconds(figures | {"before": before}, 4) == 12 + 10
    assert critic_study.processor_seconds(figures, None) is None
    assert critic_study.format_range([4, None, 6]) == "6 (4-inf)"


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", ["ppo_step", "decode", "time_to_sums"])
def test_our_side_of_a_benchmark_takes_a_turn(harness, monkeypatch, tmp_path, benchmark):
    """Our workers use the package's parts, which change; peers are not installed here."""
    folder = tmp_path / "worker"
    folder.mkdir()
    if benchmark == "ppo_step":
        import ppo_step

        words = "--reward=model --response=4 --samples=4 --lora=2 --sides=ours"
        monkeypatch.setattr(sys, "argv", ["", *words.split()])
        args = ppo_step.parse()
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
        model = harness.DATA / "tinystories-260k"
        if not model.is_dir():
            pytest.skip(f"{model} is missing")
        options = {
            "model.path": str(model),
            "data.max_prompt_length": 64,
            "model.dtype": "float32",
            "data.val_files": "sums:8:heldout",
        }
        limits = {"target": 1.0, "max_steps": 1}
        worker = harness.Worker("ours", "ours_sums.py", {"options": options, "limits": limits})
        assert worker.turn()["steps"] == 1
    worker.close()


COMPILED = """\
%fused_write (p.0: bf16[8,4], p.1: bf16[1,4], p.2: s32[]) -> bf16[8,4] {
  %p.0 = bf16[8,4]{1,0} parameter(0)
  %p.1 = bf16[1,4]{1,0} parameter(1)
  %p.2 = s32[] parameter(2)
  ROOT %write = bf16[8,4]{1,0} dynamic-update-slice(%p.0, %p.1, %p.2, %p.2)
}

%fused_look_up (p.3: f32[100,4], p.4: s32[2]) -> f32[2,4] {
  %p.3 = f32[100,4]{1,0} parameter(0)
  %exponential = f32[100,4]{1,0} exponential(%p.3)
  %p.4 = s32[2]{0} parameter(1)
  ROOT %gather = f32[2,4]{1,0} gather(%exponential, %p.4), offset_dims={1}
}

%fused_transpose (p.5: f32[1024,512]) -> f32[512,1024] {
  %p.5 = f32[1024,512]{1,0} parameter(0)
  ROOT %transpose = f32[512,1024]{1,0} transpose(%p.5), dimensions={1,0}
}

%fused_part (p.6: f32[2,4]) -> f32[2,1] {
  %p.6 = f32[2,4]{1,0} parameter(0)
  %narrow = bf16[2,4]{1,0} convert(%p.6)
  %column = bf16[2,1]{1,0} slice(%narrow), slice={[0:2], [0:1]}
  ROOT %wide = f32[2,1]{1,0} convert(%column)
}

%body (state: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %state = (s32[], f32[4,8]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%state), index=1
  %w = f32[8,8]{1,0} constant({...})
  %dot = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %next = (s32[], f32[4,8]{1,0}) tuple(%count, %dot)
}

%condition (state.1: (s32[], f32[4,8])) -> pred[] {
  %state.1 = (s32[], f32[4,8]{1,0}) parameter(0)
  %count.1 = s32[] get-tuple-element(%state.1), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%count.1, %limit), direction=LT
}

ENTRY %main (cache: bf16[8,4], new: bf16[1,4], i: s32[], table: f32[100,4]) -> f32[512,1024] {
  %cache = bf16[8,4]{1,0} parameter(0)
  %new = bf16[1,4]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %table = f32[100,4]{1,0} parameter(3)
  %ids = s32[2]{0} constant({3, 4})
  %written = bf16[8,4]{1,0} fusion(%cache, %new, %i), kind=kLoop, calls=%fused_write
  %found = f32[2,4]{1,0} fusion(%table, %ids), kind=kLoop, calls=%fused_look_up
  %seen = f32[2,4]{1,0} bitcast(%found)
  %part = f32[2,1]{1,0} fusion(%seen), kind=kLoop, calls=%fused_part
  %start = (s32[], f32[4,8]{1,0}) tuple(%i, %found)
  %while = (s32[], f32[4,8]{1,0}) while(%start), condition=%condition, body=%body
  %sent = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%x), dimensions={0}
  %here = f32[16,8]{1,0} all-gather-done(%sent)
  %attention = (bf16[2,6,1,8]{3,2,1,0}, u8[0]{0}) custom-call(%q, %k, %v), target="__cudnn$fmha"
  %q = bf16[2,1,6,8]{3,2,1,0} constant({...})
  %k = bf16[2,10,3,8]{3,2,1,0} constant({...})
  %v = bf16[2,10,3,8]{3,2,1,0} constant({...})
  ROOT %large = f32[512,1024]{1,0} fusion(%ids), kind=kInput, calls=%fused_transpose
}
"""


def test_a_compiled_program_is_counted_from_its_text(harness):
    import hlo_counts

    program = hlo_counts.Program(COMPILED)
    launched = list(program.launched(program.entry, lambda loop: program.fixed_trips(loop)))
    times = {x.name: repeats for x, repeats in launched}
    # The limit of the condition says five trips; what ends an exchange launches nothing.
    once = ("written", "found", "part", "sent", "attention", "large")
    assert times == dict.fromkeys(once, 1) | {"dot": 5}
    of = {x.name: x for x, _ in launched}
    assert program.flops(of["dot"]) == 2 * 4 * 8 * 8
    # Two products of 6 queries with 10 keys of 8 numbers, in each of two rows.
    assert program.flops(of["attention"]) == 2 * (2 * 2 * 6 * 10 * 8)
    # A row is read and written, beside an index; two rows of the table are, beside two indices.
    assert program.moved_bytes(of["written"], used=1) == 8 + 4 + 8
    assert program.moved_bytes(of["found"], used=1) == 2 * 32 + 8
    # A quarter of two rows is read; nothing of both leaves the cache of the processor.
    assert program.moved_bytes(of["part"], used=1) == 32 / 4 + 8
    assert program.moved_bytes(of["part"], used=1, made={"found", "part"}) == 0
    assert program.moved_bytes(of["attention"], used=0.5) == 192 + 960 / 2 * 2 + 192
    assert {name: program.copied_bytes(x) for name, x in of.items() if program.copied_bytes(x)} == {
        "large": 4 * 512 * 1024
    }
    assert hlo_counts.collective_bytes(of["sent"]) == 4 * 16 * 8


def test_products_that_a_tpu_calls_convolutions_are_counted(harness):
    import hlo_counts

    text = """\
ENTRY %main (x: bf16[4,8], w: bf16[8,16]) -> bf16[4,16] {
  %x = bf16[4,8]{1,0} parameter(0)
  %w = bf16[8,16]{1,0} parameter(1)
  ROOT %product = bf16[4,16]{1,0:S(1)} convolution(%x, %w), dim_labels=bf_io->bf
}
"""
    program = hlo_counts.Program(text)
    ((product, _),) = program.launched("main", lambda loop: 1)
    assert program.flops(product) == 2 * 4 * 8 * 16
    # The result stays in vector memory.
    assert program.moved_bytes(product, used=1) == 2 * (4 * 8 + 8 * 16)


# Of a step on a CPU: two operations, a loop of two runs, and another program; and of a GPU.
MEASURE, OTHERS = ("jit_measure_sampling", 102), ("jit_others_in_decoding_form", 0)
UPDATE, SAMPLE = ("jit_update_actor", 7), ("jit_sample", 3)
TRACE = {
    "tf_XLAPjRtCpuClient/1": [
        ("sort.0", 688_660, 6_429, "sort.0", *MEASURE),
        ("copy.2", 695_450, 691, "copy.2", *MEASURE),
        ("while.32", 697_323, 16_995, "while.32", *MEASURE),
        ("wrapped_add.1", 700_648, 1_192, "wrapped_add.1", *MEASURE),
        ("wrapped_add.1", 706_086, 290, "wrapped_add.1", *MEASURE),
        ("end: wrapped_add.1", 706_300, 80),
    ],
    "tf_XLAEigen/2": [("wrapped_convert", 774_317, 865_976, "wrapped_convert", *OTHERS)],
    "Stream #13(Compute)": [
        ("gemm_bf16", 2_000_000, 2_000_000, "cublas-gemm.4", *UPDATE),
        ("MemcpyD2D", 5_000_000, 1_000_000),
    ],
    "Stream #14(Compute)": [("loop_add", 5_500_000, 1_500_000, "add.9", *SAMPLE)],
}
SUMMARY = """\
all programs: 4.875 ms busy, 1.437 idle
jit_update_actor#7: 3.000 ms busy, 1.360 idle
  2.000 ms in 1: cublas-gemm.4 gemm_bf16
  1.000 ms in 1: MemcpyD2D
jit_sample#3: 1.000 ms busy, 0.000 idle
  1.500 ms in 1: add.9 loop_add
jit_others_in_decoding_form#0: 0.866 ms busy, 0.068 idle
  0.866 ms in 1: wrapped_convert
jit_measure_sampling#102: 0.009 ms busy, 0.009 idle
  0.006 ms in 1: sort.0
  0.001 ms in 2: wrapped_add.1"""


def test_a_trace_is_read_by_program_without_counting_time_twice(harness):
    import gpu_parts

    def event(name, start, duration, *facts):
        stats = zip(("hlo_op", "hlo_module", "program_id"), facts, strict=False)
        times = dict(start_ns=start, duration_ns=duration, end_ns=start + duration)
        return SimpleNamespace(name=name, stats=stats, **times)

    lines = [SimpleNamespace(name=x, events=[event(*y) for y in TRACE[x]]) for x in TRACE]
    kernels = gpu_parts.read_kernels(SimpleNamespace(planes=[SimpleNamespace(lines=lines)]))
    assert "\n".join(gpu_parts.summarize_kernels(kernels, longest=2)) == SUMMARY


# Stands in for Python: a part takes no time, and one variant fails.
PYTHON = """\
#!/bin/bash
if [[ $1 == -c || $1 == *end_with_parent.py ]]; then exec "$REAL" "$@"; fi
echo "$2 ${VARIANT:-}" >> "$LOG"
if [[ $VARIANT == *attention* ]]; then exit 3; fi
if [[ $2 != step && $2 != profile ]]; then exit; fi
printf '2\\t%s\\n' "$VARIANT" >> "$3/variants.tsv"
"""


def test_a_call_on_a_gpu_measures_what_earlier_ones_did_not(tmp_path, monkeypatch):
    """Each flag of the table is a variant; one that fails is not tried again."""
    for name in ("train.jsonl", "test.jsonl", "python"):
        (tmp_path / name).write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    names = {"PYTHON": "python", "CACHE": "cache", "LOG": "log"}
    variables = {name: str(tmp_path / file) for name, file in names.items()}
    script, log = ROOT / "benchmarks" / "gpu_minutes.sh", tmp_path / "log"

    def call(parts):
        log.write_text("")
        environment = os.environ | variables | {"REAL": sys.executable, "PARTS": parts}
        command = [script, tmp_path, tmp_path, tmp_path / "out", "500"]
        subprocess.run(command, check=True, env=environment)
        return [line.split(" ", 1) for line in log.read_text().splitlines()]

    (first, *others) = call("a,b")
    assert first == ["profile", ""] and ["step", ""] not in others
    flags = [x.removeprefix("XLA_FLAGS=") for _, x in others if x.startswith("XLA_FLAGS=")]
    monkeypatch.setenv("XLA_FLAGS", " ".join([*backends.GPU_FLAGS, *flags]))
    assert len(flags) == 5 and backends.refused_flags() == []
    assert [x for x, _ in call("a,b,c,d,e")] == ["ratios", "jax_ppo.train", "pytest"]
    assert [x for x, _ in call("a,b,c,d,e")] == ["jax_ppo.train"]
    lines = (tmp_path / "out" / "variants.tsv").read_text().splitlines()
    assert len(lines) == len(others) + 1
    assert "inf\t--config.model.attention=xla\tcode 3" in lines
