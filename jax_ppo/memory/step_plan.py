"""The plan of a step, compiled for the machine or else estimated, and its tables as text."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_ppo.config.schema import Config
from jax_ppo.errors import UserError, counted
from jax_ppo.kernels.platform import assume_platform
from jax_ppo.memory.abstract_step import AbstractStep, build_abstract_step
from jax_ppo.memory.compiler_figures import measure_programs
from jax_ppo.memory.memory_check import GIB
from jax_ppo.memory.memory_estimate import ProgramMemory, estimate_memory
from jax_ppo.memory.remedies import PossibleChanges, rank_remedies
from jax_ppo.memory.step_flops import count_program_flops
from jax_ppo.ppo.programs import StepProgram, find_step_program, planned_programs
from jax_ppo.ppo.samples.source import BATCHES_IN_POOL
from jax_ppo.runtime import meshes
from jax_ppo.runtime.devices import PEAK_RATES, bytes_per_device, resolve_dtype
from jax_ppo.runtime.topologies import (
    CompilerMissingError,
    Topology,
    cpu_devices,
    described_devices,
)


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
    """One program of a step."""

    name: str  # see `ppo.programs.PROGRAMS`
    memory: ProgramMemory  # temporaries are the compiler's figures if there is a compiler
    flops: float  # operations of matrix products on each device, as MFU counts them
    read_bytes: float  # bytes of weights, optimizer states and caches that a device moves
    seconds: float | None  # predicted by the device's peak rates; `None` if they are unknown
    is_refused: bool = False  # the compiler refused the program for its memory

    @property
    def label(self) -> str:
        """Return the program's name in tables."""
        return find_step_program(self.name).label


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The plan of a step on a machine."""

    topology: Topology
    mesh: dict[str, int]  # size of each mesh axis
    rollout_mesh: dict[str, int]  # size of each axis of the mesh for decoding
    decoding_devices: int  # devices that only decode
    decodes_beside: bool  # they decode a whole step while the others learn
    available: float | None  # bytes per device; `None` if unknown
    source: str  # origin of the temporaries, for the user
    programs: tuple[PlannedProgram, ...]  # in the order of a step
    tokens: int  # prompt and response tokens of a step
    response_tokens: int  # tokens of the responses alone
    # If it does not fit: changes of options, and the estimated bytes per device after each,
    # ascending, and without any.
    remedies: tuple[tuple[str, int], ...] = ()
    estimated_peak: int | None = None

    @property
    def peak(self) -> int:
        """Return the bytes that the step needs on each device."""
        return max(program.memory.peak for program in self.programs)

    @property
    def fits(self) -> bool | None:
        """Return whether every program fits; `None` if the memory is unknown."""
        return None if self.available is None else self.peak <= self.available

    @property
    def seconds(self) -> float | None:
        """Return the predicted seconds of a step's programs; `None` if one is unknown.

        Devices that only decode sample the next step, once they have its weights, while the others
        do the rest. Partial rollouts wait for most of their stages.
        """
        known = {x.name: x.seconds for x in self.programs if x.seconds is not None}
        if len(known) < len(self.programs):
            return None
        if not self.decodes_beside:
            return sum(known.values())
        copied, beside = known.pop("prepare_weights"), known.pop("sample")
        return copied + max(beside, sum(known.values()))

    def _per_second(self, tokens: int) -> float | None:
        return tokens / self.seconds if self.seconds else None

    def to_json(self) -> dict[str, Any]:
        """Return all figures, in bytes, operations and seconds."""
        return {
            "topology": self.topology.name,
            "devices": self.topology.num_devices,
            "mesh": self.mesh,
            "rollout_mesh": self.rollout_mesh,
            "decoding_devices": self.decoding_devices,
            "available": self.available,
            "peak": self.peak,
            "fits": self.fits,
            "source": self.source,
            "programs": [
                {
                    "name": program.name,
                    **vars(program.memory),
                    "peak": program.memory.peak,
                    "is_refused": program.is_refused,
                    "flops": program.flops,
                    "read_bytes": program.read_bytes,
                    "predicted_seconds": program.seconds,
                }
                for program in self.programs
            ],
            "predicted_step_seconds": self.seconds,
            "predicted_tokens_per_second": self._per_second(self.tokens),
            "predicted_response_tokens_per_second": self._per_second(self.response_tokens),
            "estimated_peak": self.estimated_peak,
            "remedies": [
                {"options": options, "estimated_peak": needed} for options, needed in self.remedies
            ],
        }


def plan_step(config: Config, topology: Topology, *, compiles: bool = True) -> StepPlan:
    """Plan memory and time of a PPO step.

    The step is compiled if the machine's compiler is installed; without it or `compiles` its
    temporaries are estimated.

    Raises:
      UserError: the options do not match the machine or the models, or a model has no config.json.
    """
    platform = topology.device_type.platform
    # All GPUs that can be named have bfloat16.
    config = dataclasses.replace(config, model=resolve_dtype(config.model, platform))
    separate = config.rollout.mesh.devices
    hosts = topology.num_hosts  # with one process each
    devices, source = _describe_machine(topology, compiles)
    # Without a compiler CPU devices stand for the machine's; nothing is compiled for them.
    mesh = meshes.make_mesh(
        config.mesh, devices or cpu_devices(topology), decoding=separate, processes=hosts
    )
    with assume_platform("gpu" if platform == "cuda" else platform):  # JAX's name
        with jax.set_mesh(mesh):
            step = build_abstract_step(config, mesh, hosts)
        refused: set[str] = set()
        if devices is None:
            memory = _estimate(step)
        else:
            memory, refused = _measure(step)
        plan = StepPlan(
            topology=topology,
            mesh=dict(mesh.shape),
            rollout_mesh=dict(step.rollout_mesh.shape),
            decoding_devices=separate,
            decodes_beside=bool(separate) and config.rollout.max_staleness == 1,
            available=topology.available_bytes,
            source=" ".join(source.split()),
            programs=_plan_programs(step, topology, memory, refused),
            tokens=step.samples * config.sequence_length,
            response_tokens=step.samples * config.data.max_response_length,
        )
        if plan.fits is False:
            estimated = _peak(_estimate(step))
            ranked = rank_remedies(
                PossibleChanges(config, mesh),
                lambda changed, mesh: _peak(_estimate(_build_step(changed, mesh))),
                estimated,
                plan.available,
            )
            remedies = tuple((remedy.options, remedy.needed) for remedy in ranked)
            plan = dataclasses.replace(plan, remedies=remedies, estimated_peak=estimated)
    return plan


def _describe_machine(topology: Topology, compiles: bool) -> tuple[list[jax.Device] | None, str]:
    """Return the devices to compile for, `None` without a compiler, and the plan's `source`."""
    estimated = "estimated, within 15 % of a compiler's peak for plain decoders"
    if not compiles:
        return None, f"{estimated}; nothing was compiled"
    try:
        devices = described_devices(topology)
    except CompilerMissingError as missing:
        return None, f"{estimated}, because {missing}"
    kind = devices[0].device_kind
    return devices, f"compiled for {kind} ({devices[0].client.platform_version})"


