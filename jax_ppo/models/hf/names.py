"""Tables that map our parameters to Hugging Face checkpoint tensors, for import and export."""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jax_ppo.models.architecture import BLOCKS, CORRECTION_BIAS, Architecture
from jax_ppo.models.hf.deberta import DebertaArchitecture, deberta_tensor_table
from jax_ppo.models.hf.families import FAMILIES
from jax_ppo.models.hf.tensors import Fused, TensorMapping, TensorTable

PEFT_PREFIX = "base_model.model."
# What most checkpoints call our groups of a layer's parameters; layers differ in which they have.
HF_MODULES = {
    "attention": "self_attn",
    "local_attention": "self_attn",
    "shared_attention": "self_attn",
    "local_shared_attention": "self_attn",
    "delta_net": "linear_attn",
    "short_conv": "conv",
    "mlp": "mlp",
    "dense_mlp": "mlp",
    "shared_expert": "mlp.shared_expert",
}
EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")  # the projections of a single MLP
# In the name of a tensor that holds all experts of a layer.
STACKED_EXPERTS = ".experts.gate_up_proj"


def tensor_table(
    architecture: Architecture | DebertaArchitecture, head: str, stacked_experts: bool = False
) -> TensorTable:
    """Return the checkpoint tensor of each parameter by our path: ("layers", "mlp", ..., "kernel").

    `head` is "lm", "scalar", "reward", "both" or "token"; an encoder always has "reward". With
    `stacked_experts`, one tensor holds all experts of a layer even if exports have one for each.
    """
    if isinstance(architecture, DebertaArchitecture):
        return deberta_tensor_table(architecture)
    a, D = architecture, architecture.hidden_size
    table = _DecoderTable(a)
    table.add_outside(("embed", "embedding"), "model.embed_tokens", (a.vocab_size, D))
    for name, hf_name in table.norm_parameters.items():
        table.add_outside(("norm", name), "model.norm", (D,), hf_name)
    if a.learned_positions:
        shape = (a.max_position_embeddings, D)
        table.add_outside(("positions", "embedding"), "model.embed_positions", shape)
    table.add_layer_norms()
    if a.latent_size:
        table.add_latent_attention()
    else:
        # Layers of one kind of attention have the same shapes.
        kinds = zip(a.layers_are_local, a.layers_are_shared, strict=True)
        for module, kind in {a.attention_module(*kind): kind for kind in kinds}.items():
            table.add_attention(module, *kind)
    if a.linear_layers and a.block == "convolution":
        table.add_short_conv()
    elif a.linear_layers:
        table.add_delta_net()
    if a.per_layer_size:
        table.add_per_layer_embeddings()
    if a.layer_scalars:
        table.add(("layer_scalar",), "layer_scalar", (1,))
    if a.num_experts:
        table.add_experts(stacked_experts)
    else:
        table.add_mlp("mlp", a.intermediate_size)
    if a.shared_expert_size:
        table.add_mlp("shared_expert", a.shared_expert_size)
        if a.shared_expert_gate:
            gate = "shared_expert_gate"
            table.add(
                ("shared_expert", gate, "kernel"), f"mlp.{gate}", (D, 1), ".weight", transposed=True
            )
    if a.dense_layers:
        table.add_mlp("dense_mlp", a.dense_size)
    rows = table.rows
    for path, row in rows.items():
        if path[0] == "layers" and (owners := a.partial_stacks.get(path[1])):
            numbers = tuple(i for i, is_owner in enumerate(owners) if is_owner)
            rows[path] = dataclasses.replace(row, layers=len(numbers), layer_numbers=numbers)
    if head != "lm":
        rows["score", "kernel"] = TensorMapping("score.weight", (D, 1), transposed=True)
    if head == "token":
        # transformers' head has a bias, which critics do not.
        rows["score", "bias"] = TensorMapping("score.bias", (1,))
    if head in ("lm", "both") and not a.tied:
        table.add_outside(("lm_head", "embedding"), "lm_head", (a.vocab_size, D))
    return rows


