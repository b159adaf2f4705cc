"""Plan a run: `python -m jax_ppo.plan --config=FILE --topology=v5e:2x4 [--json] [--arithmetic]`.

Prints the memory and the predicted time per device in each phase of a step. The step is compiled
for the named machine, which is not needed itself: its compiler is enough. Of the models, only
config.json is read.
"""

import json
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax_ppo.config import command_line
from jax_ppo.config.schema import Config
from jax_ppo.errors import UserError, counted, exit_on_user_error
from jax_ppo.runtime import backends, topologies
from jax_ppo.runtime.topologies import GIB, Topology

if TYPE_CHECKING:  # imported once the environment is prepared for the topology
    from jax_ppo.memory.step_plan import StepPlan

USAGE = """\
usage: python -m jax_ppo.plan --config=FILE[:ARG] --topology=TYPE:SHAPE
           [--config.OPTION=VALUE ...] [--json] [--arithmetic]

--topology       {examples}
--json           print all figures as JSON
--arithmetic     estimate temporaries instead of compiling, within seconds
--hbm-gib        memory of a device of another type, TYPE:NUMBER; with it
--tflops         its peak rate in bfloat16, and
--hbm-gb-per-s   the bandwidth of its memory, which bounds sampling

Prints the memory of each device in each phase of a step of `jax_ppo.train` with these options, and
a lower bound of its time. Takes the same options as jax_ppo.train. Of a model, a folder with its
config.json is enough.
"""

_COLUMNS = {
    "parameters": "params",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "frozen": "frozen",
    "decoding_copy": "decoding",
    "cache": "cache",
    "batch": "batch",
    "process": "process",
    "temporaries": "temporary",
}
_PREDICTION = (
    "A prediction, not a measurement: the slower of matrix products and of reading weights and\n"
    "caches at the device's peak rates, all prompts and responses at their maximum lengths, no\n"
    "exchanges, no work on the host. Runs are slower."
)
_MOST_REMEDIES = 8
_EPOCH = 10_000  # prompts, where the data, which are not read, determine the number of steps
_FIGURES = {"--hbm-gib": GIB, "--tflops": 1e12, "--hbm-gb-per-s": 1e9}  # of another type of device
_NUMBER = re.compile(r"\d{1,7}(\.\d+)?", re.ASCII)
_USUAL_AXES = ("data", "fsdp", "model")


def main(arguments: list[str]) -> None:
    """Run the command; `arguments` are `sys.argv`."""
    with exit_on_user_error():
        if {"--help", "-h", "-help"} & set(arguments[1:]):
            examples = textwrap.fill(topologies.EXAMPLES, 80, subsequent_indent=" " * 17)
            print(USAGE.format(examples=examples))
            return
        config, topology, flags = read_plan_arguments(arguments)
        backends.require_settings()
        topologies.prepare_environment(topology)
        from jax_ppo.memory import step_plan

        plan = step_plan.plan_step(config, topology, compiles="--arithmetic" not in flags)
    if "--json" in flags:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        print(format_plan(plan))


def read_plan_arguments(arguments: list[str]) -> tuple[Config, Topology, set[str]]:
    """Return the options, the machine and the flags; raise `UserError` for wrong ones."""
    switches, valued = ("--json", "--arithmetic"), ("--topology", *_FIGURES)
    flags, words = command_line.take_flags(arguments, switches, valued)
    if "--topology" not in flags:
        raise UserError(f"--topology: must be given, for example {topologies.EXAMPLES}")
    figures = {name: flags[name] for name in _FIGURES if name in flags}
    topology = _read_topology(flags["--topology"], figures)
    config, _ = command_line.read_command_line(words, "plan")
    return config, topology, set(flags)


def _read_topology(name: str, figures: dict[str, str]) -> Topology:
    """Return the machine; `figures` describe devices of another type than the known ones."""
    if not figures:
        return topologies.parse_topology(name)
    given = " ".join(f"{flag}={value}" for flag, value in figures.items())
    numbers = all(_NUMBER.fullmatch(value) and float(value) for value in figures.values())
    if "--hbm-gib" not in figures or not numbers:
        raise UserError(f"{given}: expected --hbm-gib, and numbers above 0")
    memory, flops, rate = (float(figures.get(flag, 0)) * unit for flag, unit in _FIGURES.items())
    other = topologies.DeviceType("cuda", memory, flops, rate)
    topology = topologies.parse_topology(name, other=other)
    if topology.kind in topologies.DEVICE_TYPES:
        raise UserError(f"--topology={name}: {topology.kind} is known; leave out {given}")
    return topology


def format_plan(plan: "StepPlan") -> str:
    """Return the plan as lines of text."""
    parts = [_heading(plan), _memory_table(plan), _verdict(plan)]
    if plan.estimated_peak is not None:
        parts.append(_remedies(plan))
    if plan.seconds is not None:
        parts += [_time_table(plan), _PREDICTION]
        if not plan.topology.device_type.memory_rate:
            parts.append(
                "The memory's bandwidth is unknown (--hbm-gb-per-s): the seconds are those of\n"
                "matrix products alone, which for sampling is far too few."
            )
    return "\n\n".join(parts)


