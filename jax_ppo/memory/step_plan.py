"""The plan of a step: compiled for the machine if its compiler is installed, else by arithmetic."""

import dataclasses

import jax
from jax.sharding import Mesh

from jax_ppo.config.schema import Config
from jax_ppo.kernels.platform import assume_platform
from jax_ppo.memory.arithmetic import estimate_phases
from jax_ppo.memory.compiled import measure_phases
from jax_ppo.memory.phases import TITLES, Phase, StepPlan
from jax_ppo.memory.pipeline_memory import count_bubbles
from jax_ppo.memory.plan_inputs import read_descriptions, set_up_step
from jax_ppo.memory.remedies import rank_remedies
from jax_ppo.memory.work import count_work, predict_seconds
from jax_ppo.runtime import meshes
from jax_ppo.runtime.computation_dtype import resolve_dtype
from jax_ppo.runtime.device_speed import PEAK_RATES
from jax_ppo.runtime.topologies import (
    CompilerMissingError,
    Topology,
    cpu_devices,
    described_devices,
)
from jax_ppo.training.networks import Networks

# JAX's names of the platforms.
_JAX_PLATFORMS = {"cuda": "gpu"}


def plan_step(config: Config, topology: Topology, *, compiles: bool = True) -> StepPlan:
    """Plan memory and time of a PPO step.

    Args:
      config: all options.
      topology: the machine.
      compiles: whether to compile the step, if the machine's compiler is installed; otherwise all
        figures are by arithmetic.

    Raises:
      UserError: the options do not match the machine or the models, or a model has no config.json.
    """
    platform = topology.device_type.platform
    config = resolve_dtype(config, platform)  # all GPUs that can be named have bfloat16
    devices, source = _describe_machine(topology, compiles)
    # Without a compiler CPU devices stand for the machine's; nothing is compiled for them.
    mesh = meshes.make_mesh(config.mesh, devices or cpu_devices(topology))
    with assume_platform(_JAX_PLATFORMS.get(platform, platform)):
        nets = read_descriptions(config, mesh)
        with jax.set_mesh(mesh):
            step = set_up_step(config, nets, mesh)
            estimated = estimate_phases(step)
            work = count_work(step)
            bubbles = count_bubbles(mesh, step.plans)
        measured = estimated
        refused: set[str] = set()
        if devices is not None:
            measured, refused = measure_phases(step)
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
            for name in TITLES
            if name in measured
        )
        plan = StepPlan(
            topology=topology,
            mesh=dict(mesh.shape),
            rollout_mesh=dict(step.rollout_mesh.shape),
            available=topology.available_bytes,
            is_compiled=devices is not None,
            source=" ".join(source.split()),
            phases=phases,
            tokens=step.programs.samples * config.sequence_length,
            response_tokens=step.programs.samples * config.data.max_response_length,
        )
        if plan.fits is False:
            plan = dataclasses.replace(plan, remedies=_rank_remedies(config, mesh, plan))
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


def _rank_remedies(config: Config, mesh: Mesh, plan: StepPlan) -> tuple[tuple[str, int], ...]:
    """Return the changes of options that save memory, and the bytes needed after each."""

    def read_nets(changed: Config) -> Networks:
        changed_mesh = meshes.make_mesh(changed.mesh, list(mesh.devices.flat))
        return read_descriptions(changed, changed_mesh)

    remedies = rank_remedies(
        config,
        mesh,
        needed=plan.estimated_peak,
        read_nets=read_nets,
        measure=_estimate_peak,
        available=plan.available,
    )
    return tuple((remedy.options, remedy.needed) for remedy in remedies)


def _estimate_peak(config: Config, nets: Networks, mesh: Mesh) -> int:
    """Return the bytes that a step needs on each device, by arithmetic."""
    with jax.set_mesh(mesh):
        estimated = estimate_phases(set_up_step(config, nets, mesh))
    return max(memory.peak for memory in estimated.values())
