"""Which tensor of a Hugging Face checkpoint is which of our parameters: one table, for import and for export."""

import dataclasses
from collections.abc import Iterable, Sequence

from flax import traverse_util

from jax_ppo.models.architecture import Architecture
from jax_ppo.models.deberta.architecture import DebertaArchitecture

HEADS = ("lm", "scalar", "reward", "both")
PEFT_PREFIX = "base_model.model."


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """One parameter of ours and its name in the checkpoint.

    Attributes:
      name: Hugging Face's; `{}` stands for the layer's number.
      shape: ours, of one layer.
      transposed: the checkpoint has its axes the other way round, [out, in] where ours are [in, out].
      layers: how many are stacked along a first axis of ours; None: the parameter belongs to no layer.
      fused: (first row, rows of all) where the checkpoint's tensor holds several parameters of ours one below the other.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    layers: int | None = None
    fused: tuple[int, int] | None = None

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        shape = self.shape[::-1] if self.transposed else self.shape
        return shape if self.fused is None else (self.fused[1], *shape[1:])

    def hf_index(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Where the checkpoint's tensor has what `index` takes from ours."""
        index = index[::-1] if self.transposed else index
        if self.fused is None:
            return index
        rows = self.shape[-1] if self.transposed else self.shape[0]
        start, stop, _ = index[0].indices(rows)
        return (slice(self.fused[0] + start, self.fused[0] + stop), *index[1:])

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Of our parameter, with the layers' axis."""
        return self.shape if self.layers is None else (self.layers, *self.shape)

    def names(self) -> list[str]:
        """The checkpoint's names, one a layer."""
        return (
            [self.name]
            if self.layers is None
            else [self.name.format(i) for i in range(self.layers)]
        )


def tensor_table(
    architecture: Architecture | DebertaArchitecture, head: str
) -> dict[tuple[str, ...], TensorMapping]:
    """Our paths (("layers", "mlp", "up_proj", "kernel"), ...) to tensors. `head`: one of HEADS; an encoder has "reward"."""
    if head not in HEADS:
        raise ValueError(f"head={head!r}: expected one of {', '.join(map(repr, HEADS))}")
    if isinstance(architecture, DebertaArchitecture):
        return _deberta(architecture)
    a = architecture
    rows = {
        ("embed", "embedding"): TensorMapping(
            "model.embed_tokens.weight", (a.vocab_size, a.hidden_size)
        ),
        ("norm", "scale"): TensorMapping("model.norm.weight", (a.hidden_size,)),
        **_layer_norm(a, "input_norm", "input_layernorm"),
        **_layer_norm(a, "post_attention_norm", "post_attention_layernorm"),
    }
    if a.post_norms:
        rows |= _layer_norm(a, "pre_feedforward_norm", "pre_feedforward_layernorm")
        rows |= _layer_norm(a, "post_feedforward_norm", "post_feedforward_layernorm")
    if a.qk_norm:
        for name in ("q_norm", "k_norm"):
            hf_name = f"model.layers.{{}}.self_attn.{name}.weight"
            rows["layers", "attention", name, "scale"] = TensorMapping(
                hf_name, (a.head_dim,), False, a.num_layers
            )
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    fused = a.family == "phi3"
    rows |= _side_by_side(
        a,
        "attention",
        "self_attn",
        {"q_proj": queries, "k_proj": keys, "v_proj": keys},
        a.qkv_bias,
        "qkv_proj" if fused else None,
    )
    rows |= _dense(
        a, ("attention", "o_proj"), "self_attn.o_proj", queries, a.hidden_size, a.output_bias
    )
    rows |= _side_by_side(
        a,
        "mlp",
        "mlp",
        dict.fromkeys(("gate_proj", "up_proj"), a.intermediate_size),
        a.mlp_bias,
        "gate_up_proj" if fused else None,
    )
    rows |= _dense(
        a, ("mlp", "down_proj"), "mlp.down_proj", a.intermediate_size, a.hidden_size, a.mlp_bias
    )
    if head != "lm":
        rows["score", "kernel"] = TensorMapping("score.weight", (a.hidden_size, 1), transposed=True)
    if head in ("lm", "both") and not a.tied:
        rows["lm_head", "embedding"] = TensorMapping(
            "lm_head.weight", (a.vocab_size, a.hidden_size)
        )
    return rows


def adapter_tensor_table(
    architecture: Architecture, rank: int, targets: Sequence[str], head: str
) -> dict[tuple[str, ...], TensorMapping]:
    """As `table`, of adapters (lora.py), by PEFT's names for them; a scalar head stands beside them, as PEFT keeps it."""
    rows = {}
    for path, row in tensor_table(architecture, head).items():
        if path == ("score", "kernel"):
            rows[path] = dataclasses.replace(row, name=PEFT_PREFIX + row.name)
        if path[-1] == "kernel" and path[-2] in targets:
            name, (inputs, outputs) = PEFT_PREFIX + row.name.removesuffix("weight"), row.shape
            rows[*path[:-1], "lora_a"] = TensorMapping(
                f"{name}lora_A.weight", (inputs, rank), True, row.layers
            )
            rows[*path[:-1], "lora_b"] = TensorMapping(
                f"{name}lora_B.weight", (rank, outputs), True, row.layers
            )
    return rows


