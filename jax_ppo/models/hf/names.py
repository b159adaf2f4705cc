"""Tables that map our parameters to Hugging Face checkpoint tensors, for import and export."""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jax_ppo.models.architecture import BLOCKS, CORRECTION_BIAS, Architecture
from jax_ppo.models.hf.deberta import DebertaArchitecture
from jax_ppo.models.hf.families import ENCODERS, FAMILIES
from jax_ppo.models.hf.tensors import Fused, TensorMapping, TensorTable

HEADS = ("lm", "scalar", "reward", "both", "token")
PEFT_PREFIX = "base_model.model."
# What most checkpoints call our groups of a layer's parameters; layers differ in which they have.
HF_MODULES = {
    **dict.fromkeys(("attention", "local_attention", "shared_attention"), "self_attn"),
    "local_shared_attention": "self_attn",
    "delta_net": "linear_attn",
    "short_conv": "conv",
    "mlp": "mlp",
    "dense_mlp": "mlp",
    "shared_expert": "mlp.shared_expert",
}
# The projections of a single MLP.
EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# In the name of a tensor that holds all experts of a layer.
STACKED_EXPERTS = ".experts.gate_up_proj"


def tensor_table(
    architecture: Architecture | DebertaArchitecture, head: str, stacked_experts: bool = False
) -> TensorTable:
    """Return the checkpoint tensor of each parameter by our path: ("layers", "mlp", ..., "kernel").

    `head` is one of `HEADS` (`ValueError` for others); an encoder always has "reward". With
    `stacked_experts`, a tensor of the checkpoint holds all experts of a layer although exports of
    the family have one for each.
    """
    if head not in HEADS:
        raise ValueError(f"head={head!r}: expected one of {', '.join(map(repr, HEADS))}")
    if isinstance(architecture, DebertaArchitecture):
        return ENCODERS[architecture.family].tensor_table(architecture)
    a = architecture
    rows: TensorTable = {
        ("embed", "embedding"): TensorMapping(
            f"{_hf_name(a, 'model.embed_tokens')}.weight", (a.vocab_size, a.hidden_size)
        ),
        **{
            ("norm", name): TensorMapping(
                f"{_hf_name(a, 'model.norm')}.{hf_name}", (a.hidden_size,)
            )
            for name, hf_name in _norm_parameters(a).items()
        },
    }
    if a.learned_positions:
        rows["positions", "embedding"] = TensorMapping(
            f"{_hf_name(a, 'model.embed_positions')}.weight",
            (a.max_position_embeddings, a.hidden_size),
        )
    rows |= _layer_norms(a)
    if a.latent_size:
        rows |= _latent_attention(a)
    else:
        # Layers of one kind of attention have the same shapes.
        kinds = zip(a.layers_are_local, a.layers_are_shared, strict=True)
        for module, kind in {a.attention_module(*kind): kind for kind in kinds}.items():
            rows |= _attention(a, module, *kind)
    if a.linear_layers:
        rows |= _short_conv(a) if a.block == "convolution" else _delta_net(a)
    if a.per_layer_size:
        rows |= _per_layer_embeddings(a)
    if a.layer_scalars:
        rows["layers", "layer_scalar"] = _in_layers(a, "layer_scalar", (1,))
    if a.num_experts:
        rows |= _experts(a, stacked_experts)
    else:
        rows |= _mlp(a, "mlp", a.intermediate_size)
    if a.shared_expert_size:
        rows |= _mlp(a, "shared_expert", a.shared_expert_size)
        if a.shared_expert_gate:
            gate, shape = "shared_expert_gate", (a.hidden_size, 1)
            row = _in_layers(a, f"{HF_MODULES['mlp']}.{gate}", shape, ".weight", transposed=True)
            rows["layers", "shared_expert", gate, "kernel"] = row
    if a.dense_layers:
        rows |= _mlp(a, "dense_mlp", a.dense_size)
    rows = {path: _of_some_layers(a, path, row) for path, row in rows.items()}
    if head != "lm":
        rows["score", "kernel"] = TensorMapping("score.weight", (a.hidden_size, 1), transposed=True)
    if head == "token":
        # transformers' head has a bias, which critics do not.
        rows["score", "bias"] = TensorMapping("score.bias", (1,))
    if head in ("lm", "both") and not a.tied:
        rows["lm_head", "embedding"] = TensorMapping(
            f"{_hf_name(a, 'lm_head')}.weight", (a.vocab_size, a.hidden_size)
        )
    return rows


