"""The decoder of all families: an embedding, layers of one type (blocks.py) and a norm.

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
    norm/scale [D]

An ungated block has no gate_proj, and each norm/scale has a norm/bias beside it.

L is the axis of the stacked layers. The unrolled form has `layer_0`, `layer_1`, ... instead of
`layers`, without this axis. Heads are stored in the same dict (heads.py) and adapters next to the
kernels that they belong to (lora.py); the decoder ignores the heads.

`unroll_params` and the optimizer only rely on L coming first. A block may return auxiliary outputs,
which are collected per layer in `TransformerOutput.auxiliary`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int, UInt

from jax_ppo.models import rope
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.blocks import MODULES
from jax_ppo.models.cache import LayerCache, num_columns
from jax_ppo.models.gradient_sums import GRADIENT_SUM, scan_layers
from jax_ppo.models.layers import (
    ATTENTION_OUTPUT,
    Auxiliary,
    Layer,
    LayerKind,
    layer_kinds,
    multiply,
)
from jax_ppo.models.lora import Lora
from jax_ppo.runtime.parallelism.context import num_row_parts
from jax_ppo.runtime.parallelism.pipeline import num_stages, run_stages
from jax_ppo.runtime.parallelism.vocabulary import look_up_embedding
from jax_ppo.types import Params

# Up to this number of layers the loop over stacked parameters is unrolled: on a CPU the gradient
# takes a quarter less time, and compilation is as fast.
MAX_UNROLLED_LAYERS = 8


# What the forward pass keeps of each layer for the backward pass besides the layer's input, fewest
# bytes first; everything else is computed again.
REMAT_POLICIES: dict[str, Callable[..., Any]] = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(ATTENTION_OUTPUT),
    "dots": jax.checkpoint_policies.checkpoint_dots,
}


class TransformerOutput(NamedTuple):
    """Result of the decoder.

    Attributes:
      hidden: hidden states after the last norm, [B, T, D] in the type of the computation.
      cache: keys and values of each layer (cache.py) in the unrolled form, `None` otherwise.
      auxiliary: further outputs of the layers by name, [L, ...]: with `router_loss`, "router_loss"
        [L, B, T] (experts.balance_losses), and with `returns_routed_experts` "routed_experts"
        [L, B, T, k] (experts.select_experts).
    """

    hidden: jax.Array
    cache: tuple[LayerCache, ...] | None
    auxiliary: Auxiliary


class Transformer(nn.Module):
    """The decoder without a head.

    Attributes:
      architecture: the architecture.
      dtype: type of the computation; parameters may have any type.
      remat: whether each layer is recomputed in the backward pass.
      remat_policy: with `remat`, what is kept instead of recomputed, one of `REMAT_POLICIES`.
      unrolled: `False`: the layers are one `scan` over stacked parameters, which compiles fast
        (training, scoring). `True`: each layer has its own code and keys and values are returned
        (decoding, without copies of the cache). `unroll_params` converts parameters of the first
        form to the second.
      attention: program for whole sequences, one of attention.py's.
      decoding: program for one new token per row, one of cache.py's; it determines the layout of
        the cache.
      lora: shape of the adapters in the parameters (lora.join_adapters), if there are any.
      quantized: whether decoding reads kernels as int8 (quantization.py).
      router_loss: whether the loss of the routers is returned, for training with experts.
      returns_routed_experts: whether the experts that each token passes through are returned.
    """

    architecture: Architecture
    dtype: DTypeLike = jnp.float32
    remat: bool = False
    unrolled: bool = False
    attention: str = "xla"
    decoding: str = "cpu"
    lora: Lora | None = None
    quantized: bool = False
    remat_policy: str = "full"
    router_loss: bool = False
    returns_routed_experts: bool = False

    @nn.compact
    def __call__(
        self,
        tokens_BxT: Int[Array, "B T"],
        positions_BxT: Int[Array, "B T"],
        segments_BxT: Int[Array, "B T"] | None = None,
        *,
        cache: tuple[LayerCache, ...] | None = None,
        routed_experts: UInt[Array, "B T L k"] | None = None,
    ) -> TransformerOutput:
        """Compute the hidden states of tokens.

        Args:
          tokens_BxT: token ids.
          positions_BxT: position of each token in its own sequence, from 0 and below T (below S
            with a cache).
          segments_BxT: A token attends to the earlier tokens in its row that have the same
            segment. `None`: each row is one segment. Not used with a cache.
          cache: keys and values of each layer (cache.py), for one new token per row (T = 1,
            unrolled). Its rows beyond B are left alone. The token at position i of a sequence is
            in column i; the new token is written to its own column and attends up to it.
          routed_experts: the experts of each token, recorded in another pass
            (experts.select_experts); `None`: the routers select them.

        Returns:
          Hidden states and, if unrolled, the cache: that of these tokens with S = T, or the one
          passed in with the new tokens written to it.
        """
        a = self.architecture
        embedding = self.param("embed", _init_embedding, a.vocab_size, a.hidden_size)["embedding"]
        x = look_up_embedding(embedding, tokens_BxT, self.dtype)
        if a.scaled_embedding:
            # The factor is rounded to the computation dtype, as in transformers.
            x = x * jnp.float32(a.hidden_size**0.5).astype(self.dtype)
        x = multiply(x, a.embedding_multiplier)
        if a.learned_positions:
            rows = a.max_position_embeddings
            table = self.param("positions", _init_embedding, rows, a.hidden_size)["embedding"]
            # As with rotary embeddings, a position beyond the table becomes NaN.
            x += table.at[positions_BxT].get(mode="fill").astype(self.dtype)
        # Tokens of a row, of which this may be a part.
        length = tokens_BxT.shape[1] * num_row_parts()
        if cache is not None:
            # While decoding, positions reach up to the cache's last column, not to T.
            length = num_columns(self.decoding, cache[0])
        if self.unrolled:
            # The token at position i belongs in column i of its row.
            columns_B = positions_BxT[:, 0]
            rotations = self._rotations(positions_BxT, length)
            x, new_cache, auxiliary = self._unrolled_layers(
                x, rotations, segments_BxT, routed_experts, cache, columns_B
            )
        else:
            # Parameters are created by the plain loop.
            in_stages = num_stages() > 1 and not self.is_initializing()
            run_layers = self._staged_layers if in_stages else self._scanned_layers
            if self.has_variable("params", GRADIENT_SUM):
                run_layers = self._summing_layers
            x, auxiliary = run_layers(x, positions_BxT, segments_BxT, routed_experts)
            new_cache = None
        norm = MODULES[a.block].norm(a, name="norm")
        return TransformerOutput(norm(x), new_cache, auxiliary)

    def _rotations(self, positions_BxT: jax.Array, length: int) -> tuple[rope.Rotation, ...]:
        """Return the rotations of global layers, and those of local ones if they differ."""
        a = self.architecture
        global_rotation = rope.rotation_tables(a, positions_BxT, length)
        if a.local_rope_theta is None:
            return (global_rotation,)
        return global_rotation, rope.rotation_tables(a, positions_BxT, length, local=True)

    def _layer_options(self) -> dict[str, Any]:
        return {
            "architecture": self.architecture,
            "dtype": self.dtype,
            "attention": self.attention,
            "decoding": self.decoding,
            "lora_scale": None if self.lora is None else self.lora.scale,
            "router_loss": self.router_loss,
            "returns_routed_experts": self.returns_routed_experts,
        }

    def _layer_class(self, prevent_cse: bool) -> type[Layer]:
        """Return the block's layer, recomputed in the backward pass if configured."""
        layer = MODULES[self.architecture.block].layer
        if not self.remat:
            return layer
        policy = REMAT_POLICIES[self.remat_policy]
        return nn.remat(layer, prevent_cse=prevent_cse, policy=policy)

    def _scanned_layers(
        self,
        x: jax.Array,
        positions_BxT: jax.Array,
        segments_BxT: jax.Array | None,
        routed_experts_BxTxLxk: jax.Array | None,
    ) -> tuple[jax.Array, Auxiliary]:
        """Run all layers as one scan over stacked parameters."""
        layers = self._layer_stack(self.architecture.num_layers, name="layers")
        rotations = self._rotations(positions_BxT, positions_BxT.shape[1] * num_row_parts())
        routed_LxBxTxk = _layers_first(routed_experts_BxTxLxk)
        x, output = layers(x, self._kind_of_each(), rotations, segments_BxT, routed_LxBxTxk)
        return x, output.auxiliary

    def _summing_layers(
        self,
        x: jax.Array,
        positions_BxT: jax.Array,
        segments_BxT: jax.Array | None,
        routed_experts_BxTxLxk: jax.Array | None,
    ) -> tuple[jax.Array, Auxiliary]:
        """Run all layers as `_scanned_layers` does; going backward, add to a sum of gradients."""
        kind = self._kind_of_all()
        num_layers = self.architecture.num_layers
        layer_class = self._layer_class(prevent_cse=not _is_loop(num_layers))
        # A module of its own, without a name in this one: it gets its parameters in the loop.
        layer = layer_class(**self._layer_options(), keep_cache=False, kind=kind, parent=None)
        rotations = self._rotations(positions_BxT, positions_BxT.shape[1] * num_row_parts())

        def run_layer(params: Params, x: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
            kind, routed = inputs
            return layer.apply({"params": params}, x, kind, rotations, segments_BxT, routed)

        inputs = (self._kind_of_each(), _layers_first(routed_experts_BxTxLxk))
        layers: Any = self.get_variable("params", "layers")
        gradient_sum: Any = self.get_variable("params", GRADIENT_SUM)
        x, output = scan_layers(
            run_layer, layers, x, inputs, gradient_sum, unroll=_layers_per_iteration(num_layers)
        )
        return x, output.auxiliary

    def _staged_layers(
        self,
        x: jax.Array,
        positions_BxT: jax.Array,
        segments_BxT: jax.Array | None,
        routed_experts_BxTxLxk: jax.Array | None,
    ) -> tuple[jax.Array, Auxiliary]:
        """Run the layers of each stage as a scan, one micro-batch after the other."""
        layers_per_stage = self.architecture.num_layers // num_stages()
        # A stage's layers are a module of their own, without a name in this one.
        stack = self._layer_stack(layers_per_stage, parent=None)

        def run_stage(layers: Any, x: jax.Array, rows: Any) -> tuple[jax.Array, Auxiliary]:
            params, kind_of_each = layers
            positions, segments, routed = rows
            rotations = self._rotations(positions, positions.shape[1] * num_row_parts())
            routed = _layers_first(routed)
            if routed is not None:
                # A micro-batch has the experts of all layers.
                first = jax.lax.axis_index("stage") * layers_per_stage
                routed = jax.lax.dynamic_slice_in_dim(routed, first, layers_per_stage)
            inputs = (kind_of_each, rotations, segments, routed)
            x, output = stack.apply({"params": params}, x, *inputs)
            return x, output.auxiliary

        layers: Any = (self.get_variable("params", "layers"), self._kind_of_each())
        rows = (positions_BxT, segments_BxT, routed_experts_BxTxLxk)
        return run_stages(run_stage, layers, x, rows)

    def _layer_stack(self, num_layers: int, **options: Any) -> Any:
        """Return layers with stacked parameters, run one after the other."""
        kind = self._kind_of_all()
        layer = self._layer_class(prevent_cse=not _is_loop(num_layers))
        stack = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=num_layers,
            # One kind per layer, or none; rotations and segments are the same for all layers.
            # Each layer has its own recorded experts, if there are any.
            in_axes=(0 if kind is None else nn.broadcast, nn.broadcast, nn.broadcast, 0),
            unroll=_layers_per_iteration(num_layers),
        )
        return stack(**self._layer_options(), keep_cache=False, kind=kind, **options)

    def _kind_of_all(self) -> LayerKind | None:
        """Return the kind of all layers; `None` if they differ."""
        # With layers of one kind it is a constant of the program, and no branch is compiled.
        kinds = set(layer_kinds(self.architecture))
        return next(iter(kinds)) if len(kinds) == 1 else None

    def _kind_of_each(self) -> LayerKind | None:
        """Return the kinds of all layers, [L]; `None` if they are alike."""
        if self._kind_of_all() is not None:
            return None
        return LayerKind(*map(jnp.array, zip(*layer_kinds(self.architecture), strict=True)))

    def _unrolled_layers(
        self,
        x: jax.Array,
        rotations: tuple[rope.Rotation, ...],
        segments_BxT: jax.Array | None,
        routed_experts_BxTxLxk: jax.Array | None,
        cache: tuple[LayerCache, ...] | None,
        columns_B: jax.Array,
    ) -> tuple[jax.Array, tuple[LayerCache, ...], Auxiliary]:
        """Run the layers unrolled, each with code of its own."""
        layer = self._layer_class(prevent_cse=True)
        new_cache = []
        auxiliary = []
        for i, kind in enumerate(layer_kinds(self.architecture)):
            block = layer(**self._layer_options(), keep_cache=True, kind=kind, name=f"layer_{i}")
            layer_cache = None if cache is None else cache[i]
            routed = None if routed_experts_BxTxLxk is None else routed_experts_BxTxLxk[:, :, i]
            x, output = block(x, None, rotations, segments_BxT, routed, layer_cache, columns_B)
            assert output.cache is not None  # because of keep_cache
            if cache is None and self.decoding == "tpu":
                # Where a norm follows the products (Gemma), the compiler for TPUs would keep what
                # each layer adds instead of the sum, and add all of it up again in every layer.
                x = jax.lax.optimization_barrier(x)
            new_cache.append(output.cache)
            # Stacked below, to the same form that a scan returns.
            auxiliary.append(output.auxiliary)
        return x, tuple(new_cache), jax.tree.map(lambda *x: jnp.stack(x), *auxiliary)


