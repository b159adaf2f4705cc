"""How parameters and batches are laid out on the mesh: the only file with a PartitionSpec.

One ordered, strict table of rules per layout; and the functions that keep arrays split, or exchange
their parts, inside compiled functions.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jax_ppo.runtime.meshes import (
    AXES,
    COLUMNS,
    EXPERT_WEIGHTS,
    ROWS,
    WEIGHTS,
    cache_parts,
    row_parts,
    row_shards,
    weight_shards,
)

Rules = tuple[tuple[str, P], ...]

# (path pattern, layout). The first pattern that matches the end of a parameter's path decides; a
# parameter without a match raises. Parameters below "layers/" have the stacked layers' axis in
# front. Stages split it in a decoder (`TRAIN_RULES`); an encoder's is never split.
ENCODER_RULES: Rules = (
    (r"(embed|lm_head)/embedding", P("model", WEIGHTS)),
    # Before the rules of other kernels: experts have an axis of their own.
    (r"layers/.*experts/(gate_proj|up_proj)/kernel", P(None, "expert", EXPERT_WEIGHTS, "model")),
    (r"layers/.*experts/down_proj/kernel", P(None, "expert", "model", EXPERT_WEIGHTS)),
    (r"layers/.*router/kernel", P(None, WEIGHTS, None)),
    (r"layers/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/kernel", P(None, WEIGHTS, "model")),
    (r"layers/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/bias", P(None, "model")),
    (r"layers/.*(o_proj|down_proj)/kernel", P(None, "model", WEIGHTS)),
    (r"layers/.*(o_proj|down_proj)/bias", P()),
    # Adapters are split like the sides of the kernel that they touch; their rank is never split.
    (r"layers/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/lora_a", P(None, WEIGHTS, None)),
    (r"layers/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/lora_b", P(None, None, "model")),
    (r"layers/.*(o_proj|down_proj)/lora_a", P(None, "model", None)),
    (r"layers/.*(o_proj|down_proj)/lora_b", P(None, None, WEIGHTS)),
    (r"layers/.*norm/(scale|bias)", P()),
    (r"norm/(scale|bias)", P()),
    # Learned positions are few.
    (r"positions/embedding", P()),
    (r"score/kernel", P(WEIGHTS, None)),
    # An encoder. Its words are not split over `model`: DeBERTa-v3 has 128,100 of them.
    (r"(words|places|relative)/embedding", P(None, WEIGHTS)),
    (r"embed_proj/kernel", P(WEIGHTS, None)),
    (r"conv/kernel", P(None, WEIGHTS, "model")),
    (r"pooler/kernel", P(WEIGHTS, "model")),
    (r"(conv|pooler|score)/bias", P()),
    (r"(layers/)?\w+_norm/(scale|bias)", P()),
    (r"count", P()),  # of the optimizer
)
TRAIN_RULES: Rules = tuple(
    (pattern, P("stage", *spec[1:]) if pattern.startswith("layers/") else spec)
    for pattern, spec in ENCODER_RULES
)
# Decoding reads every weight once per token: nothing is split along fsdp, so that nothing is
# gathered inside the loop.
DECODE_RULES: Rules = (
    (r"(embed|lm_head)/embedding", P("model", None)),
    (r"layer_\d+/.*experts/(gate_proj|up_proj)/kernel", P("expert", None, "model")),
    (r"layer_\d+/.*experts/(gate_proj|up_proj)/kernel_scale", P("expert", "model")),
    (r"layer_\d+/.*experts/down_proj/kernel", P("expert", "model", None)),
    (r"layer_\d+/.*experts/down_proj/kernel_scale", P("expert")),
    (r"layer_\d+/.*router/kernel", P()),
    (r"layer_\d+/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/kernel", P(None, "model")),
    (r"layer_\d+/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/(bias|kernel_scale)", P("model")),
    (r"layer_\d+/.*(o_proj|down_proj)/kernel", P("model", None)),
    (r"layer_\d+/.*(o_proj|down_proj)/(bias|kernel_scale)", P()),
    (r"layer_\d+/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/lora_a", P()),
    (r"layer_\d+/.*(q_proj|k_proj|v_proj|gate_proj|up_proj)/lora_b", P(None, "model")),
    (r"layer_\d+/.*(o_proj|down_proj)/lora_a", P("model", None)),
    (r"layer_\d+/.*(o_proj|down_proj)/lora_b", P()),
    (r"(layer_\d+/.*)?norm/(scale|bias)", P()),
    (r"positions/embedding", P()),
)


def decode_rules(mesh: Mesh | AbstractMesh, num_kv_heads: int) -> Rules:
    """Return `DECODE_RULES`, with copies of the projections to keys and values if they need it.

    A device computes whole heads. If it shares one with others, it computes all of them instead of
    receiving parts of them for each token.
    """
    if num_kv_heads % mesh.shape["model"] == 0:
        return DECODE_RULES
    copied = r"layer_\d+/.*(k_proj|v_proj)/(kernel|kernel_scale|bias|lora_b)"
    return ((copied, P()), *DECODE_RULES)


def tree_shardings(mesh: Mesh | AbstractMesh, tree: Any, rules: Rules) -> Any:
    """Return the `NamedSharding` of each leaf of `tree` by its path.

    Args:
      mesh: the mesh of the shardings.
      tree: arrays or shapes.
      rules: `TRAIN_RULES`, `ENCODER_RULES` or `DECODE_RULES`.

    Raises:
      ValueError: a path matches no rule.
    """

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = "/".join(
            str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", part))))
            for part in path
        )
        for pattern, spec in rules:
            if re.search(rf"(^|/){pattern}$", name):
                return NamedSharding(mesh, spec)
        raise ValueError(
            f"{name}: no partition rule for this parameter of shape {leaf.shape}; add one to "
            "sharding.py"
        )

    return jax.tree_util.tree_map_with_path(sharding, tree)


def rows(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Return the sharding that splits `axis`, which counts rows or samples."""
    return NamedSharding(mesh, P(*[None] * axis, ROWS))