def _heading(plan: "StepPlan") -> str:
    shape = _mesh_text(plan.mesh)
    if plan.rollout_mesh != plan.mesh or plan.decoding_devices:
        shape += ", decoding on "
        if plan.decoding_devices:
            shape += f"{counted(plan.decoding_devices, 'other device')}, "
        shape += _mesh_text(plan.rollout_mesh)
    data = plan.config.data
    sizes = f"{plan.sizes}\n" if plan.sizes else ""
    return (
        f"{plan.topology}, mesh {shape}\n"
        f"a step: {counted(data.train_batch_size, 'prompt')} of at most {data.max_prompt_length:,} "
        f"tokens, {counted(plan.config.rollout.n, 'response')} each of at most "
        f"{data.max_response_length:,}\n{sizes}temporaries: {plan.source}"
    )


def _mesh_text(shape: dict[str, int]) -> str:
    shown_axes = {axis: size for axis, size in shape.items() if size > 1 or axis in _USUAL_AXES}
    return " x ".join(f"{axis} {size}" for axis, size in shown_axes.items())


def _memory_table(plan: "StepPlan") -> str:
    # Only the memory of a single CPU has the process in it.
    counts = any(program.memory.process for program in plan.programs)
    columns = {name: title for name, title in _COLUMNS.items() if counts or name != "process"}
    rows = [["GiB per device", *columns.values(), "peak"]]
    for program in plan.programs:
        figures = [getattr(program.memory, column) for column in (*columns, "peak")]
        rows.append([program.label, *(f"{value / GIB:.2f}" for value in figures)])
    return _table(rows)


def _verdict(plan: "StepPlan") -> str:
    peak = plan.peak / GIB
    if plan.available is None:
        line = f"Peak {peak:.2f} GiB per device; the memory of the devices is unknown."
    else:
        verdict = "fits" if plan.fits else "does not fit"
        line = f"Peak {peak:.2f} GiB of {plan.available / GIB:.2f} GiB per device: {verdict}."
        if (share := plan.topology.memory_share) != 1:
            memory = plan.topology.device_type.memory / GIB
            line += (
                f"\nJAX takes {100 * share:g} % of the {memory:.2f} GiB of a GPU; "
                f"XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 would make it {0.9 * memory:.2f}."
            )
    refused = [program.label for program in plan.programs if program.is_refused]
    if refused:
        line += (
            f"\nThe compiler refused: {'; '.join(refused)}. Its figures may count replaced arrays "
            "twice."
        )
    return line


def _remedies(plan: "StepPlan") -> str:
    assert plan.available is not None and plan.estimated_peak is not None, "it is known to fit"
    now = f"estimated, GiB per device, {plan.estimated_peak / GIB:.2f} now"
    if not plan.fits:
        lines = [f"Changes that save the most ({now}):"]
        for options, needed in plan.remedies[:_MOST_REMEDIES]:
            saved = plan.estimated_peak - needed
            verdict = "fits" if needed <= plan.available else "does not fit"
            lines.append(f"  {options}: {needed / GIB:.2f}, saves {saved / GIB:.2f}; {verdict}")
        none = "No change of a single option saves memory: more devices are needed."
    else:
        free = f"{(plan.available - plan.peak) / GIB:.2f} GiB per device stay free"
        lines = [f"{free}. Changes for speed or fewer devices ({now}):"]
        lines += [f"  {options}: {needed / GIB:.2f}" for options, needed in plan.remedies]
        none = f"{free}: larger batches or models fit."
    return "\n".join(lines) if plan.remedies else none


def _time_table(plan: "StepPlan") -> str:
    rows = [["per device", "TFLOP", "GB read", "seconds"]]
    for program in plan.programs:
        figures = (program.flops / 1e12, program.read_bytes / 1e9, program.seconds)
        rows.append([program.label, *(f"{figure:.3g}" for figure in figures)])
    seconds = plan.seconds
    assert seconds is not None, "the caller has checked"
    rows.append(["step", "", "", f"{seconds:.3g}"])
    trainer = plan.config.trainer
    steps, run = trainer.total_training_steps, "The run"
    if steps is None:
        steps = trainer.total_epochs * _EPOCH // plan.config.data.train_batch_size
        run = f"For each {_EPOCH:,} prompts of the training data, "
        run += counted(trainer.total_epochs, "epoch")
    return (
        f"{_table(rows)}\n\n{plan.tokens / seconds:,.0f} tokens per second, of which "
        f"{plan.response_tokens / seconds:,.0f} are sampled\n"
        f"{run}, {counted(steps, 'step')}: at least {steps * seconds / 3600:.2g} hours"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv)
