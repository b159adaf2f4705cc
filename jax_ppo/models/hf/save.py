"""Parameters out, as a folder that transformers loads: weights, configuration and the tokenizer's files."""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf.config import to_hf_config
from jax_ppo.models.hf.files import INDEX_FILE, SAFETENSORS_DTYPES, SINGLE_FILE, write_safetensors
from jax_ppo.models.hf.names import adapter_tensor_table, flatten_like, tensor_table
from jax_ppo.models.lora import Lora, merge_kernel

EXPORT_DTYPES = {
    "float32": "F32",
    "bfloat16": "BF16",
}  # not float16: its range is smaller than the parameters' may be
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)
GIB = 1024**3


def export_checkpoint(
    params: dict,
    architecture: Architecture,
    folder: str | Path,
    *,
    dtype: str = "float32",
    source_folder: str | Path | None = None,
    tokenizer_folder: str | Path | None = None,
    max_shard_bytes: int = 4 * GIB,
    adapters: dict | None = None,
    lora: Lora | None = None,
) -> None:
    """Writes a Hugging Face folder: a causal language model, or with a scalar head a sequence classifier of one label.

    The folder appears whole or not at all: it is written beside its place and renamed. One tensor is on the host at a
    time. In a run of several processes all call it, and process 0 writes.

    Args:
      params: of one role, in the stacked form (transformer.py, heads.py), on any devices.
      architecture: theirs.
      folder: where to; an earlier export there is replaced.
      dtype: of the weights in the files: "float32" or "bfloat16".
      source_folder: whose tokenizer files and generation defaults are taken along.
      tokenizer_folder: whose tokenizer files are taken instead, where the two differ.
      max_shard_bytes: a weight file is no larger (but holds one tensor at least).
      adapters, lora: of adapters that are merged into `params` on the way, one tensor at a time.

    Raises:
      ValueError: `params` is not of this architecture, or `dtype` is neither of the two.
      FileExistsError: `folder` holds something that is no export.
    """
    if dtype not in EXPORT_DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(map(repr, EXPORT_DTYPES))}")
    head = "scalar" if "score" in params else "lm"
    rows = tensor_table(architecture, head)
    arrays = flatten_like(params, rows, "`params`")
    for path, row in rows.items():
        if tuple(arrays[path].shape) != row.full_shape:
            raise ValueError(
                f"{'/'.join(path)} has shape {list(arrays[path].shape)}, the architecture makes it "
                f"{list(row.full_shape)}"
            )
    if adapters is not None:
        arrays = _with_adapters(arrays, adapters, architecture, lora)
    folder = Path(folder)
    with atomic_folder(folder, "config.json", "model*.safetensors") as temporary:
        if temporary:
            write_json(temporary / "config.json", to_hf_config(architecture, dtype, head))
            write_json(
                temporary / "generation_config.json",
                _generation_config(architecture, source_folder),
            )
            if tokenizer := tokenizer_folder or source_folder:
                _copy_tokenizer(Path(tokenizer), temporary)
        write_weights(temporary, rows, arrays, dtype, max_shard_bytes)


@contextlib.contextmanager
def atomic_folder(folder: Path, config: str, weights: str) -> Iterator[Path | None]:
    """A folder that appears whole or not at all, in the place of an earlier one of the kind, or of none.

    Args:
      config, weights: a file's name, and a pattern of others, that each such folder has.

    Yields:
      where to write; None in the other processes, which wait at the end until the folder is there.

    Raises:
      FileExistsError: `folder` holds something else.
    """
    _refuse_foreign(folder, config, weights)
    writer, temporary = jax.process_index() == 0, folder.with_name(f".{folder.name}.writing")
    if writer:
        shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed
        temporary.mkdir(parents=True)
    yield temporary if writer else None
    if writer:
        _replace(folder, temporary)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(
            "export"
        )  # nobody looks for the folder before it is there


@dataclasses.dataclass(frozen=True)
class MergedKernel:
    """A kernel and its adapters, [L, in, out], [L, in, r] and [L, r, out], in the place of an array."""

    kernel: jax.Array
    lora_a: jax.Array
    lora_b: jax.Array
    scale: float


def _with_adapters(arrays, adapters, architecture, lora):
    rows = adapter_tensor_table(architecture, lora.rank, lora.targets, "lm")
    flat = flatten_like(adapters, rows, "`adapters`")
    together = {}
    for *path, _ in rows:
        a, b = flat[*path, "lora_a"], flat[*path, "lora_b"]
        together[*path, "kernel"] = MergedKernel(arrays[*path, "kernel"], a, b, lora.scale)
    return arrays | together


def _generation_config(architecture, source_folder):
    """The source's sampling defaults with the architecture's special tokens."""
    source = Path(source_folder or "") / "generation_config.json"
    config = (
        json.loads(source.read_text(encoding="utf-8")) if source_folder and source.exists() else {}
    )
    ids = {
        "bos_token_id": architecture.bos_id,
        "eos_token_id": list(architecture.eos_ids) or None,
        "pad_token_id": architecture.pad_id,
    }
    return config | {name: value for name, value in ids.items() if value is not None}


def _copy_tokenizer(source, target):
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)  # follows the links of the hub's cache


def write_weights(folder, rows, arrays, dtype, max_shard_bytes, single=SINGLE_FILE):
    """The weight files and, for several, their index. `folder` None: only takes part in gathering the arrays.

    `single`: the name of the file, if it is one.
    """
    code = EXPORT_DTYPES[dtype]
    shards = _shards(rows, SAFETENSORS_DTYPES[code].itemsize, max_shard_bytes)
    total, weight_map = 0, {}
    for i, shard in enumerate(shards, 1):
        file = single if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        header = {name: (code, rows[paths[0]].hf_shape) for name, paths, _ in shard}
        tensors = (
            _joined([_on_host(arrays[path], rows[path], layer, dtype) for path in paths])
            for _, paths, layer in shard
        )
        write_safetensors(folder and folder / file, header, tensors)
        weight_map |= dict.fromkeys(header, file)
        total += sum(
            int(np.prod(shape)) * SAFETENSORS_DTYPES[code].itemsize for _, shape in header.values()
        )
    if folder is not None and len(shards) > 1:
        write_json(
            folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map}
        )


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


@functools.partial(jax.jit, static_argnames=("dtype", "scale"))
def _one_merged(kernel, lora_a, lora_b, layer, dtype, scale):
    parts = (
        jax.lax.dynamic_index_in_dim(array, layer, 0, keepdims=False)
        for array in (kernel, lora_a, lora_b)
    )
    return merge_kernel(*parts, scale).astype(dtype)


def _on_host(array, row, layer, dtype) -> np.ndarray:
    """One tensor as the checkpoint has it. A collective operation where the array spans processes."""
    if isinstance(array, MergedKernel):
        array = _one_merged(array.kernel, array.lora_a, array.lora_b, layer, dtype, array.scale)
    else:
        array = _one(array, layer or 0, dtype, layer is not None)
    if not array.is_fully_addressable:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array).T if row.transposed else np.asarray(array)


def _refuse_foreign(folder, config, weights):
    """Nothing but an earlier export is ever replaced."""
    ours = (folder / config).exists() and any(folder.glob(weights))
    if folder.exists() and not ours and (folder.is_file() or any(folder.iterdir())):
        raise FileExistsError(
            f"{folder} exists and holds something else; remove it or export to another folder"
        )


def _replace(folder, temporary):
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
