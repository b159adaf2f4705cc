"""The decoder of all families: an embedding, layers and a norm.

The layers are Flax modules; layer_stack.py scans over their `apply`.

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
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt

from jax_ppo.models.attention import Segments
from jax_ppo.models.cache import LayerCache
from jax_ppo.models.layer_stack import MODULES, LayerStack, Shared, stack_places
from jax_ppo.models.layers import (
    NO_INPUTS,
    Auxiliary,
    Dense,
    Layer,
    LayerInputs,
    RMSNorm,
    layer_kinds,
    multiply,
)
from jax_ppo.runtime.parallelism.pipeline import num_stages
from jax_ppo.runtime.parallelism.vocabulary import look_up_embedding
from jax_ppo.types import Params


class TransformerOutput(NamedTuple):
    """Result of the decoder."""

    hidden: jax.Array  # after the last norm, [B, T, D] in the type of the computation
    # The memories of the layers that have one (cache.py), in the unrolled form, `None` otherwise.
    cache: tuple[LayerCache, ...] | None
    # By name, for the L layers with experts: with `router_loss`, "router_loss" [L, B, T]
    # (experts.balance_losses); with `returns_routed_experts`, "routed_experts" [L, B, T, k].
    auxiliary: Auxiliary


@dataclasses.dataclass(frozen=True)
class Transformer(LayerStack):
    """The decoder without a head. Hashable: it is a static argument of compiled functions."""

    # `False`: a `scan` over stacked layers, which compiles fast. `True`: each layer has separate
    # code and parameters (`unroll_params`), and keys and values are returned, for decoding.
    unrolled: bool = False
    quantized: bool = False  # decoding reads kernels as int8 (quantization.py)

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
            x, new_cache, auxiliary = self.run_unrolled(params, x, rows, cache, ends_B)
        else:
            run_layers = self.run_in_stages if num_stages() > 1 else self.run_stacked
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
        rotations = self.decoder.rotations(jnp.zeros((1, 1), jnp.int32), 1)

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
        x, _ = create(self.decoder.layer(name="layers"), x)
        norm: Any = MODULES[a.block].norm_class
        norm(a, name="norm")(x)


def _init_embedding(key: jax.Array, rows: int, width: int) -> Params:
    return {"embedding": nn.initializers.normal(0.02)(key, (rows, width), jnp.float32)}
