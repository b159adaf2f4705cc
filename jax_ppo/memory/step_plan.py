"""The plan of a step, compiled for the machine or else by formulas, and its tables as text."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jax_ppo.config.schema import Config
from jax_ppo.errors import UserError, counted
from jax_ppo.kernels.platform import assume_platform
from jax_ppo.memory.abstract_step import AbstractStep, build_abstract_step
from jax_ppo.memory.compiler_figures import measure_phases
from jax_ppo.memory.memory_check import GIB
from jax_ppo.memory.memory_formulas import PhaseMemory, estimate_phases
from jax_ppo.memory.remedies import PossibleChanges, rank_remedies
from jax_ppo.memory.step_work import PhaseWork, count_bubbles, count_work, predict_seconds
from jax_ppo.ppo.programs import find_step_program
from jax_ppo.runtime import meshes
from jax_ppo.runtime.devices import PEAK_RATES, resolve_dtype
from jax_ppo.runtime.topologies import (
    CompilerMissingError,
    Topology,
    cpu_devices,
    described_devices,
)


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase of a step."""

    name: str  # the program's name, see `ppo.programs.PROGRAMS`
    memory: PhaseMemory  # temporaries are the compiler's figures if there is a compiler
    estimated_peak: int  # the peak by arithmetic alone
    work: PhaseWork  # of one device
    seconds: float | None  # predicted by the device's peak rates; `None` if they are unknown
    is_refused: bool = False  # the compiler refused the program for its memory
    bubble: float = 0.0  # share of the time in the layers in which a pipeline stage waits, 0..1


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The plan of a step on a machine."""

    topology: Topology
    mesh: dict[str, int]  # size of each mesh axis
    rollout_mesh: dict[str, int]  # size of each axis of the mesh for decoding
    decoding_devices: int  # devices that only decode
    decodes_beside: bool  # they decode a whole step while the others learn
    available: float | None  # bytes per device; `None` if unknown
    is_compiled: bool  # the machine's own compiler measured the temporaries
    source: str  # origin of the temporaries, for the user
    phases: tuple[Phase, ...]  # in the order of a step
    tokens: int  # prompt and response tokens of a step
    response_tokens: int  # tokens of the responses alone
    # Changes of options, and the estimated bytes per device after each, ascending.
    remedies: tuple[tuple[str, int], ...] = ()

    @property
    def peak(self) -> int:
        """Return the bytes that the step needs on each device."""
        return max(phase.memory.peak for phase in self.phases)

    @property
    def estimated_peak(self) -> int:
        """Return the bytes that the step needs on each device by arithmetic alone."""
        return max(phase.estimated_peak for phase in self.phases)

    @property
    def fits(self) -> bool | None:
        """Return whether every phase fits; `None` if the memory is unknown."""
        return None if self.available is None else self.peak <= self.available

    @property
    def seconds(self) -> float | None:
        """Return the predicted seconds of a step's phases together; `None` if one is unknown.

        Devices that only decode sample the next step, once they have its weights, while the others
        do the rest. Partial rollouts wait for most of their stages.
        """
        known = {phase.name: phase.seconds for phase in self.phases if phase.seconds is not None}
        if len(known) < len(self.phases):
            return None
        first = known.pop("prepare_weights", 0.0)
        beside = known.pop("sample", 0.0) if self.decodes_beside else 0.0
        return first + max(beside, sum(known.values()))

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
            "estimated_peak": self.estimated_peak,
            "fits": self.fits,
            "is_compiled": self.is_compiled,
            "source": self.source,
            "phases": [
                {
                    "name": phase.name,
                    **vars(phase.memory),
                    "peak": phase.memory.peak,
                    "estimated_peak": phase.estimated_peak,
                    "is_refused": phase.is_refused,
                    "bubble": phase.bubble,
                    **vars(phase.work),
                    "predicted_seconds": phase.seconds,
                }
                for phase in self.phases
            ],
            "predicted_step_seconds": self.seconds,
            "predicted_tokens_per_second": self._per_second(self.tokens),
            "predicted_response_tokens_per_second": self._per_second(self.response_tokens),
            "remedies": [
                {"options": options, "estimated_peak": needed} for options, needed in self.remedies
            ],
        }


def plan_step(config: Config, topology: Topology, *, compiles: bool = True) -> StepPlan:
    """Plan memory and time of a PPO step.

    The step is compiled if the machine's compiler is installed; without it or `compiles` all
    figures are by arithmetic.

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
            estimated = estimate_phases(step)
            work = count_work(step)
            bubbles = count_bubbles(step)
        measured, refused = (estimated, set()) if devices is None else _measure(step)
        rates = PEAK_RATES.get(topology.device_type.jax_kind)
        phases = tuple(
            Phase(
                name=name,
                memory=measured[name],
                estimated_peak=estimated[name].peak,
                is_refused=name in refused,
                bubble=bubbles.get(name, 0.0),
                work=work[name],
                seconds=predict_seconds(
                    work[name], rates, topology.network_bytes(mesh.shape["model"])
                ),
            )
            for name in estimated
        )
        plan = StepPlan(
            topology=topology,
            mesh=dict(mesh.shape),
            rollout_mesh=dict(step.rollout_mesh.shape),
            decoding_devices=separate,
            decodes_beside=bool(separate) and config.rollout.max_staleness == 1,
            available=topology.available_bytes,
            is_compiled=devices is not None,
            source=" ".join(source.split()),
            phases=phases,
            tokens=step.samples * config.sequence_length,
            response_tokens=step.samples * config.data.max_response_length,
        )
        if plan.fits is False:
            remedies = rank_remedies(
                PossibleChanges(config, mesh), _estimate_peak, plan.estimated_peak, plan.available
            )
            plan = dataclasses.replace(
                plan, remedies=tuple((remedy.options, remedy.needed) for remedy in remedies)
            )
    return plan


