"""What torch, transformers and peft compute, stored in tests/expected/ for tests without them.

Tests compare with the stored values. With `--parity` pytest computes the values again, and fails
where the stored ones differ; `tests/harness/regenerate_expected.py` stores new ones.
"""

import base64
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

EXPECTED = Path(__file__).parents[1] / "expected"
LAYOUTS = "layouts"
# Classifiers that transformers lacks, each with the base of its models and its configuration.
MISSING_CLASSIFIERS = {
    "GraniteForSequenceClassification": ("GranitePreTrainedModel", "GraniteConfig"),
    "Gemma4ForSequenceClassification": ("Gemma4PreTrainedModel", "Gemma4TextConfig"),
    "Lfm2ForSequenceClassification": ("Lfm2PreTrainedModel", "Lfm2Config"),
    "Qwen3_5MoeTextForSequenceClassification": (
        "Qwen3_5MoePreTrainedModel",
        "Qwen3_5MoeTextConfig",
    ),
}
LIBRARIES = ("torch", "transformers", "peft")
AGAIN = "store it again with tests/harness/regenerate_expected.py, which needs the extra `parity`"

mode: str | None = None  # of --parity: None, "check" or "write"
_files: dict[str, dict[str, Any]] = {}
_calls: Counter[str] = Counter()


def value(
    name: str,
    compute: Callable[[], Any],
    *inputs: Any,
    where: tuple[str, str] | None = None,
    rtol: float = 1e-4,
) -> Any:
    """Return the stored result of `compute`, which needs torch, transformers or peft.

    Args:
        name: what it is. It is stored for the running test, by this name.
        compute: returns lists and dicts of arrays (stored as float32), numbers and strings.
        inputs: what the result depends on: folders of checkpoints, arrays, and anything with a
            unique representation. The test fails if the stored result was computed from others.
        where: file and key instead of the running test's, for what several tests use.
        rtol: how far a stored number may be from one that is computed again, as a part of it or of
            the largest of its array.
    """
    file, key = where or _address(name)
    stored, digest = _read(file)["values"], _digest(inputs)
    if mode == "write":
        stored[key] = {"inputs": digest, "value": _compute(compute)}
    elif key not in stored:
        pytest.fail(f"tests/expected/{file}.json has no {key!r}: {AGAIN}")
    elif stored[key]["inputs"] != digest:
        pytest.fail(f"tests/expected/{file}.json: {key!r} was computed from other inputs: {AGAIN}")
    elif mode == "check":
        live = _decode(_compute(compute))
        _assert_near(_decode(stored[key]["value"]), live, rtol, f"{file}.json: {key}: {AGAIN}")
        return live
    return _decode(stored[key]["value"])


def _compute(compute: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # how those libraries use each other is not tested here
        return _encode(compute())


def write_files() -> None:
    """Write the values of this session, with the versions of the libraries that computed them."""
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    for file, contents in _files.items():
        path = EXPECTED / f"{file}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {key: contents["values"][key] for key in sorted(contents["values"])}
        lines = [f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in values.items()]
        body = ",\n".join(lines)
        path.write_text(f'{{"versions": {json.dumps(versions)},\n"values": {{\n{body}\n}}}}\n')


def _read(file: str) -> dict[str, Any]:
    if file not in _files:
        path = EXPECTED / f"{file}.json"
        _files[file] = json.loads(path.read_text()) if path.exists() else {"values": {}}
    return _files[file]


def _address(name: str) -> tuple[str, str]:
    """Return file and key of a value of the running test; the same name may be used again."""
    path, _, test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0].partition("::")
    key = f"{test}: {name}"
    _calls[f"{path}{key}"] += 1
    if (count := _calls[f"{path}{key}"]) > 1:
        key += f" {count}"
    file = Path(path).relative_to("tests").with_suffix("")
    return str(file.with_name(file.name.removeprefix("test_"))), key


@dataclasses.dataclass(frozen=True)
class Headers:
    """A folder whose numbers are computed here, so that their last bits depend on the machine."""

    folder: Path


def _digest(inputs: Sequence[Any]) -> str:
    digest = hashlib.sha256()
    for x in inputs:
        if isinstance(x, Path | Headers):
            _digest_folder(digest, x)
        elif isinstance(x, np.ndarray):
            digest.update(f"{x.dtype} {x.shape}".encode() + np.ascontiguousarray(x).tobytes())
        else:
            digest.update(repr(x).encode())
    return digest.hexdigest()[:16]


def _digest_folder(digest: Any, folder: Path | Headers) -> None:
    for file in sorted((folder.folder if isinstance(folder, Headers) else folder).iterdir()):
        if file.name.endswith("config.json"):
            digest.update(json.dumps(json.loads(file.read_text()), sort_keys=True).encode())
        elif file.suffix == ".safetensors":
            header, data = _parts(file)
            for name, entry in sorted(header.items()):
                digest.update(f"{name} {entry['dtype']} {entry['shape']}".encode())
                if not isinstance(folder, Headers):
                    digest.update(data[slice(*entry["data_offsets"])])


def _encode(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _encode(entry) for key, entry in x.items()}
    if isinstance(x, list | tuple):
        return [_encode(entry) for entry in x]
    if isinstance(x, np.generic):
        return x.item()
    if not isinstance(x, np.ndarray):
        return x
    dtype = "<f4" if x.dtype.kind == "f" else "<i2" if x.dtype.kind == "i" else "bool"
    packed = np.packbits(x) if dtype == "bool" else x.astype(dtype)
    assert dtype != "<i2" or (packed == x).all()
    data = base64.b64encode(packed.tobytes()).decode()
    return {"dtype": dtype, "shape": list(x.shape), "data": data}


