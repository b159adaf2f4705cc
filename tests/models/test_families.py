"""Every family computes the numbers of transformers.

The tests compare logits, log-probs and gradients, decoding with a cache, and exports.
"""

import copy
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file

import hf_reference as reference
import recorded
import tiny
from family_variants import GEMMA, QWEN_3_5, VARIANTS
from jax_ppo.config.parsing import PARAMETER_GROUPS
from jax_ppo.kernels.logprobs import token_logprobs
from jax_ppo.kernels.vocabulary_chunks import LogitOptions
from jax_ppo.models import heads, rope
from jax_ppo.models.cache import RecurrentState, keep_states
from jax_ppo.models.hf.config import from_hf_config
from jax_ppo.models.hf.config_export import to_hf_config
from jax_ppo.models.hf.families import FAMILIES
from jax_ppo.models.hf.load import load_checkpoint, read_architecture
from jax_ppo.models.hf.names import tensor_table
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.layer_stack import unroll_params
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import placement, sharding
from jax_ppo.sampler.decode_loop import SamplingOptions, sampler_program
from jax_ppo.types import Prompts

LENGTHS, TEMPERATURE = (14, 10), 0.7  # two sequences, packed into a row
QUICK = {"xla_backend_optimization_level": 0}  # shorter compilation


# Forms of families of which the slow suite has another one.
FURTHER_FORMS = (
    *("gemma3, last logits capped", "mistral, no window", "gemma3, in a loop", "gemma4, in a loop"),
    *("gemma4, without further embeddings", "mistral, in a loop", "mixtral, in a loop"),
    *("qwen3_5, as many key heads", "qwen3_5, in a loop", "qwen2_moe, normalized"),
    *("qwen2_moe, layers without experts", "deepseek_v2, without groups", "deepseek_v3, in a loop"),
    *("qwen3_next, weights as they are", "qwen3_next, layers without experts", "lfm2, untied"),
    *("qwen3_moe, weights as they are", "gpt_oss, in a loop", "qwen3, local layers"),
    *("gemma2, biases, no caps", "phi3, longrope", "ministral, local layers", "smollm3, in a loop"),
    *("granite, biases", "olmo2, one key head", "olmo3, in a loop", "glm"),
    *("glm4, a quarter of each head", "gpt2, odd heads, untied", "gpt2, in a loop"),
    *("gpt_neox, one after the other", "gpt_neox, in a loop"),
)
# One for each kind of layers.
REPRESENTATIVES = ("llama", "qwen3_moe", "qwen3_5", "gemma2, in a loop", "gpt2")
# And for each kind of attention and head.
FURTHER_REPRESENTATIVES = (
    "qwen2, local layers",
    "deepseek_v3",
    "gemma4",
    "phi3, part of each head",
    "smollm3",
)


def test_the_group_attention_is_what_checkpoints_call_so(tmp_path):
    """In every family: Gated DeltaNets, short convolutions and latents too, no norm outside."""
    mixers = re.compile(r"\.(self_attn|linear_attn|attn|attention|conv)\.")
    for name, (family, changes) in VARIANTS.items():
        reference.save(tmp_path / name, family, **changes)
        table = tensor_table(read_architecture(tmp_path / name), "scalar")
        group = {path for path, row in table.items() if mixers.search(row.name)}
        pattern = PARAMETER_GROUPS["attention"]
        assert group == {path for path in table if re.search(pattern, "/".join(path))}, name


def suite(name):
    """Return the marks of a variant: the default suite has one for each kind of layers."""
    if name in REPRESENTATIVES:
        return []
    return [pytest.mark.exhaustive if name in FURTHER_FORMS else pytest.mark.slow]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=suite(name)) for name in VARIANTS])