def _layer_norm(a, name, hf_name):
    hf_name = f"model.layers.{{}}.{hf_name}.weight"
    return {
        ("layers", name, "scale"): TensorMapping(hf_name, (a.hidden_size,), False, a.num_layers)
    }


def _side_by_side(a, module, hf_module, outputs, bias, fused):
    """Projections of the same input, apart in the checkpoint or in one tensor of the name `fused`."""
    rows, start = {}, 0
    for name, width in outputs.items():
        own = _dense(a, (module, name), f"{hf_module}.{fused or name}", a.hidden_size, width, bias)
        if fused:
            own = {
                path: dataclasses.replace(row, fused=(start, sum(outputs.values())))
                for path, row in own.items()
            }
        rows, start = rows | own, start + width
    return rows


def _dense(a, path, hf_name, inputs, outputs, bias):
    prefix = f"model.layers.{{}}.{hf_name}"
    rows = {
        ("layers", *path, "kernel"): TensorMapping(
            f"{prefix}.weight", (inputs, outputs), True, a.num_layers
        )
    }
    if bias:
        rows["layers", *path, "bias"] = TensorMapping(
            f"{prefix}.bias", (outputs,), False, a.num_layers
        )
    return rows


def _deberta(a):
    D, encoder = a.hidden_size, "deberta.encoder"
    layer = f"{encoder}.layer.{{}}"

    def dense(name, inputs, outputs, layers=None):
        return {
            "kernel": TensorMapping(f"{name}.weight", (inputs, outputs), True, layers),
            "bias": TensorMapping(f"{name}.bias", (outputs,), False, layers),
        }

    def norm(name, layers=None):
        return {
            "scale": TensorMapping(f"{name}.LayerNorm.weight", (D,), False, layers),
            "bias": TensorMapping(f"{name}.LayerNorm.bias", (D,), False, layers),
        }

    def projection(name):
        return dense(f"{layer}.attention.self.{name}", D, D, a.num_layers)

    attention = {
        "q_proj": projection("query_proj"),
        "k_proj": projection("key_proj"),
        "v_proj": projection("value_proj"),
        "o_proj": dense(f"{layer}.attention.output.dense", D, D, a.num_layers),
    }
    if a.content_to_position and not a.share_keys:
        attention["pos_k_proj"] = projection("pos_key_proj")
    if a.position_to_content and not a.share_keys:
        attention["pos_q_proj"] = projection("pos_query_proj")
    rows = {
        "score": dense("classifier", D, 1),  # first: what has none is another kind of model
        "words": {
            "embedding": TensorMapping(
                "deberta.embeddings.word_embeddings.weight", (a.vocab_size, a.embedding_size)
            )
        },
        "embed_norm": norm("deberta.embeddings"),
        "relative": {
            "embedding": TensorMapping(f"{encoder}.rel_embeddings.weight", (2 * a.relative_span, D))
        },
        "layers": {
            "attention": attention,
            "attention_norm": norm(f"{layer}.attention.output", a.num_layers),
            "mlp": {
                "up_proj": dense(
                    f"{layer}.intermediate.dense", D, a.intermediate_size, a.num_layers
                ),
                "down_proj": dense(f"{layer}.output.dense", a.intermediate_size, D, a.num_layers),
            },
            "mlp_norm": norm(f"{layer}.output", a.num_layers),
        },
        "pooler": dense("pooler.dense", D, D),
    }
    if a.absolute_positions:
        places = (a.max_position_embeddings, a.embedding_size)
        rows["places"] = {
            "embedding": TensorMapping("deberta.embeddings.position_embeddings.weight", places)
        }
    if a.embedding_size != D:
        rows["embed_proj"] = {
            "kernel": TensorMapping(
                "deberta.embeddings.embed_proj.weight", (a.embedding_size, D), True
            )
        }
    if a.norm_relative:
        rows["relative_norm"] = norm(encoder)
    if a.conv_kernel_size:
        rows["conv"] = {
            "kernel": TensorMapping(
                f"{encoder}.conv.conv.weight", (a.conv_kernel_size, D, D), True
            ),
            "bias": TensorMapping(f"{encoder}.conv.conv.bias", (D,)),
        }
        rows["conv_norm"] = norm(f"{encoder}.conv")
    return traverse_util.flatten_dict(rows)


def flatten_like(tree: dict, rows: dict, what: str) -> dict:
    """`tree` by paths. Raises ValueError where its paths are not the table's. `what` names the tree in the message."""
    flat = traverse_util.flatten_dict(tree)
    missing, unknown = sorted(rows.keys() - flat.keys()), sorted(flat.keys() - rows.keys())
    if missing or unknown:
        lists = [
            f"{word} {abbreviate('/'.join(map(str, path)) for path in paths)}"
            for word, paths in (("it lacks", missing), ("it should not have", unknown))
            if paths
        ]
        raise ValueError(
            f"{what} does not have the structure of this architecture's parameters: {'; '.join(lists)}"
        )
    return flat


def abbreviate(names: Iterable[str]) -> str:
    """The first few, for a message."""
    names = list(names)
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
