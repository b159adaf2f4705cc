"""The contents of a plan: memory, work and predicted time per device in each phase of a step."""

import dataclasses
from typing import Any

from jax_ppo.runtime.topologies import Topology

# The programs of a step in their order, and the titles that the user sees.
TITLES = {
    "prepare_weights": "decoding weights",
    "sample": "sampling",
    "score_policy": "scoring, policy",
    "score_critic": "scoring, critic",
    "score_reward": "scoring, reward",
    "estimate": "advantages",
    "update_actor": "update, actor",
    "update_critic": "update, critic",
}

# Those that a step dispatches together: a single CPU runs them at the same time.
TOGETHER = (("score_policy", "score_critic"), ("update_actor", "update_critic"))


@dataclasses.dataclass(frozen=True)
class PhaseMemory:
    """Bytes per device in one phase of a step; the fields add up to its peak.

    Attributes:
      parameters: trained parameters of actor and critic.
      optimizer: their optimizer states.
      gradients: the sum of gradients over micro-batches.
      frozen: parameters of reference and reward model.
      decoding_copy: the copy of the weights that sampling reads.
      cache: keys and values of the slots, and of the prompts on their stage.
      batch: prompts, rollout, scores and packing, as arguments and results.
      process: interpreter, libraries and compiled programs, if the device is the run's only CPU.
      temporaries: everything else, also of a program that runs at the same time.
    """

    parameters: int = 0
    optimizer: int = 0
    gradients: int = 0
    frozen: int = 0
    decoding_copy: int = 0
    cache: int = 0
    batch: int = 0
    process: int = 0
    temporaries: int = 0

    @property
    def peak(self) -> int:
        """Return the sum of all parts."""
        return sum(vars(self).values())

    def beside(self, other: "PhaseMemory") -> "PhaseMemory":
        """Return the memory while the program of another phase runs at the same time."""
        added = other.gradients + other.cache + other.temporaries
        return dataclasses.replace(self, temporaries=self.temporaries + added)


@dataclasses.dataclass(frozen=True)
class PhaseWork:
    """Work of one device in one phase of a step, by arithmetic.

    Attributes:
      flops: operations of matrix products; recomputed activations count too.
      memory_bytes: bytes read from and written to the device's memory.
      link_bytes: bytes that the device sends to others.
      row_bytes: those of them that the mesh's axes of rows exchange: gathered weights and
        gradients, which cross from host to host.
    """

    flops: float = 0.0
    memory_bytes: float = 0.0
    link_bytes: float = 0.0
    row_bytes: float = 0.0

    def __add__(self, other: "PhaseWork") -> "PhaseWork":
        return PhaseWork(
            flops=self.flops + other.flops,
            memory_bytes=self.memory_bytes + other.memory_bytes,
            link_bytes=self.link_bytes + other.link_bytes,
            row_bytes=self.row_bytes + other.row_bytes,
        )

    def __mul__(self, times: float) -> "PhaseWork":
        return PhaseWork(
            flops=self.flops * times,
            memory_bytes=self.memory_bytes * times,
            link_bytes=self.link_bytes * times,
            row_bytes=self.row_bytes * times,
        )


@dataclasses.dataclass(frozen=True)
class Phase:
    """One phase of a step.

    Attributes:
      name: the program's name, a key of `TITLES`.
      memory: bytes per device; temporaries are the compiler's figures if there is a compiler.
      estimated_peak: the peak by arithmetic alone.
      is_refused: whether the compiler refused the program for its memory.
      bubble: share of the time in the layers in which a pipeline stage waits, 0..1.
      work: the work of one device.
      seconds: predicted by the device's peak rates; `None` if they are unknown.
    """

    name: str
    memory: PhaseMemory
    estimated_peak: int
    work: PhaseWork
    seconds: float | None
    is_refused: bool = False
    bubble: float = 0.0


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The plan of a step on a machine.

    Attributes:
      topology: the machine.
      mesh: size of each mesh axis.
      rollout_mesh: size of each axis of the mesh for decoding.
      available: bytes per device; `None` if unknown.
      is_compiled: whether the machine's own compiler measured the temporaries.
      source: origin of the temporaries, for the user.
      phases: in the order of a step.
      tokens: prompt and response tokens of a step.
      response_tokens: those of the responses alone.
      remedies: changes of options, and the estimated bytes per device after each, in ascending
        order.
    """

    topology: Topology
    mesh: dict[str, int]
    rollout_mesh: dict[str, int]
    available: float | None
    is_compiled: bool
    source: str
    phases: tuple[Phase, ...]
    tokens: int
    response_tokens: int
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
        if self.available is None:
            return None
        return self.peak <= self.available

    @property
    def seconds(self) -> float | None:
        """Return the predicted seconds of all phases together; `None` if one is unknown."""
        known = [phase.seconds for phase in self.phases if phase.seconds is not None]
        if len(known) < len(self.phases):
            return None
        return sum(known)

    def _per_second(self, tokens: int) -> float | None:
        if not self.seconds:
            return None
        return tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return all figures, in bytes, operations and seconds."""
        return {
            "topology": self.topology.name,
            "devices": self.topology.num_devices,
            "mesh": self.mesh,
            "rollout_mesh": self.rollout_mesh,
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
