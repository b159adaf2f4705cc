"""Small random checkpoints made by transformers, and this project's logits for them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.models import heads
from jax_ppo.models.hf.load import load_checkpoint, read_architecture
from jax_ppo.models.transformer import Transformer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

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
MODELS = {
    "llama": ("LlamaConfig", "LlamaFor"),
    "qwen2": ("Qwen2Config", "Qwen2For"),
    "qwen3": ("Qwen3Config", "Qwen3For"),
    "mistral": ("MistralConfig", "MistralFor"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeFor"),
    "mixtral": ("MixtralConfig", "MixtralFor"),
    "ministral": ("MinistralConfig", "MinistralFor"),
    "phi3": ("Phi3Config", "Phi3For"),
    "smollm3": ("SmolLM3Config", "SmolLM3For"),
    "granite": ("GraniteConfig", "GraniteFor"),
    "olmo2": ("Olmo2Config", "Olmo2For"),
    "glm": ("GlmConfig", "GlmFor"),
    "glm4": ("Glm4Config", "Glm4For"),
    "gemma": ("GemmaConfig", "GemmaFor"),
    "gemma2": ("Gemma2Config", "Gemma2For"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3For"),
    "gpt2": ("GPT2Config", "GPT2For"),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXFor"),
}


# Names of classes, fields and tensors that do not follow the rule.
CLASSES = {
    "GPT2ForCausalLM": "GPT2LMHeadModel",
    # The classifier without "Text" is multimodal.
    "Gemma3ForSequenceClassification": "Gemma3TextForSequenceClassification",
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
STORED_NAMES = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}


def fields(family, values):
    """Return fields of a config.json, given by Llama's names, under the family's names."""
    names = FIELDS.get(family, {})
    return {names.get(name, name): x for name, x in values.items() if names.get(name, name)}


def make(family="llama", task="CausalLM", **changes):
    """Return a float32 model of transformers with all parameters far from their initial values."""
    config_class, model_class = MODELS[family]
    # Not "sdpa", which silently ignores soft caps.
    values = fields(family, SIZES | changes)
    config = getattr(transformers, config_class)(attn_implementation="eager", **values)
    name = model_class + task
    model = getattr(transformers, CLASSES.get(name, name))(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.15, generator=generator)
            if "norm" in name or ".ln_" in name:
                parameter += 1
    return model


def save(folder, *args, **changes):
    """Write the model of `~make` to `~folder` and return it."""
    model = make(*args, **changes)
    model.save_pretrained(folder)
    return model


def reload(folder, dtype="float32", task="CausalLM"):
    """Return the model that transformers loads from a folder."""
    return (
        getattr(transformers, "AutoModelFor" + task)
        .from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        .eval()
    )


def tokens(rows=2, length=24, vocab_size=97):
    return np.random.default_rng(3).integers(3, vocab_size, (rows, length)).astype(np.int32)


def their_logits(model, ids):
    with torch.no_grad():
        return model(torch.from_numpy(np.asarray(ids, np.int64))).logits.float().numpy()


def one_device(architecture, head):
    """Return shardings that put every parameter of a role on the first device."""
    shapes = jax.eval_shape(
        lambda: heads.init_params(Transformer(architecture), jax.random.key(0), head)
    )
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
