"""Adapters in and out in PEFT's format: adapter_config.json beside adapter_model.safetensors, in a folder that
`peft.PeftModel.from_pretrained` loads."""

import re
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jax_ppo.config.schema import LORA_TARGETS
from jax_ppo.errors import UserError
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf.files import SafetensorsCheckpoint
from jax_ppo.models.hf.load import read_json, read_parameters, tensors_to_read, validate_tensors
from jax_ppo.models.hf.names import (
    PEFT_PREFIX,
    abbreviate,
    adapter_tensor_table,
    flatten_like,
)
from jax_ppo.models.hf.save import atomic_folder, write_json, write_weights
from jax_ppo.models.lora import Lora

ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLE = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
FUSED = {
    "phi3": ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
}  # of these checkpoints have one tensor for several
# Fields of adapter_config.json that would change the numbers, with the values that do not.
PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None, []),
    "lora_bias": (False, None),
    "init_lora_weights": (True, False, "gaussian", None),  # others change the base too
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "layers_to_transform": (None, []),
}


def holds_adapters(folder: Path) -> bool:
    return (Path(folder) / ADAPTER_CONFIG).exists()


def peft_obstacle(architecture: Architecture, lora: Lora) -> str:
    """Why PEFT's format can not hold these adapters; "" where it can."""
    fused = [name for name in FUSED.get(architecture.family, ()) if name in lora.targets]
    return (
        fused
        and (
            f"checkpoints of {architecture.family} hold {', '.join(fused)} in larger tensors, for which PEFT's "
            "format has no adapters of their own"
        )
        or ""
    )


def read_adapter_config(folder: str | Path) -> tuple[Lora, str]:
    """What adapter_config.json and the tensors' names say: the adapters' shape, and the model that they stand on.

    Raises UserError for what is not supported.
    """
    folder = Path(folder)
    if not holds_adapters(folder):
        raise UserError(f"{folder} has no {ADAPTER_CONFIG}: it holds no adapters in PEFT's format")
    config = read_json(folder / ADAPTER_CONFIG)
    for name, plain in PLAIN.items():
        if name in config and config[name] not in plain:
            raise UserError(
                f"{folder / ADAPTER_CONFIG}: {name}={config[name]!r} is not supported, only {plain[0]!r} is"
            )
    whole = config.get("modules_to_save") or ()
    if not set(whole) <= {"score", "classifier"}:  # PEFT itself adds both for a sequence classifier
        raise UserError(
            f"{folder / ADAPTER_CONFIG}: modules_to_save={whole!r} is not supported, only ['score'] of a reward model is"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise UserError(
            f"{folder / ADAPTER_CONFIG}: r={rank!r} and lora_alpha={alpha!r} must be a whole number and a number"
        )
    if config.get("use_rslora"):
        alpha *= rank**0.5  # alpha / sqrt(r)
    with _open(folder) as checkpoint:
        there = {
            found[1]
            for name in checkpoint.names()
            if (found := re.search(r"\.(\w+)\.lora_A\.weight$", name))
        }
    targets = tuple(name for name in LORA_TARGETS if name in there)
    if not targets:
        raise UserError(
            f"{folder / ADAPTER_WEIGHTS} has adapters on none of {', '.join(LORA_TARGETS)}, only these are supported"
        )
    return Lora(rank, float(alpha), targets), config.get("base_model_name_or_path") or ""


def load_adapters(
    folder: str | Path,
    architecture: Architecture,
    lora: Lora,
    shardings: dict,
    dtype=jnp.float32,
    head: str = "lm",
    progress: Callable[[int, int], None] | None = None,
) -> dict:
    """Reads adapters into sharded arrays, as `load_checkpoint` reads a checkpoint.

    Args:
      lora: as `read` gives it.
      head: "lm"; "scalar" and "both": a scalar head starts at zero; "reward": it is read.

    Raises:
      UserError: a tensor is missing, of another shape, of another type, or not used. The message names it.
    """
    rows = adapter_tensor_table(architecture, lora.rank, lora.targets, head)
    places, wanted = (
        flatten_like(shardings, rows, "`shardings`"),
        tensors_to_read(rows, head),
    )
    with _open(Path(folder)) as checkpoint:
        _check(checkpoint, wanted, head)
        return read_parameters(checkpoint, rows, wanted, places, dtype, progress)


def validate_adapters(
    folder: str | Path, architecture: Architecture, lora: Lora, head: str
) -> None:
    """Raises what `load` would raise, after a look at names and shapes alone."""
    rows = adapter_tensor_table(architecture, lora.rank, lora.targets, head)
    with _open(Path(folder)) as checkpoint:
        _check(checkpoint, tensors_to_read(rows, head), head)


def _check(checkpoint, wanted, head):
    validate_tensors(checkpoint, wanted, head, ADAPTER_CONFIG)
    used = {name for row in wanted.values() for name in row.names()}
    used |= {PEFT_PREFIX + "score.weight"} if head in ("scalar", "both") else set()
    if unused := sorted(checkpoint.names() - used):
        raise UserError(
            f"{checkpoint.folder} has {len(unused)} tensors that this model would not use: "
            f"{abbreviate(unused)}; adapters are supported on {', '.join(LORA_TARGETS)}"
        )


def _open(folder):
    if not (folder / ADAPTER_WEIGHTS).exists():
        pickle = f"; {ADAPTER_PICKLE} is a pickle, and is not read: save it again with safe_serialization=True"
        raise UserError(
            f"{folder} has no {ADAPTER_WEIGHTS}{pickle if (folder / ADAPTER_PICKLE).exists() else ''}"
        )
    return SafetensorsCheckpoint(folder, [folder / ADAPTER_WEIGHTS])


def save_adapters(
    adapters: dict,
    architecture: Architecture,
    lora: Lora,
    folder: str | Path,
    base_model: str,
    revision: str | None = None,
) -> None:
    """Writes a folder that PEFT loads, whole or not at all. In a run of several processes all call it, and process 0 writes.

    Args:
      adapters: of one role, on any devices; with a scalar head they are those of a sequence classifier.
      base_model, revision: name and revision on the hub, or path, of the model that they stand on.

    Raises:
      ValueError: `adapters` is not of this shape.
      FileExistsError: `folder` holds something that is no adapters.
    """
    head, folder = "scalar" if "score" in adapters else "lm", Path(folder)
    rows = adapter_tensor_table(architecture, lora.rank, lora.targets, head)
    arrays = flatten_like(adapters, rows, "`adapters`")
    everything = sum(4 * int(np.prod(row.full_shape)) for row in rows.values())
    with atomic_folder(folder, ADAPTER_CONFIG, ADAPTER_WEIGHTS) as temporary:
        if temporary:
            write_json(
                temporary / ADAPTER_CONFIG, to_adapter_config(lora, head, base_model, revision)
            )
        write_weights(temporary, rows, arrays, "float32", everything, ADAPTER_WEIGHTS)


def to_adapter_config(lora: Lora, head: str, base_model: str, revision: str | None = None) -> dict:
    """The contents of adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head == "lm" else "SEQ_CLS",
        "base_model_name_or_path": base_model,
        "revision": revision,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "modules_to_save": None if head == "lm" else ["score"],
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "layers_pattern": None,
    }
