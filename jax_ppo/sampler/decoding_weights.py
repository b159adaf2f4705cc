"""The copy of the actor's weights that decoding reads: its shapes and the programs that make it."""

import collections
import contextlib
import functools
import math

import jax
import jax.numpy as jnp

from jax_ppo.models.heads import without_part
from jax_ppo.models.layer_stack import stack_places, unroll_params
from jax_ppo.models.quantization import quantize_kernels, round_parameters
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import placement, sharding
from jax_ppo.runtime.compiled_programs import CompiledProgram
from jax_ppo.types import Params


def shape_decoding_weights(mesh: jax.sharding.Mesh, actor: Transformer, params: Params) -> Params:
    """Return shapes and layouts of the copy of the trained parameters that decoding reads."""
    a = actor.architecture
    unroll = functools.partial(unroll_params, partial_stacks=a.partial_stacks)
    shapes = jax.eval_shape(lambda params: _to_decoding_form(actor, unroll(params)), params)
    # Decoding reads every weight per token, so it has another layout.
    rules = sharding.decode_rules(mesh, math.gcd(a.num_kv_heads, a.global_kv_heads))
    return sharding.with_layout(mesh, shapes, rules)


def _to_decoding_form(actor: Transformer, params: Params) -> Params:
    if actor.quantized:
        # Rounded once, from what is trained.
        return quantize_kernels(params, actor.dtype)
    return round_parameters(params, actor.dtype)


def largest_part_bytes(weights: Params) -> int:
    """Return the bytes of the copy's largest part that one program makes, on a single device."""
    parts = collections.Counter[str]()
    for name, tree in weights.items():
        part = name if name.startswith("layer_") else ""
        parts[part] += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    return max(parts.values())


class WeightPreparation:
    """Makes the copy from stacked parameters, one layer after the other.

    One program for all would take longer to compile, and gather all layers at once.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        actor: Transformer,
        params: Params,
        trained_on: jax.sharding.Mesh | None = None,
    ) -> None:
        """Prepare the programs; `trained_on`, if not `None`, is the mesh of the parameters."""
        weights = shape_decoding_weights(mesh, actor, params)
        layouts = jax.tree.map(lambda x: x.sharding, weights)
        self._trained_on = trained_on
        self._copied_layouts = layouts
        if trained_on is not None:
            mesh = trained_on
            layouts = jax.tree.map(lambda _: sharding.replicated(trained_on), layouts)
        stacks = actor.architecture.partial_stacks
        self._missing = {  # for each layer, the stacks that it has no entry in
            f"layer_{i}": tuple(name for name, owners in stacks.items() if not owners[i])
            for i in range(actor.architecture.num_layers)
        }
        others = {name: layout for name, layout in layouts.items() if name not in self._missing}
        index = sharding.replicated(mesh)

        def others_in_decoding_form(params: Params) -> tuple[Params, jax.Array]:
            return round_parameters(params, actor.dtype), jnp.int32(0)  # index of the first layer

        self._others = CompiledProgram(
            others_in_decoding_form, "prepare_weights", out_shardings=(others, index)
        )
        self._layer = {  # one program for each kind of layer
            missing: CompiledProgram(
                functools.partial(_layer_in_decoding_form, actor, missing),
                "prepare_weights",
                static_argnums=2,  # stages
                out_shardings=(layouts[name], index),
            )
            for name, missing in self._missing.items()
        }

    def __call__(self, params: Params) -> Params:
        """Dispatch the programs, and return the copy."""
        # The parts that training splits the stacked layers into.
        layout = getattr(jax.tree.leaves(params["layers"])[0], "sharding", None)
        stages = 1
        if isinstance(layout, jax.sharding.NamedSharding):
            stages = int(layout.mesh.shape["stage"])
        mesh = self._trained_on
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            weights, index = self._others(without_part(params, "layers"))
            weights = self._copy(weights)
            for name, missing in self._missing.items():
                layer, index = self._layer[missing](params["layers"], index, stages)
                weights |= self._copy({name: layer})
        return weights

    def _copy(self, made: Params) -> Params:
        """Return arrays that the programs made, or their shapes, on the mesh to decode on."""
        if self._trained_on is None:
            return made
        layouts = {name: self._copied_layouts[name] for name in made}
        copied: Params = jax.tree.map(placement.copy_whole, made, layouts)
        if not isinstance(jax.tree.leaves(copied)[0], jax.ShapeDtypeStruct):
            # Dispatched all at once, the parts would fill the memory of the devices that learn.
            jax.block_until_ready(copied)
        return copied


def _layer_in_decoding_form(
    actor: Transformer, missing: tuple[str, ...], layers: Params, index: jax.Array, stages: int
) -> tuple[Params, jax.Array]:
    """Return a layer as decoding reads it, and the index of the next, which stays on devices."""
    one = {}
    partial_stacks = actor.architecture.partial_stacks
    for name, stacked in layers.items():
        if name in missing:
            continue
        at = index
        if name in partial_stacks:
            at = jnp.array(stack_places(partial_stacks[name]))[index]
        one[name] = jax.tree.map(lambda x, at=at: _take_layer(x, at, stages), stacked)
    return _to_decoding_form(actor, {"layer_0": one})["layer_0"], index + 1


def _take_layer(x: jax.Array, index: jax.Array, stages: int) -> jax.Array:
    """Return `x[index]` of stacked layers, each stage of which is on other devices."""
    if stages == 1:
        return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
    # An index into a split axis would gather all layers. Instead each stage takes one of its
    # layers, and all but one of these count as zeros.
    stage_layers = x.reshape(stages, -1, *x.shape[1:])
    stage, layer = jnp.divmod(index, stage_layers.shape[1])
    taken = jax.lax.dynamic_index_in_dim(stage_layers, layer, axis=1, keepdims=False)
    is_owner = jnp.arange(stages) == stage
    return jnp.sum(taken, axis=0, where=is_owner.reshape(-1, *[1] * (x.ndim - 1)))
