"""Import and export of adapters in PEFT's format, as `PeftModel.from_pretrained` loads them."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jax_ppo.config.parsing import LORA_TARGETS
from jax_ppo.errors import UserError, shorten
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf.families import FAMILIES, MULTIMODAL
from jax_ppo.models.hf.family import TEXT_PREFIXES, replace_prefix
from jax_ppo.models.hf.fields import ConfigReader, read_json_object, write_json
from jax_ppo.models.hf.files import SafetensorsCheckpoint
from jax_ppo.models.hf.load import read_parameters, tensors_to_read, validate_tensors
from jax_ppo.models.hf.names import PEFT_PREFIX, adapter_tensor_table, module_names
from jax_ppo.models.hf.save import atomic_folder, exported_head, write_value_unit
from jax_ppo.models.hf.tensors import flatten_like
from jax_ppo.models.hf.weight_files import write_weights
from jax_ppo.models.lora import Lora
from jax_ppo.runtime import distributed

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"
DECODER = "model"  # the module of a language model that has the layers
# Fields of adapter_config.json that are read, or do not change the numbers. Any other field, which
# might, must have one of these values: by name, or as if it were not there.
_HARMLESS_FIELDS = frozenset(
    """
    auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config exclude_modules
    inference_mode layers_pattern loftq_config lora_alpha lora_dropout lora_ga_config
    megatron_config megatron_core merge_weights modules_to_save monteclora_config peft_version
    qalora_group_size r revision runtime_config target_modules task_type use_rslora velora_config
    """.split()
)
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", None),  # other values change the base model
}
_ABSENT: tuple[Any, ...] = (None, False, [], {})


def holds_adapters(folder: str | Path) -> bool:
    """Return whether a folder holds adapters in PEFT's format."""
    return (Path(folder) / ADAPTER_CONFIG).exists()


def holds_critic(folder: str | Path) -> bool:
    """Return whether a folder holds a classifier of tokens, as critics are exported."""
    if holds_adapters(folder):
        return read_json_object(Path(folder) / ADAPTER_CONFIG).get("task_type") == "TOKEN_CLS"
    file = Path(folder) / "config.json"
    classes = (read_json_object(file).get("architectures") if file.exists() else None) or [""]
    return str(classes[0]).endswith("ForTokenClassification")


def peft_obstacle(architecture: Architecture, lora: Lora) -> str:
    """Return why PEFT's format cannot hold these adapters, or "" if it can."""
    family = FAMILIES[architecture.family]
    if taken := [name for name in family.expert_names_in_peft if name in lora.targets]:
        return (
            f"PEFT takes {', '.join(taken)} of {architecture.family} for routed experts, which "
            "have no adapters; leave them out of config.model.lora.targets if PEFT is to load them"
        )
    fused = [name for names in family.fused_projections for name in names if name in lora.targets]
    if fused:
        return (
            f"checkpoints of {architecture.family} hold {', '.join(fused)} in larger tensors, for "
            "whose parts PEFT's format has no separate adapters"
        )
    return ""


def read_adapter_config(folder: str | Path, architecture: Architecture) -> tuple[Lora, str]:
    """Return the shape of the adapters in a folder and the name of their base model.

    Raise `UserError` if there are no adapters, or unsupported ones.
    """
    folder = Path(folder)
    if not holds_adapters(folder):
        raise UserError(f"{folder} has no {ADAPTER_CONFIG}: it holds no adapters in PEFT's format")
    config = read_json_object(folder / ADAPTER_CONFIG)
    reader = ConfigReader(config, where=f"{folder / ADAPTER_CONFIG}: ")
    _refuse_unsupported(reader, config, architecture)
    rank = reader.integer("r")
    alpha = reader.number("lora_alpha", above=-math.inf)
    if reader.boolean("use_rslora", nullable=True):
        alpha *= rank**0.5  # the rank-stabilized scale is alpha / sqrt(r) instead of alpha / r
    name = "base_model_name_or_path"
    base_model = "" if config.get(name) is None else reader.string(name)
    return Lora(rank, float(alpha), _adapted_projections(folder, architecture)), base_model


def _refuse_unsupported(
    reader: ConfigReader, config: dict[str, Any], architecture: Architecture
) -> None:
    for name in sorted(config.keys() - _HARMLESS_FIELDS):
        neutral = _NEUTRAL_VALUES.get(name, _ABSENT)
        if name == "fan_in_fan_out" and FAMILIES[architecture.family].input_first:
            neutral = (True, *neutral)  # it describes the base's kernels
        if config[name] not in neutral:
            raise reader.error(f"{name}={config[name]!r} is not supported, only {neutral[0]!r} is")
    modules = reader.strings("modules_to_save") or ()
    # PEFT itself adds both names for a sequence classifier.
    if not {"score", "classifier"}.issuperset(modules):
        raise reader.error(
            f"modules_to_save={modules!r} is not supported, only ['score'] of a reward model is"
        )


def _adapted_projections(folder: Path, architecture: Architecture) -> tuple[str, ...]:
    rows = adapter_tensor_table(architecture, 1, LORA_TARGETS, "lm")
    with _open_adapters(folder) as checkpoint:
        names = checkpoint.names()
    adapted = {path[-2] for path, row in rows.items() if not names.isdisjoint(row.names())}
    targets = tuple(name for name in LORA_TARGETS if name in adapted)
    if not targets:
        raise UserError(
            f"{folder / ADAPTER_WEIGHTS} has adapters on none of {', '.join(LORA_TARGETS)}, only "
            "these are supported"
        )
    return targets


