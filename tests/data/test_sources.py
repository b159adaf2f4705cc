import concurrent.futures
import gzip
import sys
import time
import types
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_files import write_rows
from jax_ppo.config.loading import keep_rows
from jax_ppo.data import sources
from jax_ppo.data.columns import Columns
from jax_ppo.data.responses import validate_responses
from jax_ppo.data.sources import read_examples
from jax_ppo.data.tokenize_prompts import PromptEncoding, tokenize_prompts
from jax_ppo.errors import UserError
from real_data import DATA, needs

GSM8K = [
    {"question": "How many?", "answer": "Two and two.\n2+2=<<2+2=4>>4\n#### 4"},
    {"question": "How much?", "answer": "It costs\n#### 1,234"},
    {"question": "Café?", "answer": "below zero\n#### -7"},
]
VERL = [
    {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 0, "split": "train"},
    },
    {
        "data_source": "arithmetic",
        "ability": "math",
        "prompt": [{"role": "user", "content": "3+3?"}],
        "reward_model": {"style": "rule", "ground_truth": "6"},
        "extra_info": {"index": 1, "split": "train"},
    },
]


FORMS = pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])


@FORMS
def test_rows_of_gsm8ks_form(tmp_path, name):
    examples = read_examples(write_rows(tmp_path / name, GSM8K), instruction="Think.")
    assert [e.prompt for e in examples] == [
        ({"role": "user", "content": text},)
        for text in ("How many? Think.", "How much? Think.", "Café? Think.")
    ]
    assert [e.ground_truth for e in examples] == ["4", "1234", "-7"]
    assert {e.data_source for e in examples} == {"openai/gsm8k"}


@FORMS
def test_rows_of_verls_form_round_trip(tmp_path, name):
    examples = read_examples(write_rows(tmp_path / name, VERL))
    assert [e.prompt for e in examples] == [tuple(row["prompt"]) for row in VERL]
    assert [e.data_source for e in examples] == ["openai/gsm8k", "arithmetic"]
    assert [e.ground_truth for e in examples] == ["4", "6"]
    assert [e.extra_info for e in examples] == [row["extra_info"] for row in VERL]


def test_several_sources_follow_each_other(tmp_path):
    examples = read_examples(
        f"{write_rows(tmp_path / 'a.jsonl', GSM8K)}, stories:2,arithmetic:3:heldout"
    )
    assert [e.data_source for e in examples] == ["openai/gsm8k"] * 3 + ["stories"] * 2 + [
        "arithmetic"
    ] * 3
    assert examples[-1].extra_info["split"] == "heldout"


@needs("gsm8k")
def test_real_gsm8k_is_read_whole():
    train, test = (read_examples(f"{DATA}/gsm8k/{name}.jsonl") for name in ("train", "test"))
    assert (len(train), len(test)) == (7473, 1319)
    assert test[0].ground_truth == "18"
    assert test[0].prompt[0]["content"].startswith("Janet")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", ["config.data.train_files=''", "arithmetic:COUNT"]),
        ("arithmatic:8", ["config.data.train_files='arithmatic:8'", "Did you mean 'arithmetic'?"]),
        ("data.txt", [".jsonl, .jsonl.gz, .json, .csv, .parquet"]),
        ("arithmetic:some", ["at least 1", "'some'"]),
        ("arithmetic:0", ["at least 1", "'0'"]),
        (f"arithmetic:{'9' * 5000}", ["at most 7 digits", "'9999"]),
        (f"{'x' * 300}.jsonl", ["config.data.train_files='xxx", "not a usable path", "too long"]),
        ("~nouser/a.jsonl", ["config.data.train_files='~nouser/a.jsonl'", "home directory"]),
        ("stories:8:held_out", ["stories:8:heldout", "'held_out'"]),
        ("hf:gsm8k/train.parquet", ["hf:OWNER/NAME/FILE"]),
        ("hf:openai/gsm8k/README.md", ["hf:OWNER/NAME/FILE"]),
        ("tfds:gsm8k", ["tfds:NAME/SPLIT"]),
    ],
)
def test_a_wrong_specification_is_explained(spec, words):
    with pytest.raises(UserError) as error:
        read_examples(spec)
    assert all(word in str(error.value) for word in words), error.value


