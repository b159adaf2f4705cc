"""Export of parameters as a folder that transformers loads: weights, config and tokenizer files."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf import tensors
from jax_ppo.models.hf.config import to_hf_config, update_hf_config
from jax_ppo.models.hf.files import (
    INDEX_FILE,
    SAFETENSORS_DTYPES,
    SINGLE_FILE,
    write_safetensors,
)
from jax_ppo.models.hf.json_files import read_json_object
from jax_ppo.models.hf.names import adapter_tensor_table, tensor_table
from jax_ppo.models.hf.tensors import TensorMapping, TensorTable, flatten_like
from jax_ppo.models.lora import Lora, merge_kernel
from jax_ppo.storage import disk_space

# Not float16, whose range is smaller than that of the parameters.
EXPORT_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)
GIB = 1024**3


@dataclasses.dataclass(frozen=True)
class MergedKernel:
    """A kernel and its adapters, which take the place of one array in an export.

    Attributes:
      kernel: [L, in, out].
      lora_a: [L, in, r].
      lora_b: [L, r, out].
      scale: Factor on the product of the adapters.
    """

    kernel: jax.Array
    lora_a: jax.Array
    lora_b: jax.Array
    scale: float


@dataclasses.dataclass(frozen=True)
class ExportedTensor:
    """One tensor of an exported checkpoint.

    Attributes:
      name: Its name in the checkpoint.
      paths: Our parameters that it holds, in order along its first axis.
      layer: The layer that it belongs to, or `None`.
    """

    name: str
    paths: list[tensors.Path]
    layer: int | None


Arrays = Mapping[tensors.Path, jax.Array | MergedKernel]


def export_checkpoint(
    params: dict[str, Any],
    architecture: Architecture,
    folder: str | Path,
    *,
    dtype: str = "float32",
    source_folder: str | Path | None = None,
    tokenizer_folder: str | Path | None = None,
    max_shard_bytes: int = 4 * GIB,
    adapters: dict[str, Any] | None = None,
    lora: Lora | None = None,
) -> None:
    """Write a Hugging Face folder: a causal language model or, with a scalar head, a classifier.

    The folder appears complete or not at all: it is written under another name and renamed. One
    tensor is in host memory at a time. In a run of several processes, all of them must call this;
    process 0 writes.

    Args:
      params: Parameters of one role in the stacked form (transformer.py, heads.py), on any devices.
      architecture: Their architecture.
      folder: The folder; an earlier export in it is replaced.
      dtype: Type of the weights in the files, "float32" or "bfloat16".
      source_folder: Folder of the checkpoint that the model started from. Its tokenizer files and
        generation defaults are copied, and the fields of config.json that need not change.
      tokenizer_folder: Folder whose tokenizer files are copied instead, if it differs.
      max_shard_bytes: Maximum size of a weight file, unless a single tensor is larger.
      adapters: Adapters to merge into `params` during the export, one tensor at a time.
      lora: Shape of the adapters.

    Raises:
      ValueError: `params` does not fit the architecture, or `dtype` is unknown.
      FileExistsError: `folder` holds something other than an export.
    """
    if dtype not in EXPORT_DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(map(repr, EXPORT_DTYPES))}")
    head = "scalar" if "score" in params else "lm"
    rows = tensor_table(architecture, head)
    arrays = flatten_like(params, rows, "`params`")
    _validate_shapes(arrays, rows)
    if adapters is not None and lora is not None:
        arrays |= _merged_kernels(arrays, adapters, architecture, lora)
    with atomic_folder(Path(folder), "config.json", "model*.safetensors") as temporary:
        if temporary:
            write_json(
                temporary / "config.json", _model_config(architecture, dtype, head, source_folder)
            )
            write_json(
                temporary / "generation_config.json",
                _generation_config(architecture, source_folder),
            )
            if tokenizer := tokenizer_folder or source_folder:
                _copy_tokenizer(Path(tokenizer), temporary)
        write_weights(temporary, rows, arrays, dtype, max_shard_bytes)


def _validate_shapes(arrays: Mapping[tensors.Path, jax.Array], rows: TensorTable) -> None:
    for path, row in rows.items():
        shape = tuple(arrays[path].shape)
        if shape != row.full_shape:
            raise ValueError(
                f"{'/'.join(path)} has shape {list(shape)}, the architecture makes it "
                f"{list(row.full_shape)}"
            )


@contextlib.contextmanager
def atomic_folder(folder: Path, config: str, weights: str) -> Iterator[Path | None]:
    """Yield a temporary folder that replaces `folder` on exit, so that it is never incomplete.

    Args:
      folder: The folder; it may hold an earlier export of the same kind, or nothing.
      config: Name of a file that each such export has.
      weights: Pattern of other files that each such export has.

    Yields:
      The folder to write to in process 0, and `None` in the other processes, which wait on exit
      until `folder` exists.

    Raises:
      FileExistsError: `folder` holds something else.
    """
    _refuse_foreign_folder(folder, config, weights)
    is_writer = jax.process_index() == 0
    temporary = folder.with_name(f".{folder.name}.writing")
    if is_writer:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a killed run
        temporary.mkdir(parents=True)
    yield temporary if is_writer else None
    if is_writer:
        _replace(folder, temporary)
    if jax.process_count() > 1:
        # No process looks for the folder before it exists.
        multihost_utils.sync_global_devices("export")


def _merged_kernels(
    arrays: Mapping[tensors.Path, jax.Array],
    adapters: dict[str, Any],
    architecture: Architecture,
    lora: Lora,
) -> dict[tensors.Path, MergedKernel]:
    """Return the kernels that have adapters, together with these."""
    rows = adapter_tensor_table(architecture, lora.rank, lora.targets, "lm")
    flat = flatten_like(adapters, rows, "`adapters`")
    merged = {}
    for *path, _ in rows:
        merged[*path, "kernel"] = MergedKernel(
            kernel=arrays[*path, "kernel"],
            lora_a=flat[*path, "lora_a"],
            lora_b=flat[*path, "lora_b"],
            scale=lora.scale,
        )
    return merged


def _model_config(
    architecture: Architecture, dtype: str, head: str, source_folder: str | Path | None
) -> dict[str, Any]:
    """Return the contents of config.json, with the source's fields that need not change."""
    source = None if source_folder is None else Path(source_folder) / "config.json"
    if source is None or not source.exists():
        return to_hf_config(architecture, dtype, head)
    return update_hf_config(read_json_object(source), architecture, dtype, head)


