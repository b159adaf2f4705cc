"""Parameters out, as a folder that transformers loads: weights, configuration and the tokenizer's files."""

import functools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_ppo.models import hf_files, hf_names
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf_config import to_hf_config

DTYPES = {"float32": "F32", "bfloat16": "BF16"}  # not float16: its range is smaller than the parameters' may be
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
                   "chat_template*")
GIB = 1024**3


def export(params: dict, architecture: Architecture, folder: str | Path, *, dtype: str = "float32",
           source_folder: str | Path | None = None, max_shard_bytes: int = 4 * GIB) -> None:
    """Writes a Hugging Face folder: a causal language model, or with a scalar head a sequence classifier of one label.

    The folder appears whole or not at all: it is written beside its place and renamed. One tensor is on the host at a
    time. In a run of several processes all call it, and process 0 writes.

    Args:
      params: of one role, in the stacked form (transformer.py, heads.py), on any devices.
      architecture: theirs.
      folder: where to; an earlier export there is replaced.
      dtype: of the weights in the files: "float32" or "bfloat16".
      source_folder: whose tokenizer files and generation defaults are taken along.
      max_shard_bytes: a weight file is no larger (but holds one tensor at least).

    Raises:
      ValueError: `params` is not of this architecture, or `dtype` is neither of the two.
      FileExistsError: `folder` holds something that is no export.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(map(repr, DTYPES))}")
    head = "scalar" if "score" in params else "lm"
    rows = hf_names.table(architecture, head)
    arrays = hf_names.flatten_like(params, rows, "`params`")
    for path, row in rows.items():
        if tuple(arrays[path].shape) != row.full_shape:
            raise ValueError(f"{'/'.join(path)} has shape {list(arrays[path].shape)}, the architecture makes it "
                             f"{list(row.full_shape)}")
    folder = Path(folder)
    _refuse_foreign(folder)
    writer = jax.process_index() == 0
    temporary = folder.with_name(f".{folder.name}.writing")
    if writer:
        shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
        temporary.mkdir(parents=True)
        _write_json(temporary / "config.json", to_hf_config(architecture, dtype, head))
        _write_json(temporary / "generation_config.json", _generation_config(architecture, source_folder))
        if source_folder is not None:
            _copy_tokenizer(Path(source_folder), temporary)
    _write_weights(temporary if writer else None, rows, arrays, dtype, max_shard_bytes)
    if writer:
        _replace(folder, temporary)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("export")  # nobody looks for the folder before it is there


def _generation_config(architecture, source_folder):
    """The source's sampling defaults with the architecture's special tokens."""
    source = Path(source_folder or "") / "generation_config.json"
    config = json.loads(source.read_text(encoding="utf-8")) if source_folder and source.exists() else {}
    ids = {"bos_token_id": architecture.bos_id, "eos_token_id": list(architecture.eos_ids) or None,
           "pad_token_id": architecture.pad_id}
    return config | {name: value for name, value in ids.items() if value is not None}


def _copy_tokenizer(source, target):
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)  # follows the links of the hub's cache


def _write_weights(folder, rows, arrays, dtype, max_shard_bytes):
    """The weight files and, for several, their index. `folder` None: only takes part in gathering the arrays."""
    code = DTYPES[dtype]
    shards = _shards(rows, hf_files.DTYPES[code].itemsize, max_shard_bytes)
    total, weight_map = 0, {}
    for i, shard in enumerate(shards, 1):
        file = hf_files.SINGLE if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        header = {name: (code, rows[paths[0]].hf_shape) for name, paths, _ in shard}
        tensors = (_joined([_on_host(arrays[path], rows[path], layer, dtype) for path in paths]) for _, paths, layer in shard)
        hf_files.write(folder and folder / file, header, tensors)
        weight_map |= dict.fromkeys(header, file)
        total += sum(int(np.prod(shape)) * hf_files.DTYPES[code].itemsize for _, shape in header.values())
    if folder is not None and len(shards) > 1:
        _write_json(folder / hf_files.INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(rows, itemsize, max_bytes) -> list[list[tuple[str, list[tuple[str, ...]], int | None]]]:
    """(checkpoint's name, our paths, layer) of every tensor, in files of at most `max_bytes`."""
    shards, room = [], 0
    for name, paths, layer in _in_order(rows):
        size = int(np.prod(rows[paths[0]].hf_shape)) * itemsize
        if not shards or size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append((name, paths, layer))
        room -= size
    return shards


def _in_order(rows) -> Iterator[tuple[str, list[tuple[str, ...]], int | None]]:
    """Layer after layer, as checkpoints are usually cut."""
    outside, stacked = {}, {}
    for path, row in rows.items():  # several paths have one name where the checkpoint fuses them
        (outside if row.layers is None else stacked).setdefault(row.name, []).append(path)
    yield from ((name, paths, None) for name, paths in outside.items())
    for layer in range(max(row.layers for row in rows.values() if row.layers is not None)):
        yield from ((name.format(layer), paths, layer) for name, paths in stacked.items())


def _joined(parts):
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@functools.partial(jax.jit, static_argnames=("dtype", "stacked"))
def _one(array, layer, dtype, stacked):
    one = jax.lax.dynamic_index_in_dim(array, layer, 0, keepdims=False) if stacked else array
    return one.astype(dtype)


def _on_host(array, row, layer, dtype) -> np.ndarray:
    """One tensor as the checkpoint has it. A collective operation where the array spans processes."""
    array = _one(array, layer or 0, dtype, layer is not None)
    if not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array).T if row.transposed else np.asarray(array)


def _refuse_foreign(folder):
    """Nothing but an earlier export is ever replaced."""
    ours = (folder / "config.json").exists() and any(folder.glob("model*.safetensors"))
    if folder.exists() and not ours and (folder.is_file() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is no exported model; remove it or export to another folder")


def _replace(folder, temporary):
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)


def _write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
