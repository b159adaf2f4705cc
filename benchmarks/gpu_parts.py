"""Measure PPO steps on this machine, for gpu_minutes.sh.

    python benchmarks/gpu_parts.py profile|step|ratios FOLDER --config=FILE [--config.X=Y ...]

`step` appends what a step takes to variants.tsv in FOLDER; `profile` also traces one, and prints
the longest kernels of each program; `ratios` counts the ratios that rounding alone changes.
"""

import collections
import dataclasses
import gzip
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_ppo import command
from jax_ppo.config import command_line
from jax_ppo.config.option import option_value
from jax_ppo.config.schema import replace_options
from jax_ppo.ppo.mini_batches import RolloutPacker
from jax_ppo.ppo.step import take_ppo_step
from jax_ppo.reporting.sinks import read_metrics_csv
from jax_ppo.run import ppo_training

Kernel = tuple[float, float, str, str]  # start and end in nanoseconds, program, name
ROWS = "actor.ppo_micro_batch_size_per_device"
SHOWN = ("model.gradient_checkpointing", "model.gradient_checkpointing_policy")
STEPS, TRACED = 5, 2  # the third step compiles nothing
RUN = (
    f"trainer.total_training_steps={STEPS} trainer.save_freq=0 trainer.export=False data.val_files="
)
METRICS = ("seconds/", "tokens_per_second", "perf/mfu", "memory/")
TRACE = "a.xplane.pb.gz"
ONLY_POLICY = {"old_logprobs": True, "reference": False, "full_kl": False, "values": False}


def read_kernels(profile: Any) -> Iterator[Kernel]:
    """Yield the kernels of a `jax.profiler.ProfileData`; on CPUs, operations other than loops."""
    for line in (line for plane in profile.planes for line in plane.lines):
        program, kernels = "?", []
        for event in sorted(line.events, key=lambda event: (event.start_ns, -event.duration_ns)):
            facts = dict(event.stats)
            if not line.name.startswith("Stream") and "hlo_op" not in facts:
                continue
            if module := facts.get("hlo_module"):  # copies, and kernels in graphs, have none
                program = f"{module}#{facts.get('program_id', '')}"
            names = dict.fromkeys((facts.get("hlo_op", event.name), event.name))
            kernels.append((event.start_ns, event.end_ns, program, " ".join(names)))
        for kernel, following in itertools.pairwise([*kernels, None]):
            if following is None or following[1] > kernel[1]:  # a loop contains what it runs
                yield kernel


def summarize_kernels(kernels: Iterable[Kernel], longest: int = 20) -> list[str]:
    """Return lines about the kernels of a step, by program.

    The milliseconds in which any kernel of a program ran, and those before its kernels in which
    none did, add up to the step. The longest kernels follow, with the sum of their runs.
    """
    busy: dict[str, float] = collections.defaultdict(float)
    idle: dict[str, float] = collections.defaultdict(float)
    times: dict[str, dict[str, list[float]]] = {}
    reached = None
    for start, end, program, name in sorted(kernels):
        before = start if reached is None else reached
        idle[program] += max(start - before, 0) / 1e6
        busy[program] += max(end - max(start, before), 0) / 1e6
        reached = max(end, before)
        times.setdefault(program, {}).setdefault(name, []).append((end - start) / 1e6)
    lines = [f"all programs: {sum(busy.values()):.3f} ms busy, {sum(idle.values()):.3f} idle"]
    for program in sorted(times, key=lambda program: -(busy[program] + idle[program])):
        lines.append(f"{program}: {busy[program]:.3f} ms busy, {idle[program]:.3f} idle")
        ranked = sorted(times[program].items(), key=lambda item: -sum(item[1]))
        lines += [f"  {sum(x):.3f} ms in {len(x)}: {name}" for name, x in ranked[:longest]]
    return lines


def take_traced_step(folder: Path, run: Any, state: Any, *arguments: Any) -> Any:
    """Take a step, and write its trace."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as trace:
        with jax.profiler.trace(trace, profiler_options=options):
            result = take_ppo_step(run, jax.block_until_ready(state), *arguments)
            jax.block_until_ready(result[0])
        [file] = Path(trace).rglob("*.xplane.pb")
        (folder / TRACE).write_bytes(gzip.compress(file.read_bytes(), 4))
    return result


def measure_steps(part: str, folder: Path, words: list[str]) -> None:
    """Append a line about the steps of a run to variants.tsv."""
    facts: dict[str, Any] = {}
    traced = TRACED if part == "profile" else None
    started = time.monotonic()

    def take_step(run: Any, state: Any, samples: Any, step: int, observer: Any) -> Any:
        if part == "ratios":
            measure_ratios(run, state, samples.take(state, step, observer))
            raise SystemExit
        if step == traced:
            return take_traced_step(folder, run, state, samples, step, observer)
        state, result = take_ppo_step(run, state, samples, step, observer)
        if not step:
            facts.update({name: option_value(run.config, name) for name in SHOWN})
            facts[ROWS] = result.packed.mini_batches["actor"].packing.sample.shape[2]
            facts["rollout.max_num_seqs"] = run.sampling.slots
            jax.block_until_ready(state)
            facts["seconds to the end of the first step"] = round(time.monotonic() - started, 2)
        return state, result

    ppo_training.take_ppo_step = take_step
    arguments = ["", *words, *(f"--config.{option}" for option in RUN.split())]
    config, _ = command_line.read_command_line(arguments)
    with (
        tempfile.TemporaryDirectory() as workdir,
        command.prepared_run(config, workdir) as prepared,
    ):
        ppo_training.train_ppo(*prepared)
        rows = read_metrics_csv(Path(workdir) / "training_metrics.csv")
    warm = [row for i, row in enumerate(rows) if i not in (0, traced)]
    for name in (name for name in rows[0] if name.startswith(METRICS)):
        values = [float(row[name]) for row in warm if row[name]]
        facts |= {name: round(statistics.median(values), 4)} if values else {}
    variant = os.environ.get("VARIANT", "")
    with (folder / "variants.tsv").open("a") as file:
        print(facts["seconds/step"], variant, json.dumps(facts), sep="\t", file=file)
    print(json.dumps(facts, indent=1))


def measure_ratios(run: Any, state: Any, sampled: Any) -> None:
    """Print the shares of ratios of the same weights that are outside 0.9 to 1.1."""
    mask = np.asarray(sampled.rollout.action_mask)
    logprobs = {"the sampler": sampled.rollout.logprobs}
    for rows in (1, 8):
        packer = RolloutPacker(replace_options(run.config, {ROWS: rows}), run.mesh, False)
        resized = dataclasses.replace(run, packer=packer)
        passes = resized.run_forward_passes(state, sampled.batch, sampled.rollout, **ONLY_POLICY)
        logprobs[f"micro-batches of {rows}"] = passes[1].old_logprobs
    base, *others = reversed(logprobs)
    for other in others:
        ratios = np.exp(np.asarray(logprobs[base] - logprobs[other], float)[mask])
        share, size = np.mean(abs(ratios - 1) > 0.1), f"of {len(ratios)} ratios outside 0.9 to 1.1"
        within = f"all within {ratios.min():.6g} to {ratios.max():.6g}"
        print(f"{base} and {other}: {share:.4%} {size}, {within}", flush=True)


if __name__ == "__main__":
    part, folder, words = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    measure_steps(part, folder, words)
    if part == "profile":
        content = gzip.decompress((folder / TRACE).read_bytes())
        profile = jax.profiler.ProfileData.from_serialized_xspace(content)
        print(*summarize_kernels(read_kernels(profile)), sep="\n")
