"""Import of Hugging Face checkpoints: config.json to an architecture, safetensors to parameters."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import NamedSharding, Sharding
from jax.typing import DTypeLike

from jax_ppo.errors import UserError, nearest_name, shorten
from jax_ppo.models.architecture import EXACT_PARAMETERS, Architecture
from jax_ppo.models.hf import tensors
from jax_ppo.models.hf.config import from_hf_config, text_config
from jax_ppo.models.hf.deberta import DebertaArchitecture, deberta_from_hf_config
from jax_ppo.models.hf.families import DEBERTA, FAMILIES, MULTIMODAL
from jax_ppo.models.hf.fields import ConfigReader, read_json_object
from jax_ppo.models.hf.files import SAFETENSORS_DTYPES, SafetensorsCheckpoint
from jax_ppo.models.hf.ignored import (
    MULTI_TOKEN_HEADS,
    MULTI_TOKEN_LAYER,
    OUTPUT_EMBEDDINGS,
    SCORE_WEIGHTS,
    is_ignorable,
)
from jax_ppo.models.hf.model_folders import find_weight_files, gguf_error, without_quantization
from jax_ppo.models.hf.names import STACKED_EXPERTS, tensor_table
from jax_ppo.models.hf.tensors import TensorMapping, TensorTable

ReadingProgress = Callable[[int, int], None]  # takes the tensors read so far, and in total


def read_architecture(folder: str | Path, needs_weights: bool = True) -> Architecture:
    """Return the architecture of a checkpoint; raise `UserError` if none is usable.

    The EOS ids of config.json are followed by the further ones of generation_config.json. As in
    transformers 5, a checkpoint that stores a separate output embedding has it, even if
    config.json calls the model tied. `needs_weights=False` also accepts a folder without weights.
    """
    architecture = from_hf_config(text_config(_read_config(folder)))
    if needs_weights:
        find_weight_files(Path(folder))
    if architecture.tied and has_weights(folder):
        names = _embedding_names(architecture)
        with _open_checkpoint(folder) as checkpoint:
            if checkpoint.names().issuperset(names) and not checkpoint.are_equal(*names):
                architecture = dataclasses.replace(architecture, tied=False)
    generation_file = Path(folder) / "generation_config.json"
    eos_ids = architecture.eos_ids
    if generation_file.exists():
        reader = ConfigReader(read_json_object(generation_file), where=f"{generation_file}: ")
        eos_ids += reader.token_ids("eos_token_id")
    return dataclasses.replace(architecture, eos_ids=tuple(dict.fromkeys(eos_ids)))


def describe_unread_parts(folder: str | Path) -> list[str]:
    """Return a line about each part of a checkpoint that is neither read nor exported."""
    file = Path(folder) / "config.json"
    config = read_json_object(file) if file.exists() else {}  # adapters have none
    kind = str(config.get("model_type"))
    text = text_config(config)
    lines = []
    if kind in MULTIMODAL and not MULTIMODAL[kind].is_text:
        of_text = f"only the text part of {kind} is used, as {text['model_type']}"
        lines.append(f"{folder}: {of_text}; images are not read")
    names: set[str] = set()
    if has_weights(folder):
        with SafetensorsCheckpoint(folder) as checkpoint:
            names = checkpoint.names()
    if text.get("mtp_num_hidden_layers") or any(
        name.startswith(MULTI_TOKEN_HEADS) or name.endswith(MULTI_TOKEN_LAYER) for name in names
    ):
        lines.append(
            f"{folder}: layers that predict further tokens than the next are neither read nor "
            "exported"
        )
    return lines


def has_weights(folder: str | Path) -> bool:
    """Return whether a folder holds all safetensors weights of a checkpoint."""
    try:
        find_weight_files(Path(folder))
    except UserError:
        return False
    return True


def read_reward_architecture(
    folder: str | Path, needs_weights: bool = True
) -> Architecture | DebertaArchitecture:
    """Return the architecture of a reward model, which is a decoder or an encoder with one score.

    Raise `UserError` unless the headers of the weights belong to a classifier with one label.
    """
    config = _read_config(folder)
    kind = str(config.get("model_type"))
    architecture: Architecture | DebertaArchitecture
    if kind == DEBERTA:
        architecture = deberta_from_hf_config(config)
    elif kind in FAMILIES or kind in MULTIMODAL:
        architecture = read_architecture(folder, needs_weights)
    else:
        raise UserError(
            f"{folder}: config.json's model_type {kind!r} is not supported for a reward model, "
            f"only {', '.join((*FAMILIES, *MULTIMODAL, DEBERTA))} are"
        )
    if needs_weights or has_weights(folder):
        with _open_checkpoint(folder) as checkpoint:
            rows = _stored_tensors(checkpoint, architecture, "reward")
            _validate_checkpoint(checkpoint, rows, "reward", architecture)
    return architecture


def _embedding_names(architecture: Architecture) -> tuple[str, str]:
    """Return the names of the input's and of the output's embedding, if that is stored."""
    untied = tensor_table(dataclasses.replace(architecture, tied=False), "lm")
    return untied["embed", "embedding"].name, untied["lm_head", "embedding"].name


def has_score_head(folder: str | Path) -> bool:
    """Return whether a checkpoint has the head of a reward model."""
    with _open_checkpoint(folder) as checkpoint:
        return not checkpoint.names().isdisjoint(SCORE_WEIGHTS)


def _read_config(folder: str | Path) -> dict[str, Any]:
    folder = Path(folder)
    if not (folder / "config.json").exists():
        if (folder / "adapter_config.json").exists():
            raise UserError(
                f"{folder} holds adapters, which belong to another model's weights: set "
                "config.model.path to that model and config.model.lora.path to these, or merge "
                "them into it first (PEFT's merge_and_unload)"
            )
        if gguf := sorted(folder.glob("*.gguf")):
            raise gguf_error(gguf[0])
        raise UserError(f"{folder} has no config.json: it is not a Hugging Face checkpoint")
    config = read_json_object(folder / "config.json")
    family = FAMILIES.get(str(config.get("model_type")))
    return without_quantization(config, folder, bool(family and family.stacked_experts))


def _open_checkpoint(folder: str | Path) -> SafetensorsCheckpoint:
    """Open the weights, of which the tensors have their family's usual names."""
    kind = str(_read_config(folder).get("model_type"))
    family = MULTIMODAL.get(kind) or FAMILIES.get(kind)
    return SafetensorsCheckpoint(folder, rename=family.tensor_name if family else str)


