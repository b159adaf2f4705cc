"""Hugging Face checkpoints in: a folder or hub name to an architecture, and its safetensors to sharded parameters."""

import dataclasses
import difflib
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import NamedSharding, SingleDeviceSharding

from jax_ppo.errors import UserError
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.deberta.architecture import FAMILY, DebertaArchitecture, deberta_from_hf_config
from jax_ppo.models.hf.config import FAMILIES, from_hf_config
from jax_ppo.models.hf.files import SAFETENSORS_DTYPES, SafetensorsCheckpoint, weight_files
from jax_ppo.models.hf.names import TensorMapping, abbreviate, flatten_like, tensor_table

SCORES = (
    "score.weight",
    "classifier.weight",
)  # a reward model's head, of a decoder and of an encoder


def read_architecture(folder: str | Path) -> Architecture:
    """From config.json. generation_config.json may name more ends of sequence: config.json's come first.

    Raises UserError for a folder without config.json or safetensors weights, or of a model that is not supported.
    """
    architecture = from_hf_config(_read_config(folder))
    generation_file = Path(folder) / "generation_config.json"
    weight_files(Path(folder))
    more = read_json(generation_file).get("eos_token_id") if generation_file.exists() else None
    more = more if isinstance(more, list) else [] if more is None else [more]
    eos_ids = tuple(dict.fromkeys([*architecture.eos_ids, *more]))
    return dataclasses.replace(architecture, eos_ids=eos_ids)


def read_reward_architecture(folder: str | Path) -> Architecture | DebertaArchitecture:
    """As `read_architecture`, of a decoder or an encoder that gives one score.

    Reads the headers of the weights too, so that UserError is raised as well where they are not those of a sequence
    classifier with one label.
    """
    config = _read_config(folder)
    if config.get("model_type") == FAMILY:
        architecture = deberta_from_hf_config(config)
    elif config.get("model_type") in FAMILIES:
        architecture = read_architecture(folder)
    else:
        raise UserError(
            f"{folder}: config.json's model_type {config.get('model_type')!r} is not supported for a reward model, "
            f"only {', '.join((*FAMILIES, FAMILY))} are"
        )
    with SafetensorsCheckpoint(folder) as checkpoint:
        _check(checkpoint, tensor_table(architecture, "reward"), "reward", architecture)
    return architecture


def has_score_head(folder: str | Path) -> bool:
    """Whether the checkpoint has a reward model's head."""
    with SafetensorsCheckpoint(folder) as checkpoint:
        return not checkpoint.names().isdisjoint(SCORES)


def _read_config(folder):
    if not (Path(folder) / "config.json").exists():
        if (Path(folder) / "adapter_config.json").exists():
            raise UserError(
                f"{folder} holds adapters, which stand on another model's weights: set config.model.path to that "
                "model and config.model.lora.path to these, or merge them into it first (PEFT's merge_and_unload)"
            )
        raise UserError(f"{folder} has no config.json: it is not a Hugging Face checkpoint")
    return read_json(Path(folder) / "config.json")


def read_json(path: Path):
    """Its contents; UserError where it is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error


def load_checkpoint(
    folder: str | Path,
    architecture: Architecture | DebertaArchitecture,
    shardings: dict,
    dtype=jnp.float32,
    head: str = "lm",
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Reads a checkpoint's weights into sharded arrays, each process only its own devices' parts.

    On the host lives one layer's slice at a time. In a run of several processes all of them call it.

    Args:
      folder: with model.safetensors, or shards and their index. float32, bfloat16 or float16.
      architecture: as `read_architecture` gives it.
      shardings: a `jax.sharding.Sharding` for each parameter, in the structure of the parameters.
      dtype: of the parameters.
      head: "lm"; "scalar": score/kernel is zeros, as a critic starts; "reward": score/kernel is read; "both": of "lm" and
        "scalar".
      progress: called as progress(done, total) after each tensor of the checkpoint, or part of one that becomes several.

    Returns:
      the parameters (transformer.py and heads.py, or deberta.py, say their layout).

    Raises:
      UserError: a tensor is missing, of another shape, of another type, or not used. The message names it.
    """
    rows = tensor_table(architecture, head)
    places = flatten_like(shardings, rows, "`shardings`")
    wanted = tensors_to_read(rows, head)
    with SafetensorsCheckpoint(folder) as checkpoint:
        _check(checkpoint, wanted, head, architecture)
        return read_parameters(checkpoint, rows, wanted, places, dtype, progress)


def tensors_to_read(
    rows: dict[tuple[str, ...], TensorMapping], head: str
) -> dict[tuple[str, ...], TensorMapping]:
    """Those of the rows that a checkpoint must hold: a scalar head that starts at zero is not read."""
    return {
        path: row
        for path, row in rows.items()
        if head not in ("scalar", "both") or path != ("score", "kernel")
    }


