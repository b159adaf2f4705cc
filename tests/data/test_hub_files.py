import types

import huggingface_hub
import pytest
from huggingface_hub import errors

from jax_ppo.data import sources
from jax_ppo.errors import UserError
from jax_ppo.storage import hub


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    """Return a hub with one data set, whose cache is tmp_path.

    Setting `down` disconnects the network.
    """
    state = types.SimpleNamespace(down=False, broken=False, error=None, revision="main")
    names = ["README.md", "main/train.jsonl", "main/test.jsonl"]
    state.names = names

    def repo_info(self, repo_id, **_):
        if state.down:
            raise ConnectionError("no route to host")
        if state.error:
            raise state.error
        return types.SimpleNamespace(
            siblings=[types.SimpleNamespace(rfilename=name) for name in names]
        )

    def snapshot_download(
        repo_id,
        repo_type,
        revision,
        allow_patterns,
        ignore_patterns,
        local_files_only=False,
        etag_timeout=None,
    ):
        assert (repo_id, repo_type, revision) == ("owner/name", "dataset", state.revision)
        if local_files_only and not any(tmp_path.iterdir()):
            raise FileNotFoundError("not in the cache")
        if state.broken:
            raise ConnectionError("broken off")
        for name in set(allow_patterns) & set(names) if not local_files_only else ():
            (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / name).write_text('{"question": "q", "answer": "#### 5"}\n')
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return state


def test_a_file_of_the_hub_is_read_and_cached(fake_hub):
    (example,) = sources.read_examples("hf:owner/name/main/train.jsonl")
    assert example.ground_truth == "5"
    fake_hub.down = True
    assert sources.read_examples("hf:owner/name/main/train.jsonl") == [example]
    with pytest.raises(
        UserError,
        match=r"^option: .* owner/name .* cannot be reached \(ConnectionError: no route to host\)",
    ):
        # Only the other one is in the cache.
        sources.read_examples("hf:owner/name/main/test.jsonl", option="option")


@pytest.mark.parametrize(
    ("location", "names", "read"),
    [
        ("", ["train.jsonl", "test.jsonl"], ["train.jsonl"]),
        (":test", ["train.jsonl", "test.jsonl"], ["test.jsonl"]),
        ("/main", ["main/train.jsonl", "other/train.jsonl"], ["main/train.jsonl"]),
        ("/main:test", ["main/train.jsonl", "main/test.jsonl"], ["main/test.jsonl"]),
        (
            "",
            ["data/train-00000-of-00002-0a1b.jsonl", "data/train-00001-of-00002-9f.jsonl"],
            ["data/train-00000-of-00002-0a1b.jsonl", "data/train-00001-of-00002-9f.jsonl"],
        ),
        ("/all", ["all/train/0000.jsonl", "all/test/0000.jsonl"], ["all/train/0000.jsonl"]),
        (":train_sft", ["data/train_sft-00000-of-00001.jsonl"], None),
    ],
)
def test_the_files_of_a_split_are_found(fake_hub, tmp_path, location, names, read):
    fake_hub.names[:] = ["README.md", *names]
    examples = sources.read_examples(f"hf:owner/name{location}")
    cached = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.jsonl")}
    assert cached == set(read or names) and len(examples) == len(cached)
    fake_hub.down = True
    assert sources.read_examples(f"hf:owner/name{location}") == examples


@pytest.mark.parametrize(
    ("location", "names", "words"),
    [
        (":tset", ["train.jsonl", "test.jsonl"], ["it has test, train", "Did you mean 'test'?"]),
        ("", ["a/train.jsonl", "b/train.jsonl"], ["hf:owner/name/a:train or hf:owner/name/b:tra"]),
        ("", ["train-00000-of-00002.jsonl"], ["expected as many as their names state"]),
        ("", ["train.arrow"], ["none that can be read"]),
        ("/main", ["train.jsonl"], ["in the folder main"]),
    ],
)
def test_a_split_that_cannot_be_read_is_explained(fake_hub, location, names, words):
    fake_hub.names[:] = ["README.md", *names]
    with pytest.raises(UserError, match=r"^config\.data\.train_files: ") as error:
        sources.read_examples(f"hf:owner/name{location}")
    assert all(word in str(error.value) for word in words), error.value


def test_a_slice_of_a_split_counts_the_rows_of_all_its_files(fake_hub):
    fake_hub.names[:] = [f"train-0000{i}-of-00003.jsonl" for i in range(3)] + ["README.md"]
    assert len(sources.read_examples("hf:owner/name[1:]")) == 2


def test_a_revision_of_a_data_set(fake_hub):
    for fake_hub.revision in ("v1.0", "refs/convert/parquet", "refs/pr/7"):
        spec = f"hf:owner/name@{fake_hub.revision}/main/train.jsonl"
        assert sources.read_examples(spec)[0].ground_truth == "5"


def test_a_download_that_breaks_off_and_a_missing_file_are_named(fake_hub):
    missing = "no file main/trian.jsonl; .* Did you mean 'main/train.jsonl'?"
    with pytest.raises(UserError, match=f"train_files: .* {missing}"):
        sources.read_examples("hf:owner/name/main/trian.jsonl")
    fake_hub.broken = True
    broken = r"downloading it from .* failed \(ConnectionError: broken off\)"
    with pytest.raises(UserError, match=f"train_files: .* {broken}"):
        sources.read_examples("hf:owner/name/main/train.jsonl")


def test_a_repository_that_the_hub_has_not(fake_hub):
    response = types.SimpleNamespace(headers={}, request=None, status_code=404)
    fake_hub.error = errors.RepositoryNotFoundError("404", response=response)
    with pytest.raises(
        UserError,
        match="train_files: the data set owner/name at revision main is unavailable: .* has no "
        "repository of this name .*check the spelling.* HF_TOKEN, or `hf auth login`",
    ):
        sources.read_examples("hf:owner/name/main/train.jsonl")
    fake_hub.error = errors.GatedRepoError("403", response=response)
    with pytest.raises(
        hub.HubError, match="/datasets/owner/name is gated: accept its terms there and set HF_TOKEN"
    ):
        sources.read_examples("hf:owner/name/main/train.jsonl")
