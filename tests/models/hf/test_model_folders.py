"""Location of checkpoints: local folders, a local hub server, and every way to find none."""

import hashlib
import json
import os
import socket
import time

import pytest

from jax_ppo.errors import UserError
from jax_ppo.models.hf.model_folders import resolve_model_folder, shareable_model_name
from jax_ppo.storage import hub
from serving import QuietHandler, serving
from waiting import keep_port

constants = pytest.importorskip("huggingface_hub.constants")
SHA = "a" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"pickle",
    "onnx/model.safetensors": b"another",
    "other/config.json": b"{}",
    "additional_chat_templates/rag.jinja": b"template",
}


class Hub(QuietHandler):
    """The part of the hub's interface that a download needs.

    ada/tiny is public and ada/locked is gated. Only the files of ada/shut are gated, as on the real
    hub, which lists them for anyone.
    """

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        if "/resolve/" not in path:
            path = path.replace("ada/shut", "ada/tiny")
        if path in (
            "/api/models/ada/tiny/revision/main",
            "/api/models/ada/tiny/revision/refs%2Fpr%2F1",
        ):
            self.send(json.dumps({"id": "ada/tiny", "sha": SHA, "siblings": []}).encode())
        elif path == f"/api/models/ada/tiny/tree/{SHA}":
            files = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for name, data in FILES.items()
            ]
            self.send(json.dumps(files).encode())
        elif path.startswith(f"/ada/tiny/resolve/{SHA}/"):
            self.send(FILES[path.removeprefix(f"/ada/tiny/resolve/{SHA}/")])
        else:
            gated = "locked" in path or "shut" in path
            kind = (
                "GatedRepo" if gated else "RevisionNotFound" if "tiny" in path else "RepoNotFound"
            )
            self.send(b"{}", 403 if kind == "GatedRepo" else 404, {"X-Error-Code": kind})

    def send(self, data, status=200, headers=()):
        etag = hashlib.sha1(data).hexdigest()
        self.answer(status, data, {"ETag": f'"{etag}"', "X-Repo-Commit": SHA, **dict(headers)})


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "TIMEOUT_SECONDS", 60)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def online(monkeypatch):
    with serving(Hub) as server:
        # These two are what HF_ENDPOINT sets.
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield


@pytest.fixture
def offline(monkeypatch):
    with keep_port() as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        yield


def refusal(*arguments):
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        resolve_model_folder(*arguments)
    assert time.monotonic() - start < 60  # the hub's own client retries for minutes
    return str(caught.value)


def test_a_folder_is_taken_as_it_is(tmp_path, offline, monkeypatch):
    (tmp_path / "model").mkdir()
    assert resolve_model_folder(str(tmp_path / "model")) == tmp_path / "model"
    assert resolve_model_folder("model").resolve() == tmp_path / "model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_folder("~/model") == tmp_path / "model"


def test_a_hub_name_is_fetched_once_without_pickles_and_subfolders(online, monkeypatch):
    folder = resolve_model_folder("ada/tiny")
    files = (path for path in folder.rglob("*") if not path.is_dir())
    assert {path.relative_to(folder).as_posix() for path in files} == {
        "additional_chat_templates/rag.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert resolve_model_folder("ada/tiny") == folder  # from the cache


@pytest.mark.parametrize("path", ["~nouser/model", "x" * 5000])
def test_a_path_that_cannot_be_looked_up_is_named(path):
    with pytest.raises(UserError, match="config.model.path=.*not a usable path") as error:
        resolve_model_folder(path)
    assert len(str(error.value)) < 300


def test_where_others_find_a_model(tmp_path):
    (tmp_path / "model").mkdir()
    assert shareable_model_name("model", tmp_path / "model") == (str(tmp_path / "model"), None)
    assert shareable_model_name("", tmp_path / "model") == (str(tmp_path / "model"), None)
    assert shareable_model_name("ada/tiny@v1", tmp_path / "cache") == ("ada/tiny", "v1")
    assert shareable_model_name("ada/tiny", tmp_path / "cache") == ("ada/tiny", "main")


def test_a_revision_is_asked_for_and_kept_by_its_name(online, monkeypatch):
    folder = resolve_model_folder("ada/tiny@refs/pr/1")
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert resolve_model_folder("ada/tiny@refs/pr/1") == folder
    assert "cannot be reached" in refusal("ada/tiny")  # another revision, which is not in the cache


def test_what_the_hub_refuses(online):
    message = refusal("ada/huge")
    assert "config.model.path='ada/huge'" in message and "has no repository of this name" in message
    assert "HF_TOKEN" in message
    assert "has no revision 'v9'" in refusal("ada/tiny@v9")
    assert "is gated: accept its terms there and set HF_TOKEN" in refusal("ada/locked")
    assert "/ada/shut is gated: accept its terms there and set HF_TOKEN" in refusal("ada/shut")
    assert "it is not a hub name" in refusal("ada..x/tiny")


def test_no_network(offline, tmp_path):
    message = refusal("Qwen/Qwen2.5-0.5B-Instruct", "config.critic.path")
    assert message.startswith(
        "config.critic.path='Qwen/Qwen2.5-0.5B-Instruct': there is no such folder (looked from "
    )
    assert "cannot be reached (ConnectError" in message
    assert "set config.critic.path to a folder with config.json and model.safetensors" in message
    assert (
        "`hf download Qwen/Qwen2.5-0.5B-Instruct --revision main --local-dir Qwen2.5-0.5B-Instruct`"
        in message
    )
    (tmp_path / "Qwen2.5-0.5B").mkdir()
    assert "(the nearest one here is Qwen2.5-0.5B)" in refusal("Qwen2.5-05B")


def test_a_hub_that_is_turned_off(online, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refusal("ada/tiny")


def test_a_hub_that_never_answers(monkeypatch):
    monkeypatch.setattr(hub, "TIMEOUT_SECONDS", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "cannot be reached (ReadTimeout" in refusal("ada/tiny")


def test_wrong_paths_name_the_nearest_folder(tmp_path, offline):
    (tmp_path / "models/qwen-0.5b").mkdir(parents=True)
    models = f"{tmp_path}/models"
    assert refusal(f"{models}/qwen-05b") == (
        f"config.model.path='{models}/qwen-05b': there is no such folder "
        f"(looked from {os.getcwd()}), and the path is not a hub name, OWNER/NAME; "
        "set config.model.path to a folder with config.json and model.safetensors "
        f"(the nearest one here is {models}/qwen-0.5b)"
    )
    assert f"the nearest one here is {tmp_path}/models/qwen-0.5b)" in refusal(
        str(tmp_path / "Models/qwen-0.5b")
    )
    assert "nearest" not in refusal(str(tmp_path / "models/zebra"))
    (tmp_path / "weights.bin").touch()
    assert "this is a file; set config.model.path to a folder" in refusal(
        str(tmp_path / "weights.bin")
    )
    assert "config.data.x='': must be set" in refusal("", "config.data.x")


def test_the_work_directory_of_a_run_names_its_models(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "training_metrics.csv").touch()
    with pytest.raises(
        UserError, match="config.critic.path=.*: is the work directory of a run; it"
    ):
        resolve_model_folder(str(tmp_path), "config.critic.path")
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"run; a model of it is {tmp_path}/actor$"):
        resolve_model_folder(str(tmp_path), "config.critic.path")
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    with pytest.raises(UserError, match=f"is a checkpoint of a run; a model of it is {tmp_path}/a"):
        resolve_model_folder(str(tmp_path / "checkpoints" / "3"), "config.model.path")
