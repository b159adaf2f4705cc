"""Batches of prompts: in the order of the data, shuffled or mixed."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from jax_ppo.data.tokenize_prompts import PromptDataset
from jax_ppo.errors import UserError, counted
from jax_ppo.types import Example, Prompts


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """A batch of prompts."""

    examples: tuple[Example, ...]  # B examples
    prompts: Prompts  # NumPy arrays: tokens int32 [B, P], P from `bucket_width`, lengths int32 [B]
    indices: np.ndarray  # int64 [B], rows of the data set
    count: int  # real rows; later ones repeat others to fill the batch: ignore them in averages


class PromptBatches:
    """Endless iterator over training batches that can resume from a saved `position`.

    The order of an epoch follows from (seed, epoch) alone; an incomplete batch at its end is
    dropped. `position` counts the rows consumed over all epochs. It is valid for another batch size
    too: the epoch continues with the rows not yet consumed.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        position: int = 0,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Start at a saved position.

        With `shuffle` each epoch has a new order, else that of the rows. With `weights` of the data
        set's sources an epoch has as many rows as the data set, divided in these shares. Raise
        `UserError` if the data set is smaller than a batch, or a source has no row or no share.
        """
        if not 1 <= batch_size <= len(dataset):
            raise UserError(
                f"{dataset.name} has {counted(len(dataset), 'prompt')}, fewer than a step's "
                f"config.data.train_batch_size={batch_size}; set it to at most {len(dataset)}, or "
                "use more data"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.position = position
        self._mixture = None if weights is None else Mixture(dataset, weights, shuffle, seed)
        # The epoch that `_order` belongs to, and the order of its rows.
        self._ordered_epoch = -1
        self._order = np.arange(0)

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of full batches in an epoch."""
        return len(self.dataset) // self.batch_size

    @property
    def epoch(self) -> int:
        """Return the epoch that the next batch belongs to, from 0."""
        # An epoch without room for another full batch is over.
        epoch, offset = divmod(self.position, len(self.dataset))
        is_exhausted = offset + self.batch_size > len(self.dataset)
        return epoch + is_exhausted

    def __iter__(self) -> Iterator[PromptBatch]:
        return self

    def __next__(self) -> PromptBatch:
        # Epoch and offset depend only on the position, so that a resumed run continues exactly.
        epoch = self.epoch
        epoch_start = epoch * len(self.dataset)
        start = max(self.position, epoch_start)
        offset = start - epoch_start
        indices = self._epoch_order(epoch)[offset : offset + self.batch_size]
        self.position = start + self.batch_size
        return make_batch(self.dataset, indices, self.batch_size)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._ordered_epoch != epoch:
            rows = len(self.dataset)
            if self._mixture is not None:
                self._order = self._mixture.epoch_order(epoch)
            elif self.shuffle:
                self._order = np.random.default_rng([self.seed, epoch]).permutation(rows)
            else:
                self._order = np.arange(rows)
            self._ordered_epoch = epoch
        return self._order