def load_checkpoint(
    folder: str | Path,
    architecture: Architecture | DebertaArchitecture,
    shardings: dict[str, Any],
    dtype: DTypeLike = jnp.float32,
    head: str = "lm",
    progress: ReadingProgress | None = None,
) -> dict[str, Any]:
    """Read the weights of a checkpoint into sharded arrays.

    Each process reads only the parts of its devices, and holds one layer of one parameter (of all
    experts that its devices have) in host memory at a time. All processes of a run must call this.

    Args:
      folder: folder with safetensors files in float32, bfloat16 or float16.
      architecture: what `read_architecture` or `read_reward_architecture` returned for it.
      shardings: A `jax.sharding.Sharding` per parameter, in the structure of the parameters.
      dtype: type of the parameters.
      head: "lm"; "scalar": score/kernel is zeros, as a critic starts; "reward": score/kernel is
        read; "both": the heads of "lm" and "scalar".
      progress: called with the number of tensors read so far and in total, after each one. A
        tensor that holds several parameters counts once per parameter.

    Returns:
      Parameters as transformer.py and heads.py, or deberta_encoder.py, describe them.

    Raises:
      UserError: A tensor is missing, has another shape or type, or would not be used.
    """
    with _open_checkpoint(folder) as checkpoint:
        rows = _stored_tensors(checkpoint, architecture, head)
        _validate_checkpoint(checkpoint, tensors_to_read(rows, head), head, architecture)
        return read_parameters(checkpoint, rows, head, shardings, dtype, progress)


