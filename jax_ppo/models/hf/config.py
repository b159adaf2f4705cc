"""Conversion of Hugging Face's config.json (of transformers 4 or 5) to `Architecture`."""

from typing import Any

from jax_ppo.errors import UserError, nearest_name, shorten
from jax_ppo.models.architecture import ACTIVATIONS, INTEGER_FIELDS, Architecture
from jax_ppo.models.hf.families import FAMILIES, MULTIMODAL
from jax_ppo.models.hf.family import Family
from jax_ppo.models.hf.fields import (
    MAX_LAYERS,
    MAX_SIZE,
    Config,
    ConfigReader,
    require_divisor,
)
from jax_ppo.models.hf.rope_config import FULL, LOCAL, read_rope
from jax_ppo.models.rope import latent_scale

# Beginnings of fields that describe media in the description of a decoder.
MEDIA_FIELDS = ("vision_", "image_", "video_")
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def from_hf_config(config: Config) -> Architecture:
    """Return the architecture that config.json describes.

    Raise `UserError` for a field that is missing, unsupported or unknown.
    """
    kind, family = _read_family(config)
    reader = ConfigReader(config, family.defaults, names=family.field_names)
    reader.string("model_type")
    hidden_size = reader.integer("hidden_size")
    num_layers = reader.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = reader.integer("num_attention_heads")
    vocab_size = reader.integer("vocab_size")
    head_dim = _read_head_dim(reader, family, hidden_size, num_heads)
    _refuse_unsupported(reader, kind, family)
    linear_layers = _read_linear_layers(reader, family, num_layers)
    sliding_window, local_layers = _read_windows(reader, family, num_layers)
    family_fields = _read_family_fields(reader, family)
    rope = read_rope(reader, family, family_fields.get("rope_head_dim", head_dim))
    if family.fixed.get("block") == "latent":
        family_fields["attention_multiplier"] = latent_scale(head_dim, rope["rope_scaling"])
    num_kv_heads = _read_num_kv_heads(reader, family, num_heads)
    tied = reader.boolean("tie_word_embeddings")
    if family.adjusted_width:
        # Its older name in some files, which transformers prefers.
        tied = reader.boolean("tie_embedding", tied)
    if family.has_global_heads:
        local = local_layers or (False,) * num_layers
        family_fields |= _read_global_heads(reader, num_heads, num_kv_heads, head_dim, local)
        family_fields |= _read_shared_layers(reader, local)
        family_fields["per_layer_size"] = reader.integer("hidden_size_per_layer_input", minimum=0)
        rows = reader.integer("vocab_size_per_layer_input")
        if family_fields["per_layer_size"] and rows != vocab_size:
            raise reader.error(f"vocab_size_per_layer_input={rows} must be vocab_size={vocab_size}")
    architecture = Architecture(
        family=kind,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        activation=_read_activation(reader, family),
        norm_epsilon=reader.fraction("rms_norm_eps"),
        sliding_window=sliding_window,
        local_layers=local_layers,
        linear_layers=linear_layers,
        unrotated_layers=_read_unrotated_layers(reader, family, num_layers),
        learned_positions=family.learned_positions,
        max_position_embeddings=reader.integer("max_position_embeddings"),
        tied=tied,
        bos_id=reader.token_id("bos_token_id"),
        eos_ids=reader.token_ids("eos_token_id"),
        pad_id=reader.token_id("pad_token_id", maximum=vocab_size - 1),
        **rope,
        **_read_mlp(reader, family, hidden_size, num_layers),
        **family_fields,
    )
    reader.refuse_unread()
    return architecture


