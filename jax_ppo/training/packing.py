"""Several samples in one row: planned on the host from lengths alone, gathered and scattered on the mesh.

A plan has room for the worst case (a row for each sample) and says how many of its micro-batches hold something, so that the
compiled functions that loop over them have one shape for all lengths and spend nothing on what is empty.
"""

import bisect

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.types import Packing, Sequences, pytree

MOST_TOKENS, LEAST_TOKENS = 8192, 1024  # of a device's micro-batch, where its rows are not set


def rows_at_once(per_device: int | None, row_length: int, samples: int, shards: int) -> int:
    """Rows of a micro-batch over all devices, R: a multiple of `shards`, no more than there are samples to fill them.

    Where `per_device` is not set it is a sixteenth of the samples, since the last micro-batch is on average half empty; up to a
    quarter of them if this makes no more than LEAST_TOKENS, since small products are slow; and MOST_TOKENS at most.
    """
    most = -(-samples // shards)
    wanted = max(most // 16, min(most // 4, LEAST_TOKENS // row_length))
    wanted = per_device or max(1, min(wanted, MOST_TOKENS // row_length))
    return shards * min(wanted, most)


def row_width(longest: int) -> int:
    """L for samples of which the longest has so many tokens: 128, 256, 384, 512, 768, 1024, 1536, ...

    Few, so that few shapes compile; multiples of 128, so that every attention program can take them.
    """
    power = 128
    while power < longest:
        power *= 2
    between = power * 3 // 4
    return between if power > 256 and longest <= between else power


def assign(lengths, row_length: int, packed: bool) -> list[list[int]]:
    """Deals samples to rows, longest first, each into the fullest row that has room (best-fit decreasing).

    Args:
      lengths: tokens of each sample (prompt and response), each at most row_length.
      row_length: L.
      packed: False gives each sample a row of its own.

    Returns:
      for each row the indices into `lengths` of its samples, in the order in which they stand.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    if not packed:
        return [[i] for i in order]
    rows, room = [], []  # room: (tokens free, row), sorted
    for i in order:
        at = bisect.bisect_left(room, (lengths[i], -1))
        free, row = room.pop(at) if at < len(room) else (row_length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        bisect.insort(room, (free - int(lengths[i]), row))
    return rows


def plan(
    lengths_B, groups, rows_per_micro_batch: int, row_length: int, packed: bool = True
) -> tuple[Packing, np.ndarray]:
    """Packs groups of samples (the mini-batches), each apart.

    Args:
      lengths_B: int [B], tokens of each sample's prompt and response.
      groups: int [U, samples], the samples of each of U mini-batches.
      rows_per_micro_batch: R.
      row_length: L.
      packed: False gives each sample a row of its own.

    Returns:
      Packing of int32 [U, A, R, L], A enough micro-batches for a row a sample; and int32 [U], how many of them hold something.
    """
    groups, lengths_B, R = np.asarray(groups), np.asarray(lengths_B), rows_per_micro_batch
    U, samples = groups.shape
    A = -(-samples // R)
    sample = np.full((U, A * R, row_length), -1, np.int32)
    position = np.zeros((U, A * R, row_length), np.int32)
    counts = np.zeros(U, np.int32)
    for u, group in enumerate(groups):
        rows = assign(lengths_B[group], row_length, packed)
        counts[u] = -(-len(rows) // R)
        for r, members in enumerate(rows):
            start = 0
            for b in group[members]:
                end = start + lengths_B[b]
                sample[u, r, start:end] = b
                position[u, r, start:end] = np.arange(end - start)
                start = end
    shape = (U, A, R, row_length)
    return Packing(sample.reshape(shape), position.reshape(shape)), counts


def split_pairs(plan: Packing, first_lengths) -> Packing:
    """Packing of pairs' sequences, from one of pairs as wholes: the two stand one behind the other, in one row.

    Args:
      plan: of pairs, NumPy arrays; `sample` is the pair.
      first_lengths: int [pairs], tokens of each pair's first sequence.

    Returns:
      of 2 x pairs sequences: pair b's are b and pairs + b.
    """
    lengths = np.asarray(first_lengths, np.int32)[np.maximum(plan.sample, 0)]
    second = (plan.sample >= 0) & (plan.position >= lengths)
    return Packing(
        plan.sample + second * np.int32(len(first_lengths)), plan.position - second * lengths
    )


@pytree
class Rows:
    """A micro-batch as the models take it; every field is [R, L].

    Attributes:
      tokens, positions, segments: int32, the decoder's input.
      targets: int32, the token that follows in the same sample (what this place predicts).
      samples: int32, the sample, 0 where the row is empty.
      steps: int32, which token of the response the target is; any valid index where mask is False.
      mask: bool, True where the target is a token that the policy chose (`action_mask`): where a log-prob, a value, a loss belong.
    """

    tokens: jax.Array
    positions: jax.Array
    segments: jax.Array
    targets: jax.Array
    samples: jax.Array
    steps: jax.Array
    mask: jax.Array


def gather(sequences: Sequences, packing: Packing) -> Rows:
    """The rows of one micro-batch, `packing` being [R, L]."""
    filled = packing.sample >= 0
    samples = jnp.maximum(packing.sample, 0)
    last = sequences.tokens.shape[1] - 1
    steps = packing.position + 1 - sequences.prompt_lengths[samples]
    in_response = filled & (steps >= 0) & (steps < sequences.lengths[samples])
    steps = jnp.where(in_response, steps, 0)
    mask = in_response & sequences.action_mask[samples, steps]
    return Rows(
        tokens=jnp.where(filled, sequences.tokens[samples, packing.position], 0),
        positions=packing.position,
        segments=packing.sample,
        targets=jnp.where(
            mask, sequences.tokens[samples, jnp.minimum(packing.position + 1, last)], 0
        ),
        samples=samples,
        steps=steps,
        mask=mask,
    )


def to_rows(values_BxT, rows: Rows):
    """[R, L]: each action token's value at the place that predicts it; 0 elsewhere."""
    return jnp.where(rows.mask, values_BxT[rows.samples, rows.steps], 0)


def sample_sums(values_RxL, rows: Rows, samples: int):
    """[R, L]: at each action token the sum over its response's, of `samples` samples in all; 0 elsewhere."""
    sums_B = (
        jnp.zeros(samples, values_RxL.dtype)
        .at[rows.samples]
        .add(jnp.where(rows.mask, values_RxL, 0))
    )
    return jnp.where(rows.mask, sums_B[rows.samples], 0)


def to_samples(values_RxL, rows: Rows, into_BxT):
    """`into_BxT` with the values of these rows' action tokens in their places."""
    outside = into_BxT.shape[0]  # dropped
    return into_BxT.at[jnp.where(rows.mask, rows.samples, outside), rows.steps].set(
        values_RxL, mode="drop"
    )
