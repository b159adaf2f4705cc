import dataclasses
import os
import signal

import numpy as np
import pytest

from character_tokenizer import CharacterTokenizer
from jax_ppo.data import tokenize_prompts as prompt_lib
from jax_ppo.data.prompt_batches import PromptBatches, bucket_width, evaluation_batches
from jax_ppo.data.tokenize_prompts import PromptDataset, PromptEncoding, tokenize_prompts
from jax_ppo.errors import UserError
from jax_ppo.types import Example


def examples(*prompts):
    return [Example(prompt, "stories") for prompt in prompts]


def dataset(rows, max_prompt_length=64):
    tokens = [np.full(1 + i % 7, i, np.int32) for i in range(rows)]
    return PromptDataset(tuple(examples(*map(str, range(rows)))), tokens, max_prompt_length)


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[::-1],
        lambda rows: rows[:-1],
        lambda rows: [*rows[:-1], dataclasses.replace(rows[-1], ground_truth="2")],
        lambda rows: [*rows[:-1], dataclasses.replace(rows[-1], extra_info={"level": 2})],
        lambda rows: [*rows[:-1], dataclasses.replace(rows[-1], source=1)],
    ],
)
def test_other_rows_have_another_fingerprint(change):
    rows = examples("a", "b", "c")
    moved = [dataclasses.replace(row, location="b.jsonl:1") for row in rows]
    fingerprints = [
        PromptDataset(tuple(data), [], max_prompt_length=4).fingerprint
        for data in (rows, moved, change(rows))
    ]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def take_batches(batches, count):
    return [next(batches).indices.tolist() for _ in range(count)]


def test_bucket():
    lengths = (1, 16, 17, 33, 64, 65, 97, 128, 129, 192, 193, 257, 385, 513, 769, 1025)
    widths = [16, 16, 32, 64, 64, 96, 128, 128, 192, 192, 256, 384, 512, 768, 1024, 1536]
    assert [bucket_width(length, 4096) for length in lengths] == widths
    assert bucket_width(40, 50) == 50
    assert bucket_width(3, 8) == 8


def test_a_batch_by_hand():
    data = PromptDataset(
        tuple(examples("a", "b")), [np.array([5, 6, 7]), np.array([8])], max_prompt_length=4
    )
    batch = next(PromptBatches(data, 2, shuffle=False))
    np.testing.assert_array_equal(batch.prompts.tokens, [[5, 6, 7, 0], [8, 0, 0, 0]])
    np.testing.assert_array_equal(batch.prompts.lengths, [3, 1])
    assert batch.prompts.tokens.dtype == batch.prompts.lengths.dtype == np.int32
    assert batch.examples == data.examples
    assert batch.count == 2


@pytest.mark.parametrize(
    ("truncation", "kept"), [("left", "cdefg"), ("right", "abcde"), ("middle", "abefg")]
)
def test_truncation_is_applied(letters, truncation, kept):
    """Regression: verl's data.truncation was read and never applied."""
    data = tokenize_prompts(
        examples("abcdefg", "abcde"),
        letters,
        PromptEncoding(max_prompt_length=5, filter_overlong_prompts=False, truncation=truncation),
    )
    assert ["".join(map(chr, ids)) for ids in data.tokens] == [kept, "abcde"]
    assert data.tokens[0].dtype == np.int32


def test_truncation_error_names_row_length_and_option(letters):
    encoding = PromptEncoding(max_prompt_length=5, filter_overlong_prompts=False)
    message = "train_files, example 2: .* 7 tokens, and config.data.max_prompt_length=5.*truncation"
    with pytest.raises(UserError, match=message):
        tokenize_prompts(examples("abc", "abcdefg"), letters, encoding)


def test_overlong_prompts_are_dropped_and_counted(letters, caplog):
    rows = examples("abc", "abcdefg", "x")
    data = tokenize_prompts(rows, letters, PromptEncoding(5), name="config.data.val_files")
    assert [e.prompt for e in data.examples] == ["abc", "x"]
    assert (
        "config.data.val_files: dropped 1 of 3 prompts, longer than config.data.max_prompt_length=5"
        in caplog.text
    )


def test_nothing_left_is_refused(letters):
    with pytest.raises(UserError, match="2 are dropped, longer than .*data.max_prompt_length=2"):
        tokenize_prompts(examples("abc", "def"), letters, PromptEncoding(max_prompt_length=2))
    with pytest.raises(UserError, match="no prompt is left of 0"):
        tokenize_prompts([], letters, PromptEncoding(max_prompt_length=2))


