"""Kernels as int8: what is rounded, what keeps its type, and that no wide copy is made."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.config.schema import MeshShape
from jax_ppo.models import heads
from jax_ppo.models.layer_stack import unroll_params
from jax_ppo.models.quantization import quantize_kernels, round_kernels
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime.meshes import make_mesh
from jax_ppo.sampler.decode_loop import sampler_program
from jax_ppo.sampler.decoding_weights import shape_decoding_weights
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.types import Prompts
from tiny_actor import ARCHITECTURE, Actor


@pytest.fixture(scope="module")
def params():
    return Actor().stacked


def test_kernels_are_rounded_by_column_and_everything_else_keeps_its_type(params):
    quantized = quantize_kernels(unroll_params(params), jnp.bfloat16)
    types = {}
    for path, x in jax.tree_util.tree_leaves_with_path(quantized):
        types.setdefault(path[-1].key, set()).add(x.dtype.name)
    assert types == {
        "kernel": {"int8"},
        "kernel_scale": {"float32"},
        "bias": {"bfloat16"},
        "scale": {"bfloat16"},
        "embedding": {"bfloat16"},
    }
    entry = quantized["layer_1"]["mlp"]["down_proj"]
    original = params["layers"]["mlp"]["down_proj"]["kernel"][1]
    assert np.abs(entry["kernel"]).max() == 127
    error = np.abs(entry["kernel"] * entry["kernel_scale"] - original)
    # Half a unit, of each column on its own.
    assert (error <= entry["kernel_scale"] / 2 * (1 + 1e-5)).all()


def test_only_kernels_of_rounded_products_are_rounded():
    x = jnp.ones((2, 3, 4))
    layers = {"mlp": {"router": {"kernel": x}, "up_proj": {"kernel": x, "bias": x}}}
    types = jax.tree.map(lambda x: x.dtype.name, round_kernels(layers, jnp.bfloat16))
    assert types == {
        "mlp": {
            "router": {"kernel": "float32"},
            "up_proj": {"kernel": "bfloat16", "bias": "float32"},
        }
    }


def test_a_column_of_zeros_stays_one():
    kernel = jnp.array([[0.0, 3.0], [0.0, -6.0]])
    entry = quantize_kernels({"layer_0": {"kernel": kernel}}, jnp.float32)["layer_0"]
    np.testing.assert_array_equal(entry["kernel"], [[0, 64], [0, -127]])
    np.testing.assert_allclose(entry["kernel_scale"], [1.0, 6 / 127])


def test_the_copy_takes_half_the_bytes_and_no_wide_one_is_made():
    """The decode loop converts a kernel where it multiplies it, not all of them before."""
    architecture = dataclasses.replace(ARCHITECTURE, hidden_size=256, intermediate_size=1024)
    mesh = make_mesh(MeshShape(1, 1, 1), jax.devices()[:1])
    shapes = jax.eval_shape(
        lambda key: heads.init_params(Transformer(architecture), key, "lm"), jax.random.key(0)
    )

    def kernel_bytes(quantized):
        model = Transformer(architecture, jnp.bfloat16, quantized=quantized)
        tree = shape_decoding_weights(mesh, model, shapes)["layer_0"]
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if x.ndim == 2)

    assert kernel_bytes(True) * 2 == kernel_bytes(False)

    def temporary_bytes(quantized):
        model = Transformer(architecture, jnp.bfloat16, unrolled=True, quantized=quantized)
        weights = shape_decoding_weights(mesh, model, shapes)
        prompts = Prompts(jnp.zeros((4, 8), jnp.int32), jnp.ones(4, jnp.int32))
        program = sampler_program(model, SamplingOptions(8, 1.0))
        compiled = program.lower(weights, prompts, jax.random.key(0)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    wide_copy = architecture.num_layers * kernel_bytes(False)
    assert temporary_bytes(True) < temporary_bytes(False) + wide_copy / 2
