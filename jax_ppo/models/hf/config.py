"""Conversion between Hugging Face's config.json (of transformers 4 or 5) and `Architecture`."""

import difflib
from typing import Any

from jax_ppo.errors import UserError
from jax_ppo.models.architecture import ACTIVATIONS, ROPE_KINDS, Architecture
from jax_ppo.models.hf.families import FAMILIES, Family
from jax_ppo.models.hf.validation import refuse_quantization, require_sizes

FULL, LOCAL = "full_attention", "sliding_attention"
# Kinds of rotary embeddings that depend on the sequence length of pretraining.
ROPE_KINDS_WITH_LENGTH = ("yarn", "llama3", "longrope")

Config = dict[str, Any]
RopeScaling = tuple[tuple[str, Any], ...]


def from_hf_config(config: Config) -> Architecture:
    """Return the architecture that config.json describes.

    Args:
      config: Contents of config.json.

    Raises:
      UserError: A field is missing or has an unsupported value; the message names it.
    """
    _refuse_unsupported(config)
    family = FAMILIES[config["model_type"]]
    fields = {**family.defaults, **config}
    head_dim = (
        fields.get("head_dim")
        or family.defaults.get("head_dim")
        or fields["hidden_size"] // fields["num_attention_heads"]
    )
    norm_epsilon = fields.get("rms_norm_eps")
    sliding_window, local_layers = _read_windows(fields, family)
    rope_theta, rope_scaling, local_rope_theta = _read_rope(fields, family)
    return Architecture(
        family=config["model_type"],
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=fields["num_attention_heads"],
        num_kv_heads=fields.get("num_key_value_heads") or fields["num_attention_heads"],
        head_dim=head_dim,
        activation=_read_activation(config, family),
        norm_epsilon=1e-6 if norm_epsilon is None else norm_epsilon,
        sliding_window=sliding_window,
        local_layers=local_layers,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        local_rope_theta=local_rope_theta,
        max_position_embeddings=_max_length(fields, family),
        tied=bool(fields.get("tie_word_embeddings")),
        bos_id=fields.get("bos_token_id"),
        eos_ids=read_eos_ids(fields),
        pad_id=fields.get("pad_token_id"),
        **_family_fields(fields, family),
    )


def _family_fields(fields: Config, family: Family) -> dict[str, Any]:
    """Return the fields of `Architecture` that only some families set."""
    values = dict(family.fixed)
    for name, field in family.fields.items():
        values[field] = fields.get(name)
    for name, biases in family.bias_fields.items():
        for bias in biases:
            values[bias] = bool(fields.get(name))
    return values


def read_eos_ids(fields: Config) -> tuple[int, ...]:
    """Return the EOS token ids of config.json or generation_config.json, where one may be bare."""
    ids = fields.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _refuse_unsupported(config: Config) -> None:
    """Raise `UserError` for a model that the decoder would compute differently."""
    kind = config.get("model_type", "")
    if kind not in FAMILIES:
        nearest = difflib.get_close_matches(str(kind), FAMILIES, n=1)
        hint = f"; the nearest is {nearest[0]}" if nearest else ""
        raise UserError(
            f"config.json: model_type {kind!r} is not supported, only {', '.join(FAMILIES)} "
            f"are{hint}"
        )
    family = FAMILIES[kind]
    require_sizes(config)
    if config.get("use_sliding_window") and family.sliding_windows != "last":
        raise UserError(
            f"config.json: use_sliding_window is not supported with model_type {kind!r}"
        )
    if config.get("use_bidirectional_attention"):
        raise UserError(
            "config.json: use_bidirectional_attention is not supported: a decoder only attends "
            "to earlier tokens"
        )
    for name, reason in family.unsupported.items():
        if config.get(name) is not None:
            raise UserError(
                f"config.json: {name} of model_type {kind!r} is not supported: {reason}"
            )
    refuse_quantization(config)


def _read_activation(config: Config, family: Family) -> str:
    field = family.activation_fields[0]
    name = config.get(field) or family.activation
    name = family.activation_aliases.get(name, name)
    if name not in ACTIVATIONS:
        raise UserError(
            f"config.json: {field} {name!r} is not supported, only "
            f"{', '.join(map(repr, ACTIVATIONS))} are"
        )
    return name


