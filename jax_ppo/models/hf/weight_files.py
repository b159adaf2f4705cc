"""Weight files of an export, which all processes write at the same time, tensor by tensor."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from jax.sharding import NamedSharding

from jax_ppo.models.architecture import EXACT_PARAMETERS, Architecture
from jax_ppo.models.hf import tensors
from jax_ppo.models.hf.fields import write_json
from jax_ppo.models.hf.files import SAFETENSORS_DTYPES, write_safetensors
from jax_ppo.models.hf.model_folders import INDEX_FILE, SINGLE_FILE
from jax_ppo.models.hf.names import adapter_tensor_table
from jax_ppo.models.hf.tensors import TensorTable
from jax_ppo.models.lora import Lora, merge_kernel
from jax_ppo.runtime import distributed, sharding, work_directory
from jax_ppo.storage import local_files
from jax_ppo.types import Params

GIB = 1024**3
MAX_SHARD_BYTES = 4 * GIB  # of a weight file, unless a single tensor is larger
# Not float16, whose range is smaller than that of the parameters.
EXPORT_DTYPES = {"float32": "F32", "bfloat16": "BF16"}


@dataclasses.dataclass(frozen=True)
class MergedKernel:
    """A kernel and its adapters, which take the place of one array in an export."""

    arrays: tuple[jax.Array, ...]  # kernel [L, in, out], lora_a [L, in, r], lora_b [L, r, out]
    scale: float


@dataclasses.dataclass(frozen=True)
class ExportedTensor:
    """One tensor of an exported checkpoint."""

    name: str
    paths: list[tensors.Path]  # our parameters that it holds, in order
    index: tuple[int, ...] = ()  # the layer, and perhaps the expert, that it belongs to


Arrays = Mapping[tensors.Path, jax.Array | MergedKernel]


def merge_adapters(
    params: Params, adapters: Params, architecture: Architecture, lora: Lora
) -> dict[str, Any]:
    """Return parameters to export with adapters, which are merged one tensor at a time."""
    rows = adapter_tensor_table(architecture, lora.rank, lora.targets, "lm")
    flat = tensors.flatten_like(adapters, rows, "`adapters`")
    merged: dict[tensors.Path, Any] = traverse_util.flatten_dict(params)
    for path in {path[:-1] for path in rows}:
        arrays = (merged[*path, "kernel"], flat[*path, "lora_a"], flat[*path, "lora_b"])
        merged[*path, "kernel"] = MergedKernel(arrays, lora.scale)
    return traverse_util.unflatten_dict(merged)


def write_weights(
    folder: Path, rows: TensorTable, arrays: Arrays, dtype: str, only_file: str = ""
) -> None:
    """Write the weight files of an export and, if there are several, their index.

    They go to the temporary folder of `folder`: one `only_file`, or files of at most
    `MAX_SHARD_BYTES`. All processes must call this.
    """
    itemsize = SAFETENSORS_DTYPES[EXPORT_DTYPES[dtype]].itemsize
    total_bytes = sum(
        math.prod(row.full_shape) * SAFETENSORS_DTYPES[_code(path, dtype)].itemsize
        for path, row in rows.items()
    )
    temporary = temporary_folder(folder)
    bucket = work_directory.bucket_of(folder)
    if distributed.is_main() or bucket:
        # Files that go to a bucket are on this disk one at a time.
        needed = total_bytes
        if bucket and not only_file:
            needed = min(total_bytes, MAX_SHARD_BYTES)
        local_files.require_free_space(folder.parent, needed, "an export of the weights")
    shards = _split_into_shards(rows, itemsize, total_bytes if only_file else MAX_SHARD_BYTES)
    count = len(shards)
    names = [only_file or SINGLE_FILE]
    if count > 1:
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    # In each round every process writes a file, so that all disks and links are busy.
    processes, process = jax.process_count(), jax.process_index()
    for first in range(0, len(shards), processes):
        in_round = shards[first : first + processes]
        contents = _gather_round(in_round, process, arrays, rows, dtype)
        if process >= len(in_round):
            collections.deque(contents, maxlen=0)  # only gathers
            continue
        header = {
            tensor.name: (_code(tensor.paths[0], dtype), rows[tensor.paths[0]].hf_shape)
            for tensor in in_round[process]
        }
        path = temporary / names[first + process]
        write_safetensors(path, header, contents)
        if bucket:
            bucket.move(path, f"{bucket.name_of(folder)}/{path.name}")
    if distributed.is_main() and len(shards) > 1:
        weight_map = {
            tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        }
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(temporary / INDEX_FILE, index)


def _code(path: tensors.Path, dtype: str) -> str:
    """Return the type of a parameter in the files, as safetensors spells it."""
    return EXPORT_DTYPES["float32" if path[-1] in EXACT_PARAMETERS else dtype]


def _gather_round(
    shards: Sequence[Sequence[ExportedTensor]],
    process: int,
    arrays: Arrays,
    rows: TensorTable,
    dtype: str,
) -> Iterator[np.ndarray]:
    """Yield the tensors of this process's file, and take part in gathering the other files'.

    Processes 0, 1, ... write the `shards` at the same time, each from one tensor in its memory: all
    gather the first tensor of each file, then the second of each, and so on.
    """
    for tensors_by_process in itertools.zip_longest(*shards):
        values: np.ndarray | None = None
        for writer, tensor in enumerate(tensors_by_process):
            if tensor is None:
                continue
            written = SAFETENSORS_DTYPES[_code(tensor.paths[0], dtype)].name
            parts = [_gather(arrays[path], tensor, written) for path in tensor.paths]
            if writer == process:
                for path, part in zip(tensor.paths, parts, strict=True):
                    values = rows[path].write(np.asarray(part), values)
            del parts  # the devices' copies are freed before the next tensor is gathered
        if values is not None:
            yield values


def _split_into_shards(
    rows: TensorTable, itemsize: int, max_bytes: int
) -> list[list[ExportedTensor]]:
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


def _in_order(rows: TensorTable) -> list[ExportedTensor]:
    """Return the tensors layer by layer, as checkpoints are usually split."""
    found: dict[str, tuple[int, ExportedTensor]] = {}
    for path, row in rows.items():
        for layer in range(row.layers or 1):
            number, index = -1, tuple[int, ...]()
            if row.layers is not None:
                number, index = (row.layer_numbers or range(row.layers))[layer], (layer,)
            for expert, name in enumerate(row.layer_names(layer)):
                part = index if row.experts is None else (*index, expert)
                _, tensor = found.setdefault(name, (number, ExportedTensor(name, [], part)))
                tensor.paths.append(path)  # a checkpoint may store several as one tensor
    return [tensor for _, tensor in sorted(found.values(), key=lambda entry: entry[0])]


@functools.partial(jax.jit, static_argnames=("dtype", "scale"))
def _select(
    arrays: tuple[jax.Array, ...], index: tuple[int, ...], dtype: str, scale: float
) -> jax.Array:
    """Return the part of a layer or of its expert, of a kernel and its adapters; () selects all."""
    for i in index:
        select = functools.partial(jax.lax.dynamic_index_in_dim, index=i, axis=0, keepdims=False)
        arrays = tuple(map(select, arrays))
    kernel, *adapters = arrays
    if adapters:
        lora_a, lora_b = adapters
        kernel = merge_kernel(kernel, lora_a, lora_b, scale)
    return kernel.astype(dtype)


def _gather(array: jax.Array | MergedKernel, tensor: ExportedTensor, dtype: str) -> jax.Array:
    """Return a parameter's part in a tensor on devices of this process: a collective operation."""
    merged = array if isinstance(array, MergedKernel) else MergedKernel((array,), 0.0)
    one_layer = _select(merged.arrays, tensor.index, dtype=dtype, scale=merged.scale)
    if one_layer.is_fully_addressable:
        return one_layer
    layout = merged.arrays[0].sharding
    assert isinstance(layout, NamedSharding)  # as all arrays of a run
    # Not in one program with the selection: the compiler might gather all layers.
    copies = _copy_to_all_devices(one_layer, layout=sharding.replicated(layout.mesh))
    # Copies of a whole tensor do not queue up on the devices while a process writes.
    return jax.block_until_ready(copies.addressable_data(0))


@functools.partial(jax.jit, static_argnames="layout")
def _copy_to_all_devices(x: jax.Array, *, layout: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, layout)


def temporary_folder(folder: Path) -> Path:
    """Return where an export is written until it is complete."""
    return folder.with_name(f".{folder.name}.writing")