def _generation_config(
    architecture: Architecture, source_folder: str | Path | None
) -> dict[str, Any]:
    """Return the source's generation defaults with the architecture's special tokens."""
    config = {}
    if source_folder is not None:
        source = Path(source_folder) / "generation_config.json"
        if source.exists():
            config = read_json_object(source)
    ids = {
        "bos_token_id": architecture.bos_id,
        "eos_token_id": list(architecture.eos_ids) or None,
        "pad_token_id": architecture.pad_id,
    }
    return config | {name: value for name, value in ids.items() if value is not None}


def _copy_tokenizer(source: Path, target: Path) -> None:
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                copy = target / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)  # follows the links of the hub's cache


def write_weights(
    folder: Path | None,
    rows: TensorTable,
    arrays: Arrays,
    dtype: str,
    max_shard_bytes: int,
    single_file: str = SINGLE_FILE,
) -> None:
    """Write the weight files and, if there are several, their index.

    Args:
      folder: The folder; `None` only takes part in gathering the arrays.
      rows: The tensor table.
      arrays: The parameters by path.
      dtype: One of `EXPORT_DTYPES`.
      max_shard_bytes: Maximum size of a file, unless a single tensor is larger.
      single_file: Name of the file if there is only one.
    """
    code = EXPORT_DTYPES[dtype]
    itemsize = SAFETENSORS_DTYPES[code].itemsize
    if folder is not None:
        needed = sum(math.prod(row.full_shape) for row in rows.values()) * itemsize
        disk_space.require_free_space(folder.parent, needed, "an export of the weights")
    shards = _split_into_shards(rows, itemsize, max_shard_bytes)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        if len(shards) == 1:
            file = single_file
        header = {tensor.name: (code, rows[tensor.paths[0]].hf_shape) for tensor in shard}
        contents = (_gather_tensor(arrays, rows, tensor, dtype) for tensor in shard)
        write_safetensors(folder and folder / file, header, contents)
        weight_map |= dict.fromkeys(header, file)
        total_bytes += sum(int(np.prod(shape)) * itemsize for _, shape in header.values())
    if folder is not None and len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(folder / INDEX_FILE, index)