def adapter_tensor_table(
    architecture: Architecture, rank: int, targets: Sequence[str], head: str
) -> TensorTable:
    """Return the tensor of each adapter parameter (lora.py) under the names that PEFT uses.

    A scalar head is stored next to the adapters, as PEFT does. Projections that a checkpoint holds
    as one tensor have the same A in PEFT's format, and each a separate part of B's outputs. The
    `targets` have adapters in every layer, experts none; `head` is as in `tensor_table`.
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
    """Return the shortest names of modules by which PEFT finds projections.

    Where two projections of a layer share a name, that of the outer module precedes it.
    """
    full = {
        path[-2]: row.name.removesuffix(".weight").split(".")
        for path, row in tensor_table(architecture, "lm").items()
        if path[-1] == "kernel"
    }
    uses = collections.Counter(hf_name[-1] for hf_name in full.values())
    found = [full[name] for name in projections if name in full]
    return [".".join(x[-1:] if uses[x[-1]] == 1 else x[-2:]) for x in found]


class _DecoderTable:
    def __init__(self, architecture: Architecture) -> None:
        self.a = architecture
        self.family = FAMILIES[architecture.family]
        self.rows: TensorTable = {}
        # Names of the parameters of a norm of hidden states, ours and the checkpoint's.
        names = {"scale": "weight", "bias": "bias"}
        self.norm_parameters = {x: names[x] for x in BLOCKS[self.a.block].norm_parameters}

    def hf_name(self, name: str) -> str:
        return self.family.module_names.get(name, name)

    def add_outside(
        self, path: tuple[str, ...], module: str, shape: tuple[int, ...], parameter: str = "weight"
    ) -> None:
        self.rows[path] = TensorMapping(f"{self.hf_name(module)}.{parameter}", shape)

    def add(
        self,
        path: tuple[str, ...],
        module: str,
        shape: tuple[int, ...],
        suffix: str = "",
        **options: Any,
    ) -> None:
        """Add a tensor of a module in all layers; `suffix` follows the family's name of it."""
        hf_name = f"{self.hf_name('model.layers')}.{{}}.{self.hf_name(module)}{suffix}"
        row = TensorMapping(hf_name, shape, layers=self.a.num_layers, **options)
        self.rows["layers", *path] = row

    def add_scale(self, module: str, name: str, width: int, hf_name: str = "") -> None:
        hf_name = f"{HF_MODULES[module]}.{hf_name or name}"
        self.add((module, name, "scale"), hf_name, (width,), ".weight")

    def add_dense(
        self,
        module: str,
        name: str,
        inputs: int,
        outputs: int,
        bias: bool = False,
        hf_name: str = "",
        fused: Fused | None = None,
    ) -> None:
        hf_name = f"{HF_MODULES[module]}.{hf_name or name}"
        options: dict[str, Any] = {"transposed": not self.family.input_first, "fused": fused}
        self.add((module, name, "kernel"), hf_name, (inputs, outputs), ".weight", **options)
        if bias:
            self.add((module, name, "bias"), hf_name, (outputs,), ".bias", fused=fused)

    def add_input_projections(
        self, module: str, projections: Mapping[str, tuple[int, ...]], bias: bool, groups: int = 1
    ) -> None:
        """Add projections of the same input, which some families store as one tensor.

        The widths of the parts are in the order of that tensor; `groups` are as in `Fused`.
        """
        hf_name = self.family.fused_projections.get(tuple(projections), "")
        total = sum(map(sum, projections.values()))
        first = 0
        for name, widths in projections.items():
            firsts = itertools.accumulate(widths, initial=first)
            parts = tuple((at // groups, width) for at, width in zip(firsts, widths, strict=False))
            fused = Fused(parts, total, groups) if hf_name else None
            self.add_dense(module, name, self.a.hidden_size, sum(widths), bias, hf_name, fused)
            first += sum(widths)

    def add_layer_norms(self) -> None:
        a = self.a
        names = {"post_attention_norm": "post_attention_layernorm"}
        if a.pre_norms:
            names["input_norm"] = "input_layernorm"
        if a.post_norms:
            names["post_feedforward_norm"] = "post_feedforward_layernorm"
        if a.pre_norms and a.post_norms:
            names["pre_feedforward_norm"] = "pre_feedforward_layernorm"
        for name, hf_name in names.items():
            for parameter, hf_parameter in self.norm_parameters.items():
                self.add((name, parameter), hf_name, (a.hidden_size,), f".{hf_parameter}")

    def add_attention(self, module: str, is_local: bool, is_shared: bool) -> None:
        a = self.a
        num_kv_heads, head_dim = a.kv_heads(is_local)
        queries, keys = a.num_heads * head_dim, num_kv_heads * head_dim
        heads = {"q_norm": a.num_heads, "k_norm": num_kv_heads}
        # A gate follows the queries of each head.
        widths = {"q_proj": (queries * (1 + a.output_gate),), "k_proj": (keys,), "v_proj": (keys,)}
        if a.keys_as_values and not is_local:
            del widths["v_proj"]
        if is_shared:
            del heads["k_norm"]
            widths = {"q_proj": widths["q_proj"]}
        for name, number in heads.items() if a.qk_norm else ():
            self.add_scale(module, name, number * head_dim if a.qk_norm_over_heads else head_dim)
        groups = a.num_heads if self.family.fused_by_head else 1
        self.add_input_projections(module, widths, a.qkv_bias, groups)
        self.add_dense(module, "o_proj", queries, a.hidden_size, a.output_bias)
        if a.attention_sinks:
            self.add((module, "sinks"), f"{HF_MODULES[module]}.sinks", (a.num_heads,))

    def add_latent_attention(self) -> None:
        a, module = self.a, "attention"
        queries, width = "q_proj", a.hidden_size
        columns = a.latent_size + a.rope_head_dim
        self.add_dense(module, "kv_a_proj_with_mqa", a.hidden_size, columns, a.qkv_bias)
        if a.query_latent_size:
            self.add_dense(module, "q_a_proj", a.hidden_size, a.query_latent_size, a.qkv_bias)
            queries, width = "q_b_proj", a.query_latent_size
        self.add_dense(module, queries, width, a.num_heads * a.head_dim)
        values = a.num_heads * a.value_head_dim
        keys = a.num_heads * (a.head_dim - a.rope_head_dim)
        self.add_dense(module, "kv_b_proj", a.latent_size, keys + values)
        self.add_dense(module, "o_proj", values, a.hidden_size, a.output_bias)
        self.add_scale(module, "kv_a_norm", a.latent_size, "kv_a_layernorm")
        if a.query_latent_size:
            self.add_scale(module, "q_a_norm", a.query_latent_size, "q_a_layernorm")

    def add_per_layer_embeddings(self) -> None:
        D, P = self.a.hidden_size, self.a.per_layer_size
        projection, norm = "per_layer_model_projection", "per_layer_projection_norm"
        width = self.a.num_layers * P
        table = "model.embed_tokens_per_layer"
        self.add_outside(("embed_per_layer", "embedding"), table, (self.a.vocab_size, width))
        self.rows[projection, "kernel"] = TensorMapping(
            f"model.{projection}.weight", (D, width), transposed=True
        )
        self.add_outside((norm, "scale"), f"model.{norm}", (P,))
        scale = "post_per_layer_input_norm"
        self.add((scale, "scale"), scale, (D,), ".weight")
        for name, shape in {"per_layer_input_gate": (D, P), "per_layer_projection": (P, D)}.items():
            self.add((name, "kernel"), name, shape, ".weight", transposed=True)

    def add_short_conv(self) -> None:
        a, D, module = self.a, self.a.hidden_size, "short_conv"
        # The checkpoint has the three projections one after the other, ours are grouped.
        place = Fused(((0, D), (D, D), (2 * D, D)), 3 * D, groups_here=a.num_kv_heads)
        self.add_dense(module, "in_proj", D, 3 * D, fused=place)
        self.add_dense(module, "out_proj", D, D)
        name = f"{HF_MODULES[module]}.conv.weight"
        self.add((module, "window_filter"), name, (a.delta_window, 1, D), transposed=True)

    def add_delta_net(self) -> None:
        a, module = self.a, "delta_net"
        hf_module, heads = HF_MODULES[module], a.delta_value_heads
        keys, _, values = a.delta_widths
        channels = sum(a.delta_widths)
        # Ours are grouped by key head, so that devices can split them.
        parts = tuple(zip((0, keys, 2 * keys), a.delta_widths, strict=True))
        by_head = Fused(parts, channels, groups_here=a.delta_key_heads)
        self.add_dense(module, "out_proj", values, a.hidden_size)
        # Where they are fused, the tensors hold the projections of one key head, then of the next.
        inputs: tuple[dict[str, tuple[int, ...]], ...] = (
            {"in_proj_qkv": a.delta_widths, "in_proj_z": (values,)},
            {"in_proj_b": (heads,), "in_proj_a": (heads,)},
        )
        for projections in inputs:
            self.add_input_projections(module, projections, False, a.delta_key_heads)
        qkv = ("layers", module, "in_proj_qkv", "kernel")
        place = (self.rows[qkv].fused or by_head)._replace(groups_here=a.delta_key_heads)
        self.rows[qkv] = dataclasses.replace(self.rows[qkv], fused=place)
        options: dict[str, Any] = {"transposed": True, "fused": by_head}
        shape = (a.delta_window, 1, channels)
        self.add((module, "window_filter"), f"{hf_module}.conv1d.weight", shape, **options)
        self.add((module, "log_rate"), f"{hf_module}.A_log", (heads,))
        self.add((module, "step_bias"), f"{hf_module}.dt_bias", (heads,))
        self.add_scale(module, "norm", a.delta_value_dim)

    def add_mlp(self, module: str, width: int) -> None:
        a = self.a
        widths = dict.fromkeys(BLOCKS[a.block].mlp_inputs, (width,))
        self.add_input_projections(module, widths, a.mlp_bias)
        self.add_dense(module, "down_proj", width, a.hidden_size, a.mlp_bias)

    def add_experts(self, stacked: bool) -> None:
        a, router = self.a, "mlp.gate"
        E, D, width = a.num_experts, a.hidden_size, a.intermediate_size
        self.add(("mlp", "router", "kernel"), router, (D, E), ".weight", transposed=True)
        if a.mlp_bias:
            self.add(("mlp", "router", "bias"), router, (E,), ".bias")
        if a.sigmoid_router:
            self.add(("mlp", CORRECTION_BIAS), f"{router}.e_score_correction_bias", (E,))
        shapes = {"gate_proj": (D, width), "up_proj": (D, width), "down_proj": (width, D)}
        is_interleaved = self.family.stacked_experts
        # One tensor holds gate and up: alternate columns, or halves of a tensor [E, out, in].
        groups = width if is_interleaved else 1
        for number, (name, shape) in enumerate(shapes.items()):
            path = ("mlp", "experts", name)
            if not stacked and not is_interleaved:
                hf_name = f"mlp.experts.{{}}.{name}"
                options: dict[str, Any] = {"transposed": True, "experts": E}
                self.add((*path, "kernel"), hf_name, shape, ".weight", **options)
                continue
            options = {"stacked": True, "transposed": not is_interleaved}
            hf_name = "mlp.experts.down_proj"
            if name != "down_proj":
                hf_name = "mlp.experts.gate_up_proj"
                options["fused"] = Fused(((number * width // groups, width),), 2 * width, groups)
            self.add((*path, "kernel"), hf_name, (E, *shape), **options)
            if a.mlp_bias:
                self.add((*path, "bias"), hf_name, (E, shape[1]), "_bias", **options)