@pytest.mark.parametrize("prompt", ["", " \n", ({"role": "user", "content": ""},)])
def test_an_empty_prompt_is_refused(letters, prompt):
    with pytest.raises(UserError, match="config.data.train_files, example 2: the prompt is empty"):
        tokenize_prompts(examples("abc", prompt), letters, PromptEncoding(max_prompt_length=9))


def test_a_tokenizer_that_fails_is_reported_with_the_row(trained, monkeypatch):
    def fail(self, text, **options):
        raise ValueError("no such character")

    monkeypatch.setattr(type(trained[0]), "encode", fail)
    expected = "^config.data.train_files, example 1: the prompt cannot be encoded: no such char"
    with pytest.raises(UserError, match=expected):
        tokenize_prompts(examples("x"), trained[0], PromptEncoding(32))


def test_an_epoch_gives_each_row_once_in_a_fresh_order():
    batches = PromptBatches(dataset(12), 4, seed=1)
    assert batches.steps_per_epoch == 3
    first, second = (sum(take_batches(batches, 3), []) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second != list(range(12))
    assert sum(take_batches(PromptBatches(dataset(12), 4, seed=1), 3), []) == first
    assert sum(take_batches(PromptBatches(dataset(12), 4, seed=2), 3), []) != first


def test_without_shuffle_the_order_is_the_rows_own():
    assert take_batches(PromptBatches(dataset(5), 2, shuffle=False), 4) == 2 * [[0, 1], [2, 3]]


def test_the_rest_of_an_epoch_is_dropped():
    batches = PromptBatches(dataset(11), 4, seed=1)
    assert batches.steps_per_epoch == 2
    take_batches(batches, 2)
    assert batches.epoch == 1
    order = np.random.default_rng([1, 1]).permutation(11).tolist()
    assert take_batches(batches, 2) == [order[:4], order[4:8]]


@pytest.mark.parametrize("rows", [11, 12])
@pytest.mark.parametrize("batch_count", range(8))
def test_a_saved_position_goes_on_identically(rows, batch_count):
    """Regression: the data position was lost on resume (OpenRLHF, tunix#2288).

    In verl#5725 the run ended instead.
    """
    undisturbed = PromptBatches(dataset(rows), 4, seed=7)
    take_batches(undisturbed, batch_count)
    resumed = PromptBatches(dataset(rows), 4, seed=7, position=int(undisturbed.position))
    assert resumed.epoch == undisturbed.epoch
    assert take_batches(resumed, 9) == take_batches(undisturbed, 9)
    assert resumed.position == undisturbed.position


def test_a_saved_position_holds_for_another_batch_size():
    first = PromptBatches(dataset(12), 4, seed=7)
    first_indices = sum(take_batches(first, 1), [])
    remaining_indices = sum(
        take_batches(PromptBatches(dataset(12), 2, seed=7, position=first.position), 4), []
    )
    assert sorted(first_indices + remaining_indices) == list(range(12))
    order = np.random.default_rng([7, 0]).permutation(12).tolist()
    assert first_indices + remaining_indices == order
    larger = PromptBatches(dataset(12), 10, seed=7, position=first.position)
    assert larger.epoch == 1
    assert (
        next(larger).indices.tolist() == np.random.default_rng([7, 1]).permutation(12)[:10].tolist()
    )


def test_fewer_rows_than_a_batch_are_refused():
    """The alternative would be an endless loop that yields nothing."""
    with pytest.raises(
        UserError, match="has 3 prompts, fewer than a step.s config.data.train_batch_size=4;"
    ):
        PromptBatches(dataset(3), 4)


def test_evaluation_counts_each_row_once():
    batches = list(evaluation_batches(dataset(7), 3))
    assert [b.indices.tolist() for b in batches] == [[0, 1, 2], [3, 4, 5], [6, 6, 6]]
    assert [b.count for b in batches] == [3, 3, 1]
    assert all(b.prompts.tokens.shape[0] == len(b.examples) == 3 for b in batches)
    (small,) = evaluation_batches(dataset(2), 5)
    assert (small.indices.tolist(), small.count) == ([0, 1, 0, 1, 0], 2)


def test_few_rows_do_not_fill_a_large_evaluation_batch():
    for rows, size in ((4, 16), (17, 32), (100, 128), (250, 256)):
        (batch,) = evaluation_batches(dataset(rows), 256)
        assert (len(batch.examples), batch.count) == (size, rows)
    assert [len(b.examples) for b in evaluation_batches(dataset(300), 256)] == [256, 256]


@pytest.mark.parametrize(
    ("patience", "chunks_of_workers"), [(1e9, []), pytest.param(0.0, [3], marks=pytest.mark.slow)]
)
def test_workers_give_the_tokens_of_one_process(patience, chunks_of_workers, trained, monkeypatch):
    monkeypatch.setattr(prompt_lib, "_PATIENCE_SECONDS", patience)
    monkeypatch.setattr(prompt_lib, "_CHUNK", 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    seen, in_workers = [], prompt_lib._encode_in_workers
    monkeypatch.setattr(
        prompt_lib,
        "_encode_in_workers",
        lambda chunks, *rest: seen.append(len(chunks)) or in_workers(chunks, *rest),
    )
    rows = examples(*(f"{n} + 1" if n != 4 else "7 " * 40 for n in range(10)))
    counts = []
    data = tokenize_prompts(
        rows, trained[0], PromptEncoding(20), on_progress=lambda *count: counts.append(count)
    )
    assert counts == [(3, 10), (6, 10), (9, 10), (10, 10)]
    assert data.examples == (*rows[:4], *rows[5:])
    assert [ids.tolist() for ids in data.tokens] == [
        trained[0].encode(example.prompt) for example in data.examples
    ]
    # The first chunk shows how long a prompt takes.
    assert seen == chunks_of_workers


class Deadly(CharacterTokenizer):
    """A tokenizer that ends the process of a worker."""

    def __init__(self):
        self.parent = os.getpid()

    def encode(self, text, add_special_tokens=True, verbose=True):
        if os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(text)


@pytest.mark.slow
def test_a_killed_worker_ends_the_work_in_one_line(monkeypatch):
    monkeypatch.setattr(prompt_lib, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(prompt_lib, "_CHUNK", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    with pytest.raises(UserError, match="train_files: a worker process that tokenizes prompts was"):
        tokenize_prompts(examples("1", "2", "3"), Deadly(), PromptEncoding(20))


def test_an_unusable_prompt_of_a_later_chunk_is_named_by_its_row(letters, monkeypatch):
    monkeypatch.setattr(prompt_lib, "_CHUNK", 2)
    with pytest.raises(UserError, match="train_files, example 4: the prompt is empty"):
        tokenize_prompts(examples("a", "b", "c", " "), letters, PromptEncoding(20))


def mixed(sizes, weights, batch_size=2, **options):
    """Return batches of a data set whose row r of source s is the prompt `s:r`."""
    rows = [
        Example(f"{source}:{row}", "stories", source=source)
        for source, size in enumerate(sizes)
        for row in range(size)
    ]
    tokens = [np.array([1])] * len(rows)
    data = PromptDataset(tuple(rows), tokens, max_prompt_length=4)
    return PromptBatches(data, batch_size, weights=weights, **options)


def take_prompts(batches, count):
    return [example.prompt for _ in range(count) for example in next(batches).examples]


def test_sources_are_mixed_in_the_shares_of_their_weights():
    # 20 rows per epoch: 15 of the source that has 4, and 5 of the one that has 16.
    epochs = take_prompts(mixed((4, 16), (3.0, 1.0)), 4 * 10)
    for epoch in range(4):
        prompts = epochs[20 * epoch : 20 * (epoch + 1)]
        assert sum(prompt.startswith("0:") for prompt in prompts) == 15
    # Passes end neither at epochs nor at batches: after 60 draws each of 4 rows came 15 times, and
    # after 20 draws the first 16 had each of 16 rows once.
    counts = {prompt: epochs.count(prompt) for prompt in epochs}
    assert {counts[f"0:{row}"] for row in range(4)} == {15}
    assert {counts[f"1:{row}"] for row in range(16)} == {1, 2}
    assert epochs[:20] != epochs[20:40]


def test_a_mixture_resumes_at_any_position():
    undisturbed = take_prompts(mixed((3, 7, 5), (1.0, 2.0, 1.0)), 30)
    assert take_prompts(mixed((3, 7, 5), (1.0, 2.0, 1.0), position=22), 5) != undisturbed[22:32]
    first = mixed((3, 7, 5), (1.0, 2.0, 1.0))
    head = take_prompts(first, 11)
    rest = mixed((3, 7, 5), (1.0, 2.0, 1.0), position=first.position)
    assert head + take_prompts(rest, 19) == undisturbed


def test_an_unshuffled_mixture_takes_turns():
    assert take_prompts(mixed((2, 2), (1.0, 1.0), shuffle=False), 2) == ["0:0", "1:0", "0:1", "1:1"]


def test_a_source_without_rows_or_share_is_refused():
    with pytest.raises(UserError, match="source 2 of 2 has 0 prompts"):
        mixed((4, 0), (1.0, 1.0))
    with pytest.raises(UserError, match="source 1 of 2 has 4 prompts and a share of 0"):
        mixed((4, 4), (0.001, 1.0))
