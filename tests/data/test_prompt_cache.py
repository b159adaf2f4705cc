import functools
import os
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jax_ppo.data import files, prompt_cache, sources
from jax_ppo.data.columns import Columns
from jax_ppo.data.prompt_batches import PromptBatches
from jax_ppo.data.prompt_cache import cache_prompts, representative_examples
from jax_ppo.data.prompt_shaping import RowParser
from jax_ppo.data.prompts import PromptEncoding, tokenize_prompts
from jax_ppo.data.tokenizer import train_tokenizer
from jax_ppo.errors import UserError
from jax_ppo.rewards import row_validation

ROWS = 700
ENCODING = PromptEncoding(max_prompt_length=40)
PARSER = RowParser(Columns())
VALIDATE = functools.partial(row_validation.validate_data_sources, function="", terms="")


def verl_row(number, source="openai/gsm8k", truth=None):
    return {
        "data_source": source,
        # Every seventh prompt is too long.
        "prompt": [{"role": "user", "content": f"{number} " * (40 if number % 7 == 0 else 3)}],
        "reward_model": {"style": "rule", "ground_truth": truth or str(number)},
        "extra_info": {"index": number, "split": "train"},
        "unused": "x" * 10,
    }


def write(path, rows, row_group_size=100):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(prompt_cache, "_ROWS_PER_FILE", 150)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "a.parquet", [verl_row(n) for n in range(ROWS)])


def located(spec):
    return sources.locate_parquet(str(spec), "config.data.train_files")


def cached(folder, spec, trained, *, parser=PARSER, workers=0, **options):
    tokenizer_folder = str(trained[1])
    return cache_prompts(
        folder,
        located(spec),
        parser,
        ENCODING,
        tokenizer_folder,
        VALIDATE,
        workers=workers,
        **options,
    )


def in_memory(spec, trained):
    return tokenize_prompts(
        sources.read_examples(str(spec)), trained[0], PromptEncoding(max_prompt_length=40)
    )


def assert_same(cache, memory):
    assert list(cache.examples) == list(memory.examples)
    assert len(cache.tokens) == len(memory.tokens)
    for cached_ids, ids in zip(cache.tokens, memory.tokens, strict=True):
        np.testing.assert_array_equal(cached_ids, ids)
        assert cached_ids.dtype == np.int32


@pytest.mark.parametrize("form", ["{0}", "{0}[130:517]", "{0}[:50],{0}[300:]"])
def test_rows_tokens_and_order_are_those_of_the_same_data_in_memory(data, trained, tmp_path, form):
    spec = form.format(data)
    memory = in_memory(spec, trained)
    assert 150 < len(memory) < ROWS, "several files, and some prompts are dropped"
    assert_same(cached(tmp_path, spec, trained), memory)


def test_a_batch_from_the_middle_of_an_epoch_is_the_one_in_memory(data, trained, tmp_path):
    spec = f"{data}[:200]*1,{data}[200:]*3"
    sides = (cached(tmp_path, spec, trained), in_memory(spec, trained))
    batches = [
        next(PromptBatches(side, 16, seed=3, position=417, weights=(1.0, 3.0))) for side in sides
    ]
    assert batches[0].examples == batches[1].examples
    np.testing.assert_array_equal(batches[0].prompts.tokens, batches[1].prompts.tokens)


def test_other_forms_keep_their_columns_and_train_max_samples_counts_rows(trained, tmp_path):
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}", "n": n} for n in range(400)]
    path = write(tmp_path / "b.parquet", rows)
    memory = sources.read_examples(str(path))[:333]
    cache = cached(tmp_path / "cache", path, trained, max_samples=333)
    assert list(cache.examples) == memory
    assert cache.examples[332].extra_info["n"] == 332


@pytest.mark.slow
def test_worker_processes_continue_what_was_interrupted(data, trained, tmp_path):
    folder = tmp_path / "cache"

    class Killed(Exception):
        pass

    def stop_early(done, total):
        if done >= 400:
            raise Killed

    with pytest.raises(Killed):
        cached(folder, data, trained, on_progress=stop_early)
    first = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(first) == 2
    shown = []
    cache = cached(folder, data, trained, workers=1, on_progress=lambda *now: shown.append(now))
    assert shown == [(400, 700), (600, 700), (700, 700)]
    assert_same(cache, in_memory(data, trained))
    assert {path: path.stat().st_mtime_ns for path in first} == first