def _stored_tensors(
    checkpoint: SafetensorsCheckpoint, architecture: Architecture | DebertaArchitecture, head: str
) -> TensorTable:
    """Return the tensor table of a checkpoint, whose experts may be stacked or not."""
    stacked = any(STACKED_EXPERTS in name for name in checkpoint.names())
    rows = tensor_table(architecture, head, stacked)
    if isinstance(architecture, Architecture) and architecture.tied:
        embedding, output = _embedding_names(architecture)
        if embedding not in checkpoint and output in checkpoint:  # one tensor under either name
            row = rows["embed", "embedding"]
            rows["embed", "embedding"] = dataclasses.replace(row, name=output)
    return rows


def tensors_to_read(rows: TensorTable, head: str) -> TensorTable:
    """Return the rows that a checkpoint must hold: not a scalar head that starts at zero."""
    if head not in ("scalar", "both"):
        return dict(rows)
    return {path: row for path, row in rows.items() if path != ("score", "kernel")}


def read_parameters(
    checkpoint: SafetensorsCheckpoint,
    rows: TensorTable,
    head: str,
    shardings: dict[str, Any],
    dtype: DTypeLike,
    progress: ReadingProgress | None,
) -> dict[str, Any]:
    """Return the parameters of a tensor table as a nested dict of sharded arrays.

    What `tensors_to_read` leaves out is zeros; other arguments are as for `load_checkpoint`.
    """
    places = tensors.flatten_like(shardings, rows, "`shardings`")
    rows_to_read = tensors_to_read(rows, head)
    total = sum(len(row.names()) for row in rows_to_read.values())
    counter = itertools.count(1)

    def count_tensors(number: int) -> None:
        for tensors_read in itertools.islice(counter, number):
            if progress is not None:
                progress(tensors_read, total)

    params = {}
    for path, row in rows.items():
        stored = np.dtype(np.float32 if path[-1] in EXACT_PARAMETERS else dtype)
        if path in rows_to_read:
            params[path] = _read_parameter(checkpoint, row, stored, places[path], count_tensors)
        else:
            params[path] = _zeros(row.full_shape, stored, places[path])
    return traverse_util.unflatten_dict(params)


def _read_parameter(
    checkpoint: SafetensorsCheckpoint,
    row: TensorMapping,
    dtype: np.dtype,
    sharding: Sharding,
    count_tensors: Callable[[int], None],
) -> jax.Array:
    """Read one parameter; the layers of a stacked one are written into a buffer in place."""
    if row.layers is None:
        array = jax.block_until_ready(_read_tensors(checkpoint, [row.name], row, dtype, sharding))
        count_tensors(1)
        return array
    write_layer = jax.jit(
        jax.lax.dynamic_update_index_in_dim,
        static_argnums=3,
        donate_argnums=0,
        out_shardings=sharding,
    )
    buffer = _zeros(row.full_shape, dtype, sharding)
    layer_sharding = sharding
    if isinstance(sharding, NamedSharding):
        spec = type(sharding.spec)(*sharding.spec[1:])
        layer_sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    for layer in range(row.layers):
        names = row.layer_names(layer)
        one_layer = _read_tensors(checkpoint, names, row, dtype, layer_sharding)
        # Waiting limits the copies in flight to the devices to one layer.
        buffer = jax.block_until_ready(write_layer(buffer, one_layer, layer, 0))
        count_tensors(len(names))
    return buffer


