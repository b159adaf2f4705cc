"""Hugging Face's config.json, of transformers 4 or 5: to an Architecture and back."""

import dataclasses
import difflib
from typing import Any

from jax_ppo.errors import UserError
from jax_ppo.models.architecture import ROPE_KINDS, Architecture

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
FULL, LOCAL = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class Family:
    """What a `model_type` says without a word in config.json.

    Attributes:
      name: of transformers' classes: {name}ForCausalLM, ...
      classifier: {classifier}ForSequenceClassification, where that is another.
      attention_bias: config.json may ask for biases in attention. (Qwen2 has three of the four, always.)
      windows: where sliding windows come from: "" has none; "all": every layer has one if there is a `sliding_window`;
        "last": the layers from `max_window_layers` on, if `use_sliding_window`; "pattern": all but each n-th.
      defaults: what transformers takes for a field that is not there.
    """

    name: str
    classifier: str = ""
    attention_bias: bool = False
    windows: str = ""
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)


_GEMMA = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
}
_GEMMA_2 = _GEMMA | {"num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_QWEN = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "max_position_embeddings": 32_768,
}
FAMILIES = {
    "llama": Family("Llama", attention_bias=True, defaults={"max_position_embeddings": 2048}),
    "qwen2": Family("Qwen2", windows="last", defaults=_QWEN),
    "qwen3": Family(
        "Qwen3", attention_bias=True, windows="last", defaults=_QWEN | {"head_dim": 128}
    ),
    "mistral": Family(
        "Mistral",
        windows="all",
        defaults={
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "max_position_embeddings": 131_072,
        },
    ),
    "phi3": Family(
        "Phi3",
        windows="all",
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
        },
    ),
    "gemma": Family("Gemma", attention_bias=True, defaults=_GEMMA),
    "gemma2": Family(
        "Gemma2",
        attention_bias=True,
        windows="pattern",
        defaults=_GEMMA_2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family(
        "Gemma3",
        classifier="Gemma3Text",
        attention_bias=True,
        windows="pattern",
        defaults=_GEMMA_2 | {"max_position_embeddings": 131_072},
    ),
}


def from_hf_config(config: dict[str, Any]) -> Architecture:
    """Reads the contents of config.json. UserError names what is missing or not supported."""
    _refuse_unsupported(config)
    kind, family = config["model_type"], FAMILIES[config["model_type"]]
    given = family.defaults | config

    def value(name, default=None):  # of a field that may as well be null
        return default if given.get(name) is None else given[name]

    heads, eos, bias = (
        given["num_attention_heads"],
        given.get("eos_token_id"),
        family.attention_bias,
    )
    theta, rope, local_theta = _rope_parameters(given)
    window, local = _windows(given)
    gemma = kind.startswith("gemma")
    return Architecture(
        family=kind,
        vocab_size=given["vocab_size"],
        hidden_size=given["hidden_size"],
        intermediate_size=given["intermediate_size"],
        num_layers=given["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=given.get("num_key_value_heads") or heads,
        head_dim=given.get("head_dim")
        or family.defaults.get("head_dim")
        or given["hidden_size"] // heads,
        qkv_bias=kind == "qwen2" or bias and bool(given.get("attention_bias")),
        output_bias=bias and bool(given.get("attention_bias")),
        mlp_bias=kind == "llama" and bool(given.get("mlp_bias")),
        activation=_activation(config),
        scaled_embedding=gemma,
        norm_epsilon=value("rms_norm_eps", 1e-6),
        norm_plus_one=gemma,
        qk_norm=kind in ("qwen3", "gemma3_text"),
        post_norms=kind in ("gemma2", "gemma3_text"),
        query_pre_attn_scalar=value("query_pre_attn_scalar")
        if family.windows == "pattern"
        else None,
        attention_softcap=given.get("attn_logit_softcapping")
        if family.windows == "pattern"
        else None,
        logit_softcap=given.get("final_logit_softcapping") if family.windows == "pattern" else None,
        sliding_window=window,
        local_layers=local,
        rope_theta=theta,
        rope_scaling=rope,
        local_rope_theta=local_theta,
        max_position_embeddings=_longest(given),
        tied=bool(value("tie_word_embeddings", False)),
        bos_id=given.get("bos_token_id"),
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        pad_id=given.get("pad_token_id"),
    )


def _refuse_unsupported(config):
    kind = config.get("model_type", "")
    if kind not in FAMILIES:
        near = difflib.get_close_matches(str(kind), FAMILIES, n=1)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise UserError(
            f"config.json: model_type {kind!r} is not supported, only {', '.join(FAMILIES)} are{hint}"
        )
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ):
        if not isinstance(config.get(name), int):
            raise UserError(
                f"config.json: {name} must be a whole number, it is {config.get(name)!r}"
            )
    if config.get("use_sliding_window") and FAMILIES[kind].windows != "last":
        raise UserError(
            f"config.json: use_sliding_window is not supported with model_type {kind!r}"
        )
    if config.get("use_bidirectional_attention"):
        raise UserError(
            "config.json: use_bidirectional_attention is not supported: a decoder looks back only"
        )
    if kind == "gemma3_text" and config.get("attn_logit_softcapping") is not None:
        raise UserError(
            "config.json: attn_logit_softcapping of model_type 'gemma3_text' is not supported: transformers reads "
            "it and caps nothing, so it is not clear what the weights were made with"
        )
    if config.get("quantization_config"):
        raise UserError(
            "config.json: quantization_config is not supported; use a checkpoint in float32 or bfloat16"
        )


