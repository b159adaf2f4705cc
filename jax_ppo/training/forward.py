"""Forward passes over packed rows: hidden states, log-probs, values and scores.

These are the only way from parameters to numbers. Scoring calls them and the update differentiates them, which is what
makes the first mini-batch's ratio 1.
"""

import jax.numpy as jnp

from jax_ppo.kernels import logprobs, vocabulary_kl
from jax_ppo.models import heads
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime.sharding import split_by_device
from jax_ppo.training import packing as packing_lib


def hidden_states(model: Transformer, params, rows: packing_lib.Rows):
    """[R, L, D], in the computation's type: what the heads stand on."""
    return model.apply({"params": params}, rows.tokens, rows.positions, rows.segments).hidden


def token_logprobs(
    model: Transformer,
    params,
    hidden,
    rows: packing_lib.Rows,
    temperature: float,
    with_entropy: bool = True,
):
    """Log-prob of each target and entropy of its distribution at the sampling temperature, float32 [R, L], 0 off the mask."""
    hidden, targets, mask = (split_by_device(x) for x in (hidden, rows.targets, rows.mask))
    values, entropy = logprobs.token_logprobs(
        hidden,
        heads.output_embedding(params),
        targets,
        mask,
        temperature,
        with_entropy=with_entropy,
        logit_softcap=model.architecture.logit_softcap,
    )
    return values.reshape(rows.mask.shape), entropy.reshape(
        rows.mask.shape
    ) if with_entropy else None


def reference_kl(
    model: Transformer,
    params,
    hidden,
    reference,
    ref_hidden,
    rows: packing_lib.Rows,
    temperature: float,
):
    """KL(actor || reference) of the distribution of each target, float32 [R, L], 0 off the mask."""
    hidden, ref_hidden, mask = (split_by_device(x) for x in (hidden, ref_hidden, rows.mask))
    return vocabulary_kl.full_kl(
        hidden,
        heads.output_embedding(params),
        ref_hidden,
        heads.output_embedding(reference),
        mask,
        temperature,
        logit_softcap=model.architecture.logit_softcap,
    ).reshape(rows.mask.shape)


def scalars(model: Transformer, params, rows: packing_lib.Rows):
    """What a scalar head says at each place, float32 [R, L]: the critic's value of the state that the row is in there, or a
    reward model's score of what came so far. Where the row is empty it means nothing."""
    return heads.compute_scalars(params, hidden_states(model, params, rows))


def at_the_end(values_RxL, rows, sequences, into_B):
    """`into_B` with the values at the last tokens of these rows' samples."""
    return at_places(values_RxL, rows, sequences.prompt_lengths + sequences.lengths - 1, into_B)


def at_places(values_RxL, rows, positions_B, into_B):
    """`into_B` with the values at these positions of these rows' samples."""
    there = (rows.segments >= 0) & (rows.positions == positions_B[rows.samples])
    outside = len(into_B)  # dropped
    return into_B.at[jnp.where(there, rows.samples, outside)].set(values_RxL, mode="drop")