def _read_tensors(
    checkpoint: SafetensorsCheckpoint,
    names: list[str],
    row: TensorMapping,
    dtype: np.dtype,
    sharding: Sharding,
) -> jax.Array:
    """Read one tensor, or the tensors of a layer's experts, as a sharded array, block by block."""
    blocks: dict[tuple, np.ndarray] = {}  # devices that hold the same block share one read

    def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
        values = row.read(functools.partial(checkpoint.read_finite, name), index)
        return np.ascontiguousarray(values, dtype)

    def read_block(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # no parameter is a scalar
        key = tuple((part.start, part.stop) for part in index)
        if key not in blocks and row.experts is None:
            blocks[key] = read(names[0], index)
        elif key not in blocks:
            experts = names[index[0]]
            first = read(experts[0], index[1:])
            blocks[key] = np.empty((len(experts), *first.shape), dtype)
            blocks[key][0] = first
            for expert, name in enumerate(experts[1:], start=1):
                blocks[key][expert] = read(name, index[1:])
        return blocks[key]

    return jax.make_array_from_callback(row.layer_shape, sharding, read_block)


def _zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding) -> jax.Array:
    return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)(shape, dtype)


def _validate_checkpoint(
    checkpoint: SafetensorsCheckpoint,
    rows: TensorTable,
    head: str,
    architecture: Architecture | DebertaArchitecture,
) -> None:
    validate_tensors(checkpoint, rows)
    names = checkpoint.names()
    # Without its head, a tied model's weights would make a language model.
    if head in ("lm", "both") and "score.weight" in names and names.isdisjoint(OUTPUT_EMBEDDINGS):
        raise UserError(f"{checkpoint.folder}: {_missing_tensor(OUTPUT_EMBEDDINGS[0], names)}")
    used = {name for row in rows.values() for name in row.names()}
    unused = sorted(
        name for name in names - used if not is_ignorable(checkpoint, name, head, architecture)
    )
    if unused:
        raise UserError(
            f"{checkpoint.folder} has {len(unused)} tensors that this model would not use: "
            f"{shorten(', '.join(unused), 300)}. It is another kind of model than "
            f"config.json's model_type {architecture.family!r} with this head ({head!r})"
        )


def validate_tensors(
    checkpoint: SafetensorsCheckpoint, rows: TensorTable, config: str = "config.json"
) -> None:
    """Raise `UserError` unless the checkpoint has each tensor with its shape and a known type."""
    names = checkpoint.names()
    # Parameters of one tensor agree on its shape.
    rows_by_name = {name: row for row in rows.values() for name in row.names()}
    for name, row in rows_by_name.items():
        if name not in names:
            raise UserError(f"{checkpoint.folder}: " + _missing_tensor(name, names))
        where = f"{checkpoint.folder / checkpoint.file(name)}: {name}"
        if name in SCORE_WEIGHTS and checkpoint.shape(name)[0] != 1:
            raise UserError(
                f"{where} has {checkpoint.shape(name)[0]} labels; a reward model has num_labels = 1"
            )
        if checkpoint.shape(name) != row.hf_shape:
            raise UserError(
                f"{where} has shape {list(checkpoint.shape(name))}, {config} makes it "
                f"{list(row.hf_shape)}"
            )
        if checkpoint.dtype(name) not in SAFETENSORS_DTYPES:
            raise UserError(
                f"{where} is of type {checkpoint.dtype(name)}; only float32, bfloat16 and float16 "
                "(F32, BF16, F16) are supported"
            )


def _missing_tensor(name: str, names: set[str]) -> str:
    if name in SCORE_WEIGHTS:
        return (
            f"there is no {name} in it: it is not a sequence-classification checkpoint, so not a "
            "reward model"
        )
    if name in OUTPUT_EMBEDDINGS and "score.weight" in names:
        return (
            f"there is no {name} in it but score.weight: it is a reward model or critic, "
            "not a language model"
        )
    nearest = nearest_name(name, names)
    return f"tensor {name} is missing" + (nearest and f"; the nearest there is {nearest}")