def test_a_missing_file_names_the_option_the_path_and_the_nearest(tmp_path):
    write_rows(tmp_path / "train.jsonl", GSM8K)
    with pytest.raises(UserError) as error:
        read_examples(f"{tmp_path}/trian.jsonl", option="config.data.val_files")
    assert str(error.value) == (
        f"config.data.val_files: there is no file {tmp_path}/trian.jsonl. "
        "Did you mean 'train.jsonl'?"
    )
    with pytest.raises(UserError, match="nor a folder .*/nowhere"):
        read_examples(f"{tmp_path}/nowhere/train.jsonl")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (7, r"^option, row 2: expected a JSON object, got int"),
        ({"question": "\ud83d"}, r"^option, row 2: .* half of a surrogate pair"),
        ({"question": 7}, r"^option, row 2: question must be text or .* got 7"),
    ],
)
def test_rows_of_a_program_are_checked_as_those_of_files(row, message):
    with pytest.raises(UserError, match=message):
        read_examples(keep_rows([GSM8K[0], row], "option"), option="option")


def test_rows_of_a_program_are_copied_and_known_by_their_content(tmp_path):
    rows = [dict(row, n=np.float32(0.5), x=np.arange(2), d=date(2026, 1, 2)) for row in GSM8K]
    name = keep_rows(rows, "option")
    assert keep_rows(list(map(dict, rows)), "option") == name
    rows[0]["question"] = "Changed?"
    assert keep_rows(rows, "option") != name
    examples = read_examples(name)
    plain = [row | {"n": 0.5, "x": [0, 1], "d": "2026-01-02"} for row in GSM8K]
    assert examples == read_examples(write_rows(tmp_path / "a.jsonl", plain))
    with pytest.raises(UserError, match="rows of another Python process; pass them again"):
        read_examples("memory:list@0123456789ab")


def test_frames_and_datasets_are_read_as_the_rows_that_they_hold():
    pandas, datasets = map(pytest.importorskip, ("pandas", "datasets"))
    rows = [
        {"instruction": "How many?", "context": "Two and two.", "gold": 4, "note": None},
        {"instruction": "How much?", "context": None, "gold": 5, "note": "x"},
    ]
    columns = Columns(ground_truth="gold")
    expected = read_examples(keep_rows(rows, "option"), columns=columns)
    assert expected[0].prompt[0]["content"] == "How many?\n\nTwo and two."
    assert [example.ground_truth for example in expected] == ["4", "5"]
    frame = pandas.DataFrame(rows)
    dataset = datasets.Dataset.from_list(rows)
    for given in (frame, frame.convert_dtypes(), dataset):
        assert read_examples(keep_rows(given, "option"), columns=columns) == expected
    with pytest.raises(UserError, match="got a DatasetDict of train"):
        keep_rows(datasets.DatasetDict(train=dataset), "option")
    with pytest.raises(UserError, match="same name: .'gold', 'gold'."):
        keep_rows(frame[["gold", "gold"]], "option")