def _read_windows(fields: Config, family: Family) -> tuple[int | None, tuple[bool, ...]]:
    """Return `sliding_window` and `local_layers` of `Architecture`."""
    window = fields.get("sliding_window")
    if family.sliding_windows == "last" and not fields.get("use_sliding_window"):
        window = None
    if family.sliding_windows in ("last", "pattern"):
        local = _local_layers(fields, family, window)
    else:
        local = _uniform_layers(fields, family, window)
    if not any(local):
        return None, ()
    if not isinstance(window, int) or window < 1:
        raise UserError(f"config.json: sliding_window must be a whole number, it is {window!r}")
    return window, local


def _local_layers(fields: Config, family: Family, window: int | None) -> tuple[bool, ...]:
    """Return which layers have a sliding window, where layers differ."""
    num_layers = fields["num_hidden_layers"]
    types = fields.get("layer_types")
    if types is not None:
        if len(types) != num_layers or set(types) - {FULL, LOCAL}:
            raise UserError(
                f"config.json: layer_types {types} must be num_hidden_layers={num_layers} words, "
                f"{FULL} or {LOCAL}"
            )
        return tuple(name == LOCAL for name in types)
    if family.sliding_windows == "pattern":
        period = fields.get(family.window_period_field) or family.window_period
        return tuple((layer + 1) % period > 0 for layer in range(num_layers))
    first_local = fields["max_window_layers"]
    return tuple(window is not None and layer >= first_local for layer in range(num_layers))


def _uniform_layers(fields: Config, family: Family, window: int | None) -> tuple[bool, ...]:
    """Return which layers have a sliding window, where either all or none have."""
    is_local = family.sliding_windows == "all" and window is not None
    supported = LOCAL if is_local else FULL
    types = fields.get("layer_types") or [supported]
    if set(types) != {supported}:
        raise UserError(
            f"config.json: layer_types {sorted(set(types))} are not supported, only {supported} "
            f"is with model_type {fields['model_type']!r} and sliding_window={window!r}"
        )
    return (is_local,) * fields["num_hidden_layers"]


def _read_rope(fields: Config, family: Family) -> tuple[float, RopeScaling, float | None]:
    """Return `rope_theta`, `rope_scaling` and `local_rope_theta` of `Architecture`."""
    rope = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    if family.rope_by_layer_type:
        return _read_two_ropes(rope, bool(nested), fields, family)
    if nested:
        raise UserError(
            f"config.json: rope_parameters for each layer type ({', '.join(nested)}) are not "
            "supported"
        )
    return *_one_rope(rope, fields, family), None


def _read_two_ropes(
    rope: Config, by_layer_type: bool, fields: Config, family: Family
) -> tuple[float, RopeScaling, float]:
    """Read the rotary parameters of a family whose local layers have their own.

    transformers 5 stores both by layer type. Before, `rope_scaling` described the other layers
    and `rope_local_base_freq` the local ones.
    """
    if rope and not by_layer_type and fields.get("rope_parameters"):
        raise UserError(
            f"config.json: rope_parameters of model_type {fields['model_type']!r} must name layer "
            f"types, {FULL} and {LOCAL}, they are {rope}"
        )
    local = {"rope_theta": fields.get("rope_local_base_freq") or 10_000.0}
    other = {"rope_theta": fields.get("rope_theta") or 1_000_000.0}
    if by_layer_type:
        local |= rope.get(LOCAL) or {}
        other |= rope.get(FULL) or {}
    else:
        other |= rope
    local_theta, local_scaling = _one_rope(local, fields, family)
    local_kind = dict(local_scaling)["rope_type"]
    if local_kind != "default":
        raise UserError(
            f"config.json: rope_parameters of {LOCAL} with rope_type {local_kind!r} are not "
            "supported, only 'default' is"
        )
    return *_one_rope(other, fields, family), local_theta


