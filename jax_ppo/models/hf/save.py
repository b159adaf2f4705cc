"""Export of parameters as a folder that transformers loads: weights, config and tokenizer files."""

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jax_ppo.errors import UserError
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf.config_export import update_hf_config
from jax_ppo.models.hf.families import FAMILIES
from jax_ppo.models.hf.fields import read_json_object, write_json
from jax_ppo.models.hf.names import tensor_table
from jax_ppo.models.hf.tensors import flatten_like
from jax_ppo.models.hf.weight_files import temporary_folder, write_weights
from jax_ppo.runtime import distributed, work_directory

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
    critic_unit: dict[str, float] | None = None,
) -> None:
    """Write a Hugging Face folder: a causal language model or, with a scalar head, a classifier.

    The folder appears complete or not at all: it is written under another name and renamed; in a
    bucket, config.json is its last file. All processes of a run must call this, and each writes
    separate weight files. No host holds more than two tensors at a time, and the files do not
    depend on the number of processes.

    Args:
      params: parameters of one role in the stacked form (transformer.py, heads.py), on any devices,
        or what `weight_files.merge_adapters` returned.
      architecture: their architecture.
      folder: the folder; an earlier export in it is replaced.
      dtype: type of the weights in the files, "float32" or "bfloat16".
      source_folder: folder of the checkpoint that the model started from. Its tokenizer files and
        generation defaults are copied, and the fields of config.json that need not change.
      tokenizer_folder: folder whose tokenizer files are copied instead, if it differs.
      critic_unit: the contents of a critic's value_unit.json, {} to write none; `None` for other
        roles. A critic's head is written as a classifier of tokens instead of one of sequences,
        unless transformers has none for the family.

    Raises:
      ValueError: `params` does not fit the architecture.
      UserError: `folder` holds something other than an export.
    """
    params, head = exported_head(params, architecture, critic_unit)
    rows = tensor_table(architecture, head)
    arrays = flatten_like(params, rows, "`params`")
    with atomic_folder(Path(folder), *DESCRIPTION) as temporary:
        if distributed.is_main():
            _write_description(
                temporary, architecture, dtype, head, source_folder, tokenizer_folder
            )
        write_value_unit(temporary, critic_unit)
        write_weights(Path(folder), rows, arrays, dtype)


def write_value_unit(folder: Path, critic_unit: dict[str, float] | None) -> None:
    """Write value_unit.json, if there is something to write."""
    if critic_unit and distributed.is_main():
        write_json(folder / VALUE_UNIT, critic_unit)


def exported_head(
    params: dict[str, Any], architecture: Architecture, critic_unit: dict[str, float] | None
) -> tuple[dict[str, Any], str]:
    """Return parameters or adapters with their head as transformers stores it, and its name."""
    if "score" not in params:
        return params, "lm"
    if critic_unit is None or not FAMILIES[architecture.family].has_token_classifier:
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
    if source := tokenizer_folder or source_folder:
        matches = (Path(source).glob(pattern) for pattern in _COPIED_FILES)
        for file in filter(Path.is_file, itertools.chain.from_iterable(matches)):
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)  # follows the links of the hub's cache


@contextlib.contextmanager
def atomic_folder(folder: Path, *members: str) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` on exit, so that it is never incomplete.

    Every process must call it, and waits on exit until `folder` exists. Raise `UserError` unless
    `folder` holds nothing or an earlier export, which has the files `members`.
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
    distributed.barrier("export")  # no process looks for the folder before it exists


def _read_source(folder: str | Path | None, name: str) -> dict[str, Any]:
    if folder is None or not (Path(folder) / name).exists():
        return {}
    return read_json_object(Path(folder) / name)


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