def adapter_tensor_table(
    architecture: Architecture, rank: int, targets: Sequence[str], head: str
) -> TensorTable:
    """Return the tensor of each adapter parameter (lora.py) under the names that PEFT uses.

    A scalar head is stored next to the adapters, as PEFT does. Projections that a checkpoint holds
    as one tensor have the same A in PEFT's format, and each its own outputs of B. The `targets`
    have adapters in every layer, experts none; `head` is as in `tensor_table`.
    """
    rows: TensorTable = {}
    for path, row in tensor_table(architecture, head).items():
        if path[0] == "score":
            rows[path] = dataclasses.replace(row, name=PEFT_PREFIX + row.name)
        if path[-1] == "kernel" and path[-2] in targets and "experts" not in path:
            prefix = PEFT_PREFIX + row.name.removesuffix("weight")
            inputs, outputs = row.shape
            lora_b = dataclasses.replace(
                row, name=f"{prefix}lora_B.weight", shape=(rank, outputs), transposed=True
            )
            rows[*path[:-1], "lora_a"] = dataclasses.replace(
                lora_b, name=f"{prefix}lora_A.weight", shape=(inputs, rank), fused=None
            )
            rows[*path[:-1], "lora_b"] = lora_b
    return rows


def module_names(architecture: Architecture, projections: Sequence[str]) -> list[str]:
    """Return the shortest names of their modules by which PEFT finds projections.

    Where two projections of a layer have the same name, as in "attn.c_proj" and "mlp.c_proj", the
    name of the outer module precedes it.
    """
    rows = tensor_table(architecture, "lm")
    full = {
        path[-2]: row.name.removesuffix(".weight")
        for path, row in rows.items()
        if path[-1] == "kernel"
    }
    short = {name: hf_name.rpartition(".")[2] for name, hf_name in full.items()}
    uses = collections.Counter(short.values())
    names = []
    for name in projections:
        if name in full and uses[short[name]] == 1:
            names.append(short[name])
        elif name in full:
            names.append(".".join(full[name].split(".")[-2:]))
    return names


def _hf_name(a: Architecture, name: str) -> str:
    """Return the family's name of a module that most families call `name`."""
    return FAMILIES[a.family].module_names.get(name, name)


def _in_layers(
    a: Architecture, name: str, shape: tuple[int, ...], suffix: str = "", **options: Any
) -> TensorMapping:
    """Return a tensor of a module in all layers; `suffix` follows the family's name of it."""
    hf_name = f"{_hf_name(a, 'model.layers')}.{{}}.{_hf_name(a, name)}{suffix}"
    return TensorMapping(hf_name, shape, layers=a.num_layers, **options)


def _layer_norms(a: Architecture) -> TensorTable:
    names = {"post_attention_norm": "post_attention_layernorm"}
    if a.pre_norms:
        names["input_norm"] = "input_layernorm"
    if a.post_norms:
        names["post_feedforward_norm"] = "post_feedforward_layernorm"
    if a.pre_norms and a.post_norms:
        names["pre_feedforward_norm"] = "pre_feedforward_layernorm"
    return {
        ("layers", name, parameter): _in_layers(a, hf_name, (a.hidden_size,), f".{hf_parameter}")
        for name, hf_name in names.items()
        for parameter, hf_parameter in _norm_parameters(a).items()
    }


