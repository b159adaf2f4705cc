"""The least memory of a run on each device, compared with what the devices have.

It is a lower bound by arithmetic: activations, logits and the decoding cache come on top. It is
known before any weights are loaded, so that a mesh on which a run cannot fit is refused at once.
"""

import dataclasses
from typing import Any

from jax.sharding import Mesh

from jax_ppo.config.schema import Config
from jax_ppo.errors import UserError
from jax_ppo.memory.remedies import rank_remedies
from jax_ppo.runtime import meshes, placement
from jax_ppo.runtime.device_memory import bytes_per_device, read_memory_limit
from jax_ppo.sampler.decoding_weights import shape_decoding_weights
from jax_ppo.training.networks import Folders, Networks, read_networks
from jax_ppo.training.state import TrainState, policy_params
from jax_ppo.training.state_shapes import state_shapes
from jax_ppo.training.stochastic_rounding import gradient_shapes

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class LeastMemory:
    """Bytes on each device.

    Attributes:
      parameters: trained parameters of actor and critic, unless they are in the host's memory.
      optimizer: both optimizer states, unless they are in the host's memory.
      frozen: reference, base of adapters and reward model, unless they are in the host's memory.
      gradients: the actor's or the critic's, whichever phase needs more; clipping needs a whole
        gradient at once.
      decoding: the built-in engine's copy of the actor's weights.
      fetched: what that phase copies from the host's memory.
    """

    parameters: int
    optimizer: int
    frozen: int
    gradients: int
    decoding: int
    fetched: int = 0

    @property
    def peak(self) -> int:
        """Return the bytes of the larger phase; gradients and the decoding copy do not coincide."""
        resident = self.parameters + self.optimizer + self.frozen
        return resident + max(self.gradients + self.fetched, self.decoding)

    def __str__(self) -> str:
        parts = dataclasses.asdict(self)
        return ", ".join(f"{name} {bytes_ / GIB:.1f}" for name, bytes_ in parts.items())


def validate_memory(config: Config, folders: Folders, nets: Networks, mesh: Mesh) -> None:
    """Raise `UserError` if the run cannot fit the devices of this process.

    The message names the changes of single options that would save the most. Platforms that report
    no memory, such as CPUs, are not checked.

    Args:
      config: all options.
      folders: each role's checkpoint.
      nets: each role's model.
      mesh: the run's mesh.
    """
    limit = read_memory_limit()
    if limit is None:
        return
    least = measure_least_memory(config, nets, mesh)
    if least.peak <= limit:
        return
    remedies = rank_remedies(
        config,
        mesh,
        needed=least.peak,
        read_nets=lambda changed: read_networks(changed, folders),
        measure=lambda *changed: measure_least_memory(*changed).peak,
    )
    suggestions = "; ".join(
        f"{remedy.options} needs at least {remedy.needed / GIB:.1f}" for remedy in remedies
    )
    raise UserError(
        f"config.mesh: a device needs at least {least.peak / GIB:.1f} GiB for the run ({least}) "
        f"and has {limit / GIB:.1f}. {suggestions or 'More devices are needed'}"
    )


def measure_least_memory(config: Config, nets: Networks, mesh: Mesh) -> LeastMemory:
    """Return the bytes on each device that the persistent arrays of a run take."""
    state = state_shapes(config, nets, mesh)
    decoding = 0
    if config.rollout.engine == "built-in":
        rollout_mesh = meshes.make_rollout_mesh(mesh, config.rollout.mesh)
        weights = shape_decoding_weights(rollout_mesh, nets.actor, policy_params(nets, state))
        decoding = bytes_per_device(weights)
    gradients = {
        f"update_{role}": bytes_per_device(gradient_shapes(params, optim.gradient_dtype))
        for role, params, optim in (
            ("actor", state.actor, config.actor.optim),
            ("critic", state.critic, config.critic.optim),
        )
    }
    phases = [
        (gradients.get(phase, 0), sum(vars(fetched).values()))
        for phase, fetched in fetched_by_phase(config, state).items()
    ]
    largest_gradients, largest_fetched = max(phases, key=sum)
    return LeastMemory(
        parameters=_resident_bytes((state.actor, state.critic)),
        optimizer=_resident_bytes((state.actor_optimizer, state.critic_optimizer)),
        frozen=_resident_bytes((state.reference, state.reward)),
        gradients=largest_gradients,
        decoding=decoding,
        fetched=largest_fetched,
    )


@dataclasses.dataclass(frozen=True)
class Fetched:
    """Bytes that each device copies from the host's memory for a phase, by their kind."""

    parameters: int = 0
    optimizer: int = 0
    frozen: int = 0


def fetched_by_phase(config: Config, state: TrainState) -> dict[str, Fetched]:
    """Return what the phases of a step copy from the host's memory, by their programs' names.

    Args:
      config: all options.
      state: shapes, as `state_shapes` returns them.
    """
    reference = _fetched_bytes(state.reference)
    critic = _fetched_bytes(state.critic)
    return {
        "score_policy": Fetched(frozen=reference),
        "score_critic": Fetched(parameters=critic),
        "score_reward": Fetched(frozen=_fetched_bytes(state.reward)),
        "update_actor": Fetched(
            optimizer=_fetched_bytes(state.actor_optimizer),
            frozen=reference if config.actor.use_kl_loss else 0,
        ),
        "update_critic": Fetched(
            parameters=critic, optimizer=_fetched_bytes(state.critic_optimizer)
        ),
    }


def _fetched_bytes(shapes: Any) -> int:
    return bytes_per_device(placement.only_in_host_memory(shapes))


def _resident_bytes(shapes: Any) -> int:
    return bytes_per_device(shapes) - _fetched_bytes(shapes)
