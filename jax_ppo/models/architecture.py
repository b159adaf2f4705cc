"""What one decoder differs from another in, read from and written to Hugging Face's config.json."""

import dataclasses
import difflib
from typing import Any

from jax_ppo.errors import UserError

FAMILIES = ("llama", "qwen2")

# The kinds of rotary position embedding (rope.py), with the parameters that each cannot do without.
ROPE_KINDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor",),
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A decoder's shape. Hashable: it is a static argument of compiled functions.

    Attributes:
      family: Hugging Face's `model_type`.
      vocab_size: V, rows of the embedding.
      hidden_size: D.
      intermediate_size: width of the SwiGLU MLP.
      num_layers, num_heads, num_kv_heads, head_dim: attention; num_kv_heads divides num_heads.
      qkv_bias, output_bias, mlp_bias: which projections have a bias.
      norm_epsilon: RMSNorm.
      rope_theta: base of the rotary frequencies.
      rope_scaling: sorted (name, value) pairs of Hugging Face's rope parameters besides the base, lists as tuples.
      max_position_embeddings: longest sequence it was made for, tokens.
      tied: the output embedding is the input embedding.
      bos_id, eos_ids, pad_id: token ids; None or () where the checkpoint has none.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_epsilon: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: tuple[tuple[str, Any], ...] = (("rope_type", "default"),)
    max_position_embeddings: int = 2048
    tied: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None


def from_hf_config(config: dict[str, Any]) -> Architecture:
    """Reads the contents of config.json, of transformers 4 or 5. UserError names what is missing or not supported."""
    _refuse_unsupported(config)
    family, heads, eos = config["model_type"], config["num_attention_heads"], config.get("eos_token_id")
    theta, rope = _rope_parameters(config)
    llama_bias = family == "llama" and bool(config.get("attention_bias"))
    return Architecture(
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        qkv_bias=family == "qwen2" or llama_bias,
        output_bias=llama_bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias")),
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=rope,
        max_position_embeddings=_longest(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        bos_id=config.get("bos_token_id"),
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        pad_id=config.get("pad_token_id"),
    )


def _refuse_unsupported(config):
    family = config.get("model_type", "")
    if family not in FAMILIES:
        near = difflib.get_close_matches(str(family), FAMILIES, n=1)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise UserError(f"config.json: model_type {family!r} is not supported, only {', '.join(FAMILIES)} are{hint}")
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        if not isinstance(config.get(name), int):
            raise UserError(f"config.json: {name} must be a whole number, it is {config.get(name)!r}")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"config.json: hidden_act {config['hidden_act']!r} is not supported, only 'silu' is")
    if config.get("use_sliding_window"):
        raise UserError("config.json: use_sliding_window is not supported")
    if config.get("quantization_config"):
        raise UserError("config.json: quantization_config is not supported; use a checkpoint in float32 or bfloat16")
    layer_types = set(config.get("layer_types") or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise UserError(f"config.json: layer_types {sorted(layer_types)} are not supported, only full_attention is")


def _rope_parameters(config):
    """The base, and the other parameters in the form of `Architecture.rope_scaling`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = kind = rope.get("rope_type", rope.pop("type", None)) or "default"
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0
    if kind not in ROPE_KINDS:
        raise UserError(f"config.json: rope_type {kind!r} is not supported, only {', '.join(ROPE_KINDS)} are")
    nested = [name for name, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise UserError(f"config.json: rope_parameters for each layer type ({', '.join(nested)}) are not supported")
    if (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1) != 1:
        raise UserError("config.json: partial_rotary_factor is not supported, only 1 is")
    for name in ROPE_KINDS[kind]:
        if rope.get(name) is None:
            raise UserError(f"config.json: rope_type {kind!r} needs {name}")
    if kind in ("yarn", "llama3", "longrope"):
        # transformers' order: beside the parameters (as Phi-3 has it), among them, or else the whole length.
        original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = original or _longest(config)
    return float(theta), tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in rope.items()))


def _longest(config):
    return config.get("max_position_embeddings") or {"llama": 2048, "qwen2": 32_768}[config["model_type"]]


def to_hf_config(architecture: Architecture, dtype: str = "float32") -> dict[str, Any]:
    """The contents of config.json that transformers reads back as the same model. `dtype`: of the weights beside it."""
    a = architecture
    rope = {k: list(v) if isinstance(v, tuple) else v for k, v in a.rope_scaling}
    config = {
        "architectures": ["LlamaForCausalLM" if a.family == "llama" else "Qwen2ForCausalLM"],
        "model_type": a.family,
        "vocab_size": a.vocab_size,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.intermediate_size,
        "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
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
    if a.family == "llama":
        config |= {"attention_bias": a.qkv_bias, "mlp_bias": a.mlp_bias}
    return config
