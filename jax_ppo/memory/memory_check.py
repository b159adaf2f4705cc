"""The least memory of a run on each device, compared with what the devices have.

Activations, logits and the decoding cache come on top. It is known before any weights are loaded,
so that a mesh on which a run cannot fit is refused at once.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from jax_ppo.config.schema import Actor, Config, Critic
from jax_ppo.errors import UserError
from jax_ppo.kernels.platform import target_platform
from jax_ppo.memory.remedies import PossibleChanges, SupervisedChanges, rank_remedies
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo import programs
from jax_ppo.ppo.programs import StepProgram
from jax_ppo.ppo.step_parts import StepOptions
from jax_ppo.runtime import meshes, placement
from jax_ppo.runtime.devices import bytes_per_device, read_host_memory, read_memory_limit
from jax_ppo.sampler.decoding_weights import largest_part_bytes, shape_decoding_weights
from jax_ppo.training.networks import Folders, Networks
from jax_ppo.training.optimizer import gradient_shapes, split_frozen
from jax_ppo.training.roles import find_role, read_networks
from jax_ppo.training.state import StateBuilder, TrainState, policy_params
from jax_ppo.training.supervised_step import trained_shapes

GIB = 2**30
EXHAUSTED = "RESOURCE_EXHAUSTED"  # how XLA's message begins, on every platform
_MAX_REMEDIES = 4


class OutOfMemory(UserError):
    """A program needs more memory than a device has; `needed` are its bytes, 0 if unknown."""

    def __init__(self, message: str, details: str = "", needed: int = 0) -> None:
        """Make the message one printable line."""
        super().__init__(message, details)
        self.needed = needed


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeastMemory:
    """Bytes on each device."""

    parameters: int  # trained parameters, unless they are in the host's memory
    optimizer: int  # optimizer states, likewise
    frozen: int = 0  # reference, base of adapters and reward model, likewise
    gradients: int  # of the phase that needs more; clipping needs a whole gradient at once
    # The built-in engine's copy of the actor's weights, or its largest part on the way to others.
    decoding: int = 0
    separate: int = 0  # the whole copy, on each device that only decodes
    fetched: int = 0  # what that phase copies from the host's memory

    @property
    def resident(self) -> int:
        """Return the bytes of the state between phases."""
        return self.parameters + self.optimizer + self.frozen

    @property
    def peak(self) -> int:
        """Return the bytes of the larger phase; gradients and the decoding copy do not coincide."""
        return max(self.resident + max(self.gradients + self.fetched, self.decoding), self.separate)

    def __str__(self) -> str:
        parts = dataclasses.asdict(self)
        return ", ".join(f"{name} {bytes_ / GIB:.1f}" for name, bytes_ in parts.items() if bytes_)


@dataclasses.dataclass(frozen=True)
class PPOMemory:
    """The memory of a PPO run."""

    config: Config  # all options, any of which a remedy may change
    nets: Networks  # each role's model
    mesh: Mesh
    folders: Folders = dataclasses.field(default_factory=Folders)  # for models after a remedy

    def measure(self) -> LeastMemory:
        """Return the bytes on each device that the persistent arrays of the run take."""
        config, nets, mesh = self.config, self.nets, self.mesh
        state = StateBuilder(config, nets, mesh).shapes()
        decoding = separate = 0
        if config.rollout.engine == "built-in":
            rollout_mesh = meshes.make_rollout_mesh(mesh, config.rollout.mesh)
            weights = shape_decoding_weights(rollout_mesh, nets.actor, policy_params(nets, state))
            decoding = bytes_per_device(weights)
            if not meshes.shares_devices(mesh, rollout_mesh):
                decoding, separate = largest_part_bytes(weights), decoding
        step_options = StepOptions(config)
        phases = []
        for program in programs.PROGRAMS:
            gradients = 0
            if program.kind == "update" and program.role in state.optimizers:
                options: Actor | Critic = getattr(config, find_role(program.role).section)
                params, _ = split_frozen(options, state.models[program.role])
                gradients = bytes_per_device(gradient_shapes(params, options.optim.gradient_dtype))
            fetched = fetched_memory(program, step_options, state)
            phases.append((gradients, sum(fetched.values())))
        largest_gradients, largest_fetched = max(phases, key=sum)
        return LeastMemory(
            parameters=_resident_bytes({name: state.models[name] for name in state.optimizers}),
            optimizer=_resident_bytes(state.optimizers),
            frozen=_resident_bytes(state.without_trained().models),
            gradients=largest_gradients,
            decoding=decoding,
            separate=separate,
            fetched=largest_fetched,
        )

    @property
    def changes(self) -> PossibleChanges:
        """Return the changes of options that may save memory."""
        return PossibleChanges(self.config, self.mesh)

    def measure_changed(self, changed: Config, mesh: Mesh) -> int:
        """Return the bytes that each device needs with other options and on another mesh."""
        nets = read_networks(changed, self.folders)
        rollout_mesh = meshes.make_rollout_mesh(mesh, changed.rollout.mesh)
        for shape in (mesh, rollout_mesh):
            meshes.validate_architecture(shape, nets.actor.architecture)
        return PPOMemory(changed, nets, mesh).measure().peak


@dataclasses.dataclass(frozen=True)
class SupervisedMemory:
    """The memory of supervised training."""

    config: Config
    model: Transformer
    head: str
    mesh: Mesh

    def measure(self) -> LeastMemory:
        """Return the bytes on each device of the arrays that an optimizer step needs."""
        options = self.config.supervised
        shapes: dict[str, Any] = trained_shapes(options, self.model, self.head, self.mesh)
        gradients = gradient_shapes(shapes["params"], options.optim.gradient_dtype)
        return LeastMemory(
            parameters=bytes_per_device(shapes["params"]),
            optimizer=bytes_per_device(shapes["optimizer"]),
            gradients=bytes_per_device(gradients),
        )

    @property
    def changes(self) -> SupervisedChanges:
        """Return the changes of options that may save memory."""
        return SupervisedChanges(self.config, self.mesh)

    def measure_changed(self, changed: Config, mesh: Mesh) -> int:
        """Return the bytes that each device needs with other options and on another mesh."""
        return dataclasses.replace(self, config=changed, mesh=mesh).measure().peak


def validate_memory(run: PPOMemory | SupervisedMemory) -> None:
    """Raise `UserError` if a run cannot fit the devices of this process.

    The message names the changes of options that would save the most. CPU devices have equal parts
    of the host's memory. Other platforms that report no memory are not checked.
    """
    limit = read_memory_limit()
    is_host = limit is None and target_platform() == "cpu"
    if is_host:
        limit = read_host_memory() // jax.local_device_count()
    if limit is None:
        return
    least = run.measure()
    if least.peak <= limit or (is_host and least.separate):
        return
    suggestions = "; ".join(
        f"{remedy.options} needs at least {remedy.needed / GIB:.1f}"
        for remedy in rank_remedies(run.changes, run.measure_changed, least.peak)
    )
    more = "memory is" if is_host else "devices are"
    raise UserError(
        f"config.mesh: a device needs at least {least.peak / GIB:.1f} GiB for the run ({least}) "
        f"and has {limit / GIB:.1f}. {suggestions or f'More {more} needed'}"
    )


@contextlib.contextmanager
def explain_out_of_memory(run: PPOMemory | SupervisedMemory) -> Iterator[None]:
    """Turn an allocation that failed in the block into `OutOfMemory`, which says what may help."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if EXHAUSTED not in str(error):
            raise
        first_line = str(error).partition("\n")[0]
        raise OutOfMemory(
            f"a device ran out of memory: {first_line}", details="\n".join(_describe_memory(run))
        ) from error


