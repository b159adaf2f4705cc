"""The part of the vocabulary that a device has, where several devices split it."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class VocabularyShards:
    """The devices that split the vocabulary, seen from one of them, inside `jax.shard_map`."""

    # The mesh axis that splits the vocabulary into equal parts; `None`: nothing is split.
    axis: str | None = None

    def start(self, width: int) -> jax.Array | int:
        """Return the id of the first of this device's `width` tokens."""
        return 0 if self.axis is None else jax.lax.axis_index(self.axis) * width

    def total(self, width: int) -> int:
        """Return V, the number of tokens of all devices, each of which has `width`."""
        return width if self.axis is None else width * jax.lax.axis_size(self.axis)

    def sum(self, x: jax.Array) -> jax.Array:
        """Return the sum over devices."""
        return x if self.axis is None else jax.lax.psum(x, self.axis)

    def max(self, x: jax.Array) -> jax.Array:
        """Return the maximum over devices."""
        return x if self.axis is None else jax.lax.pmax(x, self.axis)

    def min(self, x: jax.Array) -> jax.Array:
        """Return the minimum over devices."""
        return x if self.axis is None else jax.lax.pmin(x, self.axis)

    def gather(self, x_BxN: jax.Array) -> jax.Array:
        """Return the columns of all devices."""
        if self.axis is None:
            return x_BxN
        return jax.lax.all_gather(x_BxN, self.axis, axis=1, tiled=True)


WHOLE = VocabularyShards()