def _is_loop(num_layers: int) -> bool:
    """Return whether stacked layers run as a loop, rather than each as code of its own.

    Inside a loop XLA cannot merge the second computation of a layer with the first.
    """
    return num_layers > MAX_UNROLLED_LAYERS


def _layers_per_iteration(num_layers: int) -> int:
    return 1 if _is_loop(num_layers) else num_layers


def _layers_first(routed_experts_BxTxLxk: jax.Array | None) -> jax.Array | None:
    """Return the experts of each token with the axis of layers in front, if there are any."""
    if routed_experts_BxTxLxk is None:
        return None
    return jnp.moveaxis(routed_experts_BxTxLxk, 2, 0)


def _init_embedding(key: jax.Array, rows: int, width: int) -> Params:
    return {"embedding": nn.initializers.normal(0.02)(key, (rows, width), jnp.float32)}


def unroll_params(params: Params, dtype: DTypeLike | None = None) -> Params:
    """Return the parameters of `Transformer(unrolled=True)` for stacked ones.

    Args:
      params: parameters with stacked layers; heads are kept.
      dtype: type of the result; `None`: unchanged.
    """
    if dtype is not None:
        params = jax.tree.map(lambda x: x.astype(dtype), params)
    layers = params["layers"]
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    unrolled = {name: value for name, value in params.items() if name != "layers"}
    for i in range(num_layers):
        # `i=i` binds the present layer: a closure would see the last one.
        unrolled[f"layer_{i}"] = jax.tree.map(lambda x, i=i: x[i], layers)
    return unrolled
