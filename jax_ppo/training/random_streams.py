"""Random numbers from seed, stream and step alone: numbered streams, and the keys of samples."""

import enum
import functools

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ppo.runtime import placement, sharding
from jax_ppo.runtime.compiled_programs import CompiledProgram


@enum.unique
class Stream(enum.IntEnum):
    """Second coordinate of a random key, after the seed.

    A number is never given to another use, which would draw the same numbers; 2 is retired.
    """

    TRAINING = 0
    EVALUATION = 1
    ACTOR_ADAPTERS = 3  # initial values
    CRITIC_ADAPTERS = 4
    ACTOR_ROUNDING = 5  # of what is stored in bfloat16
    CRITIC_ROUNDING = 6
    SUPERVISED_ROUNDING = 7
    FURTHER_DRAWS = 8  # and all numbers above: further draws of a step that replaces groups


class SampleKeys:
    """Makes the base key of a batch of samples, on the mesh."""

    def __init__(self, seed: int, mesh: Mesh) -> None:
        self._replicated = sharding.replicated(mesh)
        self._make_key = CompiledProgram(
            functools.partial(sample_key, seed), out_shardings=self._replicated
        )

    def __call__(self, stream: int, step: int) -> jax.Array:
        """Return the base key of a stream's samples in a step."""
        return self._make_key(
            # Arguments and not constants: one program makes the keys of all steps.
            placement.place(np.int32(stream), self._replicated),
            placement.place(np.int32(step), self._replicated),
        )


def sample_key(seed: int, stream: int | jax.Array, step: int | jax.Array) -> jax.Array:
    """Return the base key of a stream's samples in a step."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), step)


def training_stream(draw: int) -> int:
    """Return the stream of a step's draw, counted from 0."""
    return Stream.FURTHER_DRAWS + draw - 1 if draw else Stream.TRAINING
