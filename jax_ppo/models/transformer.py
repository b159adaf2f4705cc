"""The decoder of all families: an embedding, layers and a norm.

The layers are Flax modules; the decoder is a function that scans over their `apply`.

`Architecture` holds everything in which the families differ. The parameters are a nested dict:

    embed/embedding [V, D]
    positions/embedding [max_position_embeddings, D] (with learned_positions)
    layers/{input_norm, post_attention_norm}/scale [L, D] (input_norm with pre_norms)
    layers/{pre_feedforward_norm, post_feedforward_norm}/scale [L, D] (with post_norms; the first
        of them with pre_norms too)
    layers/attention/{q_proj, k_proj, v_proj, o_proj}/{kernel [L, in, out], bias [L, out]}
    layers/attention/{q_norm, k_norm}/scale [L, head_dim] (with qk_norm; [L, out] over all heads)
    layers/mlp/{gate_proj, up_proj, down_proj}/{kernel [L, in, out], bias [L, out]}
    or, with experts (experts.py), layers/mlp/router/kernel [L, D, E] and
    layers/mlp/experts/{gate_proj, up_proj, down_proj}/kernel [L, E, in, out]
    and layers/shared_expert/{gate_proj, up_proj, down_proj, shared_expert_gate}/kernel
    [L, in, out] (with shared_expert_size)
    norm/scale [D]
    embed_per_layer/embedding [V, L P], per_layer_model_projection/kernel [D, L P],
    per_layer_projection_norm/scale [P] and layers/{per_layer_input_gate/kernel [L, D, P],
    per_layer_projection/kernel [L, P, D], post_per_layer_input_norm/scale [L, D]}
    (with per_layer_size, P)
    layers/layer_scalar [L, 1] (with layer_scalars)

Where some layers have a Gated DeltaNet or a short convolution (recurrent_layers.py),
`layers/delta_net` or `layers/short_conv` has the parameters of these alone, and `layers/attention`
belongs to the others. Where some layers have no experts, `layers/dense_mlp` has their MLPs, and
`layers/mlp` and `layers/shared_expert` belong to the others. Where widths of heads differ, layers
of each kind have their stack (Architecture.attention_module). latent_attention.py has other
parameters in `layers/attention`.

An ungated block has no gate_proj, and each norm/scale has a norm/bias beside it.

L is the axis of the stacked layers. The unrolled form has `layer_0`, `layer_1`, ... instead of
`layers`, without this axis. Heads are stored in the same dict (heads.py) and adapters next to the
kernels that they belong to (lora.py); the decoder ignores the heads.

`unroll_params` and the optimizer only rely on L coming first.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from jax_ppo.models import rope
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.attention import Segments
from jax_ppo.models.cache import LayerCache, RecurrentState, cache_layout, cache_length
from jax_ppo.models.latent_attention import LatentLayer
from jax_ppo.models.layers import (
    ATTENTION_OUTPUT,
    NO_INPUTS,
    Auxiliary,
    Dense,
    Layer,
    LayerInputs,
    LayerKind,
    LayerOptions,
    RMSNorm,
    UngatedLayer,
    layer_kinds,
    multiply,
)
from jax_ppo.models.recurrent_layers import ConvolutionLayer, DeltaLayer
from jax_ppo.runtime.parallelism.pipeline import num_stages, run_stages
from jax_ppo.runtime.parallelism.split_attention import num_row_parts
from jax_ppo.runtime.parallelism.vocabulary import look_up_embedding
from jax_ppo.types import Params

# Up to so many layers a loop over layers is unrolled: on a CPU faster by a quarter.
MAX_UNROLLED_LAYERS = 8

MODULES: dict[str, type[Layer]] = {  # the layer of each block in `architecture.BLOCKS`
    "gated": Layer,
    "ungated": UngatedLayer,
    "delta": DeltaLayer,
    "convolution": ConvolutionLayer,
    "latent": LatentLayer,
}

# Groups of parameters by name, and which layers have a part of each (Architecture.partial_stacks).
PartialStacks = Mapping[str, tuple[bool, ...]]

# What the forward pass keeps of each layer for the backward pass besides the layer's input, fewest
# bytes first; everything else is computed again.
REMAT_POLICIES: dict[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(ATTENTION_OUTPUT),
    "dots": jax.checkpoint_policies.checkpoint_dots,
}

# Parameters, [L, ...], and `is_local` and `is_rotated`, [L], or `None`: the pattern says them.
StackedLayers = tuple[Params, tuple[jax.Array, jax.Array] | None]
# Positions [B, T], segments [B, T] and what each layer reads of each token, [B, T, L, ...].
LayerRows = tuple[jax.Array, Segments, LayerInputs]
# Keys and values, or their cache, that later layers with a sliding window, or without one, share.
Shared = dict[Any, Any]


class TransformerOutput(NamedTuple):
    """Result of the decoder."""

    hidden: jax.Array  # after the last norm, [B, T, D] in the type of the computation
    # The memories of the layers that have one (cache.py), in the unrolled form, `None` otherwise.
    cache: tuple[LayerCache, ...] | None
    # By name, for the L layers with experts: with `router_loss`, "router_loss" [L, B, T]
    # (experts.balance_losses); with `returns_routed_experts`, "routed_experts" [L, B, T, k].
    auxiliary: Auxiliary


@dataclasses.dataclass(frozen=True)
class Transformer(LayerOptions):
    """The decoder without a head. Hashable: it is a static argument of compiled functions."""

    remat: bool = False  # each layer is recomputed in the backward pass
    # `False`: a `scan` over stacked layers, which compiles fast. `True`: each layer has separate
    # code and parameters (`unroll_params`), and keys and values are returned, for decoding.
    unrolled: bool = False
    quantized: bool = False  # decoding reads kernels as int8 (quantization.py)
    remat_policy: str = "full"  # what is kept instead of recomputed, one of `REMAT_POLICIES`

    def clone(self, **changes: Any) -> "Transformer":
        """Return a decoder with other values of some attributes."""
        return dataclasses.replace(self, **changes)

    def init(self, key: jax.Array) -> Params:
        """Return random parameters with stacked layers."""
        # Splash attention refuses a row of one token.
        params = dict(_Parameters(self.clone(attention="xla")).init(key)["params"])
        layers = params["layers"] = dict(params["layers"])
        # Without the parameters that only layers of another kind have.
        for name, owners in self.architecture.partial_stacks.items():
            if name in layers:
                has_part = np.array(owners)
                layers[name] = jax.tree.map(lambda x, i=has_part: x[i], layers[name])
        return params

    def apply(
        self,
        variables: Mapping[str, Params],
        tokens_BxT: Int[Array, "B T"],
        positions_BxT: Int[Array, "B T"],
        segments_BxT: Segments = None,
        *,
        cache: tuple[LayerCache, ...] | None = None,
        routed_experts: UInt[Array, "B T L k"] | None = None,
        ends_B: Int[Array, " B"] | None = None,
    ) -> TransformerOutput:
        """Compute the hidden states of tokens.

        Args:
          variables: the parameters under the name "params", as Flax modules such as encoders
            take them.
          tokens_BxT: token ids.
          positions_BxT: position of each token in its sequence, from 0 and below T (below S
            with a cache).
          segments_BxT: A token attends to the earlier tokens in its row that have the same
            segment. `None`: each row is one segment. Not used with a cache.
          cache: what each layer remembers (cache.py), for one new token per row (T = 1,
            unrolled). Its rows beyond B are left alone. The token at position i of a sequence is
            in column i; the new token is written to its column and attends up to it.
          routed_experts: the experts of each token in the L layers that have some, recorded in
            another pass (experts.select_experts); `None`: the routers select them.
          ends_B: without a cache, the number of tokens of each row that returned recurrent states
            include; all are of the row's first segment. `None`: all T.

        Returns:
          Hidden states and, if unrolled, the cache: that of these tokens with S = T, or the one
          passed in with the new tokens.
        """
        params = variables["params"]
        x = self._embed(params, tokens_BxT, positions_BxT)
        if routed_experts is not None and self.architecture.dense_layers:
            # A dense layer, which reads none, gets the next sparse layer's experts.
            places = stack_places(self.architecture.partial_stacks["mlp"])
            routed_experts = routed_experts[:, :, np.minimum(places, routed_experts.shape[2] - 1)]
        inputs = LayerInputs(routed_experts, self._embed_for_layers(params, x, tokens_BxT))
        rows = (positions_BxT, segments_BxT, inputs)
        new_cache = None
        if self.unrolled:
            x, new_cache, auxiliary = self._run_unrolled(params, x, rows, cache, ends_B)
        else:
            run_layers = self._run_in_stages if num_stages() > 1 else self._run_stacked
            x, auxiliary = run_layers(params["layers"], x, rows)
        norm: Any = MODULES[self.architecture.block].norm_class
        hidden = norm(self.architecture).apply({"params": params["norm"]}, x)
        return TransformerOutput(hidden, new_cache, auxiliary)

    def _embed(self, params: Params, tokens_BxT: jax.Array, positions_BxT: jax.Array) -> jax.Array:
        """Return the input of the first layer, [B, T, D]."""
        a = self.architecture
        x = look_up_embedding(params["embed"]["embedding"], tokens_BxT, self.dtype)
        if a.scaled_embedding:
            # The factor is rounded to the computation dtype, as in transformers.
            x = x * jnp.float32(a.hidden_size**0.5).astype(self.dtype)
        x = multiply(x, a.embedding_multiplier)
        if a.learned_positions:
            table = params["positions"]["embedding"]
            # As with rotary embeddings, a position beyond the table becomes NaN.
            x += table.at[positions_BxT].get(mode="fill").astype(self.dtype)
        return x

    def _embed_for_layers(
        self, params: Params, x: jax.Array, tokens_BxT: jax.Array
    ) -> jax.Array | None:
        """Return the further embeddings of each layer, [B, T, L, P], if there are any."""
        a = self.architecture
        P = a.per_layer_size
        if not P:
            return None
        shape = (*tokens_BxT.shape, a.num_layers, P)
        of_tokens = look_up_embedding(
            params["embed_per_layer"]["embedding"], tokens_BxT, self.dtype
        )
        of_tokens *= jnp.float32(P**0.5).astype(self.dtype)
        project = Dense(a.num_layers * P, False, self.dtype, None)
        projected: Any = project.apply({"params": params["per_layer_model_projection"]}, x)
        projected = multiply(projected, a.hidden_size**-0.5).reshape(shape)
        scale = {"params": params["per_layer_projection_norm"]}
        projected = RMSNorm(a).apply(scale, projected)
        return multiply(projected + of_tokens.reshape(shape), 2**-0.5)

    def _rotations(self, positions_BxT: jax.Array, length: int) -> tuple[rope.Rotation, ...]:
        """Return the rotations of global layers, and of local ones or queries if these differ."""
        a = self.architecture
        options: list[dict[str, bool]] = [{}]
        if a.query_growth:
            options.append({"queries": True})
        elif a.local_rope_theta is not None:
            options.append({"local": True})
        return tuple(rope.rotation_tables(a, positions_BxT, length, **x) for x in options)

    def _layer(self, **names: Any) -> Layer:
        return MODULES[self.architecture.block](self, **names)

    def _run_stacked(
        self, layers: Params, x: jax.Array, rows: LayerRows
    ) -> tuple[jax.Array, Auxiliary]:
        """Run stacked layers in spans that are alike in MLP and sharing, each as a scan."""
        a = self.architecture
        kinds = layer_kinds(a)
        spans = [slice(0, a.num_layers)]
        # Layers with and without experts that take turns are one loop.
        if _period(kinds) == a.num_layers:
            properties = [(kind.is_dense, kind.is_shared) for kind in kinds]
            starts = [i for i in range(a.num_layers) if properties[i] != properties[max(i - 1, 0)]]
            spans = list(map(slice, [0, *starts], [*starts, a.num_layers]))
        *tokens, inputs_BxTxL = rows
        auxiliary = []
        shared: Shared = {}
        for span in spans:
            if len(spans) > 1:
                rows = (*tokens, jax.tree.map(lambda x, span=span: x[:, :, span], inputs_BxTxL))
            stacked = (_stacks_of(layers, span, a.partial_stacks), _varying_flags(a))
            x, to_share, of_span = self._scan_layers(stacked, x, rows, span, shared)
            shared |= to_share
            auxiliary.append(of_span)
        return x, _join_dicts(jnp.concatenate, auxiliary)

    def _run_in_stages(
        self, layers: Params, x: jax.Array, rows: LayerRows
    ) -> tuple[jax.Array, Auxiliary]:
        """Run the layers of each stage as a scan, one micro-batch after the other."""
        layers_per_stage = self.architecture.num_layers // num_stages()

        def run_stage(
            layers: StackedLayers, x: jax.Array, rows: LayerRows
        ) -> tuple[jax.Array, Auxiliary]:
            def take(x: jax.Array) -> jax.Array:
                # A micro-batch has the inputs of all layers.
                first = jax.lax.axis_index("stage") * layers_per_stage
                return jax.lax.dynamic_slice_in_dim(x, first, layers_per_stage, axis=2)

            rows = (*rows[:2], jax.tree.map(take, rows[2]))
            x, _, auxiliary = self._scan_layers(layers, x, rows, slice(layers_per_stage), {})
            return x, auxiliary

        return run_stages(run_stage, (layers, _varying_flags(self.architecture)), x, rows)

    def _scan_layers(
        self, layers: StackedLayers, x: jax.Array, rows: LayerRows, span: slice, shared: Shared
    ) -> tuple[jax.Array, Shared, Auxiliary]:
        """Run the stacked layers of a span as a scan over the repetitions of their pattern.

        `shared` are earlier layers' keys and values; the result has those that these layers share.
        """
        positions, segments, inputs_BxTxL = rows
        rotations = self._rotations(positions, positions.shape[1] * num_row_parts())
        a = self.architecture
        kinds = layer_kinds(a)[span]
        # A pattern of one layer, if flags of each layer are inputs of the loop.
        size = _period(kinds) if layers[1] is None else 1
        stacks = {name: owners[span][:size] for name, owners in a.partial_stacks.items()}
        is_loop = len(kinds) > max(MAX_UNROLLED_LAYERS, size)

        def run_pattern(
            x: jax.Array, repetition: tuple[StackedLayers, LayerInputs]
        ) -> tuple[jax.Array, tuple[Shared, Auxiliary]]:
            (params, flags), inputs = repetition

            def run_layer(
                i: int, x: jax.Array, shared_memory: LayerCache | None
            ) -> tuple[jax.Array, LayerCache | None, Auxiliary]:
                kind = kinds[i]
                if flags is not None:
                    kind = kind._replace(is_local=flags[0], is_rotated=flags[1])
                output: Any = self._layer().apply(
                    {"params": params if size == 1 else layer_params(params, i, stacks)},
                    x,
                    kind,
                    rotations,
                    segments,
                    inputs if size == 1 else jax.tree.map(lambda x: x[i], inputs),
                    shared_memory,
                )
                return output[0], output[1] if a.shared_layers else None, output[2]

            if self.remat:
                # Inside a loop XLA cannot merge the second computation of a layer with the first.
                run_layer = jax.checkpoint(
                    run_layer,
                    prevent_cse=not is_loop,
                    policy=REMAT_POLICIES[self.remat_policy],
                    static_argnums=0,
                )
            x, memories, auxiliary = _run_in_turn(run_layer, kinds[:size], x, shared)
            to_share = {
                kind.is_local: memory
                for kind, memory in zip(kinds, memories, strict=False)
                if memory is not None and not kind.is_shared
            }
            return x, (to_share, auxiliary)

        repetitions = len(kinds) // size
        stacked = (layers, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), inputs_BxTxL))
        # Without another axis the backward pass keeps no copies of what it needs of one layer.
        if size > 1:
            stacked = jax.tree.map(lambda x: x.reshape(repetitions, -1, *x.shape[1:]), stacked)
        x, (to_share, auxiliary) = jax.lax.scan(
            run_pattern, x, stacked, unroll=1 if is_loop else repetitions
        )
        to_share = jax.tree.map(lambda x: x[-1], to_share)  # the last repetition's
        return x, to_share, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), auxiliary)

    def _run_unrolled(
        self,
        params: Params,
        x: jax.Array,
        rows: LayerRows,
        cache: tuple[LayerCache, ...] | None,
        ends_B: jax.Array | None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...], Auxiliary]:
        positions_BxT, segments_BxT, inputs_BxTxL = rows
        B, T = positions_BxT.shape
        if cache is None:
            length = T * num_row_parts()
            # Only layers with a recurrent state read it: how many tokens the state includes.
            columns_B = jnp.full(B, T) if ends_B is None else ends_B
        else:
            # While decoding, positions reach up to the cache's last column, not to T.
            length = cache_length(self.decoding, cache)
            columns_B = positions_BxT[:, 0]
        rotations = self._rotations(positions_BxT, length)
        kinds = layer_kinds(self.architecture)
        size = _period(kinds)

        def run_layers(
            layers: Sequence[Params], x: jax.Array, inputs_LxBxT: LayerInputs
        ) -> tuple[jax.Array, list[Any], Auxiliary]:
            def run_layer(
                i: int, x: jax.Array, shared_memory: LayerCache | None
            ) -> tuple[jax.Array, LayerCache | None, Auxiliary]:
                kind = kinds[i]
                output: Any = self._layer().apply(
                    {"params": layers[i]},
                    x,
                    kind,
                    rotations,
                    segments_BxT,
                    jax.tree.map(lambda x: x[i], inputs_LxBxT),
                    shared_memory if kind.is_shared or cache is None else cache[i],
                    None if kind.is_shared and cache is None else columns_B,
                )
                x, memory, auxiliary = output
                if cache is None and self.decoding == "tpu":
                    # Where a norm follows the products (Gemma), the compiler for TPUs would keep
                    # what each layer adds instead of the sum, and add all up again in every layer.
                    x = jax.lax.optimization_barrier(x)
                return x, memory, auxiliary

            return _run_in_turn(run_layer, kinds[: len(layers)], x, {})

        layers = [params[f"layer_{i}"] for i in range(len(kinds))]
        inputs_LxBxT = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), inputs_BxTxL)
        is_loop = cache is None and len(kinds) > max(MAX_UNROLLED_LAYERS, size)
        if is_loop and self.decoding != "cpu":
            x, memories, auxiliary = _run_in_loop(run_layers, layers, size, x, inputs_LxBxT)
        else:
            x, memories, auxiliary = run_layers(layers, x, inputs_LxBxT)
        new_cache = tuple(
            memory
            if cache is not None or isinstance(memory, RecurrentState)
            else cache_layout(self.decoding, *memory)
            for kind, memory in zip(kinds, memories, strict=True)
            if not kind.is_shared
        )
        return x, new_cache, auxiliary


def _run_in_loop(
    run_layers: Callable[[Sequence[Params], jax.Array, LayerInputs], tuple[Any, Any, Auxiliary]],
    layers: Sequence[Params],
    size: int,
    x: jax.Array,
    inputs_LxBxT: LayerInputs,
) -> tuple[jax.Array, list[Any], Auxiliary]:
    """Return what `run_layers` returns for all layers, called for `size` at a time in a loop.

    Each repetition copies its parameters, a small part of a prefill's work: unrolled, one for
    TPUs takes longer to compile than all that decodes.
    """
    parts = [layers[i : i + size] for i in range(0, len(layers), size)]

    def run_part(x: jax.Array, part: tuple[jax.Array, LayerInputs]) -> tuple[jax.Array, Any]:
        params = jax.lax.switch(part[0], [lambda params=params: params for params in parts])
        x, *others = run_layers(params, x, part[1])
        return x, others

    inputs = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), inputs_LxBxT)
    x, (stacked, auxiliary) = jax.lax.scan(run_part, x, (jnp.arange(len(parts)), inputs))
    memories = [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(len(parts))]
    return x, sum(memories, []), jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), auxiliary)


def _run_in_turn(
    run_layer: Callable[[int, jax.Array, LayerCache | None], tuple[jax.Array, Any, Auxiliary]],
    kinds: tuple[LayerKind, ...],
    x: jax.Array,
    shared: Shared,
) -> tuple[jax.Array, list[Any], Auxiliary]:
    """Run layers one after the other; return what `run_layer` returns, auxiliary outputs [L, ...].

    `run_layer` takes the number of the layer, its input and the keys and values, or their cache,
    that it shares with an earlier one; `shared` has those of the layers before `kinds`.
    """
    memories, auxiliary = [], []
    for i, kind in enumerate(kinds):
        x, memory, of_layer = run_layer(i, x, shared[kind.is_local] if kind.is_shared else None)
        if not kind.is_shared:
            shared = {**shared, kind.is_local: memory}
        memories.append(memory)
        auxiliary.append(of_layer)
    return x, memories, _join_dicts(jnp.stack, auxiliary)


class _Parameters(nn.Module):
    """Creates a decoder's parameters: names and order determine their random keys."""

    decoder: Transformer

    @nn.compact
    def __call__(self) -> None:
        a = self.decoder.architecture
        self.param("embed", _init_embedding, a.vocab_size, a.hidden_size)
        if a.learned_positions:
            self.param("positions", _init_embedding, a.max_position_embeddings, a.hidden_size)
        x = jnp.zeros((1, 1, a.hidden_size), self.decoder.dtype)
        inputs = NO_INPUTS
        if P := a.per_layer_size:
            inputs = LayerInputs(embedding=jnp.zeros((1, 1, P), self.decoder.dtype))
            self.param("embed_per_layer", _init_embedding, a.vocab_size, a.num_layers * P)
            width = a.num_layers * P
            project = Dense(width, False, x.dtype, None, name="per_layer_model_projection")
            RMSNorm(a, name="per_layer_projection_norm")(project(x)[..., :P])
        kinds = layer_kinds(a)
        rotations = self.decoder._rotations(jnp.zeros((1, 1), jnp.int32), 1)

        def run_layer(layer: Layer, x: jax.Array) -> tuple[jax.Array, None]:
            # Each layer gets the parameters of all kinds; `Transformer.init` drops the others'.
            names = (a.attention_module(kind.is_local, kind.is_shared) for kind in kinds)
            different = {
                (name, kind.is_linear, kind.is_dense): kind
                for name, kind in zip(names, kinds, strict=True)
            }
            shared: Shared = {}
            for kind in different.values():
                memory = shared.get(kind.is_local) if kind.is_shared else None
                _, keys_and_values, _ = layer(x, kind, rotations, None, inputs, memory)
                shared.setdefault(kind.is_local, keys_and_values)
            return x, None

        create = nn.scan(
            run_layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=a.num_layers
        )
        x, _ = create(self.decoder._layer(name="layers"), x)
        norm: Any = MODULES[a.block].norm_class
        norm(a, name="norm")(x)