def test_other_tokens_other_options_and_changed_files_are_cached_apart(data, trained, tmp_path):
    folder = tmp_path / "cache"
    path = write(tmp_path / "c.parquet", [verl_row(n) for n in range(100)])
    cached(folder, path, trained)
    cached(folder, path, trained)
    assert len(list(folder.iterdir())) == 1
    cached(folder, path, trained, parser=RowParser(Columns(), template="Solve {prompt}"))
    assert len(list(folder.iterdir())) == 2
    # Written again, also with as many bytes.
    os.utime(path, ns=(1, 1))
    cached(folder, path, trained)
    assert len(list(folder.iterdir())) == 3


def test_another_tokenizer_at_the_same_path_is_loaded_in_the_same_process(data, tmp_path):
    folder = tmp_path / "tokenizer"
    path = f"{data}[:150]"
    for text in ("0 1", "! 0 1"):  # the other characters have other ids
        tokenizer = train_tokenizer([text], 64, folder)
        cache = cached(tmp_path / "cache", path, (tokenizer, folder))
        assert_same(cache, in_memory(path, (tokenizer, folder)))


def test_a_moved_file_has_its_fingerprint_and_a_changed_one_another(trained, tmp_path):
    rows = [verl_row(n) for n in range(100)]
    paths = [
        write(tmp_path / name, data)
        for name, data in (("a.parquet", rows), ("b.parquet", rows), ("c.parquet", rows[::-1]))
    ]
    a, b, c = (cached(tmp_path / "cache", path, trained).fingerprint for path in paths)
    assert a == b != c


def test_an_unusable_row_ends_the_work_with_its_place_and_leaves_no_half_file(trained, tmp_path):
    rows = [verl_row(n, truth="no number" if n == 320 else None) for n in range(390)]
    path = write(tmp_path / "d.parquet", rows)
    with pytest.raises(UserError, match=r"^\S+/d\.parquet, row 321: ground_truth='no number'"):
        cached(tmp_path / "cache", path, trained)
    # The rows before it stay for the next attempt.
    assert len(list((tmp_path / "cache").iterdir())) == 1


def cut_off(contents):
    return contents[:300]


def change_the_middle(contents):
    middle = len(contents) // 2
    return contents[:middle] + bytes([contents[middle] ^ 1]) + contents[middle + 1 :]


@pytest.mark.parametrize("damage", [cut_off, change_the_middle, lambda contents: b""])
def test_a_damaged_file_is_named_and_written_again(data, trained, tmp_path, caplog, damage):
    cached(tmp_path, data, trained)
    path = sorted(tmp_path.iterdir())[0]
    intact = path.read_bytes()
    path.write_bytes(damage(intact))
    assert_same(cached(tmp_path, data, trained), in_memory(data, trained))
    lines = [message for message in caplog.messages if "damaged" in message]
    assert lines == [f"config.data.cache_dir: {path} is damaged and is written again"]
    assert path.read_bytes() == intact and len(list(tmp_path.iterdir())) == 4


def test_a_file_that_is_damaged_during_a_run_ends_it_in_one_line(data, trained, tmp_path):
    cache = cached(tmp_path, data, trained)
    for path in tmp_path.iterdir():
        os.truncate(path, 300)
    with pytest.raises(UserError, match=r"config\.data\.cache_dir: .*Start the run again to"):
        list(cache.examples)


def test_unfinished_files_that_were_not_written_to_for_a_day_are_removed(data, trained, tmp_path):
    (tmp_path / "killed.unfinished").write_bytes(b"killed")
    os.utime(tmp_path / "killed.unfinished", (1, 1))
    (tmp_path / "alive.unfinished").write_bytes(b"another run's")
    cached(tmp_path, data, trained)
    assert [path.name for path in tmp_path.glob("*.unfinished")] == ["alive.unfinished"]
    # Also when nothing is missing.
    os.utime(tmp_path / "alive.unfinished", (1, 1))
    cached(tmp_path, data, trained)
    assert not list(tmp_path.glob("*.unfinished"))


