"""Packing of several samples into one row: decided on the host, gathered and scattered on the mesh.

A packing is computed from lengths alone. It has room for the worst case, one row per sample, and
records how many of its micro-batches are used. The compiled functions that loop over micro-batches
therefore have one shape for all lengths and skip the empty ones.
"""

import bisect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, UInt

from jax_ppo.runtime import meshes
from jax_ppo.types import Packing, Sequences, pytree

# Bounds on the tokens of a device's micro-batch if its rows are not configured.
MAX_MICRO_BATCH_TOKENS = 8192
MIN_MICRO_BATCH_TOKENS = 1024


def rows_per_micro_batch(
    per_device: int | None, row_length: int, samples: int, shards: int, has_fixed_cost: bool = False
) -> int:
    """Return the number of rows R of a micro-batch over all devices, a multiple of `shards`.

    Without `per_device` a device takes a sixteenth of its samples, since the last micro-batch is
    half empty on average; up to a quarter if that is at most MIN_MICRO_BATCH_TOKENS, and up to half
    if that is at most half as many, since small matrix products are slow and each micro-batch reads
    all weights; and at most MAX_MICRO_BATCH_TOKENS. Where each micro-batch gathers the weights
    (`fsdp`) or fills a pipeline (`stage`), it takes up to a quarter whatever their tokens
    (`has_fixed_cost`).
    """
    max_rows = -(-samples // shards)
    worthwhile_tokens = MAX_MICRO_BATCH_TOKENS if has_fixed_cost else MIN_MICRO_BATCH_TOKENS
    default = max(
        max_rows // 16,
        min(max_rows // 4, worthwhile_tokens // row_length),
        min(max_rows // 2, MIN_MICRO_BATCH_TOKENS // 2 // row_length),
    )
    default = max(1, min(default, MAX_MICRO_BATCH_TOKENS // row_length))
    return shards * min(per_device or default, max_rows)


def row_width(longest: int, parts: int = 1) -> int:
    """Return the row length L for samples of at most `longest` tokens: 128, 256, 384, 512, 768, ...

    They are powers of two and the means of neighbours: few, so that few shapes are compiled, and
    multiples of 128, which every attention program accepts, as is each of several parts.
    """
    if parts > 1:
        return parts * row_width(-(-longest // parts))
    power = 128
    while power < longest:
        power *= 2
    # With a width between powers of two, at most a third of a row above 256 is wasted.
    between = power * 3 // 4
    if power > 256 and longest <= between:
        return between
    return power


def assign_to_rows(
    lengths: Sequence[int] | np.ndarray, row_length: int, packed: bool
) -> list[list[int]]:
    """Return for each row the indices of its samples in `lengths`, from left to right.

    Samples of at most `row_length` tokens go, longest first, each to the fullest row with room for
    it (best-fit decreasing bin packing); unless `packed`, each to a separate row.
    """
    # Stable: samples of equal length keep their order.
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    if not packed:
        return [[i] for i in order]
    rows: list[list[int]] = []
    free_space: list[tuple[int, int]] = []  # (free tokens, row), sorted
    for i in order:
        # -1 sorts before every row: this is the first entry with enough free tokens.
        candidate = bisect.bisect_left(free_space, (lengths[i], -1))
        if candidate < len(free_space):
            free, row = free_space.pop(candidate)
        else:
            free = row_length
            row = len(rows)
            rows.append([])
        rows[row].append(i)
        bisect.insort(free_space, (free - int(lengths[i]), row))
    return rows


def pack_samples(
    lengths_B: Sequence[int] | np.ndarray,
    groups: Sequence[Sequence[int]] | np.ndarray,
    rows_per_micro_batch: int,
    row_length: int,
    packed: bool = True,
) -> tuple[Packing, np.ndarray]:
    """Pack each group of samples (mini-batch) separately.

    `lengths_B`, int [B], are the tokens of each sample's prompt and response, and `groups`, int
    [U, samples], the samples of each of U mini-batches. Unless `packed`, each has a separate row.
    Return a packing of int32 [U, A, R, L], with enough micro-batches A for one row per sample; and
    int32 [U], the number of micro-batches that are not empty.
    """
    groups = np.asarray(groups)
    lengths_B = np.asarray(lengths_B)
    R = rows_per_micro_batch
    U, samples = groups.shape
    A = -(-samples // R)
    # Room for the worst case; what packing saves remains empty at the end.
    sample = np.full((U, A * R, row_length), -1, np.int32)
    position = np.zeros((U, A * R, row_length), np.int32)
    counts = np.zeros(U, np.int32)
    for u, group in enumerate(groups):
        rows = assign_to_rows(lengths_B[group], row_length, packed)
        counts[u] = -(-len(rows) // R)
        for r, members in enumerate(rows):
            start = 0
            for b in group[members]:  # samples follow each other without a gap, from the left
                end = start + lengths_B[b]
                sample[u, r, start:end] = b
                position[u, r, start:end] = np.arange(lengths_B[b])
                start = end
    shape = (U, A, R, row_length)
    return Packing(sample=sample.reshape(shape), position=position.reshape(shape)), counts


def pack_on_mesh(
    mesh: Mesh,
    lengths_B: np.ndarray,
    groups: np.ndarray,
    row_length: int,
    rows_per_device: int | None,
    packed: bool,
) -> tuple[Packing, np.ndarray]:
    """Return what `pack_samples` does, for devices that split each micro-batch evenly."""
    parts = meshes.row_parts(mesh)
    shards = meshes.row_shards(mesh) // parts
    rows = rows_per_micro_batch(
        rows_per_device,
        row_length // parts,
        groups.shape[1],
        shards,
        meshes.needs_large_micro_batches(mesh),
    )
    packing, counts = pack_samples(lengths_B, groups, rows, row_length, packed)
    return split_columns(packing, shards, parts), counts


def split_columns(packed: Packing, shards: int, parts: int) -> Packing:
    """Return the packing in which the devices of `mesh.context` hold parts of the same rows.

    A row is cut into 2 C blocks of columns. Part i has blocks i and 2 C - 1 - i, in this order: a
    token reads the earlier ones, so the two blocks of each part have equally much to read.

    `packed` has NumPy arrays [..., R, L], L a multiple of 2 C; each of `shards` groups of C =
    `parts` devices has R / shards rows. Return a packing [..., R C, L / C]: for each group, part 0
    of its rows, then part 1, ...
    """
    if parts == 1:
        return packed

    def split(x: Any) -> np.ndarray:
        *outer, R, L = x.shape
        blocks = x.reshape(*outer, shards, R // shards, 2 * parts, L // (2 * parts))
        mirrored = blocks[..., ::-1, :]
        # [..., group, row, part, its two blocks]
        pairs = np.concatenate([blocks[..., :parts, :], mirrored[..., :parts, :]], axis=-1)
        return np.swapaxes(pairs, -3, -2).reshape(*outer, R * parts, L // parts)

    return Packing(sample=split(packed.sample), position=split(packed.position))


def split_pairs(packed: Packing, first_lengths: Sequence[int] | np.ndarray) -> Packing:
    """Return the packing of the sequences of pairs: pair b consists of b and pairs + b.

    In `packed`, `sample` is the pair, whose two sequences follow each other in one row;
    `first_lengths` are int [pairs], the tokens of each pair's first sequence.
    """
    # Empty places (-1) look up pair 0, and are left alone below.
    lengths = np.asarray(first_lengths, np.int32)[np.maximum(packed.sample, 0)]
    # The second sequence of a pair starts again at position 0, as a separate sample.
    is_second = (packed.sample >= 0) & (packed.position >= lengths)
    return Packing(
        sample=packed.sample + is_second * np.int32(len(first_lengths)),
        position=packed.position - is_second * lengths,
    )


@pytree
class Rows:
    """A micro-batch in the form that models read. Each place predicts the token that follows it."""

    tokens: Int[Array, "R L"]  # the decoder's input
    positions: Int[Array, "R L"]  # position of each token in its sample's sequence
    segments: Int[Array, "R L"]  # the sample that attention stays inside; -1 in empty places
    targets: Int[Array, "R L"]  # the following token of the same sample, 0 where `mask` is False
    samples: Int[Array, "R L"]  # index of the sample, 0 in empty places
    # Index of the target in its response; any valid index if it is not a response token.
    steps: Int[Array, "R L"]
    # True where the target is an action token: log-probs, values and losses are defined there.
    mask: Bool[Array, "R L"]
    # The experts that the sampler recorded of each token, any in empty places; `None` without.
    routed_experts: UInt[Array, "R L layers k"] | None = None


def gather_rows(sequences: Sequences, packing: Packing) -> Rows:
    """Return the rows of one micro-batch; the arrays of `packing` are [R, L]."""
    filled = packing.sample >= 0
    # Empty places read sample 0; the masks below exclude them.
    samples = jnp.maximum(packing.sample, 0)
    last = sequences.tokens.shape[1] - 1
    # Each place predicts the token that follows it: this is its index in the response.
    steps = packing.position + 1 - sequences.prompt_lengths[samples]
    # Tokens, positions and segments cover the whole sequence; only the mask knows about actions.
    in_response = filled & (steps >= 0) & (steps < sequences.lengths[samples])
    steps = jnp.where(in_response, steps, 0)
    mask = in_response & sequences.action_mask[samples, steps]
    next_tokens = sequences.tokens[samples, jnp.minimum(packing.position + 1, last)]
    routed_experts = sequences.routed_experts
    if routed_experts is not None:
        # Of the tokens that the places hold, not of the targets.
        routed_experts = routed_experts[samples, packing.position]
    return Rows(
        tokens=jnp.where(filled, sequences.tokens[samples, packing.position], 0),
        positions=packing.position,
        segments=packing.sample,
        targets=jnp.where(mask, next_tokens, 0),
        samples=samples,
        steps=steps,
        mask=mask,
        routed_experts=routed_experts,
    )


def to_rows(values_BxT: jax.Array, rows: Rows) -> Float[Array, "R L"]:
    """Return each action token's value at the place that predicts it; 0 elsewhere."""
    return jnp.where(rows.mask, values_BxT[rows.samples, rows.steps], 0)


def sample_sums(values_RxL: Float[Array, "R L"], rows: Rows, samples: int) -> Float[Array, "R L"]:
    """Return at each action token the sum over its response; these rows hold whole responses."""
    masked_RxL = jnp.where(rows.mask, values_RxL, 0)
    # A sum by sample, not by row: a row holds several responses.
    sums_B = jnp.zeros(samples, values_RxL.dtype).at[rows.samples].add(masked_RxL)
    return jnp.where(rows.mask, sums_B[rows.samples], 0)


def sequence_weights(sequences: Sequences, rows: Rows) -> Float[Array, "R L"]:
    """Return weights of all tokens of sequences, prompts included, that sum to 1 per sequence."""
    lengths_B = sequences.prompt_lengths + sequences.lengths
    return jnp.where(rows.segments >= 0, 1 / lengths_B[rows.samples], 0)


def to_samples(
    values_RxL: jax.Array, rows: Rows, into_BxT: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return `into_BxT` with the values at these rows' action tokens written into it."""
    dropped = into_BxT.shape[0]  # an index out of bounds, which the scatter ignores
    return into_BxT.at[jnp.where(rows.mask, rows.samples, dropped), rows.steps].set(
        values_RxL, mode="drop"
    )