def batch_rows(mesh: Mesh, count: int) -> NamedSharding:
    """Return the sharding of arrays of `count` rows: split, or whole on each device.

    Whole if the devices do not divide them. These are tokens and numbers per token, which are small
    beside a model; the packed rows that models run are always split.
    """
    return replicated(mesh) if count % row_shards(mesh) else rows(mesh)


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of arrays that every device holds as a whole."""
    return NamedSharding(mesh, P())


def copied_rows(mesh: Mesh, groups: int) -> NamedSharding:
    """Return the sharding of [G, N, ...], which splits N over the devices that hold copies of it.

    Args:
      mesh: the run's mesh.
      groups: G, the number of parts that rows are split into; 1 if each device holds all.
    """
    if groups == 1:
        return NamedSharding(mesh, P(None, AXES))
    return NamedSharding(mesh, P(ROWS, tuple(axis for axis in AXES if axis not in ROWS)))


def constrain_rows(x: jax.Array, axis: int = 0) -> jax.Array:
    """Keep the rows of `x` split, inside a compiled function.

    Without a mesh in the context, return `x`.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    # What is split over `model` stays split.
    trailing = [P.UNCONSTRAINED] * (x.ndim - axis - 1)
    return jax.lax.with_sharding_constraint(x, P(*[None] * axis, ROWS, *trailing))


def num_padded_rows(count: int) -> int:
    """Return the least number of rows, from `count` on, that the devices divide."""
    mesh = jax.sharding.get_abstract_mesh()
    return count if mesh.empty else count + -count % row_shards(mesh)


def drop_padded_rows(x: jax.Array, count: int) -> jax.Array:
    """Return the first `count` rows in the layout of `batch_rows`, inside a compiled function."""
    mesh = jax.sharding.get_abstract_mesh()
    if len(x) == count or mesh.empty:
        return x[:count]
    layout = P() if count % row_shards(mesh) else P(ROWS)
    return jax.lax.with_sharding_constraint(x[:count], layout)