def _decode(x: Any) -> Any:
    if isinstance(x, list):
        return [_decode(entry) for entry in x]
    if not isinstance(x, dict):
        return x
    if x.keys() != {"dtype", "shape", "data"}:
        return {key: _decode(entry) for key, entry in x.items()}
    data = base64.b64decode(x["data"])
    if x["dtype"] == "bool":
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=int(np.prod(x["shape"])))
        return bits.astype(bool).reshape(x["shape"])
    return np.frombuffer(data, x["dtype"]).reshape(x["shape"])


def _assert_near(stored: Any, live: Any, rtol: float, what: str) -> None:
    if isinstance(live, dict):
        assert stored.keys() == live.keys(), what
        stored, live = list(stored.values()), [live[key] for key in stored]
    if isinstance(live, list):
        assert len(stored) == len(live), what
        for one, other in zip(stored, live, strict=True):
            _assert_near(one, other, rtol, what)
    elif isinstance(live, float) or (isinstance(live, np.ndarray) and live.dtype.kind == "f"):
        atol = rtol * max(np.abs(live).max(initial=0), 0.01)
        np.testing.assert_allclose(stored, live, rtol=rtol, atol=atol, err_msg=what)
    else:
        np.testing.assert_array_equal(stored, live, err_msg=what)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A folder that transformers loads as a class, in a type.

    Attributes:
        folder: the folder.
        name: name of a class of transformers.
        dtype: type of the parameters once loaded.
    """

    folder: Path
    name: str = "AutoModelForCausalLM"
    dtype: str = "float32"

    def load(self) -> Any:
        """Return the model of transformers."""
        # Not "sdpa", which silently ignores soft caps.
        options = {"attn_implementation": "eager", "output_loading_info": True}
        model, info = model_class(self.name).from_pretrained(
            self.folder, dtype=self.dtype, **options
        )
        assert not info["missing_keys"] and not info["mismatched_keys"], info
        return model.eval()


def model_class(name: str) -> Any:
    """Return a class of transformers by its name, or the classifier that transformers lacks."""
    import transformers

    if name not in MISSING_CLASSIFIERS:
        return getattr(transformers, name)
    base, config = (getattr(transformers, x) for x in MISSING_CLASSIFIERS[name])
    generic = transformers.modeling_layers.GenericForSequenceClassification
    return type(name, (generic, base), {"config_class": config})


def write_checkpoint(
    folder: Path,
    name: str,
    config: dict[str, Any],
    *,
    std: float = 0.15,
    dtypes: Sequence[str] = ("float32",),
    shard_bytes: int | None = None,
) -> Checkpoint:
    """Write a folder as transformers does, with random parameters far from their initial values.

    Args:
        folder: the folder, which may not exist.
        name: name of a model's class of transformers.
        config: arguments of its configuration's class.
        std: standard deviation of the parameters; a norm's are 1 more.
        dtypes: types of the tensors, which take them in turn.
        shard_bytes: most bytes of a file, from which on there are several.
    """
    layout = value(
        "layout",
        lambda: _layout_of_transformers(name, config),
        where=(LAYOUTS, f"{name} {json.dumps(config, sort_keys=True)}"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "generation_config.json"):
        if file in layout:
            changes = {"dtype": dtypes[0]} if file == "config.json" and len(dtypes) == 1 else {}
            (folder / file).write_text(json.dumps(layout[file] | changes))
    write_tensors(folder, random_tensors(layout["tensors"], std, dtypes), shard_bytes)
    return Checkpoint(folder, name)


def random_tensors(
    tensors: dict[str, list[int]], std: float, dtypes: Sequence[str] = ("float32",)
) -> dict[str, np.ndarray]:
    """Return the tensors that `write_checkpoint` writes."""
    rng, filled = np.random.default_rng(7), {}
    for i, (name, shape) in enumerate(sorted(tensors.items())):
        # Numbers that no library of mathematical functions rounds in its own way.
        x = (rng.random(shape, np.float32) - np.float32(0.5)) * np.float32(12**0.5 * std)
        is_norm = name.endswith("weight") and ("norm" in name.lower() or ".ln_" in name)
        is_factor = is_norm or name.endswith("layer_scalar")
        filled[name] = (x + is_factor).astype(jnp.dtype(dtypes[i % len(dtypes)]))
    return filled


def write_tensors(
    folder: Path, tensors: dict[str, np.ndarray], shard_bytes: int | None = None
) -> None:
    """Write tensors to one file, or to several and the index that transformers writes for them."""
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, x in tensors.items():
        held = sum(other.nbytes for other in shards[-1].values())
        if shard_bytes and held and held + x.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = x
    if len(shards) == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, {"format": "pt"})
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    size = {"total_size": sum(x.nbytes for x in tensors.values())}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": size, "weight_map": weight_map})
    )


def _layout_of_transformers(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration files, and names and shapes of the tensors, of a saved model."""
    import torch

    cls = model_class(name)
    torch.manual_seed(0)
    model = cls(cls.config_class(attn_implementation="eager", **config))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        layout = {file.name: json.loads(file.read_text()) for file in Path(folder).glob("*.json")}
        for contents in layout.values():
            contents.pop("transformers_version")
        return layout | {"tensors": shapes(Path(folder) / "model.safetensors")}


def shapes(file: Path) -> dict[str, list[int]]:
    """Return the names and shapes of the tensors of a safetensors file."""
    return {name: entry["shape"] for name, entry in _parts(file)[0].items()}


def _parts(file: Path) -> tuple[dict[str, Any], bytes]:
    """Return the header of a safetensors file, without its metadata, and the bytes behind it."""
    contents = file.read_bytes()
    end = 8 + int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8:end])
    header.pop("__metadata__", None)
    return header, contents[end:]
