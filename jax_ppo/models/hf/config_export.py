"""Conversion of `Architecture` to Hugging Face's config.json."""

import dataclasses

from jax_ppo.errors import UserError
from jax_ppo.models.architecture import INTEGER_FIELDS, Architecture
from jax_ppo.models.hf.config import from_hf_config
from jax_ppo.models.hf.families import FAMILIES
from jax_ppo.models.hf.family import Family
from jax_ppo.models.hf.fields import Config
from jax_ppo.models.hf.rope_config import FULL, LOCAL, write_rope


def to_hf_config(architecture: Architecture, dtype: str = "float32", head: str = "lm") -> Config:
    """Return the contents of a config.json that transformers reads as the same model.

    `dtype` is that of the exported weights; `head` is "lm", "scalar" for a sequence classifier with
    one label, or "token" for a classifier of tokens with one label.
    """
    a = architecture
    family = FAMILIES[a.family]
    config: Config = {
        "architectures": [family.decoder_class or f"{family.class_prefix}ForCausalLM"],
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
        # One number, a list, or null.
        "eos_token_id": a.eos_ids[0] if len(a.eos_ids) == 1 else list(a.eos_ids) or None,
        "pad_token_id": a.pad_id,
        "dtype": dtype,
    }
    config = {
        family.field_names.get(name, name): value
        for name, value in config.items()
        if name not in family.absent
    }
    activation = a.activation
    if family.activation_aliases.get(family.activation) == activation:
        activation = family.activation  # the family's word
    config |= dict.fromkeys(("hidden_act", *family.activation_fields), activation)
    for name, field in family.fields.items():
        value = getattr(a, field)
        # transformers refuses 4.0 where it expects a whole number.
        is_whole = field in INTEGER_FIELDS and value is not None and value % 1 == 0
        config[name] = int(value) if is_whole else value
    config |= {name: getattr(a, biases[-1]) for name, biases in family.bias_fields.items()}
    if a.num_experts:
        config |= _write_experts(a, family)
    if a.latent_size:
        config["qk_nope_head_dim"] = a.head_dim - a.rope_head_dim
    if family.has_global_heads:
        config |= _write_global_heads(a)
    config |= _write_windows(a, family)
    if family.unrotated_period:
        # The field lists the layers that are rotated, in spite of its name.
        config["no_rope_layers"] = [int(rotated) for rotated in a.layers_are_rotated]
    config |= write_rope(a, family)
    if head != "lm":
        prefix = family.classifier_prefix or family.class_prefix
        unit = "Token" if head == "token" else "Sequence"
        config["architectures"] = [f"{prefix}For{unit}Classification"]
        # This is how transformers writes num_labels = 1.
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config


def update_hf_config(source: Config, architecture: Architecture, dtype: str, head: str) -> Config:
    """Return the config.json of a trained model, which is that of its source where possible.

    `source` is the first checkpoint's config.json, {} if there is none. What an export must change
    is changed; if it describes another model, the result is `to_hf_config`'s.
    """
    ours = to_hf_config(architecture, dtype, head)
    try:
        described = from_hf_config(source)
    except UserError:
        return ours
    # The export has none of the source's files of code.
    changed = {name: value for name, value in source.items() if name != "auto_map"}
    changed["architectures"] = ours["architectures"]
    for name in {"dtype", "torch_dtype"} & source.keys() or {"dtype"}:
        changed[name] = dtype
    if described.tied != architecture.tied:
        changed["tie_word_embeddings"] = architecture.tied
    for name, before, after in (
        ("bos_token_id", described.bos_id, architecture.bos_id),
        ("pad_token_id", described.pad_id, architecture.pad_id),
        # generation_config.json's too: some programs read one of the files only.
        ("eos_token_id", described.eos_ids, architecture.eos_ids),
    ):
        if before != after:
            changed[name] = ours[name]
    if head != "lm":
        changed |= {name: ours[name] for name in ("id2label", "label2id")}
        for name in ("num_labels", "problem_type"):
            changed.pop(name, None)
    exported = dataclasses.replace(  # with what the run knows and config.json does not say
        from_hf_config(changed), eos_ids=architecture.eos_ids, num_ids=architecture.num_ids
    )
    return changed if exported == architecture else ours


def _write_experts(a: Architecture, family: Family) -> Config:
    config: Config = {  # "" is the name of what a family has no field for
        family.expert_fields[0]: a.num_experts,
        family.expert_width: a.intermediate_size,
        "num_experts_per_tok": a.experts_per_token,
        family.expert_weights_field: a.normalized_expert_weights,
        family.shared_experts_field: a.shared_expert_size // a.intermediate_size,
        family.first_dense_field: sum(a.dense_layers),
    }
    config.pop("", None)
    if family.lists_dense_layers and any(a.dense_layers):
        config["mlp_only_layers"] = [i for i, is_dense in enumerate(a.dense_layers) if is_dense]
    if a.dense_size:
        config["intermediate_size"] = a.dense_size
    if family.has_router_groups:
        config |= {"n_group": a.router_groups, "topk_group": a.groups_per_token}
    if "topk_method" in family.defaults:
        config["topk_method"] = "greedy" if a.router_groups == 1 else "group_limited_greedy"
    return config


def _write_global_heads(a: Architecture) -> Config:
    sizes = {"head_dim": a.global_head_dim, "num_key_value_heads": a.global_kv_heads}
    return {
        "global_head_dim": a.global_head_dim,
        "num_global_key_value_heads": a.global_kv_heads,
        "per_layer_config": {
            str(layer): sizes for layer, is_local in enumerate(a.layers_are_local) if not is_local
        },
        "num_kv_shared_layers": a.shared_layers,
        "use_double_wide_mlp": bool(a.dense_layers) and a.dense_size != a.intermediate_size,
        "hidden_size_per_layer_input": a.per_layer_size,
        "vocab_size_per_layer_input": a.vocab_size,
    }


def _write_windows(a: Architecture, family: Family) -> Config:
    config: Config = {}
    if family.linear_word:
        words = (FULL, family.linear_word)
        config["layer_types"] = [words[linear] for linear in a.layers_are_linear]
    if family.adjusted_width:
        config["block_auto_adjust_ff_dim"] = False
    rule = family.sliding_windows
    if rule in ("pattern", "listed"):
        # transformers cannot make these families' masks without a window, even if no layer uses it.
        config["sliding_window"] = a.sliding_window or family.defaults["sliding_window"]
    elif rule not in ("none", "refused"):
        config["sliding_window"] = a.sliding_window
    if rule in ("last", "pattern", "listed"):
        config["layer_types"] = [LOCAL if local else FULL for local in a.layers_are_local]
    if rule in ("last", "switched"):
        config["use_sliding_window"] = a.sliding_window is not None
    if rule == "last":
        # transformers 4.49 and earlier read this field instead of layer_types.
        config["max_window_layers"] = (*a.layers_are_local, True).index(True)
    return config