def _one_rope(rope: Config, fields: Config, family: Family) -> tuple[float, RopeScaling]:
    """Return the base of one kind of rotary embedding and its other parameters."""
    rope = dict(rope)
    older = rope.pop("type", None)
    kind = rope.get("rope_type") or older or "default"
    kind = family.rope_aliases.get(kind, kind)
    rope["rope_type"] = kind
    theta = rope.pop("rope_theta", None) or fields.get("rope_theta") or 10_000.0
    if kind not in ROPE_KINDS:
        raise UserError(
            f"config.json: rope_type {kind!r} is not supported, only {', '.join(ROPE_KINDS)} are"
        )
    if (rope.pop("partial_rotary_factor", None) or fields.get("partial_rotary_factor") or 1) != 1:
        raise UserError("config.json: partial_rotary_factor is not supported, only 1 is")
    for name in ROPE_KINDS[kind]:
        if rope.get(name) is None:
            raise UserError(f"config.json: rope_type {kind!r} needs {name}")
    if kind in ROPE_KINDS_WITH_LENGTH:
        # The order of transformers: outside the parameters, among them, or else the whole length.
        rope["original_max_position_embeddings"] = (
            fields.get("original_max_position_embeddings")
            or rope.get("original_max_position_embeddings")
            or _max_length(fields, family)
        )
    # Lists become tuples, so that the architecture is hashable.
    hashable = ((k, tuple(v) if isinstance(v, list) else v) for k, v in rope.items())
    return float(theta), tuple(sorted(hashable))


def _max_length(fields: Config, family: Family) -> int:
    default = family.defaults["max_position_embeddings"]
    return fields.get("max_position_embeddings") or default


def to_hf_config(architecture: Architecture, dtype: str = "float32", head: str = "lm") -> Config:
    """Return the contents of a config.json that transformers reads as the same model.

    Args:
      architecture: The decoder.
      dtype: Type of the exported weights.
      head: "lm", or "scalar" for a sequence classifier with one label.
    """
    a = architecture
    family = FAMILIES[a.family]
    config = {
        "architectures": [f"{family.class_prefix}ForCausalLM"],
        "model_type": a.family,
        "vocab_size": a.vocab_size,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.intermediate_size,
        "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "rms_norm_eps": a.norm_epsilon,
        "max_position_embeddings": a.max_position_embeddings,
        "tie_word_embeddings": a.tied,
        "bos_token_id": a.bos_id,
        "eos_token_id": a.eos_ids[0] if len(a.eos_ids) == 1 else list(a.eos_ids) or None,
        "pad_token_id": a.pad_id,
        "dtype": dtype,
    }
    config |= dict.fromkeys(("hidden_act", *family.activation_fields), a.activation)
    config |= {name: getattr(a, field) for name, field in family.fields.items()}
    config |= {name: getattr(a, biases[-1]) for name, biases in family.bias_fields.items()}
    config |= _write_windows(a, family)
    config |= _write_rope(a, family)
    if head == "scalar":
        prefix = family.classifier_prefix or family.class_prefix
        config["architectures"] = [f"{prefix}ForSequenceClassification"]
        # This is how transformers writes num_labels = 1.
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config


def _write_windows(a: Architecture, family: Family) -> Config:
    config: Config = {}
    if family.sliding_windows != "none":
        config["sliding_window"] = a.sliding_window
    if family.sliding_windows in ("last", "pattern"):
        config["layer_types"] = [LOCAL if local else FULL for local in a.layers_are_local]
    if family.sliding_windows == "last":
        config["use_sliding_window"] = a.sliding_window is not None
        # transformers 4.49 and earlier read this field instead of layer_types.
        config["max_window_layers"] = (*a.layers_are_local, True).index(True)
    return config


def _write_rope(a: Architecture, family: Family) -> Config:
    """Return the rotary parameters in the spellings of transformers 4 and 5."""
    rope = {name: list(v) if isinstance(v, tuple) else v for name, v in a.rope_scaling}
    config: Config = {
        "rope_parameters": {**rope, "rope_theta": a.rope_theta},
        # transformers 4 reads the next two fields.
        "rope_theta": a.rope_theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
    }
    length = "original_max_position_embeddings"
    if family.rope_length_outside and length in rope:
        config[length] = rope.pop(length)
        # transformers 4 accepts no further field in rope_scaling.
        config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    if a.local_rope_theta is not None:
        config["rope_local_base_freq"] = a.local_rope_theta
        config["rope_parameters"] = {
            FULL: config["rope_parameters"],
            LOCAL: {"rope_type": "default", "rope_theta": a.local_rope_theta},
        }
    return config
