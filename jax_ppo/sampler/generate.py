"""The decode loop as a jitted program, compiled once for each number and width of prompts."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime.parallelism.replicas import map_replicas
from jax_ppo.runtime.sharding import drop_padded_rows, num_padded_rows
from jax_ppo.sampler.decode_loop import PADDING, generate_responses
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.types import Params, Prompts, Rollout


def sampler_program(
    model: Transformer,
    options: SamplingOptions,
    split_rows: Callable[[Callable], Callable] = lambda function: function,
) -> Any:
    """Return the jitted `generate_responses`, of parameters, prompts and a key.

    `model` is unrolled. `split_rows` wraps `generate(params, prompts, indices, key)` so that each
    row shard of the mesh runs it on its own rows: it refills its slots from its own queue.
    """

    def generate_from(
        params: Params, prompts: Prompts, key: jax.Array, first_sample_index: jax.Array | int = 0
    ) -> Rollout:
        count = len(prompts.lengths)
        replicas = options.replicas
        missing = -count % replicas if replicas else num_padded_rows(count) - count
        # The index addresses a sample's random numbers, wherever the sample is decoded.
        indices_N = first_sample_index + jnp.arange(count * options.n)
        generate = functools.partial(generate_responses, model, options, has_padding=missing > 0)
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

    return jax.jit(generate_from)
