"""Properties of the decoder for any weights: segments, heads, and equality of its forms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from jax_ppo.kernels.platform import assume_platform
from jax_ppo.models import cache as cache_module
from jax_ppo.models import heads
from jax_ppo.models.layer_stack import MAX_UNROLLED_LAYERS, REMAT_POLICIES, unroll_params
from jax_ppo.models.quantization import round_parameters
from jax_ppo.models.transformer import Transformer

B, T = 2, 12
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
ARCHITECTURE = dataclasses.replace(tiny.ARCHITECTURE, num_layers=2, tied=False, **BIASES)
QUICK = {"xla_backend_optimization_level": 0}  # shorter compilation
STACKED, UNROLLED = Transformer(ARCHITECTURE), Transformer(ARCHITECTURE, unrolled=True)


@pytest.fixture(scope="module")
def params():
    """Change biases and norms from their initial values, which would hide half of the decoder."""
    rng = np.random.default_rng(0)
    shapes = heads.param_shapes(STACKED, "lm")

    def draw(path, x):
        return jnp.asarray(("norm" in str(path[-2])) + 0.2 * rng.normal(size=x.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(1).integers(0, ARCHITECTURE.vocab_size, (B, T))


def hidden_states(params, ids, segments=None, positions=None, model=STACKED):
    """Return hidden states [B, T, D] of whole sequences."""
    positions = (
        np.broadcast_to(np.arange(ids.shape[1]), ids.shape) if positions is None else positions
    )
    return apply(model, params, ids, positions, segments)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def apply(model, params, ids, positions, segments):
    return model.apply({"params": params}, ids, positions, segments)


def test_packed_sequences_do_not_see_each_other(params, ids):
    lengths = (5, 4, 3)  # three sequences in a row, the last one unused padding
    segments = np.repeat([1, 2, 0], lengths)[None].repeat(B, 0)
    positions = np.concatenate([np.arange(n) for n in lengths])[None].repeat(B, 0)
    packed = hidden_states(params, ids, segments, positions)[0]
    start = 0
    for n in lengths[:2]:
        alone = hidden_states(params, ids[:, start : start + n])[0]
        np.testing.assert_allclose(packed[:, start : start + n], alone, atol=1e-5)
        start += n
    assert np.isfinite(packed).all()


def test_unroll_keeps_the_head_and_rounding_casts_it(params):
    flat = round_parameters(unroll_params(params), jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(flat)} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(
        flat["lm_head"]["embedding"], params["lm_head"]["embedding"].astype(jnp.bfloat16)
    )
    second_layer = jax.tree.map(lambda x: x[1].astype(jnp.bfloat16), params["layers"])
    jax.tree.map(np.testing.assert_array_equal, flat["layer_1"], second_layer)


@pytest.mark.parametrize("decoding", ["cpu", "tpu"])
def test_one_token_at_a_time_is_the_whole_sequence(params, ids, decoding, monkeypatch):
    """The second row lags three tokens behind the first."""
    monkeypatch.setattr(cache_module, "MIN_READ_WIDTH", 3)
    model = UNROLLED.clone(decoding=decoding)
    flat = unroll_params(params)
    expected = hidden_states(params, ids)[0]
    lag = np.array([0, 3])
    # Garbage that must not be read.
    empty = jnp.full((B, T, ARCHITECTURE.num_kv_heads, ARCHITECTURE.head_dim), 7.0)
    cache = (cache_module.cache_layout(decoding, empty, empty),) * ARCHITECTURE.num_layers

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(cache, new, positions):
        return model.apply({"params": flat}, new, positions, cache=cache)

    for i in range(T + max(lag)):
        at = np.clip(i - lag, 0, T - 1)  # a row that has not started, or has ended, repeats a token
        hidden, cache, _ = step(cache, np.take_along_axis(ids, at[:, None], 1), at[:, None])
        np.testing.assert_allclose(hidden[:, 0], expected[np.arange(B), at], atol=1e-5)


def test_a_deep_models_prefill_on_an_accelerator_is_a_loop_with_the_same_results(ids):
    """One body for each pattern of layers; a CPU's prefill stays unrolled."""
    L = 2 * MAX_UNROLLED_LAYERS
    local = (True, False) * MAX_UNROLLED_LAYERS
    architecture = dataclasses.replace(
        ARCHITECTURE, num_layers=L, local_layers=local, sliding_window=3
    )
    params = unroll_params(tiny.random_params(architecture, 0, 0, "lm"))
    positions = np.broadcast_to(np.arange(T), ids.shape)
    results, products = [], []
    for decoding in ("tpu", "cpu"):
        model = Transformer(architecture, unrolled=True, decoding=decoding)
        lowered = jax.jit(model.apply).lower({"params": params}, ids, positions)
        hidden, cache, _ = lowered.compile(QUICK)({"params": params}, ids, positions)
        if decoding == "cpu":  # its keys and values have other orders of axes
            cache = [(k.transpose(0, 3, 1, 2), v.swapaxes(1, 2)) for k, v in cache]
        results.append((hidden, cache))
        products.append(lowered.as_text().count("stablehlo.dot_general"))
    assert products[1] == MAX_UNROLLED_LAYERS * products[0]
    assert len(results[0][1]) == L
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5),
        *(jax.tree.leaves(each) for each in results),
    )