def _varying_flags(architecture: Architecture) -> tuple[jax.Array, jax.Array] | None:
    """Return `is_local` and `is_rotated` of all layers, [L], as inputs of one loop over them.

    `None` if all are alike, so that no branch is compiled, or have different parameters.
    """
    a = architecture
    if a.partial_stacks or len(set(layer_kinds(a))) == 1:
        return None
    return jnp.array(a.layers_are_local), jnp.array(a.layers_are_rotated)


def _init_embedding(key: jax.Array, rows: int, width: int) -> Params:
    return {"embedding": nn.initializers.normal(0.02)(key, (rows, width), jnp.float32)}


def _period(kinds: tuple[LayerKind, ...]) -> int:
    """Return the number of layers after which the kinds of layers repeat."""
    for size in range(1, len(kinds)):
        if len(kinds) % size == 0 and kinds[:size] * (len(kinds) // size) == kinds:
            return size
    return len(kinds)


def stack_places(owners: tuple[bool, ...]) -> np.ndarray:
    """Return the number of layers in front of each one that have a part of the same stack."""
    return np.cumsum(owners) - owners


def layer_params(
    layers: Params, i: int, partial_stacks: PartialStacks = MappingProxyType({})
) -> Params:
    """Return the parameters of layer i of stacked ones."""
    params: Params = {}
    for name, stacked in layers.items():
        owners = partial_stacks.get(name)
        if owners is None or owners[i]:
            at = i if owners is None else stack_places(owners)[i]
            params[name] = jax.tree.map(lambda x, at=at: x[at], stacked)
    return params


def _stacks_of(layers: Params, span: slice, partial_stacks: PartialStacks) -> Params:
    """Return the parts of stacked parameters, or of trees like them, that some layers have."""
    taken: Params = {}
    for name, stacked in layers.items():
        part = span
        if (owners := partial_stacks.get(name)) is not None:
            first = sum(owners[: span.start])
            part = slice(first, first + sum(owners[span]))
        if part.stop > part.start:
            taken[name] = jax.tree.map(lambda x, part=part: x[part], stacked)
    return taken


def _join_dicts(join: Callable[[list[jax.Array]], jax.Array], parts: list[Auxiliary]) -> Auxiliary:
    filled = [part for part in parts if part]
    return {name: join([part[name] for part in filled]) for name in (filled or [{}])[0]}


def unroll_params(params: Params, partial_stacks: PartialStacks = MappingProxyType({})) -> Params:
    """Return the parameters of `Transformer(unrolled=True)` for stacked ones, heads included."""
    layers = params["layers"]
    num_layers = len(next(iter(partial_stacks.values()), jax.tree.leaves(layers)[0]))
    unrolled = {name: value for name, value in params.items() if name != "layers"}
    for i in range(num_layers):
        unrolled[f"layer_{i}"] = layer_params(layers, i, partial_stacks)
    return unrolled