def _norm_parameters(a: Architecture) -> dict[str, str]:
    """Return the names of the parameters of a norm of hidden states, ours and the checkpoint's."""
    names = {"scale": "weight", "bias": "bias"}
    return {name: names[name] for name in BLOCKS[a.block].norm_parameters}


def _scale(a: Architecture, module: str, name: str, width: int, hf_name: str = "") -> TensorTable:
    """Return the scale of an RMSNorm inside a module."""
    row = _in_layers(a, f"{HF_MODULES[module]}.{hf_name or name}", (width,), ".weight")
    return {("layers", module, name, "scale"): row}


def _attention(a: Architecture, module: str, is_local: bool, is_shared: bool) -> TensorTable:
    num_kv_heads, head_dim = a.kv_heads(is_local)
    queries = a.num_heads * head_dim
    keys = num_kv_heads * head_dim
    heads = {"q_norm": a.num_heads, "k_norm": num_kv_heads}
    # A gate follows the queries of each head.
    widths = {"q_proj": (queries * (1 + a.output_gate),), "k_proj": (keys,), "v_proj": (keys,)}
    if a.keys_as_values and not is_local:
        del widths["v_proj"]
    if is_shared:
        del heads["k_norm"]
        widths = {"q_proj": widths["q_proj"]}
    rows: TensorTable = {}
    for name, number in heads.items() if a.qk_norm else ():
        rows |= _scale(a, module, name, number * head_dim if a.qk_norm_over_heads else head_dim)
    groups = a.num_heads if FAMILIES[a.family].fused_by_head else 1
    rows |= _shared_input_projections(a, module, widths, a.qkv_bias, groups)
    rows |= _dense(a, module, "o_proj", queries, a.hidden_size, a.output_bias)
    if a.attention_sinks:
        name = f"{HF_MODULES[module]}.sinks"
        rows["layers", module, "sinks"] = _in_layers(a, name, (a.num_heads,))
    return rows


def _per_layer_embeddings(a: Architecture) -> TensorTable:
    D, P = a.hidden_size, a.per_layer_size
    projection, norm = "per_layer_model_projection", "per_layer_projection_norm"
    rows: TensorTable = {
        ("embed_per_layer", "embedding"): TensorMapping(
            "model.embed_tokens_per_layer.weight", (a.vocab_size, a.num_layers * P)
        ),
        (projection, "kernel"): TensorMapping(
            f"model.{projection}.weight", (D, a.num_layers * P), transposed=True
        ),
        (norm, "scale"): TensorMapping(f"model.{norm}.weight", (P,)),
    }
    for name, parameter, shape in (
        ("post_per_layer_input_norm", "scale", (D,)),
        ("per_layer_input_gate", "kernel", (D, P)),
        ("per_layer_projection", "kernel", (P, D)),
    ):
        row = _in_layers(a, name, shape, ".weight", transposed=parameter == "kernel")
        rows["layers", name, parameter] = row
    return rows


def _latent_attention(a: Architecture) -> TensorTable:
    module, unrotated = "attention", a.head_dim - a.rope_head_dim
    queries, width = "q_proj", a.hidden_size
    parts = [("kv_a_proj_with_mqa", a.hidden_size, a.latent_size + a.rope_head_dim, a.qkv_bias)]
    norms = [("kv_a_norm", a.latent_size, "kv_a_layernorm")]
    if a.query_latent_size:
        parts.append(("q_a_proj", a.hidden_size, a.query_latent_size, a.qkv_bias))
        norms.append(("q_a_norm", a.query_latent_size, "q_a_layernorm"))
        queries, width = "q_b_proj", a.query_latent_size
    parts += [
        (queries, width, a.num_heads * a.head_dim, False),
        ("kv_b_proj", a.latent_size, a.num_heads * (unrotated + a.value_head_dim), False),
        ("o_proj", a.num_heads * a.value_head_dim, a.hidden_size, a.output_bias),
    ]
    rows: TensorTable = {}
    for part in parts:
        rows |= _dense(a, module, *part)
    for norm in norms:
        rows |= _scale(a, module, *norm)
    return rows