class Mixture:
    """The order of rows that are mixed from several sources in given shares.

    A source is repeated as often as its share requires, in a new order each time. The rows of a
    pass that one epoch does not use come first in the next.
    """

    def __init__(
        self, dataset: PromptDataset, weights: Sequence[float], shuffle: bool, seed: int
    ) -> None:
        """Divide an epoch's rows by weights > 0; raise `UserError` if a source gets no row."""
        sources = np.array([example.source for example in dataset.examples])
        self._rows = [np.flatnonzero(sources == source) for source in range(len(weights))]
        self._shuffle = shuffle
        self._seed = seed
        # By the largest remainders, the counts add up to the rows of the data set.
        shares = np.array(weights) / np.sum(weights) * len(dataset)
        counts = np.floor(shares).astype(int)
        counts[np.argsort(counts - shares, kind="stable")[: len(dataset) - counts.sum()]] += 1
        self._counts = counts
        for source, (rows, count) in enumerate(zip(self._rows, counts, strict=True), 1):
            if not len(rows) or not count:
                raise UserError(
                    f"{dataset.name}: source {source} of {len(weights)} has {len(rows)} prompts "
                    f"and a share of {count} of {len(dataset)} per epoch; remove it, or give it "
                    "more of both"
                )

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Return the rows of an epoch, int [rows of the data set]."""
        drawn = [
            self._draw(source, epoch * count, (epoch + 1) * count)
            for source, count in enumerate(self._counts.tolist())
        ]
        if self._shuffle:
            order = np.random.default_rng([self._seed, epoch]).permutation(self._counts.sum())
        else:
            # The rows of each source are spread evenly over the epoch.
            positions = [(np.arange(len(rows)) + 0.5) / len(rows) for rows in drawn]
            order = np.argsort(np.concatenate(positions), kind="stable")
        return np.concatenate(drawn)[order]

    def _draw(self, source: int, start: int, end: int) -> np.ndarray:
        """Return the draws `start` to `end` of a source, counted over all epochs."""
        rows = self._rows[source]
        first_pass = start // len(rows)
        passes = [rows] * ((end - 1) // len(rows) - first_pass + 1)
        if self._shuffle:
            # With three numbers, no pass has the seed of an epoch, which has two.
            passes = [
                np.random.default_rng([self._seed, number, source + 1]).permutation(rows)
                for number in range(first_pass, first_pass + len(passes))
            ]
        offset = first_pass * len(rows)
        return np.concatenate(passes)[start - offset : end - offset]


def evaluation_batches(dataset: PromptDataset, batch_size: int) -> Iterator[PromptBatch]:
    """Yield all rows once, in order.

    The last batch is filled up by repeating its rows; its `count` is the number of real ones. If
    all rows fit into one batch, it has only the next `bucket_width` of rows.
    """
    batch_size = bucket_width(len(dataset), batch_size)
    for start in range(0, len(dataset), batch_size):
        # All batches have one size, so that the last one needs no further program.
        real = np.arange(start, min(start + batch_size, len(dataset)))
        yield make_batch(dataset, np.resize(real, batch_size), len(real))


def make_batch(
    dataset: PromptDataset, indices: np.ndarray, count: int, width: int | None = None
) -> PromptBatch:
    """Return the batch of rows `indices`, the first `count` of them real.

    It has `width` columns, by default as many as `bucket_width` says.
    """
    rows = [dataset.tokens[index] for index in indices]
    lengths = np.array([len(row) for row in rows], np.int32)
    width = width or bucket_width(int(lengths.max()), dataset.max_prompt_length)
    tokens = pad_token_rows(rows, width)
    first = dataset.first_row
    numbers = None if first is None else (first + indices).astype(np.int32)
    return PromptBatch(
        examples=tuple(dataset.examples[index] for index in indices),
        prompts=Prompts(tokens=tokens, lengths=lengths, rows=numbers),
        indices=indices,
        count=count,
    )


def pad_token_rows(rows: Sequence[Sequence[int] | np.ndarray], width: int) -> np.ndarray:
    """Return rows of at most `width` tokens as int32 [len(rows), width], with zeros at the end."""
    padded = np.zeros((len(rows), width), np.int32)
    for padded_row, row in zip(padded, rows, strict=True):
        padded_row[: len(row)] = row
    return padded


def bucket_width(length: int, cap: int) -> int:
    """Return the width of a batch whose longest prompt has `length` tokens.

    It is the smallest of 16, 32, 64, 96, 128, 192, 256, 384, 512, ... that is not below `length`,
    and at most `cap`. The widths are few so that few shapes are compiled.
    """
    width = 16
    while width < length:
        width *= 2
    # Above 64 there is a width between two powers of two.
    if width > 64 and length <= width * 3 // 4:
        width = width * 3 // 4
    return min(width, cap)