def _build_step(config: Config, mesh: jax.sharding.Mesh) -> AbstractStep:
    with jax.set_mesh(mesh):
        return build_abstract_step(config, mesh)


def _estimate(step: AbstractStep) -> dict[str, ProgramMemory]:
    with jax.set_mesh(step.mesh):
        return estimate_memory(step)


def _peak(memory: dict[str, ProgramMemory]) -> int:
    return max(program.peak for program in memory.values())


def _measure(step: AbstractStep) -> tuple[dict[str, ProgramMemory], set[str]]:
    try:
        return measure_programs(step)
    except UserError as error:
        if step.is_separate and step.hosts > 1:
            option = f"config.rollout.mesh.devices={step.rollout_mesh.size}"
            raise UserError(
                f"{option}: takes a part of each of {step.hosts} hosts, which compilers of TPUs "
                f"may refuse: {error}"
            ) from error
        raise


def _plan_programs(
    step: AbstractStep, topology: Topology, memory: dict[str, ProgramMemory], refused: set[str]
) -> tuple[PlannedProgram, ...]:
    """Return the programs of a step, if all prompts and responses have their maximum lengths."""
    prompts, prompt = step.prompts.tokens.shape
    lengths = np.full(step.samples, step.step_options.sequence_length)
    counted_flops = count_program_flops(
        step.step_options, step.nets, np.full(prompts, prompt), lengths
    )
    rates = PEAK_RATES.get(topology.device_type.jax_kind)
    planned = []
    for program in planned_programs(step):
        devices = step.rollout_mesh.size if program.kind == "sampling" else step.mesh.size
        flops = counted_flops.get(program.name, 0.0) / devices
        read_bytes = _count_read_bytes(step, program)
        seconds = None
        if rates is not None and rates.memory_bytes:
            seconds = max(flops / rates.flops, read_bytes / rates.memory_bytes)
        planned.append(
            PlannedProgram(
                name=program.name,
                memory=memory[program.name],
                flops=flops,
                read_bytes=read_bytes,
                seconds=seconds,
                is_refused=program.name in refused,
            )
        )
    return tuple(planned)