def test_an_unfinished_file_that_cannot_be_removed_does_not_matter(data, trained, tmp_path):
    (tmp_path / "folder.unfinished").mkdir()
    os.utime(tmp_path / "folder.unfinished", (1, 1))
    assert_same(cached(tmp_path, data, trained), in_memory(data, trained))


def die(examples):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_worker_ends_the_work_in_one_line(data, trained, tmp_path):
    folder, deadly = tmp_path / "cache", functools.partial(die)
    arguments = (folder, located(data), PARSER, ENCODING, str(trained[1]))
    with pytest.raises(UserError, match="a worker process was killed, which happens when memory"):
        cache_prompts(*arguments, deadly, workers=1)
    assert_same(cached(folder, data, trained), in_memory(data, trained))


@pytest.mark.parametrize("folder", ["/proc/cache", "/dev/full/cache"])
def test_a_folder_that_cannot_be_made_is_named_before_any_work(data, trained, folder):
    expected = rf"config\.data\.cache_dir='{folder}': cannot be written to: "
    with pytest.raises(UserError, match=expected):
        cached(Path(folder), data, trained)


def test_an_example_of_each_data_source_is_found_without_reading_all(tmp_path):
    rows = [
        verl_row(n, source="lighteval/MATH" if n == 350 else "openai/gsm8k") for n in range(400)
    ]
    path = write(tmp_path / "e.parquet", rows)
    found = list(representative_examples(located(path), PARSER))
    assert [(e.data_source, e.extra_info["index"]) for e in found] == [
        ("openai/gsm8k", 0),
        ("lighteval/MATH", 350),
    ]


def test_ignored_columns_are_named_and_tools_are_kept(trained, tmp_path, caplog):
    tools = [{"name": "add", "a": 1}, {"name": "sub", "b": {"c": 2}}]
    path = write(tmp_path / "a.parquet", [verl_row(1) | {"tools": tools, "images": []}])
    list(prompt_cache.representative_examples(located(path), PARSER))
    assert "ignored columns: unused (" in caplog.text
    (example,) = cached(tmp_path / "cache", path, trained).examples
    # Parquet gives both objects all entries.
    assert example.tools == tuple(tools)


def test_images_of_any_row_are_refused(trained, tmp_path):
    rows = [verl_row(n) | {"images": ["a.png"] if n == 9 else []} for n in range(1, 20)]
    path = write(tmp_path / "a.parquet", rows)
    with pytest.raises(UserError, match=r"a.parquet, row 9: the column images has \['a.png'\]"):
        cached(tmp_path / "cache", path, trained)


def test_categories_with_several_dictionaries_become_text(trained, tmp_path, monkeypatch):
    """A file takes one dictionary per column, and each batch of rows comes with its own."""
    batch = 32
    monkeypatch.setattr(files, "_PARQUET_BATCH", batch)
    path = tmp_path / "f.parquet"
    kind = pa.dictionary(pa.int8(), pa.string())
    halves = [["a", "b"] * (batch // 2), ["c", "d"] * (batch // 2)]
    with pq.ParquetWriter(path, pa.schema([("prompt", pa.string()), ("kind", kind)])) as writer:
        for kinds in halves:
            columns = {"prompt": ["1+1"] * batch, "kind": pa.array(kinds, kind)}
            writer.write_table(pa.table(columns))
    accept = functools.partial(len)
    cache = cache_prompts(
        tmp_path / "cache", located(path), PARSER, ENCODING, str(trained[1]), accept, workers=0
    )
    assert [example.extra_info["kind"] for example in cache.examples] == [*halves[0], *halves[1]]


def test_other_data_than_parquet_are_refused():
    with pytest.raises(UserError, match=r"'arithmetic:8': config\.data\.cache_dir caches"):
        located("arithmetic:8")
