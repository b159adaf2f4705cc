"""Forward passes over packed rows: hidden states, log-probs, values and scores.

The passes before the update and the update share them, so that its first ratio is 1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_ppo.kernels import logprobs, vocabulary_chunks, vocabulary_kl
from jax_ppo.models.heads import compute_scalars, output_embedding, product_scaling
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime.parallelism.vocabulary import (
    gather_columns,
    scatter_group_sum,
    split_by_device,
)
from jax_ppo.training.packing import Rows
from jax_ppo.types import Params, Sequences

# Gathered before the loop over chunks of logits: inside it, every chunk would gather it again.
UNEMBEDDING = vocabulary_chunks.UnembeddingLayout(gather_columns, scatter_group_sum)


class DecoderOutput(NamedTuple):
    """A decoder's hidden states for some rows, with the model and parameters of its heads."""

    model: Transformer
    params: Params
    hidden: Float[Array, "R L D"]


def hidden_states(
    model: Transformer, params: Params, rows: Rows, replays_routing: bool = False
) -> Float[Array, "R L D"]:
    """Return the decoder's output in the computation dtype, the input of the heads."""
    return run_decoder(
        model, params, rows, with_router_loss=False, replays_routing=replays_routing
    )[0]


def run_decoder(
    model: Transformer,
    params: Params,
    rows: Rows,
    with_router_loss: bool,
    replays_routing: bool = False,
) -> tuple[Float[Array, "R L D"], Float[Array, "R L"] | None]:
    """Return the decoder's output and each token's router loss, the mean over layers.

    All passes go through this function. Without `with_router_loss`, for which the model must have
    experts, the loss is `None`. With `replays_routing` tokens pass through the experts that the
    sampler recorded, if it recorded any: only for the actor, whose experts these are.
    """
    model = model.clone(router_loss=with_router_loss)
    output: Any = model.apply(
        {"params": params},
        rows.tokens,
        rows.positions,
        rows.segments,
        routed_experts=rows.routed_experts if replays_routing else None,
    )
    if not with_router_loss:
        return output.hidden, None
    return output.hidden, output.auxiliary["router_loss"].mean(0)


def target_logprobs(
    model: Transformer,
    params: Params,
    hidden: Float[Array, "R L D"],
    rows: Rows,
    temperature: float,
    with_entropy: bool = True,
) -> tuple[Float[Array, "R L"], Float[Array, "R L"] | None]:
    """Return each target's log-prob and entropy, in float32 nats, 0 where `rows.mask` is False.

    The temperature, > 0, divides the logits. Without `with_entropy` the entropy is `None`.
    """
    # Positions are grouped by device, so that no hidden states move between devices.
    values, entropy = logprobs.token_logprobs(
        split_by_device(hidden),
        output_embedding(params),
        split_by_device(rows.targets),
        split_by_device(rows.mask),
        _logit_options(model, temperature),
        with_entropy=with_entropy,
    )
    shape = rows.mask.shape
    return values.reshape(shape), None if entropy is None else entropy.reshape(shape)


def _logit_options(model: Transformer, temperature: float) -> vocabulary_chunks.LogitOptions:
    divisor, cap = product_scaling(model.architecture, temperature)
    return vocabulary_chunks.LogitOptions(
        divisor, softcap=cap, num_ids=model.architecture.num_ids, layout=UNEMBEDDING
    )


def kl_over_vocabulary(
    actor: DecoderOutput, reference: DecoderOutput, rows: Rows, temperature: float
) -> Float[Array, "R L"]:
    """Return KL(actor || reference) over the vocabulary for each target, in float32 nats.

    A teacher may take the reference's place; both have the same vocabulary and soft cap. The
    temperature, > 0, divides the logits of both. The result is 0 where the rows' mask is False.
    """
    divisors = [x.model.architecture.logit_divisor for x in (actor, reference)]
    ref_hidden = reference.hidden
    if divisors[0] != divisors[1]:
        ref_hidden = ref_hidden * (divisors[0] / divisors[1])
    return vocabulary_kl.full_kl(
        split_by_device(actor.hidden),
        output_embedding(actor.params),
        split_by_device(ref_hidden),
        output_embedding(reference.params),
        split_by_device(rows.mask),
        _logit_options(actor.model, temperature),
    ).reshape(rows.mask.shape)


def scalar_outputs(model: Transformer, params: Params, rows: Rows) -> Float[Array, "R L"]:
    """Return a scalar head's output at each place, float32: a value or score after the token."""
    return compute_scalars(params, hidden_states(model, params, rows))


def score_positions(sequences: Sequences, pad_id: int | None) -> Int[Array, " B"]:
    """Return the position at which a decoder's score of each sequence is read.

    It is that of the last token that is not `pad_id`, as in transformers' sequence classifiers; if
    `pad_id` is the EOS, that is the token before the final EOS. A sequence of `pad_id` only is read
    at its first token. With `pad_id=None` it is the last token.
    """
    column = jnp.arange(sequences.tokens.shape[1])
    lengths = sequences.prompt_lengths + sequences.lengths
    is_readable = column < lengths[:, None]
    if pad_id is not None:
        is_readable &= sequences.tokens != pad_id  # by token id, not by position
    return jnp.max(jnp.where(is_readable, column, 0), axis=1)


def write_values_at(
    values_RxL: Float[Array, "R L"],
    rows: Rows,
    positions_B: Int[Array, " B"],
    into_B: Float[Array, " B"],
) -> Float[Array, " B"]:
    """Return `into_B` with the values at one position of each sample in these rows."""
    # A sample's position is in one of these rows, or in none: at most one place is selected.
    selected: jax.Array = (rows.segments >= 0) & (rows.positions == positions_B[rows.samples])
    dropped = len(into_B)  # an index out of bounds, which the scatter ignores
    return into_B.at[jnp.where(selected, rows.samples, dropped)].set(values_RxL, mode="drop")