def read_parameters(
    checkpoint: SafetensorsCheckpoint,
    rows: dict[tuple[str, ...], TensorMapping],
    wanted: dict[tuple[str, ...], TensorMapping],
    places: dict,
    dtype,
    progress: Callable[[int, int], None] | None,
) -> dict:
    """The nested parameters of `rows`, each at its place: `wanted` from the checkpoint, the others zeros."""
    dtype, total, counter = (
        np.dtype(dtype),
        sum(len(row.names()) for row in wanted.values()),
        itertools.count(1),
    )

    def tick():
        done = next(counter)
        if progress is not None:
            progress(done, total)

    params = {}
    for path, row in rows.items():
        params[path] = (
            _fill(checkpoint, row, dtype, places[path], tick)
            if path in wanted
            else _zeros(row.full_shape, dtype, places[path])
        )
    return traverse_util.unflatten_dict(params)


def _fill(checkpoint, row, dtype, sharding, tick) -> jax.Array:
    """One parameter; a stacked one is a buffer into which the layers are written in place. `tick` is called a tensor."""
    if row.layers is None:
        array = jax.block_until_ready(_read(checkpoint, row.name, row, dtype, sharding))
        tick()
        return array
    write = jax.jit(
        jax.lax.dynamic_update_index_in_dim,
        static_argnums=3,
        donate_argnums=0,
        out_shardings=sharding,
    )
    buffer, one_layer = _zeros(row.full_shape, dtype, sharding), _without_first_axis(sharding)
    for i, name in enumerate(row.names()):
        # Waiting keeps the copies on their way to the devices to one layer.
        buffer = jax.block_until_ready(
            write(buffer, _read(checkpoint, name, row, dtype, one_layer), i, 0)
        )
        tick()
    return buffer


def _read(checkpoint, name, row, dtype, sharding):
    """One tensor as an array of ours (one layer), each device's block read by itself."""
    blocks = {}  # devices that hold the same block share one reading

    def block(index):
        key = tuple((part.start, part.stop) for part in index)
        if key not in blocks:
            values = checkpoint.read(name, row.hf_index(index))
            blocks[key] = np.ascontiguousarray(values.T if row.transposed else values, dtype)
        return blocks[key]

    return jax.make_array_from_callback(row.shape, sharding, block)


def _zeros(shape, dtype, sharding):
    return jax.jit(jnp.zeros, static_argnums=(0, 1), out_shardings=sharding)(shape, dtype)


def _without_first_axis(sharding):
    if isinstance(sharding, SingleDeviceSharding):
        return sharding
    if isinstance(sharding, NamedSharding):
        spec = type(sharding.spec)(*sharding.spec[1:])
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
    raise TypeError(f"shardings must be NamedSharding or SingleDeviceSharding, got {sharding}")


def _check(checkpoint, wanted, head, architecture):
    """Raises UserError unless the checkpoint has what is wanted, as it is wanted, and nothing that would change it."""
    validate_tensors(checkpoint, wanted, head)
    names = checkpoint.names()
    used = {name for row in wanted.values() for name in row.names()}
    unused = sorted(
        name for name in names - used if not _ignorable(checkpoint, name, head, architecture)
    )
    if unused:
        raise UserError(
            f"{checkpoint.folder} has {len(unused)} tensors that this model would not use: "
            f"{abbreviate(unused)}. It is another kind of model than "
            f"config.json's model_type {architecture.family!r} with this head ({head!r})"
        )


def validate_tensors(
    checkpoint: SafetensorsCheckpoint,
    wanted: dict[tuple[str, ...], TensorMapping],
    head: str,
    config: str = "config.json",
) -> None:
    """Raises UserError unless the checkpoint has what is wanted, as it is wanted. `config`: the file that says so."""
    names = checkpoint.names()
    for row in wanted.values():
        for name in row.names():
            if name not in names:
                raise UserError(f"{checkpoint.folder}: " + _missing(name, names, head))
            where = f"{checkpoint.folder / checkpoint.file(name)}: {name}"
            if name in SCORES and checkpoint.shape(name)[0] != 1:
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


def _missing(name, names, head):
    if name in SCORES:
        return f"there is no {name} in it: it is not a sequence-classification checkpoint, so not a reward model"
    if name == "lm_head.weight" and "score.weight" in names:
        return "there is no lm_head.weight in it but score.weight: it is a reward model or critic, not a language model"
    near = difflib.get_close_matches(name, names, n=1)
    return f"tensor {name} is missing" + (f"; the nearest there is {near[0]}" if near else "")


def _ignorable(checkpoint, name, head, architecture):
    """Tensors whose absence from our model changes nothing."""
    if isinstance(
        architecture, DebertaArchitecture
    ):  # the places, and what a model without them keeps all the same
        return name in (
            "deberta.embeddings.position_ids",
            "deberta.embeddings.position_embeddings.weight",
        )
    if name.endswith("rotary_emb.inv_freq"):  # computed from config.json
        return True
    if name == "lm_head.weight":
        return head not in ("lm", "both") or architecture.tied
    if name == "score.weight":
        return True
    if name in ("score.bias", "classifier.bias"):
        return head != "reward" or not np.any(checkpoint.read(name))
    return False