def checkpoint(request, tmp_path_factory):
    """Return a model as transformers writes it, its folder, architecture and parameters."""
    return write_variant(request.param, tmp_path_factory.mktemp("family"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            name,
            marks=[]
            if name in REPRESENTATIVES
            else pytest.mark.slow
            if name in FURTHER_REPRESENTATIVES
            else pytest.mark.exhaustive,
        )
        for name in VARIANTS
    ],
)
def representative(request, tmp_path_factory):
    """Return the same of one family for each kind of layers, attention and head."""
    return write_variant(request.param, tmp_path_factory.mktemp("family"))


def write_variant(name, folder):
    # transformers adds to nested dicts that it gets.
    family, changes = copy.deepcopy(VARIANTS[name])
    model = reference.save(folder, family, **changes)
    with jax.default_matmul_precision("highest"):
        return model, folder, *reference.load(folder)


def test_every_family_is_tested():
    assert {family for family, _ in VARIANTS.values()} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_configuration_leaves_out_is_what_transformers_takes(family):
    """config.json on the hub contains what differed from the defaults when it was written."""
    few = {name: reference.SIZES[name] for name in ("vocab_size", "intermediate_size")}
    # The default number of key and value heads of each family divides this number of heads.
    few |= {"num_attention_heads": 128, "hidden_size": 1024}
    few |= {"num_hidden_layers": 30, "model_type": family}
    if family == "deepseek_v2":
        few["num_experts_per_tok"] = 6  # transformers' default is null, and fails
    if family == "gemma4_text":
        few["vocab_size_per_layer_input"] = few["vocab_size"]  # one number for both is required
    if FAMILIES[family].sliding_windows in ("last", "switched"):
        few["use_sliding_window"] = True  # without this, transformers forgets the window
    few = reference.fields(family, few)
    full = transformers.CONFIG_MAPPING[family](**few).to_dict()
    # Those belong to the tokenizer and must not be guessed.
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert from_hf_config(few) == from_hf_config(full | dict.fromkeys(special))


def read_fields(family, **fields):
    return from_hf_config(reference.SIZES | {"model_type": family} | fields)


