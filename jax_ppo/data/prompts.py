"""Tokenised prompts, and the batches that a run takes them in."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence

import numpy as np

from jax_ppo.data.tokenizer import encode_prompt
from jax_ppo.errors import UserError
from jax_ppo.types import Example, Prompts

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PromptDataset:
    """Examples and their prompts' token ids, row by row.

    Attributes:
      examples: one or more.
      tokens: int32 [length] each, length 1..max_prompt_length.
      max_prompt_length: tokens; no batch is wider.
      name: the option that named the data, for messages.
    """

    examples: Sequence[Example]
    tokens: Sequence[np.ndarray]
    max_prompt_length: int
    name: str = "config.data.train_files"

    def __len__(self) -> int:
        return len(self.examples)


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """A batch.

    Attributes:
      examples: B of them.
      prompts: NumPy arrays; tokens int32 [B, P] with P from `bucket`, lengths int32 [B].
      indices: int64 [B], the rows of the data set.
      count: rows that are real. Rows from there on repeat others to fill the batch, and are not to be counted.
    """

    examples: tuple[Example, ...]
    prompts: Prompts
    indices: np.ndarray
    count: int


def tokenize_prompts(
    examples: Sequence[Example],
    tokenizer,
    *,
    max_prompt_length: int,
    filter_overlong_prompts: bool = True,
    truncation: str = "error",
    chat_template: bool = True,
    name: str = "config.data.train_files",
) -> PromptDataset:
    """Encodes every prompt; those longer than max_prompt_length are dropped, cut or refused.

    Args:
      examples: the rows.
      tokenizer: of transformers.
      max_prompt_length: tokens.
      filter_overlong_prompts: drop the longer ones; how many is logged.
      truncation: what else happens to them: "error"; "left" keeps the last tokens, "right" the first, "middle" the
        first half and the last half.
      chat_template: apply the tokenizer's chat template where it has one and the prompt is a chat.
      name: the option that named the data, for messages.

    Raises:
      UserError: an empty prompt, one that can not be encoded, an overlong one with truncation "error", or nothing left.
    """
    kept, tokens, dropped = [], [], 0
    for row, example in enumerate(examples, 1):
        ids = _encode(example, tokenizer, chat_template, f"{name}, example {row}")
        if len(ids) > max_prompt_length:
            if filter_overlong_prompts:
                dropped += 1
                continue
            ids = _cut(ids, max_prompt_length, truncation, f"{name}, example {row}")
        kept.append(example)
        tokens.append(np.asarray(ids, np.int32))
    if dropped:
        log.warning(
            "%s: dropped %d of %d prompts, longer than config.data.max_prompt_length=%d tokens",
            name,
            dropped,
            len(examples),
            max_prompt_length,
        )
    if not kept:
        raise UserError(
            f"{name}: no prompt is left of {len(examples)}; {dropped} are longer than "
            f"config.data.max_prompt_length={max_prompt_length} tokens. Set it higher, or give other data"
        )
    return PromptDataset(tuple(kept), tokens, max_prompt_length, name)


def bucket_width(length: int, cap: int) -> int:
    """The width of a batch whose longest prompt has `length` tokens: the smallest of 16, 32, 64, 96, 128, 192, 256,
    384, 512, ... that holds it, at most `cap`. Few widths, so that few shapes compile."""
    power = 16
    while power < length:
        power *= 2
    between = power * 3 // 4
    return min(between if power > 64 and length <= between else power, cap)


class PromptBatches:
    """Endless batches of whole prompts for training, that go on from a saved position.

    The order of an epoch follows from (seed, epoch) alone. What is left over at an epoch's end, less than a batch, is
    dropped.

    Args:
      dataset: the prompts.
      batch_size: prompts of a batch, B.
      shuffle: a fresh order each epoch; False: the rows' own order each time.
      seed: of the orders.
      position: where to begin, as saved from `position`. It counts rows of the data set over all epochs, so that it
        holds for another batch size too: the epoch goes on with the rows it has not given yet.
      repeat: False ends after the first epoch.

    Raises:
      UserError: the data set is smaller than a batch, or the position is negative.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        position: int = 0,
        repeat: bool = True,
    ):
        if not 1 <= batch_size <= len(dataset):
            raise UserError(
                f"{dataset.name} has {len(dataset)} prompts, and config.data.train_batch_size={batch_size} "
                f"asks for that many in a step; set it to 1 to {len(dataset)}, or give more data"
            )
        if position < 0:
            raise UserError(f"position={position} in {dataset.name}: expected 0 or more")
        self.dataset, self.batch_size, self.shuffle, self.seed, self.repeat = (
            dataset,
            batch_size,
            shuffle,
            seed,
            repeat,
        )
        self.position = position
        self._order = (-1, None)

    @property
    def steps_per_epoch(self) -> int:
        return len(self.dataset) // self.batch_size

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        epoch, offset = divmod(self.position, len(self.dataset))
        return epoch + (offset + self.batch_size > len(self.dataset))

    def __iter__(self) -> Iterator[PromptBatch]:
        return self

    def __next__(self) -> PromptBatch:
        epoch, rows = self.epoch, len(self.dataset)
        if epoch and not self.repeat:
            raise StopIteration
        start = max(self.position, epoch * rows)
        chosen = self._rows(epoch)[start - epoch * rows :][: self.batch_size]
        self.position = start + self.batch_size
        return _batch(self.dataset, chosen, self.batch_size)

    def _rows(self, epoch):
        if self._order[0] != epoch:
            rows = len(self.dataset)
            order = (
                np.random.default_rng([self.seed, epoch]).permutation(rows)
                if self.shuffle
                else np.arange(rows)
            )
            self._order = (epoch, order)
        return self._order[1]


