"""The least memory of a run on each device, compared with what the devices have.

It is a lower bound by arithmetic: activations, logits and the decoding cache come on top. It is
known before any weights are loaded, so that a mesh on which a run cannot fit is refused at once.
"""

import dataclasses

from jax.sharding import Mesh

from jax_ppo.config.schema import Config
from jax_ppo.errors import UserError
from jax_ppo.ppo.remedies import rank_remedies
from jax_ppo.runtime import meshes, placement
from jax_ppo.runtime.device_memory import bytes_per_device, read_memory_limit
from jax_ppo.sampler.built_in import shape_decoding_weights
from jax_ppo.training.networks import Folders, Networks, read_networks
from jax_ppo.training.state import policy_params, state_shapes
from jax_ppo.training.stochastic_rounding import gradient_shapes

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class LeastMemory:
    """Bytes on each device.

    Attributes:
      parameters: trained parameters of actor and critic.
      optimizer: both optimizer states, unless they are in the host's memory.
      frozen: reference, base of adapters and reward model.
      gradients: those of the larger of the two, which its whole clipped gradient needs at once.
      decoding: the built-in engine's copy of the actor's weights.
      fetched: optimizer state that is in the host's memory outside of its update.
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
    """Return the bytes on each device that the arrays of a run take, apart from temporary ones."""
    state = state_shapes(config, nets, mesh)
    decoding = 0
    if config.rollout.engine == "built-in":
        rollout_mesh = meshes.make_rollout_mesh(mesh, config.rollout.mesh)
        weights = shape_decoding_weights(rollout_mesh, nets.actor, policy_params(nets, state))
        decoding = bytes_per_device(weights)
    actor, critic = bytes_per_device(state.actor), bytes_per_device(state.critic)
    on_device, updates = 0, []
    for params, optimizer, options in (
        (state.actor, state.actor_optimizer, config.actor),
        (state.critic, state.critic_optimizer, config.critic),
    ):
        gradients = bytes_per_device(gradient_shapes(params, options.optim.gradient_dtype))
        fetched = bytes_per_device(optimizer) if placement.is_in_host_memory(optimizer) else 0
        on_device += bytes_per_device(optimizer) - fetched
        updates.append((gradients, fetched))
    gradients, fetched = max(updates, key=sum)
    return LeastMemory(
        parameters=actor + critic,
        optimizer=on_device,
        frozen=bytes_per_device((state.reference, state.reward)),
        gradients=gradients,
        decoding=decoding,
        fetched=fetched,
    )
