"""Compiled samplers: the decode loop, jitted per prompt shape, side by side on a CPU."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import compat, compilation, dispatch
from jax_ppo.runtime.parallelism.replicas import map_replicas
from jax_ppo.runtime.sharding import drop_padded_rows, num_padded_rows
from jax_ppo.sampler.decode_loop import PADDING, generate_responses
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.types import Params, Prompts, Rollout

# Several programs side by side read weights of at most this size: larger ones do not stay in a
# CPU's cache.
MAX_SHARED_WEIGHT_BYTES = 2**25


class Sampler:
    """`generate_responses`, compiled once for each prompt width P and number of prompts.

    Where programs run side by side (`runtime/dispatch.py`) and the model is small, prompts and
    slots are split evenly among several programs, each with a queue of its own, if both are
    divisible.
    """

    def __init__(
        self,
        model: Transformer,
        options: SamplingOptions,
        split_rows: Callable[[Callable], Callable] = lambda function: function,
    ) -> None:
        """Prepare the program; nothing is compiled yet.

        Args:
          model: with `unrolled=True`.
          options: how to sample.
          split_rows: wraps `generate(params, prompts, indices, key)` so that each row shard of the
            mesh runs it on its own rows: it refills its slots from its own queue.
        """
        self.options = options

        def generate_from(
            params: Params,
            prompts: Prompts,
            key: jax.Array,
            first_sample_index: jax.Array | int = 0,
            slots: int | None = options.slots,
        ) -> Rollout:
            count = len(prompts.lengths)
            replicas = options.replicas
            missing = -count % replicas if replicas else num_padded_rows(count) - count
            # The index addresses a sample's random numbers, wherever the sample is decoded.
            indices_N = first_sample_index + jnp.arange(count * options.n)
            generate = functools.partial(
                generate_responses,
                model,
                dataclasses.replace(options, slots=slots),
                has_padding=missing > 0,
            )
            # Prompts are padded to a multiple of the devices; padding is not answered.
            rows = prompts.rows
            if rows is not None:
                rows = jnp.pad(rows, (0, missing))
            prompts = Prompts(
                tokens=jnp.pad(prompts.tokens, ((0, missing), (0, 0))),
                lengths=jnp.pad(prompts.lengths, (0, missing), constant_values=1),
                rows=rows,
            )
            indices_N = jnp.pad(indices_N, (0, missing * options.n), constant_values=PADDING)
            split = functools.partial(map_replicas, replicas=replicas) if replicas else split_rows
            rollout = split(generate)(params, prompts, indices_N, key)
            if not missing:
                return rollout
            cut = functools.partial(drop_padded_rows, count=count * options.n)
            # `slot_steps` has one entry per queue of prompts, not per sample.
            per_sample = dataclasses.replace(rollout, slot_steps=None)
            return dataclasses.replace(jax.tree.map(cut, per_sample), slot_steps=rollout.slot_steps)

        self.program = jax.jit(generate_from, static_argnames="slots")

    def __call__(
        self,
        params: Params,
        prompts: Prompts,
        key: jax.Array,
        first_sample_index: int | None = None,
    ) -> Rollout:
        """Sample without waiting for the result. See `generate_responses`.

        `first_sample_index=None` is a constant 0 of the program: nothing is sent from the host.
        """
        parts = dispatch.run_together(self.programs(params, prompts, key, first_sample_index))
        if len(parts) == 1:
            return parts[0]
        return concatenate_rollouts(parts)

    def programs(
        self,
        params: Params,
        prompts: Prompts,
        key: jax.Array,
        first_sample_index: int | None = None,
    ) -> list[dispatch.Program]:
        """Return the programs that a call runs, with their arguments.

        If there are several, the prompts are split here, on the device.
        """
        lanes = 1 if self.options.replicas else dispatch.num_lanes()
        slots = self.options.slots
        # Slots beyond the number of samples would stay idle, and hinder an even split.
        if slots is not None:
            slots = min(slots, len(prompts.lengths) * self.options.n)
        if lanes == 1 or not self._can_split(params, prompts, slots, lanes):
            arguments: tuple = (params, prompts, key)
            if first_sample_index is not None:
                arguments = (*arguments, first_sample_index)
            return [(self.program, arguments)]
        split_arguments = (prompts, first_sample_index, lanes, self.options.n)
        if isinstance(prompts.lengths, jax.ShapeDtypeStruct):
            parts = compilation.compile_ahead(split_prompts, *split_arguments)
        else:
            parts = split_prompts(*split_arguments)
        part_slots = None if slots is None else slots // lanes
        return [(self.program, (params, part, key, first, part_slots)) for part, first in parts]

    def _can_split(self, params: Params, prompts: Prompts, slots: int | None, lanes: int) -> bool:
        """Return whether prompts and slots are divisible and the weights small."""
        weight_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
        divisible = len(prompts.lengths) % lanes == 0 and (slots is None or slots % lanes == 0)
        return divisible and weight_bytes <= MAX_SHARED_WEIGHT_BYTES

    @property
    def compilations(self) -> int:
        """Return the number of programs compiled so far."""
        return compat.num_compiled(self.program)


@functools.partial(jax.jit, static_argnames=("lanes", "n"))
def split_prompts(
    prompts: Prompts, first_sample_index: jax.Array | int | None, lanes: int, n: int
) -> list[tuple[Prompts, jax.Array]]:
    """Return the prompts in `lanes` equal parts, each with the index of its first sample."""
    count = len(prompts.lengths) // lanes
    # Parts keep the indices of the whole batch, so that a split changes no draw.
    if first_sample_index is None:
        first_sample_index = 0
    first = jnp.int32(first_sample_index)
    parts = []
    for lane in range(lanes):
        rows = slice(lane * count, (lane + 1) * count)
        part = jax.tree.map(lambda x, rows=rows: x[rows], prompts)
        parts.append((part, first + lane * count * n))
    return parts


@jax.jit
def concatenate_rollouts(parts: list[Rollout]) -> Rollout:
    """Return the rollout of all parts' prompts, in their order."""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
