"""Small random checkpoints as transformers writes them, and its logits and ours for them."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

import recorded
from jax_ppo.models import heads
from jax_ppo.models.hf.load import load_checkpoint, read_architecture
from jax_ppo.models.hf.peft import load_adapters, read_adapter_config, save_adapters
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.lora import init_adapters, join_params
from jax_ppo.models.transformer import Transformer

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# A small DeepSeek: three experts of a token in two groups of two.
DEEPSEEK = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 24,
}
# A small Gemma 4: two layers before those that share their keys and values.
GEMMA_4 = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 5,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 97,
}
# Prefixes of class names, names of classes, fields and tensors that do not follow the rule.
CLASS_PREFIXES = {
    "qwen3_5_text": "Qwen3_5",
    "qwen3_5_moe_text": "Qwen3_5Moe",
    "smollm3": "SmolLM3",
    "gpt2": "GPT2",
    "gpt_neox": "GPTNeoX",
}
CLASSES = {
    "GPT2ForCausalLM": "GPT2LMHeadModel",
    # The classifier without "Text" is multimodal.
    "Gemma3ForSequenceClassification": "Gemma3TextForSequenceClassification",
    "Qwen3_5ForSequenceClassification": "Qwen3_5TextForSequenceClassification",
    "Qwen3_5MoeForSequenceClassification": "Qwen3_5MoeTextForSequenceClassification",
}
FIELDS = {
    "gpt2": {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": None,
        "max_position_embeddings": "n_positions",
    },
    "gpt_neox": {"num_key_value_heads": None},
}


def class_prefix(family):
    """Return what the names of transformers' classes of a family begin with."""
    words = family.removesuffix("_text").split("_")
    return CLASS_PREFIXES.get(family) or "".join(word.capitalize() for word in words)


def fields(family, values):
    """Return fields of a config.json, given by Llama's names, under the family's names."""
    names = FIELDS.get(family, {})
    return {names.get(name, name): x for name, x in values.items() if names.get(name, name)}


def save(folder, family="llama", task="CausalLM", dtypes=("float32",), shard_bytes=None, **changes):
    """Write a small model as transformers does, with random parameters; return it."""
    name = f"{class_prefix(family)}For{task}"
    return recorded.write_checkpoint(
        folder,
        CLASSES.get(name, name),
        fields(family, SIZES | changes),
        dtypes=dtypes,
        shard_bytes=shard_bytes,
    )


def rewrite_tensors(folder, add=(), remove=()):
    """Add tensors to the file of a folder, and remove others."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: value for name, value in tensors.items() if name not in remove} | dict(add)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def reload(folder, dtype="float32", task="CausalLM"):
    """Return what transformers makes of a folder."""
    return recorded.Checkpoint(folder, f"AutoModelFor{task}", dtype)


def tokens(rows=2, length=24, vocab_size=97):
    return np.random.default_rng(3).integers(3, vocab_size, (rows, length)).astype(np.int32)


def their_logits(checkpoint, ids, every=1, is_computed=False):
    """Return the logits of transformers for every n-th token of the vocabulary.

    Args:
        checkpoint: a folder and its class.
        ids: the tokens.
        every: n. Fewer numbers are stored.
        is_computed: whether the last bits of the folder's numbers depend on the machine.
    """
    folder = recorded.Headers(checkpoint.folder) if is_computed else checkpoint.folder
    return recorded.value(
        "logits",
        lambda: live_logits(checkpoint.load(), ids)[..., ::every],
        folder,
        *(checkpoint.name, checkpoint.dtype, np.asarray(ids), every),
    )


def assert_their_logits(ours, checkpoint, ids, rtol=1e-7, atol=1e-4, is_computed=False):
    """Require that our logits equal transformers', and that these tell models apart."""
    theirs = their_logits(checkpoint, ids, every=4, is_computed=is_computed)
    assert theirs.std() > 0.3
    np.testing.assert_allclose(ours[..., ::4], theirs, rtol=rtol, atol=atol)