def load_adapters(
    folder: str | Path,
    architecture: Architecture,
    lora: Lora,
    shardings: dict[str, Any],
    dtype: DTypeLike = jnp.float32,
    head: str = "lm",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Read adapters into sharded arrays, as `load_checkpoint` reads a checkpoint.

    They have the layout that lora.py describes, and the shape that `read_adapter_config` returned.
    With head "scalar" or "both" a scalar head starts at zero, with "reward" it is read.
    Raise the errors of `load_checkpoint`.
    """
    validate_adapters(folder, architecture, lora, head)
    rows = adapter_tensor_table(architecture, lora.rank, lora.targets, head)
    with _open_adapters(Path(folder)) as checkpoint:
        return read_parameters(checkpoint, rows, head, shardings, dtype, progress)


def validate_adapters(
    folder: str | Path, architecture: Architecture, lora: Lora, head: str
) -> None:
    """Raise the errors of `load_adapters` after reading only names and shapes."""
    rows = adapter_tensor_table(architecture, lora.rank, lora.targets, head)
    rows = tensors_to_read(rows, head)
    used = {name for row in rows.values() for name in row.names()}
    bias = f"{PEFT_PREFIX}score.bias"
    with _open_adapters(Path(folder)) as checkpoint:
        validate_tensors(checkpoint, rows, ADAPTER_CONFIG)
        if head in ("scalar", "both"):
            used |= {f"{PEFT_PREFIX}score.weight", bias}  # the head of another role is not read
        elif bias in checkpoint and not np.any(checkpoint.read(bias)):
            used.add(bias)  # of a classifier of tokens, as critics are exported
        if unused := sorted(checkpoint.names() - used):
            raise UserError(
                f"{checkpoint.folder} has {len(unused)} tensors that this model would not use: "
                f"{shorten(', '.join(unused), 300)}; adapters are supported on "
                f"{', '.join(LORA_TARGETS)}"
            )


def _open_adapters(folder: Path) -> SafetensorsCheckpoint:
    if not (folder / ADAPTER_WEIGHTS).exists():
        raise UserError(
            f"{folder} has no {ADAPTER_WEIGHTS}. {ADAPTER_PICKLE} is a pickle, and is not read; if "
            "you trust it, convert it: "
            f'peft.AutoPeftModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained("new")'
        )
    usual = {PEFT_PREFIX + name: PEFT_PREFIX + other for name, other in TEXT_PREFIXES.items()}
    return SafetensorsCheckpoint(
        folder, [folder / ADAPTER_WEIGHTS], rename=lambda name: replace_prefix(name, usual)
    )


def save_adapters(
    adapters: dict[str, Any],
    architecture: Architecture,
    lora: Lora,
    folder: str | Path,
    base: tuple[str, str | None],
    base_folder: str | Path | None = None,
    critic_unit: dict[str, float] | None = None,
) -> None:
    """Write a folder that PEFT loads; it appears complete or not at all.

    In a run of several processes, all of them must call this; process 0 writes. Adapters with a
    scalar head belong to a sequence classifier. `base` is what `shareable_model_name` returns of
    the base model in `base_folder`, in which PEFT must find the decoder (`None`: it is nothing but
    a decoder); `critic_unit` is as for `export_checkpoint`.

    Raises:
      ValueError: `adapters` does not have this shape.
      UserError: `folder` holds something other than adapters.
    """
    adapters, head = exported_head(adapters, architecture, critic_unit)
    decoder = _decoder_module(base_folder)
    usual, prefix = f"{PEFT_PREFIX}{DECODER}.", f"{PEFT_PREFIX}{decoder}."
    rows = {
        path: dataclasses.replace(row, name=row.name.replace(usual, prefix))
        for path, row in adapter_tensor_table(architecture, lora.rank, lora.targets, head).items()
    }
    arrays = flatten_like(adapters, rows, "`adapters`")
    with atomic_folder(Path(folder), ADAPTER_CONFIG, ADAPTER_WEIGHTS) as temporary:
        if distributed.is_main():
            config = _adapter_config(architecture, lora, head, base, decoder)
            write_json(temporary / ADAPTER_CONFIG, config)
        write_value_unit(temporary, critic_unit)
        write_weights(Path(folder), rows, arrays, "float32", only_file=ADAPTER_WEIGHTS)


def _decoder_module(folder: str | Path | None) -> str:
    kind = read_json_object(Path(folder) / "config.json").get("model_type") if folder else None
    return MULTIMODAL[kind].decoder_module if kind in MULTIMODAL else DECODER


def _adapter_config(
    architecture: Architecture, lora: Lora, head: str, base: tuple[str, str | None], decoder: str
) -> dict[str, Any]:
    alpha, (base_model, revision) = lora.alpha, base
    targets: Any = module_names(architecture, lora.targets)
    if decoder != DECODER:  # a list of names would match the modules of images, too
        targets = rf"{re.escape(decoder)}\..*\.({'|'.join(map(re.escape, targets))})"
    return {
        "peft_type": "LORA",
        "task_type": {"lm": "CAUSAL_LM", "scalar": "SEQ_CLS", "token": "TOKEN_CLS"}[head],
        "base_model_name_or_path": base_model,
        "revision": revision,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "modules_to_save": None if head == "lm" else ["score"],
        "bias": "none",
        "fan_in_fan_out": FAMILIES[architecture.family].input_first,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "layers_pattern": None,
    }