def _activation(config):
    """Gemma 2 and 3 have a field of their own; the first Gemma's says "gelu" or nothing and means its tanh approximation."""
    kind = config["model_type"]
    field = "hidden_activation" if kind in ("gemma2", "gemma3_text") else "hidden_act"
    name = config.get(field) or ACTIVATIONS[kind.startswith("gemma")]
    name = "gelu_pytorch_tanh" if kind == "gemma" and name == "gelu" else name
    if name not in ACTIVATIONS:
        raise UserError(
            f"config.json: {field} {name!r} is not supported, only {', '.join(map(repr, ACTIVATIONS))} are"
        )
    return name


def _windows(config):
    """`sliding_window` and `local_layers` of Architecture."""
    kind, layers, window = (
        config["model_type"],
        config["num_hidden_layers"],
        config.get("sliding_window"),
    )
    source, types = FAMILIES[kind].windows, config.get("layer_types")
    if source == "last" and not config.get("use_sliding_window"):
        window = None
    if source in ("last", "pattern") and types is not None:
        if len(types) != layers or set(types) - {FULL, LOCAL}:
            raise UserError(
                f"config.json: layer_types {types} must be num_hidden_layers={layers} words, {FULL} or {LOCAL}"
            )
        local = tuple(name == LOCAL for name in types)
    elif source == "pattern":
        every = 2 if kind == "gemma2" else config.get("sliding_window_pattern") or 6
        local = tuple((i + 1) % every > 0 for i in range(layers))
    elif source == "last":
        local = tuple(
            window is not None and i >= config["max_window_layers"] for i in range(layers)
        )
    else:
        local = (source == "all" and window is not None,) * layers
        supported = LOCAL if any(local) else FULL
        if set(types or [supported]) != {supported}:
            raise UserError(
                f"config.json: layer_types {sorted(set(types))} are not supported, only {supported} is with "
                f"model_type {kind!r} and sliding_window={window!r}"
            )
    if not any(local):
        return None, ()
    if not isinstance(window, int) or window < 1:
        raise UserError(f"config.json: sliding_window must be a whole number, it is {window!r}")
    return window, local


def _rope_parameters(config):
    """The base, the other parameters in the form of `Architecture.rope_scaling`, and the base of local layers."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    if config["model_type"] == "gemma3_text":
        return _two_ropes(rope if nested else {}, {} if nested else rope, config)
    if nested:
        raise UserError(
            f"config.json: rope_parameters for each layer type ({', '.join(nested)}) are not supported"
        )
    return *_one_rope(rope, config), None


def _two_ropes(by_layer_type, older, config):
    """Gemma 3's: by layer type in transformers 5; before, the local layers' base stood beside the others' parameters."""
    if older and config.get("rope_parameters"):
        raise UserError(
            "config.json: rope_parameters of model_type 'gemma3_text' must name layer types, "
            f"{FULL} and {LOCAL}, they are {older}"
        )
    local = {"rope_theta": config.get("rope_local_base_freq") or 10_000.0} | (
        by_layer_type.get(LOCAL) or {}
    )
    local_theta, local_rope = _one_rope(local, config)
    if dict(local_rope)["rope_type"] != "default":
        raise UserError(
            f"config.json: rope_parameters of {LOCAL} with rope_type {dict(local_rope)['rope_type']!r} are not "
            "supported, only 'default' is"
        )
    whole = (
        {"rope_theta": config.get("rope_theta") or 1_000_000.0}
        | older
        | (by_layer_type.get(FULL) or {})
    )
    return *_one_rope(whole, config), local_theta