def _split_into_shards(
    rows: TensorTable, itemsize: int, max_bytes: int
) -> list[list[ExportedTensor]]:
    """Split the tensors into files of at most `max_bytes`."""
    shards: list[list[ExportedTensor]] = []
    free_bytes = 0
    for tensor in _in_order(rows):
        size = int(np.prod(rows[tensor.paths[0]].hf_shape)) * itemsize
        if not shards or size > free_bytes:
            shards.append([])
            free_bytes = max_bytes
        shards[-1].append(tensor)
        free_bytes -= size
    return shards


def _in_order(rows: TensorTable) -> Iterator[ExportedTensor]:
    """Yield the tensors layer by layer, as checkpoints are usually split."""
    # Several paths share a name where the checkpoint stores them as one tensor.
    outside: dict[str, list[tensors.Path]] = {}
    stacked: dict[str, list[tensors.Path]] = {}
    for path, row in rows.items():
        (outside if row.layers is None else stacked).setdefault(row.name, []).append(path)
    for name, paths in outside.items():
        yield ExportedTensor(name, paths, layer=None)
    for layer in range(max(row.layers for row in rows.values() if row.layers is not None)):
        for name, paths in stacked.items():
            yield ExportedTensor(name.format(layer), paths, layer)


def _gather_tensor(
    arrays: Arrays, rows: TensorTable, tensor: ExportedTensor, dtype: str
) -> np.ndarray:
    """Return a checkpoint tensor, which may consist of several of our parameters."""
    parts: Sequence[np.ndarray] = [
        _to_host(arrays[path], rows[path], tensor.layer, dtype) for path in tensor.paths
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@functools.partial(jax.jit, static_argnames=("dtype", "stacked"))
def _select_layer(array: jax.Array, layer: int, dtype: str, stacked: bool) -> jax.Array:
    if stacked:
        array = jax.lax.dynamic_index_in_dim(array, layer, 0, keepdims=False)
    return array.astype(dtype)


@functools.partial(jax.jit, static_argnames=("dtype", "scale"))
def _select_merged_layer(
    kernel: jax.Array, lora_a: jax.Array, lora_b: jax.Array, layer: int, dtype: str, scale: float
) -> jax.Array:
    kernel, lora_a, lora_b = (
        jax.lax.dynamic_index_in_dim(array, layer, 0, keepdims=False)
        for array in (kernel, lora_a, lora_b)
    )
    return merge_kernel(kernel, lora_a, lora_b, scale).astype(dtype)


def _to_host(
    array: jax.Array | MergedKernel, row: TensorMapping, layer: int | None, dtype: str
) -> np.ndarray:
    """Return one parameter as the checkpoint stores it.

    This is a collective operation if the array spans processes.
    """
    if isinstance(array, MergedKernel):
        assert layer is not None  # every projection belongs to a layer
        one_layer = _select_merged_layer(
            array.kernel, array.lora_a, array.lora_b, layer, dtype=dtype, scale=array.scale
        )
    else:
        one_layer = _select_layer(array, layer or 0, dtype=dtype, stacked=layer is not None)
    if not one_layer.is_fully_addressable:
        one_layer = multihost_utils.process_allgather(one_layer, tiled=True)
    values = np.asarray(one_layer)
    return values.T if row.transposed else values


def _refuse_foreign_folder(folder: Path, config: str, weights: str) -> None:
    """Raise `FileExistsError` if the folder holds anything but an earlier export."""
    is_export = (folder / config).exists() and any(folder.glob(weights))
    if folder.exists() and not is_export and (folder.is_file() or any(folder.iterdir())):
        raise FileExistsError(
            f"{folder} exists and holds something else; remove it or export to another folder"
        )


def _replace(folder: Path, temporary: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Write a value as an indented JSON file."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