def _short_conv(a: Architecture) -> TensorTable:
    D, module = a.hidden_size, "short_conv"
    rows = _dense(a, module, "in_proj", D, 3 * D) | _dense(a, module, "out_proj", D, D)
    # The checkpoint has the three projections one after the other, ours are grouped.
    parts = ((0, D), (D, D), (2 * D, D))
    path = ("layers", module, "in_proj", "kernel")
    place = Fused(parts, 3 * D, own_groups=a.num_kv_heads)
    rows[path] = dataclasses.replace(rows[path], fused=place)
    rows["layers", module, "window_filter"] = _in_layers(
        a, f"{HF_MODULES[module]}.conv.weight", (a.delta_window, 1, D), transposed=True
    )
    return rows


def _delta_net(a: Architecture) -> TensorTable:
    module, hf_module = "delta_net", HF_MODULES["delta_net"]
    channels = sum(a.delta_widths)
    values = a.delta_widths[2]
    heads = a.delta_value_heads
    # Ours are grouped by key head, so that devices can split them.
    starts = (0, a.delta_widths[0], 2 * a.delta_widths[0])
    by_head = Fused(
        tuple(zip(starts, a.delta_widths, strict=True)), channels, own_groups=a.delta_key_heads
    )
    rows = _dense(a, module, "out_proj", values, a.hidden_size)
    # Where they are fused, the tensors hold the projections of one key head, then of the next.
    inputs: tuple[dict[str, tuple[int, ...]], ...] = (
        {"in_proj_qkv": a.delta_widths, "in_proj_z": (values,)},
        {"in_proj_b": (heads,), "in_proj_a": (heads,)},
    )
    for parts in inputs:
        rows |= _shared_input_projections(a, module, parts, False, a.delta_key_heads)
    qkv = ("layers", module, "in_proj_qkv", "kernel")
    place = (rows[qkv].fused or by_head)._replace(own_groups=a.delta_key_heads)
    rows[qkv] = dataclasses.replace(rows[qkv], fused=place)
    rows["layers", module, "window_filter"] = _in_layers(
        a,
        f"{hf_module}.conv1d.weight",
        (a.delta_window, 1, channels),
        transposed=True,
        fused=by_head,
    )
    for name, hf_name in (("log_rate", "A_log"), ("step_bias", "dt_bias")):
        rows["layers", module, name] = _in_layers(a, f"{hf_module}.{hf_name}", (heads,))
    return rows | _scale(a, module, "norm", a.delta_value_dim)


def _of_some_layers(a: Architecture, path: tuple[str, ...], row: TensorMapping) -> TensorMapping:
    """Return the entry of a parameter that perhaps only some layers have."""
    if path[0] != "layers" or path[1] not in a.partial_stacks:
        return row
    numbers = tuple(i for i, is_owner in enumerate(a.partial_stacks[path[1]]) if is_owner)
    return dataclasses.replace(row, layers=len(numbers), layer_numbers=numbers)


def _mlp(a: Architecture, module: str, width: int) -> TensorTable:
    widths = dict.fromkeys(BLOCKS[a.block].mlp_inputs, (width,))
    rows = _shared_input_projections(a, module, widths, a.mlp_bias)
    return rows | _dense(a, module, "down_proj", width, a.hidden_size, a.mlp_bias)