def _one_rope(rope, config):
    rope = dict(rope)
    older, phi = rope.pop("type", None), config["model_type"] == "phi3"
    kind = rope.get("rope_type") or older or "default"
    rope["rope_type"] = kind = (
        "longrope" if phi and kind in ("su", "yarn") else kind
    )  # Phi-3's own words for it
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    if kind not in ROPE_KINDS:
        raise UserError(
            f"config.json: rope_type {kind!r} is not supported, only {', '.join(ROPE_KINDS)} are"
        )
    if (rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1) != 1:
        raise UserError("config.json: partial_rotary_factor is not supported, only 1 is")
    for name in ROPE_KINDS[kind]:
        if rope.get(name) is None:
            raise UserError(f"config.json: rope_type {kind!r} needs {name}")
    if kind in ("yarn", "llama3", "longrope"):
        # transformers' order: beside the parameters (as Phi-3 has it), among them, or else the whole length.
        original = config.get("original_max_position_embeddings") or rope.get(
            "original_max_position_embeddings"
        )
        rope["original_max_position_embeddings"] = original or _longest(config)
    return float(theta), tuple(
        sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in rope.items())
    )


def _longest(config):
    return (
        config.get("max_position_embeddings")
        or FAMILIES[config["model_type"]].defaults["max_position_embeddings"]
    )


def to_hf_config(
    architecture: Architecture, dtype: str = "float32", head: str = "lm"
) -> dict[str, Any]:
    """The contents of config.json that transformers reads back as the same model.

    Args:
      dtype: of the weights beside it.
      head: "lm", or "scalar" for a sequence classifier of one label.
    """
    a, family = architecture, FAMILIES[architecture.family]
    rope = {k: list(v) if isinstance(v, tuple) else v for k, v in a.rope_scaling}
    config = {
        "architectures": [f"{family.name}ForCausalLM"],
        "model_type": a.family,
        "vocab_size": a.vocab_size,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.intermediate_size,
        "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "hidden_act": a.activation,
        "rms_norm_eps": a.norm_epsilon,
        "rope_parameters": {**rope, "rope_theta": a.rope_theta},
        # Both spellings: transformers 4 reads these two.
        "rope_theta": a.rope_theta,
        "rope_scaling": None if dict(a.rope_scaling)["rope_type"] == "default" else rope,
        "max_position_embeddings": a.max_position_embeddings,
        "tie_word_embeddings": a.tied,
        "bos_token_id": a.bos_id,
        "eos_token_id": a.eos_ids[0] if len(a.eos_ids) == 1 else list(a.eos_ids) or None,
        "pad_token_id": a.pad_id,
        "dtype": dtype,
    }
    if head == "scalar":
        config["architectures"] = [f"{family.classifier or family.name}ForSequenceClassification"]
        config |= {
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
        }  # transformers' spelling of num_labels = 1
    if a.family.startswith("gemma"):
        config["hidden_activation"] = a.activation
    if a.family == "phi3" and "original_max_position_embeddings" in rope:
        config["original_max_position_embeddings"] = rope.pop(
            "original_max_position_embeddings"
        )  # read here alone
        config["rope_scaling"] = {
            "type": rope.pop("rope_type"),
            **rope,
        }  # transformers 4 wants no word more
    if a.local_rope_theta is not None:
        config["rope_local_base_freq"] = a.local_rope_theta
        config["rope_parameters"] = {
            FULL: config["rope_parameters"],
            LOCAL: {"rope_type": "default", "rope_theta": a.local_rope_theta},
        }
    if family.windows == "pattern":
        config |= {
            "query_pre_attn_scalar": a.query_pre_attn_scalar,
            "attn_logit_softcapping": a.attention_softcap,
            "final_logit_softcapping": a.logit_softcap,
        }
    if family.attention_bias:
        config["attention_bias"] = a.output_bias
    if a.family == "llama":
        config["mlp_bias"] = a.mlp_bias
    if family.windows:
        config["sliding_window"] = a.sliding_window
    if family.windows in ("last", "pattern"):
        config["layer_types"] = [LOCAL if local else FULL for local in a.layers_are_local]
    if family.windows == "last":
        config |= {
            "use_sliding_window": a.sliding_window is not None,
            "max_window_layers": _first_local(a),
        }
    return config


def _first_local(architecture):
    """transformers 4.49 and earlier read this instead of layer_types."""
    return (*architecture.layers_are_local, True).index(True)