def evaluation_batches(dataset: PromptDataset, batch_size: int) -> Iterator[PromptBatch]:
    """Yields all rows once, in order. The last batch is filled up by repeating its rows; `count` are real."""
    if batch_size < 1:
        raise UserError(f"config.data.val_batch_size={batch_size}: expected 1 or more")
    for start in range(0, len(dataset), batch_size):
        real = np.arange(start, min(start + batch_size, len(dataset)))
        yield _batch(dataset, np.resize(real, batch_size), len(real))


def _batch(dataset, indices, count):
    rows = [dataset.tokens[i] for i in indices]
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros(
        (len(rows), bucket_width(int(lengths.max()), dataset.max_prompt_length)), np.int32
    )
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return PromptBatch(
        tuple(dataset.examples[i] for i in indices), Prompts(tokens, lengths), indices, count
    )


def _encode(example, tokenizer, chat_template, where):
    texts = (
        [example.prompt]
        if isinstance(example.prompt, str)
        else [message["content"] for message in example.prompt]
    )
    if not any(text.strip() for text in texts):
        raise UserError(f"{where}: the prompt is empty")
    try:
        ids = encode_prompt(tokenizer, example.prompt, chat_template)
    except Exception as error:
        raise UserError(
            f"{where}: the prompt can not be encoded (config.data.chat_template={chat_template}): "
            f"{error}"
        ) from error
    if not ids:
        raise UserError(f"{where}: the prompt has no tokens: {texts[-1][:80]!r}")
    return ids


def _cut(ids, width, truncation, where):
    if truncation == "left":
        return ids[-width:]
    if truncation == "right":
        return ids[:width]
    if truncation == "middle":
        first = width // 2
        return ids[:first] + ids[first - width :]
    raise UserError(
        f"{where}: the prompt has {len(ids)} tokens, and config.data.max_prompt_length={width}. Set that "
        "higher, config.data.filter_overlong_prompts=True to drop such prompts, or config.data.truncation "
        "to left, right or middle to cut them"
    )