def _describe_machine(topology: Topology, compiles: bool) -> tuple[list[jax.Device] | None, str]:
    """Return the devices to compile for, `None` without a compiler, and the plan's `source`."""
    if not compiles:
        return None, "arithmetic alone; nothing was compiled"
    try:
        devices = described_devices(topology)
    except CompilerMissingError as missing:
        return None, f"arithmetic, because {missing}"
    kind = devices[0].device_kind
    return devices, f"compiled for {kind} ({devices[0].client.platform_version})"


def _measure(step: AbstractStep) -> tuple[dict[str, PhaseMemory], set[str]]:
    try:
        return measure_phases(step)
    except UserError as error:
        if step.is_separate and step.hosts > 1:
            option = f"config.rollout.mesh.devices={step.rollout_mesh.size}"
            raise UserError(
                f"{option}: takes a part of each of {step.hosts} hosts, which compilers of TPUs "
                f"may refuse: {error}"
            ) from error
        raise


def _estimate_peak(config: Config, mesh: Mesh) -> int:
    with jax.set_mesh(mesh):
        estimated = estimate_phases(build_abstract_step(config, mesh))
    return max(memory.peak for memory in estimated.values())


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
    "A prediction, not a measurement: the slowest of products, memory and links at the device's\n"
    "peak rates, all prompts and responses at their maximum lengths, no work on the host. Runs\n"
    "are slower."
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
    lines = [f"{plan.topology.name}, mesh {shape}", f"temporaries: {plan.source}"]
    bubbles = [f"{find_step_program(x.name).label} {x.bubble:.1%}" for x in plan.phases if x.bubble]
    if bubbles:
        lines.append(f"stages wait for this share of the time in the layers: {'; '.join(bubbles)}")
    return "\n".join(lines)


def _mesh_text(shape: dict[str, int]) -> str:
    # Rarely used axes are left out if they split nothing.
    shown_axes = {axis: size for axis, size in shape.items() if size > 1 or axis in _USUAL_AXES}
    return " x ".join(f"{axis} {size}" for axis, size in shown_axes.items())


def _memory_table(plan: StepPlan) -> str:
    # Only the memory of a single CPU has the process in it.
    counts = any(phase.memory.process for phase in plan.phases)
    columns = {name: title for name, title in _COLUMNS.items() if counts or name != "process"}
    rows = [["GiB per device", *columns.values(), "peak"]]
    if plan.is_compiled:
        rows[0].append("by arithmetic")
    for phase in plan.phases:
        row = [find_step_program(phase.name).label]
        figures = [getattr(phase.memory, column) for column in (*columns, "peak")]
        if plan.is_compiled:
            figures.append(phase.estimated_peak)
        rows.append([*row, *(f"{value / GIB:.2f}" for value in figures)])
    return _table(rows)


def _verdict(plan: StepPlan) -> str:
    peak = plan.peak / GIB
    if plan.available is None:
        line = f"Peak {peak:.2f} GiB per device; the memory of the devices is unknown."
    else:
        verdict = _fit_text(plan.peak, plan.available)
        line = f"Peak {peak:.2f} GiB of {plan.available / GIB:.2f} GiB per device: {verdict}."
    if plan.is_compiled:
        difference = plan.estimated_peak / plan.peak - 1
        line += f" By arithmetic {plan.estimated_peak / GIB:.2f} GiB ({difference:+.1%})."
    refused = [find_step_program(phase.name).label for phase in plan.phases if phase.is_refused]
    if refused:
        line += (
            f"\nThe compiler refused: {'; '.join(refused)}. Its figures may count replaced arrays "
            "twice."
        )
    return line


def _remedies(plan: StepPlan) -> str:
    assert plan.available is not None, "a plan is refused only if the memory is known"
    if not plan.remedies:
        return "No change of a single option saves memory: more devices are needed."
    lines = ["Changes that save the most (by arithmetic, GiB per device):"]
    for options, needed in plan.remedies[:_MOST_REMEDIES]:
        saved = plan.estimated_peak - needed
        verdict = _fit_text(needed, plan.available)
        lines.append(f"  {options}: {needed / GIB:.2f}, saves {saved / GIB:.2f}; {verdict}")
    return "\n".join(lines)


def _fit_text(needed: int, available: float) -> str:
    return "fits" if needed <= available else "does not fit"


def _time_table(plan: StepPlan) -> str:
    rows = [["per device", "TFLOP", "GB memory", "GB links", "seconds"]]
    for phase in plan.phases:
        work = phase.work
        figures = (work.flops / 1e12, work.memory_bytes / 1e9, work.link_bytes / 1e9, phase.seconds)
        rows.append([find_step_program(phase.name).label, *(f"{figure:.3g}" for figure in figures)])
    seconds = plan.seconds
    assert seconds is not None, "the caller has checked"
    rows.append(["step", "", "", "", f"{seconds:.3g}"])
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
