"""Export of parameters as a folder that transformers loads: weights, config and tokenizer files."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_ppo.errors import UserError
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf import tensors
from jax_ppo.models.hf.config_export import update_hf_config
from jax_ppo.models.hf.families import FAMILIES
from jax_ppo.models.hf.fields import read_json_object, write_json
from jax_ppo.models.hf.names import adapter_tensor_table, tensor_table
from jax_ppo.models.hf.tensors import TensorTable, flatten_like
from jax_ppo.models.hf.weight_files import (
    EXPORT_DTYPES,
    MergedKernel,
    temporary_folder,
    write_weights,
)
from jax_ppo.models.lora import Lora
from jax_ppo.runtime import distributed, work_directory

GIB = 1024**3
VALUE_UNIT = "value_unit.json"  # moments of the returns that a critic's values are normalized by
DESCRIPTION = ("config.json", "generation_config.json")  # by these an export is recognized
_COPIED_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "additional_chat_templates/*.jinja",
)


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
    per_token: bool = False,
    value_unit: dict[str, float] | None = None,
) -> None:
    """Write a Hugging Face folder: a causal language model or, with a scalar head, a classifier.

    The folder appears complete or not at all: it is written under another name and renamed; in a
    bucket, config.json is its last file. In a run of several processes, all of them must call this,
    and each writes separate weight files. No host holds more than two tensors at a time, and the
    files do not depend on the number of processes.

    Args:
      params: parameters of one role in the stacked form (transformer.py, heads.py), on any devices.
      architecture: their architecture.
      folder: the folder; an earlier export in it is replaced.
      dtype: type of the weights in the files, "float32" or "bfloat16".
      source_folder: folder of the checkpoint that the model started from. Its tokenizer files and
        generation defaults are copied, and the fields of config.json that need not change.
      tokenizer_folder: folder whose tokenizer files are copied instead, if it differs.
      max_shard_bytes: maximum size of a weight file, unless a single tensor is larger.
      adapters: adapters to merge into `params` during the export, one tensor at a time.
      lora: shape of the adapters.
      per_token: write a scalar head as a classifier of tokens, as a critic is one, instead of one
        of sequences. Families for which transformers has none get one of sequences.
      value_unit: the contents of value_unit.json; `None` writes none.

    Raises:
      ValueError: `params` does not fit the architecture, or `dtype` is unknown.
      UserError: `folder` holds something other than an export.
    """
    if dtype not in EXPORT_DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(map(repr, EXPORT_DTYPES))}")
    params, head = exported_head(params, architecture, per_token)
    rows = tensor_table(architecture, head)
    arrays = flatten_like(params, rows, "`params`")
    _validate_shapes(arrays, rows)
    if adapters is not None and lora is not None:
        arrays |= _merged_kernels(arrays, adapters, architecture, lora)
    with atomic_folder(Path(folder), *DESCRIPTION) as temporary:
        if distributed.is_main():
            _write_description(
                temporary, architecture, dtype, head, source_folder, tokenizer_folder
            )
            if value_unit is not None:
                write_json(temporary / VALUE_UNIT, value_unit)
        write_weights(Path(folder), rows, arrays, dtype, max_shard_bytes)


def exported_head(
    params: dict[str, Any], architecture: Architecture, per_token: bool
) -> tuple[dict[str, Any], str]:
    """Return parameters, or adapters, with their head as transformers stores it, and its name.

    `per_token` is as for `export_checkpoint`, and names are as in `names.HEADS`.
    """
    if "score" not in params:
        return params, "lm"
    if not per_token or not FAMILIES[architecture.family].has_token_classifier:
        return params, "scalar"
    return params | {"score": params["score"] | {"bias": jnp.zeros(1)}}, "token"


def _write_description(
    folder: Path,
    architecture: Architecture,
    dtype: str,
    head: str,
    source_folder: str | Path | None,
    tokenizer_folder: str | Path | None,
) -> None:
    """Write all files of an export but its weights; arguments as for the export."""
    config = update_hf_config(_read_source(source_folder, "config.json"), architecture, dtype, head)
    write_json(folder / "config.json", config)
    # The source's generation defaults with the architecture's special tokens.
    defaults = _read_source(source_folder, "generation_config.json")
    ids = {
        "bos_token_id": architecture.bos_id,
        "eos_token_id": list(architecture.eos_ids) or None,
        "pad_token_id": architecture.pad_id,
    }
    defaults |= {name: value for name, value in ids.items() if value is not None}
    write_json(folder / "generation_config.json", defaults)
    if tokenizer := tokenizer_folder or source_folder:
        _copy_tokenizer(Path(tokenizer), folder)


def _validate_shapes(arrays: Mapping[tensors.Path, jax.Array], rows: TensorTable) -> None:
    for path, row in rows.items():
        shape = tuple(arrays[path].shape)
        if shape != row.full_shape:
            raise ValueError(
                f"{'/'.join(path)} has shape {list(shape)}, the architecture makes it "
                f"{list(row.full_shape)}"
            )


@contextlib.contextmanager
def atomic_folder(folder: Path, *members: str) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` on exit, so that it is never incomplete.

    Every process of a run must call it, and waits on exit until `folder` exists. It may hold an
    earlier export of the same kind, each of which has the files `members`, or nothing; raise
    `UserError` otherwise.
    """
    refuse_foreign_folder(folder, members)
    temporary = temporary_folder(folder)
    if distributed.is_main():
        shutil.rmtree(temporary, ignore_errors=True)  # left by a killed run
        temporary.mkdir(parents=True)
        if bucket := work_directory.bucket_of(folder):
            bucket.remove_export(bucket.name_of(folder))
    distributed.barrier("export begins")
    # In a run that writes to a bucket, each process has a separate folder.
    temporary.mkdir(parents=True, exist_ok=True)
    yield temporary
    distributed.barrier("export written")
    if distributed.is_main():
        _replace(folder, temporary)
    # No process looks for the folder before it exists.
    distributed.barrier("export")


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


def _read_source(folder: str | Path | None, name: str) -> dict[str, Any]:
    """Return a JSON file of the checkpoint that a model started from; {} if there is none."""
    if folder is None or not (Path(folder) / name).exists():
        return {}
    return read_json_object(Path(folder) / name)


def _copy_tokenizer(source: Path, target: Path) -> None:
    for pattern in _COPIED_FILES:
        for file in source.glob(pattern):
            if file.is_file():
                copy = target / file.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)  # follows the links of the hub's cache


def refuse_foreign_folder(folder: Path, members: tuple[str, ...] = DESCRIPTION) -> None:
    """Raise `UserError` if the folder holds anything but an earlier export with these members."""
    is_export = all((folder / name).exists() for name in members)
    if folder.exists() and not is_export and (folder.is_file() or any(folder.iterdir())):
        raise UserError(
            f"{folder} exists and holds something other than an export; remove it, or export to "
            "another folder"
        )


def _replace(folder: Path, temporary: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)