def live_logits(model, ids):
    """Return the logits of a model of torch."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(ids, np.int64))).logits.float().numpy()


def assert_same_logits(checkpoint, other, ids, atol=1e-6):
    """Require that transformers computes the same from two folders."""
    difference = recorded.value(
        "difference",
        lambda: float(
            np.abs(live_logits(checkpoint.load(), ids) - live_logits(other.load(), ids)).max()
        ),
        *(checkpoint.folder, other.folder, checkpoint.name, other.name, np.asarray(ids)),
    )
    assert difference <= atol


def assert_same_tensors(folder, source):
    """Require the tensors that transformers wrote, by name and to the bit."""
    written, expected = (load_file(x / "model.safetensors") for x in (folder, source))
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype
        assert written[name].tobytes() == tensor.tobytes(), name


def assert_exported_as_the_same(model, architecture, params, out, atol=1e-6):
    """Require that the export of a model that transformers wrote, to `out`, is that model."""
    export_checkpoint(params, architecture, out)
    again, loaded = load(out)
    assert again == architecture
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert json.loads((out / "config.json").read_text())["architectures"] == [model.name]
    assert_same_tensors(out, model.folder)
    assert_same_logits(reload(out), model, tokens(), atol)


def peft_logits(checkpoint, adapters, ids):
    """Return every fourth logit of a model with the adapters that PEFT reads from a folder."""

    def compute():
        import peft

        model = peft.PeftModel.from_pretrained(checkpoint.load(), str(adapters)).eval()
        return live_logits(model, ids)[..., ::4]

    return recorded.value("logits with adapters", compute, checkpoint.folder, adapters, ids)


def assert_adapters_are_pefts(folder, model, architecture, params, lora):
    """Assert that PEFT computes with random adapters what we do, and that they can be read again.

    `folder` gets their files. Returns the adapters and our logits of `tokens()`.
    """
    shapes = jax.eval_shape(lambda: init_adapters(architecture, lora, jax.random.key(0), "lm"))
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(
        lambda x: (rng.random(x.shape, np.float32) - np.float32(0.5)) * np.float32(0.35), shapes
    )
    save_adapters(adapters, architecture, lora, folder, ("some/base", None), model.folder)
    ids = tokens()
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    apply = jax.jit(Transformer(architecture, lora=lora).apply)
    hidden = apply({"params": join_params(params, adapters)}, ids, positions).hidden
    ours = np.asarray(heads.compute_logits(architecture, params, hidden))
    theirs = peft_logits(model, folder, ids)
    np.testing.assert_allclose(ours[..., ::4], theirs, rtol=1e-3, atol=1e-3)
    assert np.abs(ours - our_logits(architecture, params, ids)).max() > 0.1
    assert read_adapter_config(folder, architecture)[0] == lora
    places = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), adapters)
    again = load_adapters(folder, architecture, lora, places)
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
    return adapters, ours


def read_adapters(folder):
    """Return the configuration of a folder that PEFT wrote, with the names of its base left out."""
    config = json.loads((folder / "adapter_config.json").read_text())
    return config | {
        "base_model_name_or_path": "some/base",
        "target_modules": sorted(config["target_modules"]),
    }


def one_device(architecture, head):
    """Return shardings that put every parameter of a role on the first device."""
    shapes = heads.param_shapes(Transformer(architecture), head)
    return jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shapes)


def load(folder, head="lm", dtype=jnp.float32, **options):
    """Return architecture and parameters of a folder."""
    architecture = read_architecture(folder)
    shardings = one_device(architecture, "lm" if head == "lm" else "scalar")
    return architecture, load_checkpoint(folder, architecture, shardings, dtype, head, **options)


def hidden(architecture, params, ids, dtype=jnp.float32):
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    model = Transformer(architecture, dtype)
    return _apply(model, params, ids, positions)


# The lowest optimization level makes the compilation shorter.
@functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)
def _apply(model, params, ids, positions):
    return model.apply({"params": params}, ids, positions).hidden


def our_logits(architecture, params, ids, dtype=jnp.float32):
    return np.asarray(
        heads.compute_logits(architecture, params, hidden(architecture, params, ids, dtype))
    )
