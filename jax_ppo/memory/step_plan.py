"""The plan of a step, compiled for the machine or else estimated."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ppo.config.schema import Config, replace_options
from jax_ppo.errors import UserError
from jax_ppo.kernels.platform import assume_platform
from jax_ppo.memory.abstract_step import AbstractStep, build_abstract_step
from jax_ppo.memory.automatic_sizes import (
    AS_SET,
    SizeChoice,
    choose_sizes,
    largest_peak,
    rank_step_sizes,
)
from jax_ppo.memory.compiler_figures import measure_programs
from jax_ppo.memory.memory_estimate import ProgramMemory, estimate_memory
from jax_ppo.memory.remedies import Measure, PossibleChanges, measure_changes, rank_remedies
from jax_ppo.memory.step_flops import count_program_flops
from jax_ppo.ppo.programs import StepProgram, find_step_program, planned_programs
from jax_ppo.ppo.samples.source import BATCHES_IN_POOL
from jax_ppo.runtime import meshes
from jax_ppo.runtime.devices import bytes_per_device, resolve_dtype
from jax_ppo.runtime.topologies import (
    CompilerMissingError,
    Topology,
    described_devices,
)

_JSON_FIGURES = (  # fields and properties of a plan that stand in its JSON as they are
    *("mesh", "rollout_mesh", "decoding_devices", "available", "peak", "estimated_peak", "fits"),
    *("sizes", "source"),
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
    available: float | None  # bytes per device; `None` if unknown
    sizes: str  # a line about the sizes that were chosen; empty: all are set, or memory is unknown
    source: str  # origin of the temporaries, for the user
    programs: tuple[PlannedProgram, ...]  # in the order of a step
    tokens: int  # prompt and response tokens of a step
    response_tokens: int  # tokens of the responses alone
    config: Config  # with the sizes that were chosen
    # If it does not fit, changes of options that save memory; if half the memory is free, those
    # that use it and fit, and the smallest machine that does. The estimated bytes per device after
    # each, ascending, and without any.
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

        One step ahead, devices that only decode sample the next step, once they have its weights,
        while the others do the rest. Partial rollouts wait for most of their stages.
        """
        known = {x.name: x.seconds for x in self.programs if x.seconds is not None}
        if len(known) < len(self.programs):
            return None
        if not self.decoding_devices or self.config.rollout.max_staleness != 1:
            return sum(known.values())
        copied, beside = known.pop("prepare_weights"), known.pop("sample")
        return copied + max(beside, sum(known.values()))

    def to_json(self) -> dict[str, Any]:
        """Return all figures, in bytes, operations and seconds."""
        return {
            "topology": self.topology.name,
            "devices": self.topology.num_devices,
            **{name: getattr(self, name) for name in _JSON_FIGURES},
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
            "predicted_tokens_per_second": self.seconds and self.tokens / self.seconds,
            "predicted_response_tokens_per_second": (
                self.seconds and self.response_tokens / self.seconds
            ),
            "remedies": [
                {"options": options, "estimated_peak": needed} for options, needed in self.remedies
            ],
        }


def plan_step(config: Config, topology: Topology, *, compiles: bool = True) -> StepPlan:
    """Plan memory and time of a PPO step.

    Without `compiles` or the machine's compiler, temporaries are estimated. Raise `UserError` if
    the options do not match machine or models, or a model has no config.json.
    """
    if config.rollout.engine != "built-in":
        raise UserError(
            f"config.rollout.engine={config.rollout.engine!r}: only the memory of the built-in "
            "engine can be planned"
        )
    platform = topology.device_type.platform
    # All GPUs that can be named have bfloat16.
    config = dataclasses.replace(config, model=resolve_dtype(config.model, platform))
    separate = config.rollout.mesh.devices
    hosts = topology.num_hosts  # with one process each
    devices, source = _describe_machine(topology, compiles)
    # Without a compiler CPU devices stand for the machine's; nothing is compiled for them.
    placed = devices or jax.devices("cpu")[: topology.num_devices]
    mesh = meshes.make_mesh(config.mesh, placed, decoding=separate, processes=hosts)
    with assume_platform("gpu" if platform == "cuda" else platform):  # JAX's name
        with jax.set_mesh(mesh):

            def build(sizes: Mapping[str, Any]) -> AbstractStep:
                sized = replace_options(config, sizes)
                return build_abstract_step(sized, mesh, topology.available_bytes)

            step, memory, refused, choice = _measure_step(build, topology, bool(devices))
        given, config = config, step.config
        plan = StepPlan(
            topology=topology,
            mesh=dict(mesh.shape),
            rollout_mesh=dict(step.rollout_mesh.shape),
            decoding_devices=separate,
            available=topology.available_bytes,
            sizes=str(choice),
            source=" ".join(source.split()),
            programs=_plan_programs(step, topology, memory, refused),
            tokens=step.samples * config.sequence_length,
            response_tokens=step.samples * config.data.max_response_length,
            config=config,
        )

        def estimate_peak(config: Config, mesh: Mesh) -> int:
            with jax.set_mesh(mesh):
                step = build_abstract_step(config, mesh, topology.available_bytes)
                return max(program.peak for program in estimate_memory(step).values())

        return _find_remedies(plan, mesh, estimate_peak, lambda mesh: estimate_peak(given, mesh))


