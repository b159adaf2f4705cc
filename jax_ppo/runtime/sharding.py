"""How parameters and batches are laid out on the mesh.

One ordered, strict table of rules per layout of parameters; a batch is split along its rows. What
devices compute of such arrays, and exchange, is the subject of `parallelism`.
"""

import re
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ppo.runtime import meshes
from jax_ppo.runtime.meshes import EXPERT_WEIGHTS, ROWS, WEIGHTS, by_process, row_shards

Rules = tuple[tuple[str, P], ...]

# Projections of hidden states and back to them: `model` splits the sides between the two.
INPUTS = r"(q_proj|k_proj|v_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|in_proj(?:_\w+)?)"
OUTPUTS = "(o_proj|down_proj|out_proj)"
NARROW = "(router|shared_expert_gate|q_a_proj|kv_a_proj_with_mqa|per_layer_input_gate)"

# (path pattern, layout). The first pattern that matches the end of a parameter's path decides; a
# parameter without a match raises. Parameters below "layers/" have the stacked layers' axis in
# front. Stages split it in a decoder (`TRAIN_RULES`); an encoder's is never split.
ENCODER_RULES: Rules = (
    (r"(embed|embed_per_layer|lm_head)/embedding", P("model", WEIGHTS)),
    # Before the rules of other kernels: experts have a separate axis.
    (r"layers/.*experts/(gate_proj|up_proj)/kernel", P(None, "expert", EXPERT_WEIGHTS, "model")),
    (r"layers/.*experts/down_proj/kernel", P(None, "expert", "model", EXPERT_WEIGHTS)),
    (r"layers/.*experts/(gate_proj|up_proj)/bias", P(None, "expert", "model")),
    (r"layers/.*experts/down_proj/bias", P(None, "expert")),
    (r"layers/.*(correction_bias|sinks|layer_scalar)", P()),
    # Whole over `model`: narrow outputs, and latents, which all heads read.
    (rf"layers/.*{NARROW}/(kernel|lora_a)", P(None, WEIGHTS, None)),
    (rf"layers/.*{NARROW}/lora_b", P()),
    (rf"layers/.*{NARROW}/bias", P()),
    (r"layers/per_layer_projection/kernel", P(None, None, WEIGHTS)),
    (r"per_layer_model_projection/kernel", P(WEIGHTS, None)),
    (r"layers/.*window_filter", P(None, None, None, "model")),
    (r"layers/.*(log_rate|step_bias)", P(None, "model")),
    (rf"layers/.*{INPUTS}/kernel", P(None, WEIGHTS, "model")),
    (rf"layers/.*{INPUTS}/bias", P(None, "model")),
    (rf"layers/.*{OUTPUTS}/kernel", P(None, "model", WEIGHTS)),
    (rf"layers/.*{OUTPUTS}/bias", P()),
    # Adapters are split like the sides of the kernel that they touch; their rank is never split.
    (rf"layers/.*{INPUTS}/lora_a", P(None, WEIGHTS, None)),
    (rf"layers/.*{INPUTS}/lora_b", P(None, None, "model")),
    (rf"layers/.*{OUTPUTS}/lora_a", P(None, "model", None)),
    (rf"layers/.*{OUTPUTS}/lora_b", P(None, None, WEIGHTS)),
    (r"layers/.*norm/(scale|bias)", P()),
    (r"norm/(scale|bias)", P()),
    # Learned positions are few.
    (r"positions/embedding", P()),
    (r"score/kernel", P(WEIGHTS, None)),
    # An encoder. Its words are not split over `model`: DeBERTa-v3 has 128,100 of them.
    (r"(words|relative)/embedding", P(None, WEIGHTS)),
    (r"conv/kernel", P(None, WEIGHTS, "model")),
    (r"pooler/kernel", P(WEIGHTS, "model")),
    (r"(conv|pooler|score)/bias", P()),
    (r"(layers/)?\w+_norm/(scale|bias)", P()),
    (r"count", P()),  # the optimizer's step count
)
TRAIN_RULES: Rules = tuple(
    (pattern, P("stage", *spec[1:]) if pattern.startswith("layers/") else spec)
    for pattern, spec in ENCODER_RULES
)