@pytest.mark.parametrize("decoding", ["tpu", "cpu"])
def test_a_prefill_for_tpus_keeps_nothing_but_keys_and_values_of_a_layer(ids, decoding):
    """Those of each layer are there before the next one begins; decoding needs no such order."""
    model = Transformer(ARCHITECTURE, unrolled=True, decoding=decoding)
    params = jax.eval_shape(
        lambda: unroll_params(heads.init_params(STACKED, jax.random.key(0), "lm"))
    )
    positions = np.tile(np.arange(T), (B, 1))

    def count_barriers(*arguments, **options):
        lowered = jax.jit(model.apply).lower({"params": params}, *arguments, **options)
        return lowered.as_text().count("optimization_barrier")

    cache = jax.eval_shape(model.apply, {"params": params}, ids, positions).cache
    barriers = (
        count_barriers(ids, positions),
        count_barriers(ids[:, :1], positions[:, :1], cache=cache),
    )
    assert barriers == (ARCHITECTURE.num_layers if decoding == "tpu" else 0, 0)


def test_recomputing_activations_leaves_the_gradient(params, ids):
    def gradient(remat):
        model = Transformer(ARCHITECTURE, remat=remat)
        positions = np.broadcast_to(np.arange(T), ids.shape)

        def loss(params):
            return jnp.sum(jnp.sin(model.apply({"params": params}, ids, positions).hidden))

        return jax.jit(jax.grad(loss), compiler_options=QUICK)(params)

    plain, recomputed = gradient(False), gradient(True)
    del plain["lm_head"], recomputed["lm_head"]  # not part of this loss
    for one, other in zip(jax.tree.leaves(plain), jax.tree.leaves(recomputed), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
        assert np.abs(one).max() > 0


@pytest.mark.slow
def test_policies_trade_memory_for_products_and_leave_the_gradient():
    """In a loop over layers, as deep models have."""
    architecture = dataclasses.replace(ARCHITECTURE, num_layers=MAX_UNROLLED_LAYERS + 1)
    params = tiny.init_params(Transformer(architecture), jax.random.key(0), "scalar")
    ids = jnp.zeros((4, 32), jnp.int32) + jnp.arange(32) % 31
    gradients, kept, flops = [], [], []
    for policy in (*REMAT_POLICIES, None):
        model = Transformer(architecture, remat=policy is not None, remat_policy=policy or "full")

        def loss(params, model=model):
            positions = jnp.broadcast_to(jnp.arange(32), ids.shape)
            return jnp.sum(jnp.sin(model.apply({"params": params}, ids, positions).hidden))

        compiled = jax.jit(jax.grad(loss)).lower(params).compile(QUICK)
        gradients.append(compiled(params))
        kept.append(compiled.memory_analysis().temp_size_in_bytes)
        flops.append(compiled.cost_analysis()["flops"])
    # Ordered from least memory and most products to the opposite.
    assert kept == sorted(set(kept)), kept
    assert flops[0] >= flops[1] > flops[2] >= flops[3], flops
    for other in gradients[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients[0], other)


def test_computation_in_bfloat16(params, ids):
    low = hidden_states(params, ids, model=Transformer(ARCHITECTURE, jnp.bfloat16))[0]
    assert low.dtype == jnp.bfloat16
    # There are some thirty roundings to 8 bits between a token and its state, which is of size 1.
    np.testing.assert_allclose(low.astype(jnp.float32), hidden_states(params, ids)[0], atol=0.15)


def test_shapes_of_parameters_are_the_callers_to_change():
    shapes = heads.param_shapes(STACKED, "scalar")
    assert shapes.pop("score")["kernel"].shape == (ARCHITECTURE.hidden_size, 1)
    assert "score" in heads.param_shapes(STACKED, "scalar")
    assert "score" not in heads.param_shapes(STACKED, "lm")


def test_heads(params, ids):
    hidden = hidden_states(params, ids)[0]
    low = heads.compute_logits(ARCHITECTURE, params, hidden.astype(jnp.bfloat16))
    assert low.dtype == jnp.float32
    tied = {name: value for name, value in params.items() if name != "lm_head"}
    for tree, name in ((params, "lm_head"), (tied, "embed")):
        logits = heads.compute_logits(ARCHITECTURE, tree, hidden)
        np.testing.assert_allclose(logits, hidden @ params[name]["embedding"].T, atol=1e-5)
    critic = jax.jit(
        lambda: heads.init_params(STACKED, jax.random.key(0), "scalar"), compiler_options=QUICK
    )()
    assert "lm_head" not in critic and not heads.compute_scalars(critic, hidden).any()
    kernel = np.arange(16, dtype=np.float32)[:, None]
    scalars = heads.compute_scalars({"score": {"kernel": kernel}}, hidden)
    np.testing.assert_allclose(scalars, hidden @ kernel[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "layers", [2, pytest.param(MAX_UNROLLED_LAYERS + 1, marks=pytest.mark.slow)]
)
def test_each_layer_of_experts_returns_a_loss_and_its_router_has_a_gradient(ids, layers):
    architecture = dataclasses.replace(tiny.MIXTURE, num_layers=layers)
    model = Transformer(architecture, remat=True, router_loss=True)
    inputs = ids, np.broadcast_to(np.arange(T), ids.shape), np.zeros_like(ids)
    params = tiny.init_params(Transformer(architecture), jax.random.key(0), "lm")

    def loss(params):
        output = model.apply({"params": params}, *inputs)
        return jnp.sum(output.auxiliary["router_loss"]), output

    gradient, output = jax.jit(jax.grad(loss, has_aux=True), compiler_options=QUICK)(params)
    assert output.auxiliary["router_loss"].shape == (layers, B, T) and output.cache is None
    assert np.all(np.abs(gradient["layers"]["mlp"]["router"]["kernel"]).max(axis=(1, 2)) > 0)
    unrolled = apply(model.clone(unrolled=True), unroll_params(params), *inputs)
    np.testing.assert_allclose(
        unrolled.auxiliary["router_loss"], output.auxiliary["router_loss"], atol=1e-5
    )
    np.testing.assert_allclose(unrolled.hidden, output.hidden, atol=1e-4)


def test_auxiliary_outputs_cost_nothing_where_there_are_none(params, ids):
    assert hidden_states(params, ids).auxiliary == {}
    assert hidden_states(unroll_params(params), ids, model=UNROLLED).auxiliary == {}


def test_kernels_are_rounded_in_front_of_the_loop_over_layers(params, ids):
    """Inside, every micro-batch would round them again, and training would stack copies."""
    model = STACKED.clone(dtype=jnp.bfloat16)
    positions = np.broadcast_to(np.arange(T), ids.shape)
    run = jax.make_jaxpr(lambda params: model.apply({"params": params}, ids, positions).hidden)
    (loop,) = (x for x in run(params).eqns if x.primitive.name == "scan")
    stacked = [x.aval for x in loop.invars if x.aval.ndim == 3 and x.aval.shape[0] == 2]
    # Seven kernels and the hidden states.
    assert [x.dtype for x in stacked] == [jnp.bfloat16] * 8


def test_accelerators_keep_products_and_compute_the_rest_again(params, ids):
    """With the same results: of the MLP, both products are kept, but not the activation."""
    positions = np.broadcast_to(np.arange(T), ids.shape)

    def run(platform):
        with assume_platform(platform):
            out, pull_back = jax.vjp(
                lambda params: STACKED.apply({"params": params}, ids, positions).hidden, params
            )
        kept = [x.shape for x in jax.tree.leaves(pull_back)]
        return out, pull_back(jnp.ones_like(out))[0], kept

    out, gradients, kept = run("gpu")
    cpu_out, cpu_gradients, cpu_kept = run("cpu")
    of_mlp = [shape for shape in kept if shape[-1:] == (ARCHITECTURE.intermediate_size,)]
    assert of_mlp.count((2, B * T, ARCHITECTURE.intermediate_size)) == 2
    assert sum(map(np.prod, kept)) < 0.7 * sum(map(np.prod, cpu_kept))
    np.testing.assert_array_equal(out, cpu_out)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), gradients, cpu_gradients)