def _find_remedies(
    plan: StepPlan, mesh: Mesh, estimate_peak: Measure, estimate_least: Callable[[Mesh], int]
) -> StepPlan:
    """Add `remedies` and `estimated_peak`; `estimate_least` is for meshes of other machines."""
    available = plan.available
    if available is None or available / 2 < plan.peak <= available:
        return plan
    estimated = estimate_peak(plan.config, mesh)
    changes = PossibleChanges(plan.config, mesh)
    smallest: list[tuple[str, int]] = []
    if plan.fits:
        measured = measure_changes(changes.save_time(), mesh, estimate_peak)
        ranked = [change for change in measured if estimated < change.needed <= available]
        for machine in plan.topology.halves():
            devices = jax.devices("cpu")[: machine.num_devices]
            with contextlib.suppress(UserError):  # sizes of the mesh may need all devices
                decoding, hosts = plan.decoding_devices, machine.num_hosts
                fewer = meshes.make_mesh(plan.config.mesh, devices, decoding, hosts)
                needed = estimate_least(fewer)
                if needed <= available:
                    smallest = [(f"--topology={machine.name}", needed)]
    else:
        ranked = rank_remedies(changes, estimate_peak, estimated, available)
    remedies = [*smallest, *((change.options, change.needed) for change in ranked)]
    remedies.sort(key=lambda remedy: remedy[1])
    return dataclasses.replace(plan, remedies=tuple(remedies), estimated_peak=estimated)


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


def _measure_step(
    build: Callable[[Mapping[str, Any]], AbstractStep], topology: Topology, compiles: bool
) -> tuple[AbstractStep, dict[str, ProgramMemory], set[str], SizeChoice]:
    """Return a step with its automatic sizes, what `measure_programs` returns, and the choice."""
    choice, compiled = AS_SET, dict[Any, Any]()
    if topology.available_bytes is not None:
        choice = choose_sizes(rank_step_sizes(build), topology.available_bytes)
    while True:
        step = build(choice.sizes.options)
        if not compiles:
            return step, estimate_memory(step), set(), choice
        memory, refused = measure_programs(step, compiled)
        needed = largest_peak(memory)
        if needed <= choice.limit or (smaller := choice.smaller(needed)) is None:
            return step, memory, refused, choice
        choice = smaller


def _plan_programs(
    step: AbstractStep, topology: Topology, memory: dict[str, ProgramMemory], refused: set[str]
) -> tuple[PlannedProgram, ...]:
    """Return the programs of a step, if all prompts and responses have their maximum lengths."""
    prompts, prompt = step.prompts.tokens.shape
    lengths = np.full(step.samples, step.config.sequence_length)
    counted_flops = count_program_flops(
        step.step_options, step.nets, np.full(prompts, prompt), lengths
    )
    device = topology.device_type
    planned = []
    for program in planned_programs(step):
        devices = step.rollout_mesh.size if program.kind == "sampling" else step.mesh.size
        flops = counted_flops.get(program.name, 0.0) / devices
        read_bytes = _count_read_bytes(step, program)
        seconds = None
        if device.flops:  # of an unknown device perhaps all that is known
            reading = read_bytes / device.memory_rate if device.memory_rate else 0.0
            seconds = max(flops / device.flops, reading)
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
        if step.config.rollout.max_staleness > 1:
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