def _decoding_rule(pattern: str, spec: P) -> tuple[str, P]:
    """Return the rule of a parameter in decoding, which does not stack layers.

    Decoding reads every weight per token: `WEIGHTS` split nothing that each token would gather.
    """
    is_layer = pattern.startswith("layers/")
    if is_layer:
        pattern = r"layer_\d+" + pattern.removeprefix("layers")
    axes = [None if axis in (WEIGHTS, EXPERT_WEIGHTS) else axis for axis in spec[is_layer:]]
    # The scales of a quantized kernel are split as its bias is.
    return re.sub("/bias$", "/(bias|kernel_scale)", pattern), P(*axes)


DECODE_RULES: Rules = tuple(_decoding_rule(*rule) for rule in ENCODER_RULES)


def decode_rules(mesh: Mesh | AbstractMesh, num_kv_heads: int) -> Rules:
    """Return `DECODE_RULES`, with copies of the projections to keys and values if they need it.

    A device computes whole heads, also one that it shares with others.
    """
    if num_kv_heads % mesh.shape["model"] == 0:
        return DECODE_RULES
    copied = r"layer_\d+/.*(k_proj|v_proj)/(kernel|kernel_scale|bias|lora_b)"
    return ((copied, P()), *DECODE_RULES)


def tree_shardings(mesh: Mesh | AbstractMesh, tree: Any, rules: Rules) -> Any:
    """Return each leaf's `NamedSharding` by its path; raise `ValueError` if no rule matches."""

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for pattern, spec in rules:
            if re.search(rf"(^|/){pattern}$", name):
                if name.endswith("/embedding") and spec[:1] == ("model",):
                    spec = P(meshes.vocabulary_axis(mesh, leaf.shape[0]), *spec[1:])
                return NamedSharding(mesh, spec)
        raise ValueError(
            f"{name}: no partition rule for this parameter of shape {leaf.shape}; add one to "
            "sharding.py"
        )

    return jax.tree_util.tree_map_with_path(sharding, tree)


def with_layout(mesh: Mesh | AbstractMesh, shapes: Any, rules: Rules) -> Any:
    """Return the same shapes with the layouts of `tree_shardings`."""
    return jax.tree.map(
        lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
        shapes,
        tree_shardings(mesh, shapes, rules),
    )


def rows(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Return the sharding that splits `axis`, which counts rows or samples."""
    return NamedSharding(mesh, P(*[None] * axis, ROWS))


def batch_rows(mesh: Mesh, count: int) -> NamedSharding:
    """Return the sharding of `count` rows: split, or whole on each device if that is uneven."""
    return replicated(mesh) if count % row_shards(mesh) else rows(mesh)


def process_rows(devices: Iterable[jax.Device]) -> NamedSharding:
    """Return the sharding of [processes, ...] that gives the devices of each process one row."""
    table = np.reshape(by_process(devices), (jax.process_count(), -1))
    return NamedSharding(Mesh(table, ("process", "device")), P("process"))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of arrays that every device holds as a whole."""
    return NamedSharding(mesh, P())


def copied_rows(mesh: Mesh, groups: int) -> NamedSharding:
    """Return the sharding of [G, N, ...]: N over devices that hold copies of a group of rows."""
    if groups == 1:
        return NamedSharding(mesh, P(None, mesh.axis_names))
    return NamedSharding(mesh, P(ROWS, tuple(axis for axis in mesh.axis_names if axis not in ROWS)))


def constrain_rows(x: jax.Array) -> jax.Array:
    """Keep the rows of `x` split, inside a compiled function with a mesh."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    # Axes that are split over `model` stay split.
    return jax.lax.with_sharding_constraint(x, P(ROWS, *[P.UNCONSTRAINED] * (x.ndim - 1)))


def num_padded_rows(count: int) -> int:
    """Return the smallest number of rows >= `count` that can be split evenly over the devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return count if mesh.empty else count + -count % row_shards(mesh)


def drop_padded_rows(x: jax.Array, count: int) -> jax.Array:
    """Return the first `count` rows in the layout of `batch_rows`, inside a compiled function."""
    mesh = jax.sharding.get_abstract_mesh()
    if len(x) == count or mesh.empty:
        return x[:count]
    layout = P() if count % row_shards(mesh) else P(ROWS)
    return jax.lax.with_sharding_constraint(x[:count], layout)


def constrain_tree(tree: Any) -> Any:
    """Lay out every leaf by `TRAIN_RULES`, inside a compiled function with a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree
    return jax.lax.with_sharding_constraint(tree, tree_shardings(mesh, tree, TRAIN_RULES))