def _count_read_bytes(step: AbstractStep, program: StepProgram) -> float:
    """Return the bytes of weights, optimizer states and caches that a device moves."""
    copy = bytes_per_device(step.decoding_weights)

    def weights(name: str) -> float:
        """Return the bytes that a pass over a micro-batch reads, gathered ones included."""
        role = step.role(name)
        elements = sum(x.size for x in jax.tree.leaves(role.params))
        return elements * role.itemsize / step.mesh.shape["model"]

    if program.kind == "resharding":
        return bytes_per_device(step.state.actor) + 2.0 * copy
    if program.kind == "sampling":
        # The responses to one batch of prompts are drawn in a step, also if they begin in others.
        queue = step.queue
        if step.step_options.rollout.max_staleness > 1:
            queue //= BATCHES_IN_POOL
        tokens = step.sampling.max_response_length * -(-queue // min(step.slots, queue))
        return tokens * float(copy + step.cache_bytes)
    forwards = sum(map(weights, program.forwards(step.step_options)))
    if program.kind == "forward pass":
        rows, _ = step.packed.forward
        return rows.sample.shape[0] * forwards
    if program.kind == "update":
        steps, micro_batches = step.packed.mini_batches[program.role].packing.sample.shape[:2]
        # A pass and back reads the weights twice, a frozen policy's pass once.
        read = 2 * weights(program.role) + forwards
        trained = (step.role(program.role).trained, step.state.optimizers[program.role])
        return steps * (micro_batches * read + 2.0 * bytes_per_device(trained))
    return 0.0


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
_USUAL_AXES = ("data", "fsdp", "model")


def format_plan(plan: StepPlan) -> str:
    """Return the plan as lines of text."""
    parts = [_heading(plan), _memory_table(plan), _verdict(plan)]
    if plan.fits is False:
        parts.append(_remedies(plan))
    if plan.seconds is not None:
        parts += [_time_table(plan), _PREDICTION]
    return "\n\n".join(parts)


def _heading(plan: StepPlan) -> str:
    shape = _mesh_text(plan.mesh)
    if plan.rollout_mesh != plan.mesh or plan.decoding_devices:
        shape += ", decoding on "
        if plan.decoding_devices:
            shape += f"{counted(plan.decoding_devices, 'other device')}, "
        shape += _mesh_text(plan.rollout_mesh)
    return f"{plan.topology.name}, mesh {shape}\ntemporaries: {plan.source}"


def _mesh_text(shape: dict[str, int]) -> str:
    # Rarely used axes are left out if they split nothing.
    shown_axes = {axis: size for axis, size in shape.items() if size > 1 or axis in _USUAL_AXES}
    return " x ".join(f"{axis} {size}" for axis, size in shown_axes.items())


def _memory_table(plan: StepPlan) -> str:
    # Only the memory of a single CPU has the process in it.
    counts = any(program.memory.process for program in plan.programs)
    columns = {name: title for name, title in _COLUMNS.items() if counts or name != "process"}
    rows = [["GiB per device", *columns.values(), "peak"]]
    for program in plan.programs:
        figures = [getattr(program.memory, column) for column in (*columns, "peak")]
        rows.append([program.label, *(f"{value / GIB:.2f}" for value in figures)])
    return _table(rows)


def _verdict(plan: StepPlan) -> str:
    peak = plan.peak / GIB
    if plan.available is None:
        line = f"Peak {peak:.2f} GiB per device; the memory of the devices is unknown."
    else:
        verdict = _fit_text(plan.peak, plan.available)
        line = f"Peak {peak:.2f} GiB of {plan.available / GIB:.2f} GiB per device: {verdict}."
    refused = [program.label for program in plan.programs if program.is_refused]
    if refused:
        line += (
            f"\nThe compiler refused: {'; '.join(refused)}. Its figures may count replaced arrays "
            "twice."
        )
    return line


def _remedies(plan: StepPlan) -> str:
    assert plan.available is not None and plan.estimated_peak is not None, "it does not fit"
    if not plan.remedies:
        return "No change of a single option saves memory: more devices are needed."
    now = f"{plan.estimated_peak / GIB:.2f} now"
    lines = [f"Changes that save the most (estimated, GiB per device, {now}):"]
    for options, needed in plan.remedies[:_MOST_REMEDIES]:
        saved = plan.estimated_peak - needed
        verdict = _fit_text(needed, plan.available)
        lines.append(f"  {options}: {needed / GIB:.2f}, saves {saved / GIB:.2f}; {verdict}")
    return "\n".join(lines)


def _fit_text(needed: int, available: float) -> str:
    return "fits" if needed <= available else "does not fit"


def _time_table(plan: StepPlan) -> str:
    rows = [["per device", "TFLOP", "GB read", "seconds"]]
    for program in plan.programs:
        figures = (program.flops / 1e12, program.read_bytes / 1e9, program.seconds)
        rows.append([program.label, *(f"{figure:.3g}" for figure in figures)])
    seconds = plan.seconds
    assert seconds is not None, "the caller has checked"
    rows.append(["step", "", "", f"{seconds:.3g}"])
    return (
        f"{_table(rows)}\n\n{plan.tokens / seconds:,.0f} tokens per second, of which "
        f"{plan.response_tokens / seconds:,.0f} are sampled"
    )


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return columns of equal width; the first is aligned to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
