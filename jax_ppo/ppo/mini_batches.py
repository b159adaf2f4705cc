"""Packing of a rollout: rows for forward passes, and shuffled mini-batches for each role."""

import dataclasses
import functools

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ppo.config.schema import Config
from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.runtime import placement, sharding
from jax_ppo.training import packing
from jax_ppo.training.decoders import packed_row_length
from jax_ppo.types import MiniBatches, PackedRows, Packing, Rollout


@dataclasses.dataclass(frozen=True)
class RolloutPacking:
    """Packed rows for one rollout, on the mesh."""

    forward: PackedRows  # rows of all samples, for the passes that only read
    mini_batches: dict[str, MiniBatches]  # the actor's and a separate critic's, by role
    padding: float  # share of the places in the actor's rows that hold no token, 0..1
    lengths: np.ndarray  # int [B] on the host, tokens of each sample's prompt and response


@dataclasses.dataclass(frozen=True)
class Partition:
    """Division of a rollout into a role's optimizer steps."""

    epochs: int  # passes over the rollout
    # An optimizer step takes as many samples as these have, from anywhere in the rollout.
    prompts_per_mini_batch: int
    rows_per_device: int | None  # packed rows of a micro-batch; `None` chooses automatically


@dataclasses.dataclass(frozen=True)
class RolloutPacker:
    """Chooses how rollouts are packed. All processes make the same packing."""

    config: Config
    mesh: Mesh  # the mesh that packings are placed on
    has_critic: bool  # whether there is a separate critic

    @functools.cached_property
    def partitions(self) -> dict[str, Partition]:
        """Return how the actor and a separate critic divide a rollout, by role."""
        actor, critic = self.config.actor, self.config.critic
        of_actor = Partition(
            epochs=actor.ppo_epochs,
            prompts_per_mini_batch=actor.ppo_mini_batch_size,
            rows_per_device=actor.ppo_micro_batch_size_per_device,
        )
        if not self.has_critic:
            return {"actor": of_actor}
        of_critic = Partition(
            epochs=critic.ppo_epochs or of_actor.epochs,
            prompts_per_mini_batch=critic.ppo_mini_batch_size or of_actor.prompts_per_mini_batch,
            rows_per_device=critic.ppo_micro_batch_size_per_device or of_actor.rows_per_device,
        )
        return {"actor": of_actor, "critic": of_critic}

    def pack(self, step: int, lengths: np.ndarray) -> RolloutPacking:
        """Pack a rollout for forward passes and shuffled mini-batches; `lengths` int [B]."""
        # Roles that divide a rollout alike share one packing, which is made and sent once.
        divide = functools.cache(lambda x: self._mini_batches(step, lengths, x))
        divided = {role: divide(partition) for role, partition in self.partitions.items()}
        _, places, rows = divided["actor"]
        is_exact = self.config.rollout.exact
        return RolloutPacking(
            forward=self._first_epoch(rows) if is_exact else self.pack_rows(lengths),
            mini_batches={role: batches for role, (batches, _, _) in divided.items()},
            padding=1 - int((rows.sample >= 0).sum()) / places,
            lengths=lengths,
        )

    def pack_rows(self, lengths: np.ndarray) -> PackedRows:
        """Pack all samples of a rollout for the passes that only read."""
        # There are no mini-batches here: one group of all samples, whose axis is dropped again.
        one_group = np.arange(len(lengths))[None]
        per_device = self.config.rollout.logprob_micro_batch_size_per_device
        packed, counts = self._pack(
            lengths, one_group, per_device or self.config.actor.ppo_micro_batch_size_per_device
        )
        rows = jax.tree.map(lambda x: x[0], packed)
        return placement.place(rows, sharding.rows(self.mesh, axis=1)), self._replicate(counts[0])

    def _first_epoch(self, packed: Packing) -> PackedRows:
        """Return the micro-batches of the actor's first epoch, the empty ones last."""
        mini_batches = len(packed.sample) // self.partitions["actor"].epochs

        def join(x: np.ndarray) -> np.ndarray:
            return x[:mini_batches].reshape(-1, *x.shape[2:])

        is_used = (join(packed.sample) >= 0).any(axis=(1, 2))
        order = np.argsort(~is_used, kind="stable")
        rows = jax.tree.map(lambda x: join(x)[order], packed)
        placed = placement.place(rows, sharding.rows(self.mesh, axis=1))
        return placed, self._replicate(np.asarray(is_used.sum(), np.int32))

    def _mini_batches(
        self, step: int, lengths: np.ndarray, partition: Partition
    ) -> tuple[MiniBatches, int, Packing]:
        """Divide the whole rollout again in each epoch, and pack each mini-batch separately.

        Return the mini-batches, the number of places for tokens in micro-batches that hold any, and
        the rows on the host.
        """
        samples = len(lengths)
        mini_batches = self.config.data.train_batch_size // partition.prompts_per_mini_batch
        # Seeded by run, step and epoch: a resumed run shuffles as an uninterrupted one.
        groups = np.concatenate(
            [
                np.random.default_rng([self.config.seed, step, epoch])
                .permutation(samples)
                .reshape(mini_batches, -1)
                for epoch in range(partition.epochs)
            ]
        )
        members = np.zeros((len(groups), samples), bool)
        np.put_along_axis(members, groups, True, axis=1)
        packed, counts = self._pack(lengths, groups, partition.rows_per_device)
        # Micro-batches run one after the other, so devices split the rows (axis 2) of each.
        rows, length = packed.sample.shape[2:]
        batches = MiniBatches(
            packing=placement.place(packed, sharding.rows(self.mesh, axis=2)),
            counts=self._replicate(counts),
            members=self._replicate(members),
        )
        return batches, int(counts.sum()) * rows * length, packed

    def _pack(
        self, lengths: np.ndarray, groups: np.ndarray, rows_per_device: int | None
    ) -> tuple[Packing, np.ndarray]:
        row_length, is_packed = packed_row_length(self.config), self.config.packing.enabled
        return packing.pack_on_mesh(
            self.mesh, lengths, groups, row_length, rows_per_device, is_packed
        )

    def _replicate(self, array: np.ndarray) -> jax.Array:
        return placement.place(array, sharding.replicated(self.mesh))


def sample_lengths(batch: PromptBatch, rollout: Rollout) -> np.ndarray:
    """Return the tokens of each sample's prompt and response, int [B], on the host."""
    response_lengths = placement.to_host(rollout.lengths)  # this waits until sampling has ended
    prompts = batch.prompts.lengths
    return np.repeat(prompts, len(response_lengths) // len(prompts)) + response_lengths