def _experts(a: Architecture, stacked: bool) -> TensorTable:
    E, D, width = a.num_experts, a.hidden_size, a.intermediate_size
    module, router = HF_MODULES["mlp"], f"{HF_MODULES['mlp']}.gate"
    rows: TensorTable = {
        ("layers", "mlp", "router", "kernel"): _in_layers(
            a, router, (D, E), ".weight", transposed=True
        )
    }
    if a.mlp_bias:
        rows["layers", "mlp", "router", "bias"] = _in_layers(a, router, (E,), ".bias")
    if a.sigmoid_router:
        name = f"{router}.e_score_correction_bias"
        rows["layers", "mlp", CORRECTION_BIAS] = _in_layers(a, name, (E,))
    if stacked or FAMILIES[a.family].stacked_experts:
        return rows | _stacked_experts(a, has_halves=not FAMILIES[a.family].stacked_experts)
    shapes = {"gate_proj": (D, width), "up_proj": (D, width), "down_proj": (width, D)}
    for name, shape in shapes.items():
        rows["layers", "mlp", "experts", name, "kernel"] = _in_layers(
            a, f"{module}.experts.{{}}.{name}", shape, ".weight", transposed=True, experts=E
        )
    return rows


def _stacked_experts(a: Architecture, has_halves: bool) -> TensorTable:
    """Return projections of which a tensor holds all experts.

    With `has_halves`, gate and up are the halves of a tensor [E, out, in], instead of alternate
    columns of one [E, in, out].
    """
    E, D, width = a.num_experts, a.hidden_size, a.intermediate_size
    groups = 1 if has_halves else width
    first, second = (Fused(((i * width // groups, width),), 2 * width, groups) for i in (0, 1))
    rows: TensorTable = {}
    for name, hf_name, inputs, outputs, place in (
        ("gate_proj", "gate_up_proj", D, width, first),
        ("up_proj", "gate_up_proj", D, width, second),
        ("down_proj", "down_proj", width, D, None),
    ):
        options: dict[str, Any] = {"fused": place, "stacked": True, "transposed": has_halves}
        hf_name = f"{HF_MODULES['mlp']}.experts.{hf_name}"
        kernel = _in_layers(a, hf_name, (E, inputs, outputs), **options)
        rows["layers", "mlp", "experts", name, "kernel"] = kernel
        if a.mlp_bias:
            rows["layers", "mlp", "experts", name, "bias"] = dataclasses.replace(
                kernel, name=f"{kernel.name}_bias", shape=(E, outputs)
            )
    return rows


def _shared_input_projections(
    a: Architecture,
    module: str,
    projections: Mapping[str, tuple[int, ...]],
    bias: bool,
    groups: int = 1,
) -> TensorTable:
    """Return projections of the same input, which some families store as one tensor.

    The widths of the parts of `projections` are in the order of that tensor, of which `groups` are
    as in `Fused`.
    """
    fused = FAMILIES[a.family].fused_projections.get(tuple(projections), "")
    total = sum(map(sum, projections.values()))
    rows: TensorTable = {}
    first = 0
    for name, widths in projections.items():
        projection = _dense(a, module, name, a.hidden_size, sum(widths), bias, fused)
        if fused:
            firsts = itertools.accumulate(widths, initial=first)
            parts = tuple((at // groups, width) for at, width in zip(firsts, widths, strict=False))
            place = Fused(parts, total, groups)
            projection = {
                path: dataclasses.replace(row, fused=place) for path, row in projection.items()
            }
        rows |= projection
        first += sum(widths)
    return rows


def _dense(
    a: Architecture,
    module: str,
    name: str,
    inputs: int,
    outputs: int,
    bias: bool = False,
    hf_name: str = "",
) -> TensorTable:
    hf_name = f"{HF_MODULES[module]}.{hf_name or name}"
    transposed = not FAMILIES[a.family].input_first
    kernel = _in_layers(a, hf_name, (inputs, outputs), ".weight", transposed=transposed)
    rows: TensorTable = {("layers", module, name, "kernel"): kernel}
    if bias:
        rows["layers", module, name, "bias"] = _in_layers(a, hf_name, (outputs,), ".bias")
    return rows