ROW_WITH = '{"question": "q", "answer": "#### 1", "x": %s}'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (ROW_WITH % ("1" * 5000), "cannot be read as JSON: .*4300 digits"),
        (ROW_WITH % ("[" * 100 + "]" * 100), "nested more than 100 levels"),
        (ROW_WITH % ("[" * 100_000 + "]" * 100_000), "cannot be read as JSON: .*recursion"),
        (ROW_WITH % '"\\ud83d"', "half of a surrogate pair"),
        (b"\xff", "cannot be read as UTF-8 text: .*iconv -f WINDOWS-1252 -t UTF-8"),
    ],
    ids=("digits", "deep", "deeper", "surrogate", "bytes"),
)
def test_a_line_that_python_cannot_represent_is_named(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    encoded = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(b"\n".join([(ROW_WITH % "1").encode(), encoded]))
    with pytest.raises(UserError, match=rf"a\.jsonl:2: .*{words}"):
        read_examples(str(path))


def test_a_line_near_the_limits_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    deep = "[" * 99 + '"\\ud83d\\ude00"' + "]" * 99
    path.write_text("\ufeff" + ROW_WITH % deep, encoding="utf-8")
    value = read_examples(str(path))[0].extra_info["x"]
    for _ in range(99):
        (value,) = value
    assert value == "\N{GRINNING FACE}"


def test_slices_are_those_of_python_and_may_end_after_every_file(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", GSM8K)
    answers = ["4", "1234", "-7"]
    for chosen in (slice(2), slice(2, None), slice(1, 2)):
        bounds = ":".join("" if end is None else str(end) for end in (chosen.start, chosen.stop))
        read = [example.ground_truth for example in read_examples(f"{path}[{bounds}]")]
        assert read == answers[chosen]
    for end in ("3", "9" * 18):
        assert len(read_examples(f"{path}[1:{end}]")) == 2
    with pytest.raises(UserError, match="has no rows"):
        read_examples(f"{path}[{'9' * 18}:]")
    with pytest.raises(UserError, match="expected files"):
        read_examples(f"{path}[1:{'9' * 19}]")
    with pytest.raises(UserError, match="File name too long"):
        read_examples(f"{path}[{'9' * 5000}:]")


def test_every_damaged_byte_of_a_gzipped_file_is_noticed(tmp_path):
    """Regression: most raised zlib.error, which was not caught."""
    path = tmp_path / "a.jsonl.gz"
    text = Path(write_rows(tmp_path / "a.jsonl", GSM8K)).read_bytes()
    whole = gzip.compress(text)
    for position in range(10, len(whole)):  # after the header, which has a time and no checksum
        damaged = bytearray(whole)
        damaged[position] ^= 0x55
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="a.jsonl.gz"):
            read_examples(str(path))


def test_values_of_parquet_that_python_cannot_hold_are_named(tmp_path):
    columns = {"question": ["q", "q"], "answer": ["#### 1", "#### 2"]}
    dates = pa.array([0, 2**62], pa.timestamp("us"))
    pq.write_table(pa.table({**columns, "date": dates}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="a.parquet.*: date value out of range"):
        read_examples(str(tmp_path / "a.parquet"))
    arrays = [*columns.values(), columns["question"]]
    table = pa.table(list(map(pa.array, arrays)), names=["question", "answer", "question"])
    pq.write_table(table, tmp_path / "b.parquet")
    with pytest.raises(UserError, match="b.parquet: several columns have the same name"):
        read_examples(str(tmp_path / "b.parquet"))


@FORMS
def test_a_single_message_is_a_chat_of_one(tmp_path, name):
    """Regression: "user" and "math" became four messages of one letter."""
    message = {"role": "user", "content": "math"}
    row = {"data_source": "x", "prompt": message, "reward_model": {"ground_truth": "4"}}
    (example,) = read_examples(write_rows(tmp_path / name, [row]))
    assert example.prompt == (message,)


def test_an_example_has_the_place_of_its_row_in_its_file(tmp_path):
    """Regression: a row was told by its number among all rows, of other files and dropped ones."""
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "a"}\n\n{"prompt": "b"}\n')
    (tmp_path / "b.csv").write_text('prompt,answer\n\n"c\nc",1\nd,2\ne,3\n')
    (tmp_path / "c.json").write_text('[{"prompt": "f"}, {"prompt": " "}]')
    write_rows(tmp_path / "d.parquet", [{"prompt": "g"}, {"prompt": "h"}])
    names = ("a.jsonl", "b.csv[1:]", "c.json", "d.parquet[1:]", "arithmetic:1")
    spec = ",".join(str(tmp_path / name) for name in names[:-1]) + f",{names[-1]}"
    examples = read_examples(spec)
    assert [example.location.removeprefix(f"{tmp_path}/") for example in examples] == [
        *("a.jsonl:2", "a.jsonl:4", "b.csv:5", "b.csv:6", "c.json, row 1", "c.json, row 2"),
        *("d.parquet, row 2", ""),
    ]
    with pytest.raises(UserError, match=r"^\S*/c.json, row 2: the prompt is empty"):
        tokenize_prompts(examples[5:], None, PromptEncoding(8, chat_template=False))
    with pytest.raises(UserError, match=r"^\S*/c.json, row 1 \(data_source ''\) has no response"):
        validate_responses(examples[2:], ("response",), "config.data.train_files", "")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_file_that_the_disk_does_not_return_is_named(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    path.symlink_to("/proc/self/mem")  # can be opened, and not be read
    with pytest.raises(UserError, match=rf"a{suffix}.*: cannot be read as .*"):
        read_examples(str(path))


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
    """Return a folder with the rows above as TFDS array records.

    The records have question and answer, and messages.
    """
    tfds = pytest.importorskip("tensorflow_datasets")
    text = tfds.features.Text()

    class RoomTestSums(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")
        FEATURES = {"question": text, "answer": text}
        ROWS = GSM8K

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(self.FEATURES)
            )

        def _split_generators(self, downloads):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            yield from enumerate(self.ROWS)

    class RoomTestChats(RoomTestSums):
        FEATURES = {
            "data_source": text,
            "prompt": tfds.features.Sequence({"role": text, "content": text}),
            "reward_model": {"style": text, "ground_truth": text},
        }
        ROWS = [
            {name: row[name] for name in ("data_source", "prompt", "reward_model")} for row in VERL
        ]

    folder = tmp_path_factory.mktemp("tfds")
    for builder in (RoomTestSums, RoomTestChats):
        builder(data_dir=folder, file_format="array_record").download_and_prepare()
    return str(folder)


def test_tfds_is_read_without_tensorflow(tfds_folder, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", tfds_folder)
    sums = read_examples("tfds:room_test_sums/train")
    assert sorted(e.ground_truth for e in sums) == ["-7", "1234", "4"]
    assert "Café?" in {e.prompt[0]["content"] for e in sums}
    assert [e.location for e in sums] == [f"tfds:room_test_sums/train, row {n}" for n in (1, 2, 3)]
    chats = read_examples("tfds:room_test_chats:1.0.0/train")
    assert sorted(len(e.prompt) for e in chats) == [1, 2]
    assert {e.ground_truth for e in chats} == {"4", "6"}
    assert len(read_examples("tfds:room_test_sums/train[:2]")) == 2
    assert "tensorflow" not in sys.modules


def test_a_builder_that_tfds_ships_prepares_its_files_without_tensorflow(tmp_path, monkeypatch):
    """Regression: with TFDS_DATA_DIR it wrote TFRecord files, for which it needs TensorFlow."""
    tfds = pytest.importorskip("tensorflow_datasets")
    path = write_rows(tmp_path / "train.jsonl", GSM8K)
    monkeypatch.setattr(
        tfds.download.DownloadManager,
        "download_and_extract",
        lambda self, urls: {split: path for split in urls},
    )
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    for _ in ("prepared", "read again"):
        examples = read_examples("tfds:gsm8k/train")
        assert sorted(e.ground_truth for e in examples) == ["-7", "1234", "4"]
    assert list(tmp_path.glob("tfds/gsm8k/1.0.0/gsm8k-train.array_record*"))
    assert "tensorflow" not in sys.modules


def test_one_of_several_processes_prepares_a_tfds_data_set(tmp_path, monkeypatch):
    """TFDS renames a folder when it is complete, and fails if another process did so before."""

    class Builder:
        def is_prepared(self):
            return (tmp_path / "prepared").exists()

        def download_and_prepare(self):
            (tmp_path / "incomplete").mkdir()
            time.sleep(0.1)
            (tmp_path / "incomplete").rename(tmp_path / "prepared")

        def as_data_source(self, split):
            return split if self.is_prepared() else None

    stub = types.SimpleNamespace(
        core=types.SimpleNamespace(DatasetNotFoundError=KeyError),
        builder=lambda *arguments, **options: Builder(),
        list_builders=lambda **options: ["sums"],
    )
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", stub)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Locks of a file exclude threads that opened it separately, too.
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        opened = threads.map(sources._open_tfds_source, ["sums"] * 3, ["train"] * 3, ["option"] * 3)
        assert list(opened) == ["train"] * 3


def test_tfds_rows_that_got_lost_are_noticed(tfds_folder, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", tfds_folder)
    whole = sources._open_tfds_source("room_test_sums", "train", "option")

    class Short:
        dataset_info = whole.dataset_info

        def __len__(self):
            return 2

    monkeypatch.setattr(sources, "_open_tfds_source", lambda *_: Short())
    with pytest.raises(UserError, match="2 rows can be read, but the data set's metadata states 3"):
        read_examples("tfds:room_test_sums/train")


def test_tfds_errors(tfds_folder, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", tfds_folder)
    with pytest.raises(
        UserError, match="TFDS has no data set 'room_test_sumz'.* Did you mean 'room_test_sums'"
    ):
        read_examples("tfds:room_test_sumz/train")
    with pytest.raises(
        UserError,
        match="config.data.train_files='tfds:room_test_sums/trian': Unknown split 'trian'",
    ):
        read_examples("tfds:room_test_sums/trian")


def test_weights_follow_any_source(tmp_path):
    path = write_rows(tmp_path / "a*2.jsonl", GSM8K)
    spec = f"{path}[:2]*0.25, stories:3*.75"
    assert sources.source_weights(spec, "o") == (0.25, 0.75)
    assert sources.source_weights(path, "o") is None
    assert [e.source for e in read_examples(spec)] == [0, 0, 1, 1, 1]
    for wrong in ("stories:1*1,arithmetic:1", "stories:1*0"):
        with pytest.raises(UserError, match="a weight above 0 for each source"):
            sources.source_weights(wrong, "config.data.train_files")


def test_patterns_upper_case_and_commas_name_files(tmp_path):
    folder = tmp_path / "x,y"
    folder.mkdir()
    for name, row in zip(("b,1.jsonl", "A.JSONL", "c.Jsonl"), GSM8K, strict=True):
        write_rows(folder / name, [row])
    write_rows(folder / "D.PARQUET", GSM8K)
    (folder / "notes.txt").write_text("no data")

    def truths(spec):
        return [example.ground_truth for example in read_examples(spec)]

    assert truths(f"{folder}/b,1.jsonl") == ["4"]
    assert truths(f"{folder}/A.JSONL,{folder}/b,1.jsonl*2, {folder}/D.PARQUET[1:2]") == [
        "1234",
        "4",
        "1234",
    ]
    assert truths(f"{folder}/*") == ["1234", "4", "1234", "-7", "4", "-7"]
    assert truths(f"{folder}/?.[jJ]*") == ["1234", "-7"]
    assert truths(f"{folder}/*[1:3]") == ["4", "1234"]
    assert [e.source for e in read_examples(f"{folder}/*.jsonl,{folder}/A.JSONL")] == [0, 1]


def test_a_folder_names_the_pattern_that_reads_it(tmp_path):
    with pytest.raises(UserError, match="is a folder without files that end in .jsonl"):
        read_examples(str(tmp_path))
    write_rows(tmp_path / "a.jsonl", GSM8K)
    for spec in (str(tmp_path), f"{tmp_path}/"):
        with pytest.raises(UserError, match=r"is a folder, with a.jsonl; .*/\*\.jsonl for all"):
            read_examples(spec)
    (tmp_path / "a" / "b").mkdir(parents=True)
    write_rows(tmp_path / "a" / "b" / "c.jsonl", VERL)
    assert len(read_examples(f"{tmp_path}/**/*.jsonl")) == len(GSM8K) + len(VERL), "all levels"
    (tmp_path / "unreachable.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"there is no file \S*/unreachable.jsonl\.$"):
        read_examples(f"{tmp_path}/unreachable.jsonl")
    with pytest.raises(UserError, match="no file matches .*/z.*.jsonl"):
        read_examples(f"{tmp_path}/z*.jsonl")
    with pytest.raises(UserError, match="patterns match local files only"):
        read_examples("gs://bucket/*.jsonl")


def test_folders_of_any_depth_are_matched_once(tmp_path):
    """Regression: links that lead back were followed, without end where there are two."""
    deep = tmp_path / "b, c" / "[d]" / "e"
    deep.mkdir(parents=True)
    for folder in (tmp_path, deep):
        (folder / "loop").symlink_to(tmp_path)
        (folder / "again").symlink_to(deep)
        (folder / ".hidden").mkdir()
        write_rows(folder / ".hidden" / "a.jsonl", GSM8K)
        write_rows(folder / "a.jsonl", GSM8K)
    both = [f"{folder}/a.jsonl:{n}" for folder in (tmp_path, deep) for n in (1, 2, 3)]
    for name, expected in (
        ("**/*.jsonl", both),
        ("**", both),
        ("**/**/a.jsonl", both),
        ("**/e/*.jsonl", both[3:]),
        ("b, c/**/*.jsonl[1:]", both[4:]),  # the comma separates no sources
    ):
        assert [e.location for e in read_examples(f"{tmp_path}/{name}")] == expected


@pytest.mark.parametrize("names", [("state.json", "dataset_info.json"), ("dataset_dict.json",)])
def test_a_folder_of_save_to_disk_is_told_apart(tmp_path, names):
    """Regression: its files that describe the data were named as those to read."""
    for name in names:
        with pytest.raises(UserError, match="is a folder,? with"):
            read_examples(str(tmp_path))
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="is a folder of datasets' save_to_disk.*to_parquet"):
        read_examples(str(tmp_path))


@pytest.mark.parametrize("name", ["label", "kto_tag"])
def test_responses_that_are_not_to_be_imitated_are_left_out(tmp_path, caplog, name):
    """KTO's rows: regression: sft imitated the undesirable ones, too."""
    rows = [
        {"prompt": "p", "completion": text, name: label}
        for text, label in (("a", True), ("b", False), ("c", "TRUE"), ("d", "false"))
    ]
    path = write_rows(tmp_path / "a.jsonl", rows)
    assert [e.response for e in read_examples(path, columns=Columns())] == ["a", "c"]
    assert "2 of 4 rows are left out" in caplog.text and "ignored" not in caplog.text
    # PPO reads no responses, and a label may be the response or the reference answer itself.
    for columns in (
        Columns(reads_responses=False),
        Columns(response=name),
        Columns(ground_truth=name),
    ):
        rows = [{"prompt": "p", "completion": "a", name: str(label)} for label in (True, False)]
        examples = read_examples(write_rows(tmp_path / "b.jsonl", rows), columns=columns)
        assert len(examples) == 2
    path = write_rows(tmp_path / "c.jsonl", [{"prompt": "p", "completion": "a", name: False}])
    with pytest.raises(UserError, match="has no rows with a true label"):
        read_examples(path, columns=Columns())
