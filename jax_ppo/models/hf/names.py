"""Tables that map our parameters to Hugging Face checkpoint tensors, for import and export."""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jax_ppo.models.architecture import BLOCKS, CORRECTION_BIAS, Architecture
from jax_ppo.models.deberta.architecture import DebertaArchitecture
from jax_ppo.models.hf.families import ENCODERS, FAMILIES
from jax_ppo.models.hf.tensors import Fused, TensorMapping, TensorTable

HEADS = ("lm", "scalar", "reward", "both")
PEFT_PREFIX = "base_model.model."
ATTENTION = "self_attn"
DELTA_NET = "linear_attn"
SHORT_CONV = "conv"
MLP = "mlp"
# The names of a single MLP.
EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# In the name of a tensor that holds all experts of a layer.
STACKED_EXPERTS = ".experts.gate_up_proj"


def tensor_table(
    architecture: Architecture | DebertaArchitecture, head: str, stacked_experts: bool = False
) -> TensorTable:
    """Return the checkpoint tensor of each parameter.

    Args:
      architecture: the decoder or encoder.
      head: one of `HEADS`; an encoder always has "reward".
      stacked_experts: whether a tensor of the checkpoint holds all experts of a layer although
        exports of the family have one for each.

    Returns:
      Tensors by our paths, for example `("layers", "mlp", "up_proj", "kernel")`.

    Raises:
      ValueError: `head` is unknown.
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
        **_norm(a, ("norm",), _hf_name(a, "model.norm")),
    }
    if a.learned_positions:
        rows["positions", "embedding"] = TensorMapping(
            f"{_hf_name(a, 'model.embed_positions')}.weight",
            (a.max_position_embeddings, a.hidden_size),
        )
    rows |= _norms(a)
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
        rows |= _mlp(a, "mlp", MLP, a.intermediate_size)
    if a.shared_expert_size:
        rows |= _shared_expert(a)
    if a.dense_layers:
        rows |= _mlp(a, "dense_mlp", MLP, a.dense_size)
    rows = {path: _of_some_layers(a, path, row) for path, row in rows.items()}
    if head != "lm":
        rows["score", "kernel"] = TensorMapping("score.weight", (a.hidden_size, 1), transposed=True)
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
    as one tensor have the same A in PEFT's format, and each its own outputs of B.

    Args:
      architecture: the decoder that the adapters belong to.
      rank: rank of the adapters.
      targets: projections that have adapters, in every layer; experts have none.
      head: as in `tensor_table`.
    """
    rows: TensorTable = {}
    for path, row in tensor_table(architecture, head).items():
        if path == ("score", "kernel"):
            rows[path] = dataclasses.replace(row, name=PEFT_PREFIX + row.name)
        if path[-1] == "kernel" and path[-2] in targets and "experts" not in path:
            prefix = PEFT_PREFIX + row.name.removesuffix("weight")
            inputs, outputs = row.shape
            rows[*path[:-1], "lora_a"] = TensorMapping(
                f"{prefix}lora_A.weight",
                (inputs, rank),
                transposed=True,
                layers=row.layers,
                layer_numbers=row.layer_numbers,
            )
            rows[*path[:-1], "lora_b"] = TensorMapping(
                f"{prefix}lora_B.weight",
                (rank, outputs),
                transposed=True,
                layers=row.layers,
                fused=row.fused,
                layer_numbers=row.layer_numbers,
            )
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


def _layer_name(a: Architecture, name: str) -> str:
    """Return the name of a module in a layer, with `{}` for the layer index."""
    return f"{_hf_name(a, 'model.layers')}.{{}}.{_hf_name(a, name)}"


def _in_layers(
    a: Architecture, name: str, shape: tuple[int, ...], suffix: str = "", **options: Any
) -> TensorMapping:
    """Return a tensor of a module in all layers; `suffix` follows the family's name of it."""
    return TensorMapping(_layer_name(a, name) + suffix, shape, layers=a.num_layers, **options)


