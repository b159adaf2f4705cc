"""Responses that the forward pass of the update draws, bit for bit (`rollout.exact`).

The sampler decodes with a cache: its matrix products have other shapes than for packed rows, and
round differently. So its responses only begin here. A forward pass over the rows and
micro-batches of the update's first epoch computes the log-prob of each token, and draws it again
with its addressed random numbers. Where another token is drawn, it takes the place of the first,
the response continues from there, and all are read again, until no token differs.

Other lengths are packed in other rows, where a token whose draw is nearly a tie may be drawn
differently again, without end. So responses are final once they equal some that were read before,
or after as many passes as a response can have tokens: their log-probs are the update's in any case.
"""

import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jax_ppo.ppo.forward_passes import forward_part_exactly, join_sequences
from jax_ppo.ppo.mini_batches import sample_lengths
from jax_ppo.ppo.samples.on_policy import newest_weights, sample_batch
from jax_ppo.ppo.samples.source import SampledBatch, SampleSource
from jax_ppo.ppo.step_parts import StepObserver, StepParts
from jax_ppo.runtime import placement, sharding
from jax_ppo.runtime.compiled_programs import CompiledProgram, program
from jax_ppo.sampler.built_in import BuiltInEngine
from jax_ppo.sampler.continuation import DrawStates, begin_draws
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.sampling import advance_stop_search, finishes_responses, sample_keys
from jax_ppo.training.random_streams import training_stream
from jax_ppo.training.state import TrainState
from jax_ppo.types import PackedRows, Rollout


class ExactSource(SampleSource):
    """Samples from the newest weights, with the bits of the update's forward pass."""

    def take(self, state: TrainState, step: int, observer: StepObserver) -> SampledBatch:
        """Sample, and draw each token again. See `SampleSource.take`."""
        sampled = sample_batch(self._parts, state, self._batches, step, observer)
        return draw_exactly(self._parts, state, sampled, step, observer)


def draw_exactly(
    parts: StepParts, state: TrainState, sampled: SampledBatch, step: int, observer: StepObserver
) -> SampledBatch:
    """Return sampled responses as the update's forward pass draws them, with its log-probs."""
    rollout, slot_steps = sampled.rollout, sampled.rollout.slot_steps
    assert slot_steps is not None, "the built-in engine counts them"
    key = parts.sample_keys(training_stream(0), step)
    version = placement.place(np.int32(step), sharding.replicated(parts.mesh))
    metrics = {"rollout/exact_passes": 0.0, "rollout/redrawn_tokens": 0.0}
    read: set[bytes] = set()
    while True:
        rollout = dataclasses.replace(rollout, slot_steps=None)
        with observer.phase("rollout"):
            lengths = sample_lengths(sampled.batch, rollout)
            packed = parts.packer.pack(step, lengths)
        with observer.phase("forward"):
            rollout, replaced, draws, changed = _draw_again(
                parts, state, rollout, packed.forward, key
            )
            count = int(placement.to_host(changed))
        metrics["rollout/exact_passes"] += 1
        responses = placement.to_host(rollout.responses).tobytes() if count else b""
        settled = not count or responses in read
        if settled or metrics["rollout/exact_passes"] > parts.sampling.max_response_length:
            metrics["rollout/undecided_tokens"] = float(count)
            rollout = dataclasses.replace(rollout, slot_steps=slot_steps)
            return sampled._replace(rollout=rollout, metrics={**sampled.metrics, **metrics})
        read.add(responses)
        metrics["rollout/redrawn_tokens"] += count
        with newest_weights(parts, state, observer) as engine:
            assert isinstance(engine, BuiltInEngine), "the options require it"
            rollout, _, taken = engine.continue_responses(replaced, draws, version, parts.sampling)
            slot_steps = _add(slot_steps, taken)


_add = CompiledProgram(operator.add)


def _draw_again(
    parts: StepParts, state: TrainState, rollout: Rollout, packed: PackedRows, key: jax.Array
) -> tuple[Any, ...]:
    """Return the rollout with new log-probs, and what `replace_tokens` returns for it."""
    layout = sharding.batch_rows(parts.mesh, len(rollout.lengths))
    sequences = join_sequences(rollout, parts.config.sequence_length)
    draws = _begin_draws(len(rollout.lengths), key, layout)
    options = dataclasses.replace(
        parts.step_options.forward,
        old_logprobs=True,
        entropy=True,  # without it, the compiler fuses log-probs otherwise than in the update
        reference=False,
        full_kl=False,
        shared_trunk=False,
        sampling=parts.sampling,
    )
    outputs = forward_part_exactly(
        options, parts.nets, "policy", state, sequences, packed, draws.keys
    )
    assert outputs.drawn is not None, "keys make it draw tokens again"
    rollout = dataclasses.replace(rollout, logprobs=outputs.old_logprobs)
    return rollout, *replace_tokens(parts.sampling, rollout, outputs.drawn, draws, layout)


@program(static_argnames=("count", "layout"))
def _begin_draws(count: int, key: jax.Array, layout: NamedSharding) -> DrawStates:
    draws = begin_draws(sample_keys(key, jnp.arange(count)))
    return jax.lax.with_sharding_constraint(draws, layout)


def search_tokens(
    options: SamplingOptions, responses_NxT: jax.Array, draws: DrawStates
) -> tuple[jax.Array, jax.Array]:
    """Return the search's state before each token, and whether it ends the response, [N, T]."""

    def advance(stop_N: jax.Array, drawn: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        tokens_N, position = drawn
        after_N = advance_stop_search(options, stop_N, tokens_N, position + 1)
        return after_N, (stop_N, finishes_responses(options, tokens_N, after_N))

    tokens = (responses_NxT.T, jnp.arange(responses_NxT.shape[1]))
    _, (stop_TxN, finishes_TxN) = jax.lax.scan(advance, draws.stop_states, tokens)
    return stop_TxN.T, finishes_TxN.T


@program(static_argnames=("options", "layout"))
def replace_tokens(
    options: SamplingOptions,
    rollout: Rollout,
    tokens_NxT: jax.Array,
    draws: DrawStates,
    layout: NamedSharding,
) -> tuple[Rollout, DrawStates, jax.Array]:
    """End each response with its first token that was drawn differently, if there is one.

    `tokens_NxT` are drawn again, `draws` the states before the first token. Return the responses,
    of which changed ones may continue; their draws' states; and how many changed.
    """
    T = tokens_NxT.shape[1]
    differs_NxT = rollout.action_mask & (tokens_NxT != rollout.responses)
    differs_N = differs_NxT.any(1)
    lengths_N = jnp.where(differs_N, differs_NxT.argmax(1).astype(jnp.int32) + 1, rollout.lengths)
    is_drawn_NxT = jnp.arange(T) < lengths_N[:, None]
    stop_NxT, finishes_NxT = search_tokens(options, tokens_NxT, draws)
    replaced = dataclasses.replace(
        rollout,
        responses=jnp.where(is_drawn_NxT, tokens_NxT, 0),
        lengths=lengths_N,
        logprobs=jnp.where(is_drawn_NxT, rollout.logprobs, 0.0),
        truncated=~(is_drawn_NxT & finishes_NxT).any(1),
        action_mask=is_drawn_NxT,
    )
    next_Nx1 = jnp.minimum(lengths_N, T - 1)[:, None]
    stop_N = jnp.take_along_axis(stop_NxT, next_Nx1, axis=1)[:, 0]
    results = jax.lax.with_sharding_constraint(
        (replaced, draws._replace(stop_states=stop_N)), layout
    )
    return *results, differs_N.sum()
