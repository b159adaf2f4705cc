"""How the layers of a decoder run: stacked in scans, in stages of a pipeline, or one by one."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.kernels.platform import target_platform
from jax_ppo.models import rope
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.attention import Segments
from jax_ppo.models.cache import LayerCache, RecurrentState, cache_layout, cache_length
from jax_ppo.models.latent_attention import LatentLayer
from jax_ppo.models.layers import (
    ATTENTION_OUTPUT,
    Auxiliary,
    Layer,
    LayerInputs,
    LayerKind,
    LayerOptions,
    UngatedLayer,
    layer_kinds,
)
from jax_ppo.models.quantization import round_kernels
from jax_ppo.models.recurrent_layers import ConvolutionLayer, DeltaLayer
from jax_ppo.runtime.parallelism.pipeline import num_stages, run_stages
from jax_ppo.runtime.parallelism.split_attention import num_row_parts
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
# Parts of the names of primitives whose results accelerators keep without checkpointing: they cost
# more to compute again than to write, stack in the loop over layers and read. A CPU keeps all.
EXPENSIVE = {"dot_general", "attention", "pallas_call", "conv_general_dilated", "triangular_solve"}
EXPENSIVE |= {"sort", "top_k", "gather", "scatter", "all_to_all", "ppermute", "psum"}

# Parameters, [L, ...], and `is_local` and `is_rotated`, [L], or `None`: the pattern says them.
StackedLayers = tuple[Params, tuple[jax.Array, jax.Array] | None]
# Positions [B, T], segments [B, T] and what each layer reads of each token, [B, T, L, ...].
LayerRows = tuple[jax.Array, Segments, LayerInputs]
# Keys and values, or their cache, that later layers with a sliding window, or without one, share.
Shared = dict[Any, Any]


@dataclasses.dataclass(frozen=True)
class LayerStack(LayerOptions):
    """The layers of a decoder, which `run_stacked`, `run_in_stages` and `run_unrolled` run."""

    remat: bool = False  # each layer is recomputed in the backward pass
    remat_policy: str = "full"  # what is kept instead of recomputed, one of `REMAT_POLICIES`

    def rotations(self, positions_BxT: jax.Array, length: int) -> tuple[rope.Rotation, ...]:
        """Return the rotations of global layers, and of local ones or queries if these differ."""
        a = self.architecture
        options: list[dict[str, bool]] = [{}]
        if a.query_growth:
            options.append({"queries": True})
        elif a.local_rope_theta is not None:
            options.append({"local": True})
        return tuple(rope.rotation_tables(a, positions_BxT, length, **x) for x in options)

    def layer(self, **names: Any) -> Layer:
        """Return the Flax module of a layer."""
        return MODULES[self.architecture.block](self, **names)

    def run_stacked(
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

    def run_in_stages(
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
        rotations = self.rotations(positions, positions.shape[1] * num_row_parts())
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
                output: Any = self.layer().apply(
                    {"params": params if size == 1 else layer_params(params, i, stacks)},
                    x,
                    kind,
                    rotations,
                    segments,
                    inputs if size == 1 else jax.tree.map(lambda x: x[i], inputs),
                    shared_memory,
                )
                return output[0], output[1] if a.shared_layers else None, output[2]

            if self.remat or target_platform() != "cpu":
                # Inside a loop XLA cannot merge the second computation of a layer with the first.
                run_layer = jax.checkpoint(
                    run_layer,
                    prevent_cse=self.remat and not is_loop,
                    policy=REMAT_POLICIES[self.remat_policy] if self.remat else _is_expensive,
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
        layers = (round_kernels(layers[0], self.dtype), layers[1])
        stacked = (layers, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), inputs_BxTxL))
        # Without another axis the backward pass keeps no copies of what it needs of one layer.
        if size > 1:
            stacked = jax.tree.map(lambda x: x.reshape(repetitions, -1, *x.shape[1:]), stacked)
        x, (to_share, auxiliary) = jax.lax.scan(
            run_pattern, x, stacked, unroll=1 if is_loop else repetitions
        )
        to_share = jax.tree.map(lambda x: x[-1], to_share)  # the last repetition's
        return x, to_share, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), auxiliary)

    def run_unrolled(
        self,
        params: Params,
        x: jax.Array,
        rows: LayerRows,
        cache: tuple[LayerCache, ...] | None,
        ends_B: jax.Array | None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...], Auxiliary]:
        """Run layers with parameters of their own; also return their caches."""
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
        rotations = self.rotations(positions_BxT, length)
        kinds = layer_kinds(self.architecture)
        size = _period(kinds)

        def run_layers(
            layers: Sequence[Params], x: jax.Array, inputs_LxBxT: LayerInputs
        ) -> tuple[jax.Array, list[Any], Auxiliary]:
            def run_layer(
                i: int, x: jax.Array, shared_memory: LayerCache | None
            ) -> tuple[jax.Array, LayerCache | None, Auxiliary]:
                kind = kinds[i]
                output: Any = self.layer().apply(
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


def _is_expensive(primitive: Any, *_: Any, **__: Any) -> bool:
    return any(name in primitive.name for name in EXPENSIVE)


def _varying_flags(architecture: Architecture) -> tuple[jax.Array, jax.Array] | None:
    """Return `is_local` and `is_rotated` of all layers, [L], as inputs of one loop over them.

    `None` if all are alike, so that no branch is compiled, or have different parameters.
    """
    a = architecture
    if a.partial_stacks or len(set(layer_kinds(a))) == 1:
        return None
    return jnp.array(a.layers_are_local), jnp.array(a.layers_are_rotated)


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
