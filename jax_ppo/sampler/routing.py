"""The record of the experts that sampled tokens pass through, to be replayed in training.

A prompt's experts are recorded by its prefill, a later token's by the decode step that
runs them. The last token of a response is not run, so nothing is recorded for it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_ppo.models.architecture import Architecture
from jax_ppo.models.experts import routed_experts_dtype


class RoutingRecord(NamedTuple):
    """Experts by layer, k of each token; E, the number of experts, where there is no record."""

    buffer: jax.Array  # [G, P, layers, k], of the prompts in the prefill buffer
    sequences: jax.Array  # [N, S, layers, k], of the samples: column i is the token at position i


def empty_record(
    architecture: Architecture, prompts: int, prompt_length: int, samples: int, length: int
) -> RoutingRecord:
    """Return the record of G prompts [P] and N samples [S] before anything has been run."""
    a = architecture

    def empty(rows: int, columns: int) -> jax.Array:
        shape = (rows, columns, a.num_layers - sum(a.dense_layers), a.experts_per_token)
        return jnp.full(shape, a.num_experts, routed_experts_dtype(a.num_experts))

    return RoutingRecord(buffer=empty(prompts, prompt_length), sequences=empty(samples, length))


def routing_bytes(architecture: Architecture, samples: int, length: int) -> int:
    """Return the bytes of the record of `samples` sequences with room for `length` tokens each."""
    record = jax.eval_shape(lambda: empty_record(architecture, 0, 0, samples, length))
    return int(record.sequences.size) * int(record.sequences.dtype.itemsize)


def record_prefill(
    record: RoutingRecord,
    num_experts: int,
    routed_experts_LxGxPxk: jax.Array,
    is_prompt_GxP: jax.Array,
    is_new: jax.Array,
) -> RoutingRecord:
    """Return the record with the experts of the prompts just prefilled, if these are new ones."""
    routed_GxPxLxk = jnp.moveaxis(routed_experts_LxGxPxk, 0, 2)
    # A prompt's column of padding may later hold a token of the response.
    routed_GxPxLxk = jnp.where(is_prompt_GxP[..., None, None], routed_GxPxLxk, num_experts)
    routed_GxPxLxk = routed_GxPxLxk.astype(record.buffer.dtype)
    return record._replace(buffer=jnp.where(is_new, routed_GxPxLxk, record.buffer))


def record_entries(
    record: RoutingRecord, sample_g: jax.Array, buffer_g: jax.Array
) -> RoutingRecord:
    """Return the record with buffer rows `buffer_g` for samples `sample_g`, N for none."""
    P = record.buffer.shape[1]
    sequences = record.sequences.at[sample_g, :P].set(record.buffer[buffer_g], mode="drop")
    return record._replace(sequences=sequences)


def record_tokens(
    record: RoutingRecord,
    routed_experts_LxBx1xk: jax.Array,
    sample_B: jax.Array,
    positions_B: jax.Array,
) -> RoutingRecord:
    """Return the record with the tokens at positions [B] of samples [B], N for none."""
    routed_BxLxk = jnp.swapaxes(routed_experts_LxBx1xk[:, :, 0], 0, 1)
    sequences = record.sequences.at[sample_B, positions_B].set(routed_BxLxk, mode="drop")
    return record._replace(sequences=sequences)