def _describe_memory(run: PPOMemory | SupervisedMemory) -> Iterator[str]:
    """Yield lines: what a device holds, and the changes of options that take less."""
    least = run.measure()
    limit = read_memory_limit()
    of_limit = "" if limit is None else f" of {limit / GIB:.1f} GiB"
    yield (
        f"  arrays that stay, per device: {least.peak / GIB:.3g} GiB{of_limit} ({least}); the rest "
        "is temporary: activations, logits and the decoding cache"
    )
    for words, _ in run.changes.leave_sizes():
        yield f"  less that is temporary: {words}, chosen by the memory"
    remedies = rank_remedies(run.changes, run.measure_changed, least.peak)
    for remedy in remedies[:_MAX_REMEDIES]:
        saved = least.peak - remedy.needed
        yield f"  less that stays: {remedy.options} saves {saved / GIB:.3g} GiB"
    yield "  python -m jax_ppo.plan with the same options counts the temporary arrays, too"


def fetched_memory(program: StepProgram, options: StepOptions, state: TrainState) -> dict[str, int]:
    """Return the bytes that each device copies from the host for a program, by their kind."""
    read = {program.role, *program.forwards(options)} & state.models.keys()
    if program.kind == "sampling":
        read = set()  # it reads the decoding copy
    trained = read & state.optimizers.keys()
    updated = trained if program.kind == "update" else ()
    return {
        "parameters": _fetched_bytes([state.models[name] for name in trained]),
        "optimizer": _fetched_bytes([state.optimizers[name] for name in updated]),
        "frozen": _fetched_bytes([state.models[name] for name in read - trained]),
    }


def _fetched_bytes(shapes: Any) -> int:
    if target_platform() == "cpu":
        return 0  # the host's memory is that of the devices
    leaves = jax.tree.leaves(shapes)
    return bytes_per_device([x for x in leaves if placement.is_in_host_memory(x)])


def _resident_bytes(shapes: Any) -> int:
    return bytes_per_device(shapes) - _fetched_bytes(shapes)
