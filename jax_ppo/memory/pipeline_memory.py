"""Effects of pipeline stages on work and memory of a pass over packed rows."""

import dataclasses

from jax.sharding import AbstractMesh, Mesh

from jax_ppo.ppo.rollout_packing import Plans
from jax_ppo.runtime import meshes
from jax_ppo.runtime.parallelism import pipeline


@dataclasses.dataclass(frozen=True)
class StageSchedule:
    """The micro-batches of one pass through the layers; a single one without stages.

    Attributes:
      stages: S.
      micro_batches: M, each of one row per device.
    """

    stages: int
    micro_batches: int

    @property
    def ticks(self) -> int:
        """Return the number of times that a device runs its own layers, M + S - 1."""
        return self.micro_batches + self.stages - 1

    @property
    def slowdown(self) -> float:
        """Return the time in the layers as a multiple of that without a bubble."""
        return 1 / (1 - self.bubble)

    @property
    def bubble(self) -> float:
        """Return the share of the time in the layers in which a stage has no micro-batch."""
        return pipeline.bubble(self.stages, self.micro_batches)


def schedule_rows(mesh: Mesh | AbstractMesh, rows: int) -> StageSchedule:
    """Return the schedule of a mesh's stages for `rows` packed rows, over all devices."""
    stages = mesh.shape["stage"]
    if stages == 1:
        return StageSchedule(stages=1, micro_batches=1)
    return StageSchedule(stages=stages, micro_batches=stages * rows // meshes.row_shards(mesh))


def count_bubbles(mesh: Mesh | AbstractMesh, plans: Plans) -> dict[str, float]:
    """Return the bubble of each phase that runs in stages, by the name of its program."""
    scoring, _ = plans.scoring
    bubbles = {
        f"score_{part}": schedule_rows(mesh, scoring.sample.shape[1]).bubble
        for part in ("policy", "critic")
    }
    for role, batches in (("actor", plans.actor), ("critic", plans.critic)):
        if batches is not None:
            bubble = schedule_rows(mesh, batches.packing.sample.shape[2]).bubble
            bubbles[f"update_{role}"] = bubble
    return bubbles