def _norms(a: Architecture) -> TensorTable:
    names = {"post_attention_norm": "post_attention_layernorm"}
    if a.pre_norms:
        names["input_norm"] = "input_layernorm"
    if a.post_norms:
        names["post_feedforward_norm"] = "post_feedforward_layernorm"
    if a.pre_norms and a.post_norms:
        names["pre_feedforward_norm"] = "pre_feedforward_layernorm"
    rows: TensorTable = {}
    for name, hf_name in names.items():
        rows |= _norm(a, ("layers", name), _layer_name(a, hf_name), layers=a.num_layers)
    return rows


def _norm(
    a: Architecture, path: tuple[str, ...], hf_name: str, layers: int | None = None
) -> TensorTable:
    """Return the parameters of a norm of hidden states."""
    hf_names = {"scale": "weight", "bias": "bias"}
    return {
        (*path, name): TensorMapping(f"{hf_name}.{hf_names[name]}", (a.hidden_size,), layers=layers)
        for name in BLOCKS[a.block].norm_parameters
    }


def _attention(a: Architecture, module: str, is_local: bool, is_shared: bool) -> TensorTable:
    num_kv_heads, head_dim = a.kv_heads(is_local)
    queries = a.num_heads * head_dim
    keys = num_kv_heads * head_dim
    heads = {"q": a.num_heads, "k": num_kv_heads}
    # A gate follows the queries of each head.
    widths = {"q_proj": queries * (1 + a.output_gate), "k_proj": keys, "v_proj": keys}
    if a.keys_as_values and not is_local:
        del widths["v_proj"]
    if is_shared:
        del heads["k"]
        widths = {"q_proj": widths["q_proj"]}
    rows: TensorTable = {}
    for name, number in heads.items() if a.qk_norm else ():
        width = number * head_dim if a.qk_norm_over_heads else head_dim
        row = _in_layers(a, f"{ATTENTION}.{name}_norm", (width,), ".weight")
        rows["layers", module, f"{name}_norm", "scale"] = row
    groups = a.num_heads if FAMILIES[a.family].fused_by_head else 1
    rows |= _shared_input_projections(a, module, ATTENTION, _whole(widths), a.qkv_bias, groups)
    rows |= _dense(
        a,
        path=(module, "o_proj"),
        hf_name=f"{ATTENTION}.o_proj",
        inputs=queries,
        outputs=a.hidden_size,
        bias=a.output_bias,
    )
    if a.attention_sinks:
        rows["layers", module, "sinks"] = _in_layers(a, f"{ATTENTION}.sinks", (a.num_heads,))
    return rows


def _per_layer_embeddings(a: Architecture) -> TensorTable:
    D, P = a.hidden_size, a.per_layer_size
    names = ("per_layer_model_projection", "per_layer_projection_norm", "post_per_layer_input_norm")
    projection, norm, layer_norm = names
    rows: TensorTable = {
        ("embed_per_layer", "embedding"): TensorMapping(
            "model.embed_tokens_per_layer.weight", (a.vocab_size, a.num_layers * P)
        ),
        (projection, "kernel"): TensorMapping(
            f"model.{projection}.weight", (D, a.num_layers * P), transposed=True
        ),
        (norm, "scale"): TensorMapping(f"model.{norm}.weight", (P,)),
        **_norm(a, ("layers", layer_norm), _layer_name(a, layer_norm), layers=a.num_layers),
    }
    for name, inputs, outputs in (
        ("per_layer_input_gate", D, P),
        ("per_layer_projection", P, D),
    ):
        rows |= _dense(a, path=(name,), hf_name=name, inputs=inputs, outputs=outputs, bias=False)
    return rows


