"""Models and data in buckets are downloaded once, checked, and resumed after an interruption."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

import bucket_server
from jax_ppo.data import sources
from jax_ppo.errors import UserError
from jax_ppo.models.hf.model_folders import resolve_model_folder, shareable_model_name
from jax_ppo.storage import downloads, remote
from serving import QuietHandler, serving
from trained_tokenizer import train_tokenizer


def data_file(server, address, count=3):
    rows = "".join(
        json.dumps({"question": "?", "answer": f"#### {i}"}) + "\n" for i in range(count)
    )
    bucket_server.put(server, address, rows)


def refusal(function, *arguments):
    """Return the one-line message of a UserError."""
    with pytest.raises(UserError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("gs://bucket/a", True),
        ("gcs://bucket/a", True),
        ("gs:/bucket/a", True),
        ("hf:owner/name/a.jsonl", False),
        ("arithmetic:100", False),
        ("/gs/bucket", False),
        ("owner/name@main", False),
    ],
)
def test_addresses_are_told_from_paths_and_names(path, expected):
    assert remote.is_address(path) is expected


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("gcs://bucket/m", r"expected a local path or gs://BUCKET/PATH .* Did you mean 'gs://'\?"),
        ("gss://bucket/m", "Did you mean 'gs://'"),
        ("gs:/bucket/m", "the bucket is missing"),
        ("gs:///m", "the bucket is missing"),
    ],
)
def test_misspelt_addresses_are_explained(address, message):
    with pytest.raises(UserError, match=f"config.model.path='{address}': .*{message}"):
        resolve_model_folder(address)


def test_a_missing_client_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    message = refusal(resolve_model_folder, "gs://bucket/model")
    assert "config.model.path='gs://bucket/model': needs the package gcsfs" in message
    assert "pip install 'jax_ppo[gcs]'" in message


def test_a_cache_that_cannot_be_written_is_not_blamed_on_the_bucket():
    """Regression: a bucket was said not to exist where the local folder did not."""
    message = "x='gs://b/a': /proc/no on this machine: .*XDG_CACHE_HOME"
    with pytest.raises(UserError, match=message), remote.reported_errors("gs://b/a", "x"):
        os.mkdir("/proc/no")


def test_another_store_is_used_where_that_of_aws_does_not_resolve(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: os.stat("/no/such/name"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://minio:9000")
    remote._require_network("s3://bucket/model")


def test_rows_are_read_from_a_bucket_and_slices_are_taken(server, bucket):
    data_file(server, f"{bucket}/data/train.jsonl")
    spec = f"{bucket}/data/train.jsonl[1:], {bucket}/data/train.jsonl"
    examples = sources.read_examples(spec)
    assert [example.ground_truth for example in examples] == ["1", "2", "0", "1", "2"]


def test_missing_files_folders_and_buckets_are_named(server, bucket):
    data_file(server, f"{bucket}/data/train.jsonl")
    message = refusal(sources.read_examples, f"{bucket}/data/trian.jsonl")
    assert "there is no such file. Did you mean 'train.jsonl'?" in message
    assert "this is a folder" in refusal(downloads.download_file, f"{bucket}/data", "option")
    assert "no such folder in the bucket" in refusal(resolve_model_folder, f"{bucket}/model")
    assert "has none of the expected files, only train.jsonl" in refusal(
        resolve_model_folder, f"{bucket}/data"
    )
    assert "config.model.path='gs://nowhere/model': there is no bucket gs://nowhere" in refusal(
        resolve_model_folder, "gs://nowhere/model"
    )


@pytest.mark.parametrize(
    ("code", "reply", "message"),
    [
        (403, "x@y does not have storage.objects.list access", "no permission for gs://private: "),
        (401, "Anonymous caller does not have access", "no valid credentials for gs://private: "),
    ],
)
def test_refusals_of_the_store_are_explained(bucket, monkeypatch, code, reply, message):
    class Refusal(QuietHandler):
        def do_GET(self):
            self.answer(code, json.dumps({"error": {"code": code, "message": reply}}).encode())

    with serving(Refusal) as refusing:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", refusing.url)
        assert message in refusal(resolve_model_folder, "gs://private/model")


def test_a_model_is_downloaded_once_and_again_after_a_change(server, bucket, tmp_path, monkeypatch):
    bucket_server.put(server, f"{bucket}/m/config.json", "{}")
    bucket_server.put(server, f"{bucket}/m/model.safetensors", b"weights")
    bucket_server.put(server, f"{bucket}/m/pytorch_model.bin", b"pickle")
    bucket_server.put(server, f"{bucket}/m/onnx/model.safetensors", b"other")
    bucket_server.put(server, f"{bucket}/m2/config.json", "{}")
    folder = resolve_model_folder(f"{bucket}/m")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert shareable_model_name(f"{bucket}/m", folder) == (f"{bucket}/m", None)

    with monkeypatch.context() as patched:
        patched.setattr(downloads, "_fetch_file", None)
        assert resolve_model_folder(f"{bucket}/m/") == folder
    bucket_server.put(server, f"{bucket}/m/model.safetensors", b"trained")
    changed = resolve_model_folder(f"{bucket}/m")
    assert (changed / "model.safetensors").read_bytes() == b"trained"
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_an_interrupted_download_continues_where_it_ended(server, bucket, monkeypatch):
    contents = np.random.default_rng(0).bytes(1000)
    bucket_server.put(server, f"{bucket}/big.jsonl", contents)
    monkeypatch.setattr(downloads, "CHUNK_BYTES", 300)
    filesystem = remote.open_filesystem(bucket)
    read = filesystem.cat_file
    starts = []

    def cat_file(path, start=None, end=None):
        starts.append(start)
        if len(starts) == 3:
            raise ConnectionError("the network is gone")
        return read(path, start=start, end=end)

    monkeypatch.setattr(filesystem, "cat_file", cat_file)
    message = refusal(downloads.download_file, f"{bucket}/big.jsonl", "option")
    assert "the network is gone" in message
    path = downloads.download_file(f"{bucket}/big.jsonl", "option")
    assert path.read_bytes() == contents
    assert starts == [0, 300, 600, 600, 900]


def test_damaged_downloads_are_not_used(server, bucket, monkeypatch):
    bucket_server.put(server, f"{bucket}/a.jsonl", b"0123456789")
    filesystem = remote.open_filesystem(bucket)

    def cat_file(path, start=None, end=None):
        return b"x" * (end - start)

    with monkeypatch.context() as patched:
        patched.setattr(filesystem, "cat_file", cat_file)
        assert "changed while it was downloaded" in refusal(
            downloads.download_file, f"{bucket}/a.jsonl", "option"
        )
    assert downloads.download_file(f"{bucket}/a.jsonl", "option").read_bytes() == b"0123456789"


DOWNLOAD = """
import sys
from jax_ppo.storage import downloads
fetch = downloads._fetch_file
def counted(*arguments):
    print("downloads", flush=True)
    fetch(*arguments)
downloads._fetch_file = counted
print(downloads.download_file(sys.argv[1], "option"))
"""


@pytest.mark.slow
def test_one_process_of_a_host_downloads_and_the_others_wait(server, bucket):
    data_file(server, f"{bucket}/a.jsonl")
    command = [sys.executable, "-c", DOWNLOAD, f"{bucket}/a.jsonl"]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(2)
    ]
    printed = [process.communicate()[0].splitlines() for process in processes]
    assert sorted(map(len, printed)) == [1, 2]
    assert printed[0][-1] == printed[1][-1] and os.path.exists(printed[0][-1])


def test_a_tokenizer_is_loaded_from_a_bucket(server, bucket, tmp_path):
    from jax_ppo.data.tokenizer import load_tokenizer

    trained = train_tokenizer(["1 + 2 = 3"], 32, tmp_path / "tokenizer")
    bucket_server.put_folder(server, f"{bucket}/t", tmp_path / "tokenizer")
    assert load_tokenizer(f"{bucket}/t").encode("1 + 2") == trained.encode("1 + 2")
