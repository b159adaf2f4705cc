"""The decoder computes the numbers of transformers from the same checkpoint."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import transformers

import hf_reference as reference
import recorded
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf.load import read_architecture
from jax_ppo.models.layers import RMSNorm

VARIANTS = {
    "llama": ("llama", {}),
    "llama, one head a key": ("llama", {"num_key_value_heads": 4}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, attention bias": ("llama", {"attention_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, wide heads": ("llama", {"head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(name, tmp_path):
    family, changes = VARIANTS[name]
    model = reference.save(tmp_path, family, **changes)
    ids = reference.tokens()
    ours = reference.our_logits(*reference.load(tmp_path), ids)
    reference.assert_their_logits(ours, model, ids)


def test_the_norm_rounds_where_transformers_does():
    """Rounding to bfloat16 after the scale changes a quarter of the numbers."""
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(64, 96)), jnp.bfloat16)
    scale = rng.normal(1, 0.3, 96).astype(np.float32)
    llama = Architecture("llama", 8, 96, 8, 1, 1, 1, 96, norm_epsilon=1e-6)
    ours = RMSNorm(llama).apply({"params": {"scale": jnp.asarray(scale)}}, x)

    def theirs():
        import torch
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        norm = LlamaRMSNorm(96).bfloat16()
        with torch.no_grad():
            norm.weight.copy_(torch.from_numpy(scale))
            return norm(torch.from_numpy(np.asarray(x, np.float32)).bfloat16()).float().numpy()

    expected = recorded.value("normalized", theirs, np.asarray(x), scale)
    # An rsqrt may differ in its last bit.
    assert (np.asarray(ours, np.float32) != expected).mean() < 1e-3


def test_loading_in_bfloat16_rounds_the_weights(tmp_path):
    reference.save(tmp_path)
    _, exact = reference.load(tmp_path)
    _, low = reference.load(tmp_path, dtype=jnp.bfloat16)
    kernel = low["layers"]["mlp"]["down_proj"]["kernel"]
    assert kernel.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        kernel, exact["layers"]["mlp"]["down_proj"]["kernel"].astype(jnp.bfloat16)
    )


def test_float16_checkpoints_are_read(tmp_path):
    reference.save(tmp_path, dtypes=("float16",))
    ids = reference.tokens()
    ours = reference.our_logits(*reference.load(tmp_path), ids)
    reference.assert_their_logits(ours, reference.reload(tmp_path), ids)


def test_a_critic_starts_at_zero_from_any_checkpoint(tmp_path):
    for folder, task, options in (
        ("lm", "CausalLM", {}),
        ("reward", "SequenceClassification", {"num_labels": 1}),
    ):
        reference.save(tmp_path / folder, "llama", task, **options)
        architecture, params = reference.load(tmp_path / folder, "scalar")
        assert set(params) == {"embed", "layers", "norm", "score"}
        values = reference.heads.compute_scalars(
            params, reference.hidden(architecture, params, reference.tokens())
        )
        assert values.shape == (2, 24) and not values.any()


def test_every_end_of_sequence_is_known_the_configs_first(tmp_path):
    reference.save(tmp_path, eos_token_id=5)
    for more, expected in ((None, (5,)), (5, (5,)), (9, (5, 9)), ([9, 5, 7], (5, 9, 7))):
        file = tmp_path / "generation_config.json"
        file.write_text(json.dumps({"eos_token_id": more}))
        assert read_architecture(tmp_path).eos_ids == expected
    file.unlink()
    assert read_architecture(tmp_path).eos_ids == (5,)


def test_the_real_model(tinystories):
    model = reference.reload(tinystories)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tinystories)
    architecture, params = reference.load(tinystories)
    ids = reference.tokens(rows=1, length=200, vocab_size=512)
    ours = reference.our_logits(architecture, params, ids)[..., ::32]
    theirs = reference.their_logits(model, ids, every=32)
    np.testing.assert_allclose(ours, theirs, atol=1e-4)

    prompt = "Once upon a time, there was a little girl named Lily."
    start = tokenizer(prompt)["input_ids"]
    if start[0] != architecture.bos_id:  # it was trained with one at the start of every story
        start = [architecture.bos_id, *start]
    row, end = np.zeros((1, 64), np.int32), len(start)
    row[0, :end] = start
    for column in range(end, 64):  # later tokens do not influence a token
        row[0, column] = reference.our_logits(architecture, params, row)[0, column - 1].argmax()
    story = tokenizer.decode(row[0], skip_special_tokens=True)
    assert story.startswith(
        prompt + " She loved to play outside in the park. One day, she saw a big, red ball."
    )