def _latent_attention(a: Architecture) -> TensorTable:
    unrotated = a.head_dim - a.rope_head_dim
    queries, width = "q_proj", a.hidden_size
    rows: TensorTable = {}
    parts = [("kv_a_proj_with_mqa", a.hidden_size, a.latent_size + a.rope_head_dim, a.qkv_bias)]
    norms = [("kv_a_norm", "kv_a_layernorm", a.latent_size)]
    if a.query_latent_size:
        parts.append(("q_a_proj", a.hidden_size, a.query_latent_size, a.qkv_bias))
        norms.append(("q_a_norm", "q_a_layernorm", a.query_latent_size))
        queries, width = "q_b_proj", a.query_latent_size
    parts += [
        (queries, width, a.num_heads * a.head_dim, False),
        ("kv_b_proj", a.latent_size, a.num_heads * (unrotated + a.value_head_dim), False),
        ("o_proj", a.num_heads * a.value_head_dim, a.hidden_size, a.output_bias),
    ]
    for name, inputs, outputs, bias in parts:
        rows |= _dense(
            a,
            path=("attention", name),
            hf_name=f"{ATTENTION}.{name}",
            inputs=inputs,
            outputs=outputs,
            bias=bias,
        )
    for name, hf_name, size in norms:
        row = _in_layers(a, f"{ATTENTION}.{hf_name}", (size,), ".weight")
        rows["layers", "attention", name, "scale"] = row
    return rows


def _short_conv(a: Architecture) -> TensorTable:
    D = a.hidden_size
    rows: TensorTable = {}
    for name, outputs in (("in_proj", 3 * D), ("out_proj", D)):
        rows |= _dense(
            a,
            path=("short_conv", name),
            hf_name=f"{SHORT_CONV}.{name}",
            inputs=D,
            outputs=outputs,
            bias=False,
        )
    # The checkpoint has the three projections one after the other, ours are grouped.
    parts = ((0, D), (D, D), (2 * D, D))
    path = ("layers", "short_conv", "in_proj", "kernel")
    place = Fused(parts, 3 * D, own_groups=a.num_kv_heads)
    rows[path] = dataclasses.replace(rows[path], fused=place)
    rows["layers", "short_conv", "window_filter"] = _in_layers(
        a, f"{SHORT_CONV}.conv.weight", (a.delta_window, 1, D), transposed=True
    )
    return rows


def _delta_net(a: Architecture) -> TensorTable:
    channels = sum(a.delta_widths)
    values = a.delta_widths[2]
    heads = a.delta_value_heads
    # Ours are grouped by key head, so that devices can split them.
    starts = (0, a.delta_widths[0], 2 * a.delta_widths[0])
    by_head = Fused(
        tuple(zip(starts, a.delta_widths, strict=True)), channels, own_groups=a.delta_key_heads
    )
    rows = _dense(
        a,
        path=("delta_net", "out_proj"),
        hf_name=f"{DELTA_NET}.out_proj",
        inputs=values,
        outputs=a.hidden_size,
        bias=False,
    )
    # Where they are fused, the tensors hold the projections of one key head, then of the next.
    inputs: tuple[dict[str, tuple[int, ...]], ...] = (
        {"in_proj_qkv": a.delta_widths, "in_proj_z": (values,)},
        {"in_proj_b": (heads,), "in_proj_a": (heads,)},
    )
    for parts in inputs:
        rows |= _shared_input_projections(
            a, "delta_net", DELTA_NET, parts, False, a.delta_key_heads
        )
    qkv = ("layers", "delta_net", "in_proj_qkv", "kernel")
    place = (rows[qkv].fused or by_head)._replace(own_groups=a.delta_key_heads)
    rows[qkv] = dataclasses.replace(rows[qkv], fused=place)
    for path, hf_name, shape in (
        (("window_filter",), "conv1d.weight", (a.delta_window, 1, channels)),
        (("log_rate",), "A_log", (a.delta_value_heads,)),
        (("step_bias",), "dt_bias", (a.delta_value_heads,)),
        (("norm", "scale"), "norm.weight", (a.delta_value_dim,)),
    ):
        own = by_head if path == ("window_filter",) else None
        row = _in_layers(a, f"{DELTA_NET}.{hf_name}", shape, transposed=True, fused=own)
        rows["layers", "delta_net", *path] = row
    return rows


def _of_some_layers(a: Architecture, path: tuple[str, ...], row: TensorMapping) -> TensorMapping:
    """Return the entry of a parameter that perhaps only some layers have."""
    if path[0] != "layers" or path[1] not in a.partial_stacks:
        return row
    numbers = tuple(i for i, is_owner in enumerate(a.partial_stacks[path[1]]) if is_owner)
    return dataclasses.replace(row, layers=len(numbers), layer_numbers=numbers)