def test_configurations_of_the_hub():
    """They are unchanged copies, including those written for transformers 4."""
    gemma = read_fields("gemma", hidden_act="gelu", hidden_activation=None)
    assert gemma.activation == "gelu_pytorch_tanh"
    for family in ("gemma2", "gemma3_text"):  # they have no field hidden_act
        assert read_fields(family, hidden_act="silu").activation == "gelu_pytorch_tanh"
    gemma = read_fields(
        "gemma3_text",
        hidden_activation="gelu_pytorch_tanh",
        num_hidden_layers=26,
        rope_scaling=None,
        rope_local_base_freq=10_000,
        rope_theta=1_000_000,
        sliding_window=512,
        sliding_window_pattern=6,
        query_pre_attn_scalar=256,
        head_dim=256,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    )
    assert gemma.local_layers == ((True,) * 5 + (False,)) * 4 + (True,) * 2
    assert (gemma.sliding_window, gemma.attention_scale, gemma.tied) == (512, 1 / 16, True)
    assert (gemma.rope_theta, gemma.local_rope_theta) == (1e6, 1e4)
    phi = read_fields(
        "phi3",
        max_position_embeddings=131_072,
        original_max_position_embeddings=4096,
        rope_scaling={"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        sliding_window=262_144,
    )
    assert dict(phi.rope_scaling)["rope_type"] == "longrope"
    assert rope.max_sequence_length(phi) == 4096
    assert read_fields("mistral", sliding_window=None).local_layers == ()


def assert_close(ours, theirs, what="", tolerance=1e-4):
    """Compare with a tolerance relative to the size of the arrays."""
    theirs = np.asarray(theirs)
    assert np.abs(theirs).max() > 0, what
    np.testing.assert_allclose(
        ours, theirs, rtol=tolerance, atol=tolerance * np.abs(theirs).max(), err_msg=what
    )


def live_numbers(checkpoint, sequences, folder):
    """Return logits, log-probs, entropies and gradients by torch, and whether they vary."""
    import torch

    model, numbers, loss = checkpoint.load(), [], 0
    for sequence in sequences:
        sequence = torch.from_numpy(sequence.astype(np.int64))
        logits = model(sequence).logits
        log_p = (logits / TEMPERATURE).log_softmax(-1)[:, :-1]
        logprobs = log_p.gather(-1, sequence[:, 1:, None])[..., 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        loss = loss + logprobs.sin().sum() + (entropy**2).sum()
        numbers.append((logits[..., ::4], logprobs, entropy))
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
        for buffer in model.buffers():
            buffer.zero_()
    model.save_pretrained(folder)  # with the names and shapes of the checkpoint
    arrays = [torch.cat(parts, 1).detach().numpy() for parts in zip(*numbers, strict=True)]
    return *arrays, sketches(folder)


def sketches(folder):
    """Return 16 random combinations of each tensor, and the largest number in it.

    They differ if the tensors do, and are small enough to be stored.
    """
    found = {}
    for name, x in load_file(folder / "model.safetensors").items():
        signs = np.random.default_rng(0).choice([-1, 1], (16, x.size)) / np.sqrt(x.size)
        found[name] = np.append(signs @ x.ravel(), np.abs(x).max()).astype(np.float32)
    return found


def test_logits_logprobs_and_gradients(checkpoint, tmp_path):
    """Two sequences in one row are compared with each of them alone."""
    model, _, architecture, params = checkpoint
    ids = reference.tokens(rows=1, length=sum(LENGTHS))
    segments = np.repeat([7, 3], LENGTHS)[None]
    positions = np.concatenate([np.arange(n) for n in LENGTHS])[None]
    targets = np.roll(ids, -1, 1)
    mask = segments == np.roll(segments, -1, 1)
    mask[:, -1] = False

    @functools.partial(jax.jit, compiler_options=QUICK)
    @functools.partial(jax.grad, has_aux=True)
    def run(params):
        hidden = (
            Transformer(architecture).apply({"params": params}, ids, positions, segments).hidden
        )
        options = LogitOptions(*heads.product_scaling(architecture, TEMPERATURE))
        logprobs, entropy = token_logprobs(
            hidden, heads.output_embedding(params), targets, mask, options
        )
        loss = jnp.sum(jnp.sin(logprobs)) + jnp.sum(entropy**2)
        return loss, (heads.compute_logits(architecture, params, hidden), logprobs, entropy)

    gradients, ours = run(params)
    sequences = np.split(ids, np.cumsum(LENGTHS)[:-1], axis=1)
    *theirs, their_gradients = recorded.value(
        "numbers",
        lambda: live_numbers(model, sequences, tmp_path / "theirs"),
        *(model.folder, ids, LENGTHS, TEMPERATURE),
    )
    assert theirs[0].std() > 0.3  # otherwise the comparison would be meaningless
    logits, logprobs, entropy = ours
    assert_close(logits[..., ::4], theirs[0], "logits")
    assert_close(logprobs[mask][None], theirs[1], "log-probs")
    assert_close(entropy[mask][None], theirs[2], "entropy")
    export_checkpoint(gradients, architecture, tmp_path / "gradients")
    written = sketches(tmp_path / "gradients")
    assert written.keys() == their_gradients.keys()
    for name, sketch in their_gradients.items():
        if name.endswith(("correction_bias", "layer_scalar")):
            assert not np.any(written[name]) and not np.any(sketch)
        else:
            assert_close(written[name], sketch, name, 2e-4)


def test_cached_decode(representative):
    """Prefill, then one token at a time; the second row's prompt is shorter."""
    model, _, architecture, params = representative
    ids, prompts = reference.tokens(length=16), np.array([9, 6])
    expected = reference.their_logits(model, ids, every=4)
    flat = unroll_params(params, partial_stacks=architecture.partial_stacks)
    decoder = Transformer(architecture, unrolled=True)
    longest = prompts.max()

    @functools.partial(jax.jit, compiler_options=QUICK)
    def prefill(tokens, segments):
        hidden, cache, _ = decoder.apply(
            {"params": flat},
            tokens,
            jnp.broadcast_to(jnp.arange(longest), tokens.shape),
            segments,
            ends_B=prompts,
        )
        room = ids.shape[1] - longest
        keys, values = [(0, 0)] * 3 + [(0, room)], [(0, 0)] * 2 + [(0, room), (0, 0)]
        return heads.compute_logits(architecture, flat, hidden)[..., ::4], tuple(
            layer
            if isinstance(layer, RecurrentState)
            else (jnp.pad(layer[0], keys), jnp.pad(layer[1], values))
            for layer in cache
        )

    @functools.partial(jax.jit, compiler_options=QUICK)
    def step(tokens, columns, cache, is_over):
        hidden, new, _ = decoder.apply({"params": flat}, tokens, columns, cache=cache)
        logits = heads.compute_logits(architecture, flat, hidden)[:, 0, ::4]
        return logits, keep_states(new, cache, is_over)

    is_prompt = np.arange(longest) < prompts[:, None]
    logits, cache = prefill(np.where(is_prompt, ids[:, :longest], 0), is_prompt.astype(np.int32))
    assert_close(logits[is_prompt], expected[:, :longest][is_prompt])
    for i in range(ids.shape[1] - prompts.min()):
        # A row that is over runs its last token again.
        columns = np.minimum(prompts + i, ids.shape[1] - 1)[:, None]
        is_over = prompts + i >= ids.shape[1] - 1
        logits, cache = step(np.take_along_axis(ids, columns, 1), columns, cache, is_over)
        assert_close(logits, np.take_along_axis(expected, columns[..., None], 1)[:, 0], f"step {i}")


def test_exported_it_is_the_same_model(checkpoint, tmp_path):
    model, _, architecture, params = checkpoint
    # torch sums odd widths in an order that depends on where the weights are in memory.
    out = tmp_path / "out"
    reference.assert_exported_as_the_same(model, architecture, params, out, atol=1e-5)


def test_transformers_4_reads_the_configuration(checkpoint):
    """transformers 4 does not know rope_parameters."""
    config = to_hf_config(checkpoint[2])
    if checkpoint[2].family == "gemma4_text":
        return  # which transformers 4 does not know either
    config.pop("rope_parameters", None)
    assert from_hf_config(config) == checkpoint[2]


def without_rerouted(error):
    """Return the errors of nine tenths of the tokens, those with the smallest ones.

    Where two experts are nearly as probable, rounding gives a token to the other one, which differs
    between processors.
    """
    of_tokens = error.reshape(-1, error.shape[-1])
    order = np.argsort(of_tokens.max(-1))
    return of_tokens[order[: len(order) * 9 // 10]]


def test_bfloat16(representative):
    """Our error is of the size of transformers' own.

    An error is the difference of logits computed in bfloat16, with 8 bits, and in float32. Our mean
    must be about as small as theirs, and no error far beyond their worst.
    """
    _, folder, architecture, params = representative
    ids, rounded = reference.tokens(rows=4), reference.reload(folder, "bfloat16")

    def describe(low, exact):
        error = np.abs(low - exact)
        error = without_rerouted(error) if architecture.num_experts else error
        return float(error.mean()), float(error.max())

    def their_error():
        low = reference.live_logits(rounded.load(), ids)
        return describe(low, reference.live_logits(rounded.load().float(), ids))

    def our_logits(dtype):
        return reference.our_logits(architecture, low_params, ids, dtype)

    low_params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    mean, largest = describe(our_logits(jnp.bfloat16), our_logits(jnp.float32))
    # Processors round sums of bfloat16 differently.
    their_mean, their_largest = recorded.value("error", their_error, folder, ids, rtol=0.3)
    assert 0 < mean < 1.25 * their_mean
    assert largest < 2 * their_largest


def test_a_critic_is_a_sequence_classifier(representative, tmp_path):
    model, folder, architecture, _ = representative
    _, params = reference.load(folder, "scalar")
    params["score"]["kernel"] = np.linspace(-1, 1, architecture.hidden_size, dtype=np.float32)[
        :, None
    ]
    export_checkpoint(params, architecture, tmp_path / "out")
    jax.tree.map(
        np.testing.assert_array_equal, reference.load(tmp_path / "out", "reward")[1], params
    )
    config = json.loads((tmp_path / "out/config.json").read_text())
    theirs = recorded.Checkpoint(tmp_path / "out", config["architectures"][0])
    ids = reference.tokens()
    values = heads.compute_scalars(params, reference.hidden(architecture, params, ids))[:, -1]
    assert_close(values, reference.their_logits(theirs, ids)[:, 0])


@pytest.mark.slow  # by default sampler/test_generate.py has a Llama
@pytest.mark.parametrize(("family", "changes"), [("gemma2", GEMMA), ("qwen3_5_text", QWEN_3_5)])
def test_the_samplers_logprobs_are_those_of_a_pass_over_the_whole_text(family, changes, tmp_path):
    """Prompts reach and exceed the window; two samples each use fewer slots than samples."""
    reference.save(tmp_path, family, **changes)
    architecture, params = reference.load(tmp_path)
    prompts = Prompts(reference.tokens(rows=3, length=9), np.array([9, 5, 7], np.int32))
    options = SamplingOptions(max_response_length=12, temperature=TEMPERATURE, n=2, slots=4)
    rollout = sampler_program(Transformer(architecture, unrolled=True), options)(
        unroll_params(params, partial_stacks=architecture.partial_stacks),
        *(prompts, jax.random.key(0)),
    )
    for i in range(6):
        prompt = prompts.tokens[i // 2, : prompts.lengths[i // 2]]
        response = np.asarray(rollout.responses[i])
        text = np.concatenate([prompt, response])[None]
        logits = reference.our_logits(architecture, params, text)[0, len(prompt) - 1 : -1]
        log_p = jax.nn.log_softmax(logits / TEMPERATURE)
        assert_close(rollout.logprobs[i], np.take_along_axis(log_p, response[:, None], 1)[:, 0])


@pytest.mark.parametrize(
    "name",
    [
        "qwen3, local layers",
        "qwen3_moe",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("qwen3_next", "deepseek_v3", "gpt_oss", "gemma3, in a loop", "gpt_neox")
        ),
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("phi3", "gemma2, in a loop", "gpt2", "lfm2")
        ),
    ],
)
def test_split_over_eight_devices_it_is_the_same_model(name, tmp_path):
    """Each device reads its part of a fused tensor, and local layers stay local."""
    family, changes = VARIANTS[name]
    reference.save(tmp_path, family, **changes, vocab_size=96)
    architecture, params = reference.load(tmp_path)
    mesh = tiny.make_mesh(8, data=2, fsdp=2, model=2)
    where = sharding.tree_shardings(mesh, params, sharding.TRAIN_RULES)
    split = load_checkpoint(tmp_path, architecture, where)
    jax.tree.map(np.testing.assert_array_equal, split, params)
    ids = reference.tokens(rows=4, vocab_size=96)
    with jax.set_mesh(mesh):
        hidden = reference.hidden(architecture, split, placement.place(ids, sharding.rows(mesh)))
    assert_close(hidden, reference.hidden(architecture, params, ids))


def test_every_parameter_has_its_place(checkpoint):
    architecture, params = checkpoint[2:]
    for tree, rules in (
        (params, sharding.TRAIN_RULES),
        (unroll_params(params, partial_stacks=architecture.partial_stacks), sharding.DECODE_RULES),
    ):
        sharding.tree_shardings(tiny.make_mesh(), tree, rules)
    own = heads.param_shapes(Transformer(architecture), "lm")
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, params)