def split_rows(function: Callable[..., Any], calls_host: bool = False) -> Callable[..., Any]:
    """Make each shard of rows run `function` on its own rows.

    The loops inside may differ in length from shard to shard, unless another axis than those of
    rows is split, or experts are: the devices must then meet in every matrix product, and
    any_shard(bool) tells whether the bool holds on any shard. Without a mesh in the context the
    result is `function`.

    Args:
      function: of (params, rows, rows, key, any_shard); what it returns has rows in front.
      calls_host: whether `function` calls the host, which only rows may then be split for.
    """

    def run(params: Any, *rows_and_key: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return function(params, *rows_and_key)
        has_shared_experts = mesh.shape["expert"] > 1
        in_step = has_shared_experts or any(
            mesh.shape[axis] > 1 for axis in mesh.axis_names if axis not in ROWS
        )
        split = functools.partial(function, any_shard=_any_shard) if in_step else function
        assert not (calls_host and in_step), "an environment's options refuse this mesh"
        return jax.shard_map(
            split,
            in_specs=(_row_parts(params) if has_shared_experts else P(), P(ROWS), P(ROWS), P()),
            out_specs=P(ROWS),
            # JAX calls the host only from programs in which no axis is left to the compiler.
            axis_names=set(mesh.axis_names) if calls_host else set(ROWS),
            check_vma=False,
        )(params, *rows_and_key)

    return run


def _row_parts(params: Any) -> Any:
    """Return how the axes of rows split parameters in decoding: they share out experts."""

    def only_rows(layout: NamedSharding) -> P:
        return P(*[axis if axis in ROWS else None for axis in layout.spec])

    mesh = jax.sharding.get_abstract_mesh()
    return jax.tree.map(only_rows, tree_shardings(mesh, params, DECODE_RULES))


def _any_shard(condition: jax.Array) -> jax.Array:
    return jax.lax.pmax(condition.astype(np.int32), ROWS) > 0


def split_heads(attention: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make each device run `attention` on its own rows and heads.

    Inside `split_rows`, where rows are split already, on its own heads.

    Args:
      attention: of (q, k, v [R, L, heads, d], an array [R, ...] or `None`).
    """

    def run(q: jax.Array, k: jax.Array, v: jax.Array, per_row: jax.Array | None) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            return attention(q, k, v, per_row)
        if set(mesh.axis_names) == set(mesh.manual_axes):
            return attention(q, k, v, per_row)
        first = _remaining_row_axes(mesh)
        heads = P(first, None, "model", None)
        return jax.shard_map(
            attention,
            in_specs=(heads, heads, heads, P(first)),
            out_specs=heads,
            check_vma=False,
            axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        )(q, k, v, per_row)

    return run


def _remaining_row_axes(mesh: AbstractMesh) -> tuple[str, ...] | None:
    """Return the axes that still split rows: none inside `split_rows`, some in a stage."""
    return tuple(axis for axis in ROWS if axis not in mesh.manual_axes) or None


def num_row_parts() -> int:
    """Return the number of devices that each packed row is split over, in a compiled function.

    It is 1 inside `split_rows`, where rows are whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or "context" in mesh.manual_axes else row_parts(mesh)


def attend_over_parts(attention: Callable[..., jax.Array], shared: Any = None) -> Any:
    """Make each device run `attention` on its own queries and heads, and the keys of whole rows.

    The devices of `context` hold the parts of packed rows that `packing.split_columns` made: part i
    of C has the i-th and the i-th last of 2 C blocks of columns. Keys, values and segments are
    gathered over `context`; the gradients of keys and values are reduce-scattered.

    Args:
      attention: of (q [R, L / C, H, d], keys and values [R, L, K, d] and segments [R, L] in the
        order of the row, the segments of the queries [R, L / C], their columns [L / C], and
        `shared` if it is not `None`).
      shared: an object with `manual_sharding_spec`, such as JAX's splash kernel, of which each
        device gets the part for its queries.
    """

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        parts = row_parts(mesh)

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, *shared: Any
        ) -> jax.Array:
            block = q.shape[1] // 2
            part = jax.lax.axis_index("context")
            # The columns of the first block and of its mirror image.
            starts = jnp.array([part, 2 * parts - 1 - part]) * block
            columns = (starts[:, None] + jnp.arange(block)).reshape(-1)
            keys, values, row_segments = (_gather_row(x) for x in (k, v, segments))
            return attention(q, keys, values, row_segments, segments, columns, *shared)

        first = _remaining_row_axes(mesh)
        heads = P(first, None, "model", None)
        extra: tuple[Any, ...] = ()
        extra_specs: tuple[Any, ...] = ()
        if shared is not None:
            extra = (shared,)
            extra_specs = (shared.manual_sharding_spec(NamedSharding(mesh, P(None, "context"))),)
        return jax.shard_map(
            attend,
            in_specs=(heads, heads, heads, P(first), *extra_specs),
            out_specs=heads,
            check_vma=False,
            axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        )(q, k, v, segments, *extra)

    return run


def _gather_row(part_RxT: jax.Array) -> jax.Array:
    """Return [R, C T, ...] in the order of the columns, from the part [R, T, ...] of each device.

    Part i of C has blocks i and 2 C - 1 - i.
    """
    parts_CxRxT = jax.lax.all_gather(part_RxT, "context")
    first, mirrored = jnp.split(parts_CxRxT, 2, axis=2)
    blocks = jnp.moveaxis(jnp.concatenate([first, mirrored[::-1]]), 0, 1)
    return blocks.reshape(len(part_RxT), -1, *part_RxT.shape[2:])


def num_cache_parts() -> int:
    """Return the number of devices that split a cache's columns, in a compiled function."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else cache_parts(mesh)


def split_cache(x: jax.Array, heads_axis: int, columns_axis: int) -> jax.Array:
    """Split an array of a cache, inside a compiled function."""
    return jax.lax.with_sharding_constraint(x, _cache_spec((heads_axis, columns_axis)))


def on_cache_parts(function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Any:
    """Make each device run `function` on its own heads and columns, inside `split_rows`.

    Args:
      function: of (the device's number along the axis of columns, further arguments).
      in_axes: for each further argument a tree of pairs: the axis of heads and that of columns, or
        `None` for an axis that the array does not have; `None` for arrays that are not split.
      out_axes: the same for the result.
    """
    mesh = jax.sharding.get_abstract_mesh()

    def is_axes(x: Any) -> bool:
        return x is None or isinstance(x, tuple) and not isinstance(x[0], tuple)

    in_specs = jax.tree.map(_cache_spec, in_axes, is_leaf=is_axes)
    out_specs = jax.tree.map(_cache_spec, out_axes, is_leaf=is_axes)
    return jax.shard_map(
        lambda *x: function(jax.lax.axis_index(COLUMNS), *x),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
        axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
    )


def _cache_spec(axes: tuple[int | None, int | None] | None) -> P:
    """Return the layout of an array with these axes of heads and of columns."""
    if axes is None:
        return P()
    names = {axes[0]: "model", axes[1]: COLUMNS}
    last = max(axis for axis in axes if axis is not None)
    return P(*(names.get(axis) for axis in range(last + 1)))


def num_split_kv_heads(heads: int) -> int:
    """Return the number of key-value heads after `copy_kv_heads`."""
    mesh = jax.sharding.get_abstract_mesh()
    return heads if mesh.empty else math.lcm(heads, mesh.shape["model"])


def copy_kv_heads(x_BxTxKxd: jax.Array) -> jax.Array:
    """Copy key-value heads until the mesh can split them, inside a compiled function.

    Query head h of H reads key head h // (H / K). As many copies of each key head as are needed
    keep this true, and each device has those heads that its own query heads read.

    Without a mesh in the context, or if it can split the heads, return the argument.
    """
    K = x_BxTxKxd.shape[2]
    copies = num_split_kv_heads(K) // K
    if copies == 1:
        return x_BxTxKxd
    spec = P(P.UNCONSTRAINED, P.UNCONSTRAINED, "model", P.UNCONSTRAINED)
    return jax.lax.with_sharding_constraint(jnp.repeat(x_BxTxKxd, copies, axis=2), spec)


def num_padded_query_heads(heads: int, kv_heads: int) -> int:
    """Return the number of query heads after `pad_query_heads`."""
    copies = num_split_kv_heads(kv_heads) // kv_heads
    group = heads // kv_heads
    return kv_heads * copies * -(-group // copies)


def pad_query_heads(q_BxTxHxd: jax.Array, kv_heads: int) -> jax.Array:
    """Add query heads of zeros until the mesh can split them, inside a compiled function.

    Each group of queries that read the same key head is padded at its end, so that after
    `copy_kv_heads` query head h still reads key head h // (H / K), and each device has whole heads
    with the key heads that they read. Parameters keep their shapes.

    Without a mesh in the context, or if it can split the heads, return the argument.

    Args:
      q_BxTxHxd: queries.
      kv_heads: K, before `copy_kv_heads`.
    """
    B, T, H, d = q_BxTxHxd.shape
    padded = num_padded_query_heads(H, kv_heads)
    if padded == H:
        return q_BxTxHxd
    missing = (padded - H) // kv_heads
    q = q_BxTxHxd.reshape(B, T, kv_heads, -1, d)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, missing), (0, 0)))
    spec = P(P.UNCONSTRAINED, P.UNCONSTRAINED, "model", P.UNCONSTRAINED)
    return jax.lax.with_sharding_constraint(q.reshape(B, T, padded, d), spec)


def drop_padded_heads(out_BxTxHxd: jax.Array, heads: int, kv_heads: int) -> jax.Array:
    """Return the `heads` heads that `pad_query_heads` received, of the output of attention.

    Args:
      out_BxTxHxd: output of attention for padded queries.
      heads: number of query heads before `pad_query_heads`.
      kv_heads: K, before `copy_kv_heads`.
    """
    B, T, padded, d = out_BxTxHxd.shape
    if padded == heads:
        return out_BxTxHxd
    groups = out_BxTxHxd.reshape(B, T, kv_heads, -1, d)
    return groups[:, :, :, : heads // kv_heads].reshape(B, T, heads, d)


def _expert_parts(expert: str | None) -> dict[str, dict[str, P]]:
    """Return how a device's part of each projection is split inside `split_experts`."""
    inwards = {"kernel": P(expert, None, "model"), "kernel_scale": P(expert, "model")}
    outwards = {"kernel": P(expert, "model", None), "kernel_scale": P(expert)}
    return {"gate_proj": inwards, "up_proj": inwards, "down_proj": outwards}


def split_experts(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make each device run `function` on its own experts and its part of each one's width.

    Along `expert`, devices have experts of their own: the tokens of their rows are gathered there,
    each device adds what its experts make of them, and a reduce-scatter returns the sums to the
    devices of the rows. No kernel of another device's experts is gathered. Along the other axes of
    rows no token leaves its device, which sorts only its own. What the devices of `model` compute
    is summed. Without a mesh in the context, or for rows that the mesh cannot split, the compiler
    splits `function`.

    Args:
      function: of (x [R, L, D], two arrays [R, L, k], projections by name, each with a `kernel`
        [E, in, out] and perhaps a `kernel_scale` [E, out], and the index of the first of these E
        experts, `None` if they are all); what it returns, [R, L, D], is a sum over experts and
        their width.
    """

    def run(x: jax.Array, weights: jax.Array, experts: jax.Array, projections: Any) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        row_axes = None if mesh.empty else _remaining_row_axes(mesh)
        row_parts = math.prod(mesh.shape[axis] for axis in row_axes or ())
        if mesh.empty or len(x) % row_parts:
            return function(x, weights, experts, projections, None)

        def run_part(*rows_and_projections: Any) -> jax.Array:
            *rows, own = rows_and_projections
            first = None
            if mesh.shape["expert"] > 1:
                rows = [jax.lax.all_gather(x, "expert", tiled=True) for x in rows]
                first = jax.lax.axis_index("expert") * len(own["down_proj"]["kernel"])
            out = function(*rows, own, first)
            # XLA keeps a sum over a single device.
            if mesh.shape["model"] > 1:
                out = jax.lax.psum(out, "model")
            if mesh.shape["expert"] > 1:
                out = jax.lax.psum_scatter(out, "expert", tiled=True)
            return out

        if set(mesh.axis_names) == set(mesh.manual_axes):
            return run_part(x, weights, experts, projections)
        rows = P(row_axes)
        # Inside `split_rows` experts are shared out already, as rows are.
        specs = _expert_parts("expert" if "expert" in (row_axes or ()) else None)
        parts = {
            name: {kind: specs[name][kind] for kind in arrays}
            for name, arrays in projections.items()
        }
        return jax.shard_map(
            run_part,
            in_specs=(rows, rows, rows, parts),
            out_specs=rows,
            check_vma=False,
            axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        )(x, weights, experts, projections)

    return run


def split_vocabulary(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make each device run `function` on its own columns of the logits.

    Without a mesh in the context, or if it does not split the vocabulary, `function` runs on all
    columns with axis None.

    Args:
      function: of (logits [B, V], an array [B, ...], any number of arrays [B, V], and by name the
        axis that splits V or `None`); what it returns has B in front and is the same on all devices
        that split a row's logits.
    """

    def run(logits_BxV: jax.Array, per_row: jax.Array, *others_BxV: jax.Array) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.shape["model"] == 1:
            return function(logits_BxV, per_row, *others_BxV, axis=None)
        first = _remaining_row_axes(mesh)
        return jax.shard_map(
            functools.partial(function, axis="model"),
            in_specs=(P(first, "model"), P(first), *[P(first, "model")] * len(others_BxV)),
            out_specs=P(first),
            check_vma=False,
            axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
        )(logits_BxV, per_row, *others_BxV)

    return run


def split_by_device(x_RxL: jax.Array) -> jax.Array:
    """Reshape [R, L, ...] to [G, R * L / G, ...], inside a compiled function.

    G is the number of parts that the mesh splits rows into; 1 without a mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    groups = 1 if mesh.empty else row_shards(mesh)
    return constrain_rows(x_RxL.reshape(groups, -1, *x_RxL.shape[2:]))


def constrain_tree(tree: Any, rules: Rules) -> Any:
    """Lay every leaf out by the rules, inside a compiled function.

    Without a mesh in the context, return `tree`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree
    return jax.lax.with_sharding_constraint(tree, tree_shardings(mesh, tree, rules))


def look_up_embedding(
    embedding_VxD: jax.Array, tokens_RxL: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Return the embeddings of tokens, [R, L, D] in `dtype`, inside a compiled function.

    No device gathers the table: each looks up its own columns for the tokens of all devices that
    split them, and sends them to the devices of the rows. The gradient of the table takes the same
    way back. A compiler would gather the table and sum its gradient over all devices.

    Without a mesh in the context, inside `split_rows`, or for rows that the mesh cannot split, the
    compiler splits the look-up.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.manual_axes or len(tokens_RxL) % row_shards(mesh):
        return embedding_VxD[tokens_RxL].astype(dtype)
    # XLA keeps exchanges of a device with itself.
    split = {axis for axis in mesh.axis_names if mesh.shape[axis] > 1}
    weight_axes = tuple(axis for axis in WEIGHTS if axis in split)
    if not weight_axes and "model" not in split:
        return embedding_VxD[tokens_RxL].astype(dtype)

    def look_up(own_VxD: jax.Array, tokens_rxL: jax.Array) -> jax.Array:
        if weight_axes:
            tokens_rxL = jax.lax.all_gather(tokens_rxL, weight_axes, tiled=True)
        if "model" not in split:
            x_rxLxD = own_VxD[tokens_rxL].astype(dtype)
        else:
            # The tokens of other devices are zeros here, until the sum below.
            V = len(own_VxD)
            index_rxL = tokens_rxL - jax.lax.axis_index("model") * V
            is_own_rxL = (index_rxL >= 0) & (index_rxL < V)
            x_rxLxD = own_VxD[jnp.clip(index_rxL, 0, V - 1)].astype(dtype)
            x_rxLxD = jnp.where(is_own_rxL[..., None], x_rxLxD, 0)
        if weight_axes:
            x_rxLxD = jax.lax.all_to_all(
                x_rxLxD, weight_axes, split_axis=0, concat_axis=2, tiled=True
            )
        return jax.lax.psum(x_rxLxD, "model") if "model" in split else x_rxLxD

    # The gradient is summed over the axes that the table's layout does not name.
    columns = tuple(axis for axis in ROWS if axis in WEIGHTS or axis not in split)
    table = P("model" if "model" in split else None, columns)
    return jax.shard_map(look_up, in_specs=(table, P(ROWS)), out_specs=P(ROWS))(
        embedding_VxD, tokens_RxL
    )


def gather_columns(embedding_VxD: jax.Array) -> jax.Array:
    """Gather the columns of an embedding, inside a compiled function.

    Its rows, which are tokens, stay split over `model`. Without a mesh in the context, return the
    argument.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return embedding_VxD
    return jax.lax.with_sharding_constraint(embedding_VxD, P("model", None))


def scatter_group_sum(gradient_GxVxD: jax.Array) -> jax.Array:
    """Return the sum over groups, [V, D], laid out like an embedding in training.

    The groups are those of `split_by_device`. Each device receives only its columns of the sum (a
    reduce-scatter over `WEIGHTS`), and only these are summed over the other axes of rows; the
    compiler for the CPU would sum and send all columns.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return gradient_GxVxD.sum(0)

    def exchange(own: jax.Array) -> jax.Array:
        columns = own.sum(0)
        if weight_shards(mesh) > 1:
            columns = jax.lax.psum_scatter(columns, WEIGHTS, scatter_dimension=1, tiled=True)
        # XLA keeps a sum over a single device.
        others = tuple(axis for axis in ROWS if axis not in WEIGHTS and mesh.shape[axis] > 1)
        return jax.lax.psum(columns, others) if others else columns

    return jax.shard_map(
        exchange, in_specs=P(ROWS, "model", None), out_specs=P("model", WEIGHTS), check_vma=False
    )(gradient_GxVxD)


def embedding_layouts(mesh: Mesh, params: Any) -> Any:
    """Return the layout in which embeddings reach a mesh that other parameters are read on.

    From columns split over all devices the compiler cannot go to rows split over `model` without a
    copy of the table on each device, but it can go to this layout, and from there.

    Args:
      mesh: the mesh to decode on.
      params: arrays or shapes on another mesh of the same devices.

    Returns:
      A `NamedSharding` for each embedding that can be split so, else `None`, in the structure of
      `params`.
    """
    others = tuple(axis for axis in mesh.axis_names if axis != "model")

    def layout(path: tuple[Any, ...], x: Any) -> NamedSharding | None:
        is_table = jax.tree_util.keystr(path, simple=True, separator="/") in (
            "embed/embedding",
            "lm_head/embedding",
        )
        if is_table and x.shape[1] % math.prod(mesh.shape[axis] for axis in others) == 0:
            return NamedSharding(mesh, P("model", others))
        return None

    return jax.tree_util.tree_map_with_path(layout, params)


def split_stages(function: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Make each stage run `function` on its own layers, and each device of `data` on its own rows.

    The compiler splits what the other axes split. Gradients of layers are summed over `data` once,
    after the function: a compiler would do so after each micro-batch.

    Args:
      function: of (arrays with layers in front, any tree of arrays [1, M, r, ...] as
        `gather_micro_batches` returns them); it returns such an array, and arrays
        [layers, M, r, ...].
    """

    def run(layers: Any, micro_batches: Any) -> tuple[Any, Any]:
        # XLA keeps a sum over a single device.
        data = "data" if jax.sharding.get_abstract_mesh().shape["data"] > 1 else None
        of_stage = P("stage", None, data)
        return jax.shard_map(
            function,
            in_specs=(P("stage"), of_stage),
            out_specs=(of_stage, of_stage),
            axis_names={"stage"} | ({data} if data else set()),
            check_vma=False,
        )(layers, micro_batches)

    return run


# Of [S, M, r, ...]: a copy of the micro-batches per stage, and the rows of each that are not split
# over stages.
_MICRO_BATCHES = P("stage", None, tuple(axis for axis in ROWS if axis != "stage"))


def gather_micro_batches(x_Rx: jax.Array) -> jax.Array:
    """Give each of S stages a copy of all rows as micro-batches, [S, M, r, ...].

    A micro-batch has r rows, one on each device of a stage. No stage sees the others' copies.

    Args:
      x_Rx: rows [R, ...], where R is a multiple of `row_shards`.
    """

    def gather(own: jax.Array) -> jax.Array:
        every = jax.lax.all_gather(own, "stage", tiled=True)
        return every[None, :, None]

    return jax.shard_map(gather, in_specs=P(ROWS), out_specs=_MICRO_BATCHES)(x_Rx)


def scatter_micro_batches(x_SxMxr: jax.Array) -> jax.Array:
    """Return the last stage's copy as rows [R, ...], in the order before `gather_micro_batches`."""

    def scatter(own: jax.Array) -> jax.Array:
        # Every stage sends, the last one's part counts: unlike a sum this rounds nothing.
        stages = jax.lax.axis_size("stage")
        parts = own.reshape(stages, -1, *own.shape[3:])
        return jax.lax.all_to_all(parts, "stage", split_axis=0, concat_axis=0)[-1]

    return jax.shard_map(scatter, in_specs=_MICRO_BATCHES, out_specs=P(ROWS))(x_SxMxr)