def text_config(config: Config) -> Config:
    """Return the description of the decoder in the config.json of a multimodal model.

    Any other config.json is returned as it is. Raise `UserError` if `text_config` is not an object.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in MULTIMODAL:
        return config
    family = MULTIMODAL[kind]
    text = ConfigReader(config).table("text_config")
    if not text and kind in family.text_families:
        # The first files of Qwen2-VL describe the decoder next to the rest.
        text = {name: value for name, value in config.items() if name != "text_config"}
    text = {name: value for name, value in text.items() if not name.startswith(MEDIA_FIELDS)}
    text_kind = str(text.get("model_type", ""))
    # As in transformers, those of the whole model come first.
    outer = {name: config[name] for name in SPECIAL_TOKENS if config.get(name) is not None}
    defaults = dict(family.defaults.get(text_kind, {}))
    if text.get("rope_parameters"):
        defaults.pop("rope_theta", None)
    fields = defaults | text | outer
    fields["model_type"] = family.text_families.get(text_kind, text_kind)
    # transformers asks the whole model first.
    if tied := config.get("tie_word_embeddings", family.tied):
        fields["tie_word_embeddings"] = tied
    return fields


def _read_family(config: Config) -> tuple[str, Family]:
    kind = config.get("model_type", "")
    if not isinstance(kind, str) or kind not in FAMILIES:
        nearest = nearest_name(str(kind), (*FAMILIES, *MULTIMODAL))
        hint = nearest and f"; the nearest is {nearest}"
        raise UserError(
            f"config.json: model_type {shorten(repr(kind))} is not supported, only "
            f"{', '.join(FAMILIES)} and multimodal models of these are{hint}"
        )
    return kind, FAMILIES[kind]


def _read_head_dim(reader: ConfigReader, family: Family, hidden_size: int, num_heads: int) -> int:
    if family.fixed.get("block") == "latent":
        return _read_latent_head_dim(reader)
    head_dim = None
    if "head_dim" not in family.absent:
        head_dim = reader.optional_integer("head_dim", nullable="head_dim" in family.nullable)
    if head_dim is None:
        heads, width = map(reader.name, ("num_attention_heads", "hidden_size"))
        require_divisor(heads, num_heads, width, hidden_size)
        head_dim = hidden_size // num_heads
    if head_dim % 2 and not family.learned_positions:  # pairs of numbers are rotated
        raise reader.unsupported("head_dim", head_dim, "even numbers are")
    return head_dim


def _read_latent_head_dim(reader: ConfigReader) -> int:
    """Return the width of a key in multi-head latent attention, the sum of two other fields."""
    rotated = reader.integer("qk_rope_head_dim")
    width = reader.integer("qk_nope_head_dim") + rotated
    if rotated % 2:
        raise reader.unsupported("qk_rope_head_dim", rotated, "even numbers are")
    # transformers computes these two, and writes them.
    for name, computed in (("head_dim", rotated), ("qk_head_dim", width)):
        if reader.optional_integer(name) not in (None, computed):
            raise reader.error(f"{name} must be {computed}, as qk_rope_head_dim={rotated} makes it")
    return width


def _read_num_kv_heads(reader: ConfigReader, family: Family, num_heads: int) -> int:
    name = "num_key_value_heads"
    if name in family.absent:
        return num_heads
    num_kv_heads = reader.optional_integer(name, nullable=name in family.nullable)
    if num_kv_heads is None:
        return num_heads
    require_divisor(name, num_kv_heads, "num_attention_heads", num_heads)
    if family.fixed.get("block") == "latent" and num_kv_heads != num_heads:
        raise reader.error(f"{name} must be num_attention_heads={num_heads}; it is {num_kv_heads}")
    return num_kv_heads


def _read_global_heads(
    reader: ConfigReader,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    local_layers: tuple[bool, ...],
) -> dict[str, int]:
    """Return the sizes of heads in layers without a sliding window.

    transformers writes them to `per_layer_config`, empty if local layers have the same sizes.
    """
    heads = reader.optional_integer("num_global_key_value_heads")
    if heads is None or not reader.boolean("attention_k_eq_v"):
        heads = num_kv_heads
    sizes: Any = {"head_dim": reader.integer("global_head_dim"), "num_key_value_heads": heads}
    if "per_layer_config" in reader:
        # The numbers are as long as the last one: "05".
        table = {name.lstrip("0") or "0": x for name, x in reader.table("per_layer_config").items()}
        sizes = next(iter(table.values()), {})
        layers = {str(layer) for layer, is_local in enumerate(local_layers) if not is_local}
        # 16.0 equals 16, and True 1, but transformers refuses them.
        is_one = len(set(map(repr, table.values()))) == 1
        if table and (table.keys() != layers or not is_one or not isinstance(sizes, dict)):
            raise reader.error(
                f"per_layer_config must have the same sizes for each layer of {FULL}, and no other"
            )
    defaults = {"head_dim": head_dim, "num_key_value_heads": num_kv_heads}
    of_full = ConfigReader(sizes, defaults, where="config.json: per_layer_config: ")
    width, heads = of_full.integer("head_dim"), of_full.integer("num_key_value_heads")
    of_full.refuse_unread(())
    require_divisor("num_global_key_value_heads", heads, "num_attention_heads", num_heads)
    if width % 2:
        raise reader.unsupported("global_head_dim", width, "even numbers are")
    return {"global_head_dim": width, "global_kv_heads": heads}


def _read_shared_layers(reader: ConfigReader, local_layers: tuple[bool, ...]) -> dict[str, Any]:
    """Return which layers share keys and values of earlier ones, and the width of their MLPs.

    These have a separate stack even if they are as wide as the others: each group is a loop.
    """
    name, layers = "num_kv_shared_layers", len(local_layers)
    shared = reader.integer(name, minimum=0, maximum=layers - 1)
    first = layers - shared
    if not set(local_layers[first:]) <= set(local_layers[:first]):
        raise reader.error(
            f"{name}={shared}: must leave a layer of each of layer_types that shared ones have"
        )
    values: dict[str, Any] = {"shared_layers": shared}
    factor = 2 if reader.boolean("use_double_wide_mlp") else 1
    if shared:
        width = reader.integer("intermediate_size", maximum=MAX_SIZE // factor)
        values["dense_layers"] = tuple(layer >= first for layer in range(layers))
        values["dense_size"] = factor * width
    return values


def _read_family_fields(reader: ConfigReader, family: Family) -> dict[str, Any]:
    values = dict(family.fixed)
    for name, field in family.fields.items():
        read = reader.optional_integer if field in INTEGER_FIELDS else reader.optional_number
        values[field] = read(name, nullable=name in family.nullable)
    if "linear_num_key_heads" in family.fields:
        heads = [f"linear_num_{kind}_heads" for kind in ("key", "value")]
        key_heads, value_heads = (values[family.fields[name]] for name in heads)
        require_divisor(heads[0], key_heads, heads[1], value_heads)
    for name, biases in family.bias_fields.items():
        values |= dict.fromkeys(biases, reader.boolean(name))
    return values


def _read_intermediate_size(reader: ConfigReader, family: Family, hidden_size: int) -> int:
    name = "intermediate_size"
    if name in family.absent:
        return reader.optional_integer(name) or 0
    if reader.name(name) in family.nullable:
        return reader.optional_integer(name) or 4 * hidden_size
    if not family.adjusted_width:
        return reader.integer(name)
    # config.json may have one and a half times as much; transformers takes the older name first.
    names = ("block_ff_dim", name)
    older, newer = (reader.optional_integer(x, nullable=False) for x in names)
    width = older or newer or reader.integer(name)
    multiple = reader.integer("block_multiple_of")
    factor = reader.optional_number("block_ffn_dim_multiplier")
    if not reader.boolean("block_auto_adjust_ff_dim", default=True):
        return width
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * multiple


def _read_mlp(
    reader: ConfigReader, family: Family, hidden_size: int, num_layers: int
) -> dict[str, Any]:
    width = _read_intermediate_size(reader, family, hidden_size)
    if not family.expert_fields:
        return {"intermediate_size": width}
    names = [name for name in family.expert_fields if name in reader]
    experts, *others = (reader.integer(name) for name in names or family.expert_fields[:1])
    if {*others} - {experts}:
        raise reader.error(f"{' and '.join(names)} must be equal; they are {[experts, *others]}")
    per_token = reader.integer("num_experts_per_tok")
    if per_token > experts:
        raise reader.error(f"num_experts_per_tok={per_token}: there are only {experts} experts")
    expert_width = reader.integer(family.expert_width)
    values: dict[str, Any] = {
        "intermediate_size": expert_width,
        "num_experts": experts,
        "experts_per_token": per_token,
        "normalized_expert_weights": (
            not family.expert_weights_field or reader.boolean(family.expert_weights_field)
        ),
    }
    if name := family.shared_experts_field:
        shared = reader.integer(name, maximum=MAX_SIZE // expert_width)
        values["shared_expert_size"] = expert_width * shared
    dense = _read_dense_layers(reader, family, num_layers)
    if any(dense):
        values |= {"dense_layers": dense, "dense_size": width}
    return values | _read_router_groups(reader, family, experts, per_token)


def _read_dense_layers(reader: ConfigReader, family: Family, num_layers: int) -> tuple[bool, ...]:
    if name := family.first_dense_field:
        first = reader.integer(name, minimum=0)
        if first >= num_layers:
            raise reader.error(f"{name}={first}: must be less than num_hidden_layers={num_layers}")
        return tuple(layer < first for layer in range(num_layers))
    if not family.lists_dense_layers:
        return ()
    listed, step = reader.integers("mlp_only_layers"), reader.integer("decoder_sparse_step")
    skipped = enumerate(_all_but_every(step, num_layers))
    dense = tuple(layer in listed or is_skipped for layer, is_skipped in skipped)
    if all(dense):
        raise reader.error(
            f"mlp_only_layers and decoder_sparse_step={step} leave no layer with experts"
        )
    return dense


def _read_router_groups(
    reader: ConfigReader, family: Family, experts: int, per_token: int
) -> dict[str, Any]:
    if not family.has_router_groups:
        return {}
    least = 2  # a group is valued by its best two experts, or by its best one
    if not family.fixed.get("sigmoid_router"):
        least = 1
        method = reader.string("topk_method")
        if method == "greedy":
            for name in ("n_group", "topk_group"):
                reader.any_value(name)
            return {}
        if method != "group_limited_greedy":
            supported = "'greedy' and 'group_limited_greedy' are"
            raise reader.unsupported("topk_method", method, supported)
    groups, selected = reader.integer("n_group"), reader.integer("topk_group")
    require_divisor("n_group", groups, "the number of experts", experts)
    size = experts // groups
    if selected > groups or selected * size < per_token or size < least:
        raise reader.error(
            f"n_group={groups} and topk_group={selected} do not fit {experts} experts: expected "
            f"groups of {least} or more, and num_experts_per_tok={per_token} in topk_group of them"
        )
    return {"router_groups": groups, "groups_per_token": selected}


def _refuse_unsupported(reader: ConfigReader, kind: str, family: Family) -> None:
    """Raise `UserError` for a model that the decoder would compute differently."""
    is_switched = family.sliding_windows in ("last", "switched")
    if not is_switched and reader.boolean("use_sliding_window", nullable=True):
        raise reader.error(f"use_sliding_window is not supported with model_type {kind!r}")
    name = "use_bidirectional_attention"
    if family.has_global_heads:
        reader.boolean("enable_moe_block")
        # Tokens of images alone may attend to later ones.
        is_causal = reader.any_value(name) in (None, "vision")
    else:
        is_causal = not reader.boolean(name, nullable=True)
    if not is_causal:
        raise reader.error(f"{name} is not supported: a decoder only attends to earlier tokens")
    for name, value in family.neutral.items():
        if name in reader and reader.any_value(name) != value:
            raise reader.unsupported(name, reader.any_value(name), f"{value!r} is")
    for name, reason in family.unsupported.items():
        if reader.optional_number(name) is not None:
            raise reader.error(f"{name} of model_type {kind!r} is not supported: {reason}")


def _read_activation(reader: ConfigReader, family: Family) -> str:
    field = family.activation_fields[0]
    name = reader.string(field, family.activation)
    name = family.activation_aliases.get(name, name)
    if name not in ACTIVATIONS:
        raise reader.unsupported(field, name, f"{', '.join(map(repr, ACTIVATIONS))} are")
    return name


def _read_windows(
    reader: ConfigReader, family: Family, num_layers: int
) -> tuple[int | None, tuple[bool, ...]]:
    rule = family.sliding_windows
    if family.linear_word:
        return None, ()
    window = None
    if rule == "refused":
        reader.optional_integer("sliding_window", minimum=0)
    elif rule != "none":
        window = reader.optional_integer("sliding_window")
    if rule in ("last", "switched") and not reader.boolean("use_sliding_window"):
        window = None
    first_local = reader.integer("max_window_layers", minimum=0) if rule == "last" else 0
    period = family.window_period
    if family.window_period_field in reader:
        period = reader.integer(family.window_period_field)
    local = (False,) * num_layers
    if rule == "pattern":
        local = _all_but_every(period, num_layers)
        if family.has_global_heads:
            local = (*local[:-1], False)
    elif rule not in ("none", "refused"):
        local = tuple(window is not None and layer >= first_local for layer in range(num_layers))
    listed = _read_layer_types(reader, num_layers, LOCAL)
    if listed is not None and rule in ("last", "pattern", "listed"):
        local = listed
        if family.has_global_heads and local[-1]:
            raise reader.error(f"layer_types must end with {FULL}")
    elif listed not in (None, local):
        raise reader.error(
            f"layer_types {shorten(repr(reader.strings('layer_types')))} are not supported, only "
            f"{LOCAL if local[0] else FULL} is with model_type {reader.string('model_type')!r} and "
            f"sliding_window={window!r}"
        )
    if not any(local):
        return None, ()
    if window is None:
        raise reader.error("sliding_window must be a whole number; it is None")
    return window, local


def _read_layer_types(reader: ConfigReader, num_layers: int, word: str) -> tuple[bool, ...] | None:
    """Return which layers `layer_types` calls by a word; `None` if it is missing or null."""
    types = reader.strings("layer_types")
    if types is None:
        return None
    if len(types) != num_layers or set(types) - {FULL, word}:
        raise reader.error(
            f"layer_types {shorten(repr(types))} must be num_hidden_layers={num_layers} words, "
            f"{FULL} or {word}"
        )
    return tuple(name == word for name in types)


def _read_linear_layers(reader: ConfigReader, family: Family, num_layers: int) -> tuple[bool, ...]:
    if not family.linear_word:
        return ()
    if family.linear_period:
        period = reader.optional_integer("full_attention_interval", nullable=False)
        linear = _all_but_every(period or family.linear_period, num_layers)
    else:
        attending = reader.token_ids("full_attn_idxs") or range(num_layers)
        linear = tuple(layer not in attending for layer in range(num_layers))
    listed = _read_layer_types(reader, num_layers, family.linear_word)
    linear = linear if listed is None else listed
    if all(linear):
        raise reader.error(
            f"layer_types must have {FULL} for at least one of num_hidden_layers={num_layers}"
        )
    return linear if any(linear) else ()


def _read_unrotated_layers(
    reader: ConfigReader, family: Family, num_layers: int
) -> tuple[bool, ...]:
    if not family.unrotated_period:
        return ()
    # transformers accepts a longer list.
    rotated = reader.flags("no_rope_layers", at_least=num_layers)
    period = reader.optional_integer("no_rope_layer_interval", nullable=False)
    rotated = rotated or _all_but_every(period or family.unrotated_period, num_layers)
    unrotated = tuple(not flag for flag in rotated[:num_layers])
    return unrotated if any(unrotated) else ()


def _all_but_every(period: int, num_layers: int) -> tuple[bool, ...]:
    """Return True for each layer except every `period`-th."""
    return tuple((layer + 1) % period > 0 for layer in range(num_layers))