def _mlp(a: Architecture, module: str, hf_module: str, width: int) -> TensorTable:
    widths = dict.fromkeys(BLOCKS[a.block].mlp_inputs, width)
    inputs = _shared_input_projections(a, module, hf_module, _whole(widths), a.mlp_bias)
    output = _dense(
        a,
        path=(module, "down_proj"),
        hf_name=f"{hf_module}.down_proj",
        inputs=width,
        outputs=a.hidden_size,
        bias=a.mlp_bias,
    )
    return inputs | output


def _shared_expert(a: Architecture) -> TensorTable:
    rows = _mlp(a, "shared_expert", f"{MLP}.shared_expert", a.shared_expert_size)
    if not a.shared_expert_gate:
        return rows
    return rows | _dense(
        a,
        path=("shared_expert", "shared_expert_gate"),
        hf_name=f"{MLP}.shared_expert_gate",
        inputs=a.hidden_size,
        outputs=1,
        bias=False,
    )


def _experts(a: Architecture, stacked: bool) -> TensorTable:
    rows: TensorTable = {
        ("layers", "mlp", "router", "kernel"): _in_layers(
            a, f"{MLP}.gate", (a.hidden_size, a.num_experts), ".weight", transposed=True
        )
    }
    if a.mlp_bias:
        row = _in_layers(a, f"{MLP}.gate", (a.num_experts,), ".bias")
        rows["layers", "mlp", "router", "bias"] = row
    if a.sigmoid_router:
        name = f"{MLP}.gate.e_score_correction_bias"
        rows["layers", "mlp", CORRECTION_BIAS] = _in_layers(a, name, (a.num_experts,))
    if stacked or FAMILIES[a.family].stacked_experts:
        return rows | _stacked_experts(a, has_halves=not FAMILIES[a.family].stacked_experts)
    inwards = (a.hidden_size, a.intermediate_size)
    outwards = (a.intermediate_size, a.hidden_size)
    shapes = {"gate_proj": inwards, "up_proj": inwards, "down_proj": outwards}
    for name, shape in shapes.items():
        hf_name, experts = f"{MLP}.experts.{{}}.{name}", a.num_experts
        rows["layers", "mlp", "experts", name, "kernel"] = _in_layers(
            a, hf_name, shape, ".weight", transposed=True, experts=experts
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
        options: dict[str, Any] = {"fused": place, "stacked": True}
        shape = (E, inputs, outputs)
        kernel = _in_layers(a, f"{MLP}.experts.{hf_name}", shape, transposed=has_halves, **options)
        rows["layers", "mlp", "experts", name, "kernel"] = kernel
        if a.mlp_bias:
            rows["layers", "mlp", "experts", name, "bias"] = dataclasses.replace(
                kernel, name=f"{kernel.name}_bias", shape=(E, outputs)
            )
    return rows


def _whole(widths: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Return projections of one part each."""
    return {name: (width,) for name, width in widths.items()}


def _shared_input_projections(
    a: Architecture,
    module: str,
    hf_module: str,
    projections: dict[str, tuple[int, ...]],
    bias: bool,
    groups: int = 1,
) -> TensorTable:
    """Return projections of the same input, which some families store as one tensor.

    The widths of the parts of `projections` are in the order of that tensor, of which `groups` are
    as in `Fused`.
    """
    fused = FAMILIES[a.family].fused_projections.get(tuple(projections))
    total = sum(map(sum, projections.values()))
    rows: TensorTable = {}
    first = 0
    for name, widths in projections.items():
        projection = _dense(
            a,
            path=(module, name),
            hf_name=f"{hf_module}.{fused or name}",
            inputs=a.hidden_size,
            outputs=sum(widths),
            bias=bias,
        )
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
    a: Architecture, *, path: tuple[str, ...], hf_name: str, inputs: int, outputs: int, bias: bool
) -> TensorTable:
    transposed = not FAMILIES[a.family].input_first
    kernel = _in_layers(a, hf_name, (inputs, outputs), ".weight", transposed=transposed)
    rows: TensorTable = {("layers", *path, "kernel"): kernel}
    if bias:
        rows["layers", *path, "bias"] = _in_layers(a, hf_name, (outputs,), ".bias")
    return rows
