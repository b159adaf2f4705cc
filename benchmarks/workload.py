"""The model and prompts shared by every side of a benchmark, as a loadable Hugging Face folder.

The model determines its own response lengths, so no side needs a hook to force them. Channel 0 of
the embedding is large and identical for all tokens, so it survives every layer, and the output
embedding of a token can add a constant to its logit through that channel. EOS gets either the
probability that makes lengths geometric, truncated at the longest, or none, in which case every
response has full length.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

PAD, EOS = 0, 1
VOCABULARY = 4096
# Arguments of `make_model` for each size of model: the default, and SmolLM2-135M's with a separate
# output embedding.
SIZES = {
    "small": {},
    "smollm2": {
        "layers": 30,
        "hidden": 576,
        "vocabulary": 49152,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
    },
}
VERL = {"mean": 307, "longest": 512}  # tokens per response: verl's published run on GSM8K


def eos_chance(mean: float, longest: int) -> float:
    """Return the EOS probability p per token for which min(Geometric(p), longest) has this mean."""
    low, high = 1e-9, 1.0
    for _ in range(100):
        p = math.sqrt(low * high)
        low, high = (p, high) if (1 - (1 - p) ** longest) / p > mean else (low, p)
    return p


def typical_lengths(count: int, mean: int, longest: int) -> list[int]:
    """Return `count` evenly spaced quantiles of that length distribution, in increasing order."""
    p = eos_chance(mean, longest)
    return [
        min(math.ceil(math.log1p(-(i + 0.5) / count) / math.log1p(-p)), longest)
        for i in range(count)
    ]


def config(
    layers: int = 4, hidden: int = 256, vocabulary: int = VOCABULARY, **changes: int
) -> dict:
    """Return config.json of a Qwen2 model with untied embeddings.

    Heads have 64 channels, and two query heads share each key head, except for `changes`.
    """
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": max(1, hidden // 128),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "dtype": "float32",
    } | changes


def make_model(
    folder: Path,
    chance: float = 0.0,
    layers: int = 4,
    hidden: int = 256,
    vocabulary: int = VOCABULARY,
    score: bool = False,
    seed: int = 0,
    **changes: int,
) -> Path:
    """Write config.json, model.safetensors and, in tokenizer/, a tokenizer; return the folder.

    Args:
      folder: Folder to write to.
      chance: Probability of EOS at each token; 0 means that EOS is never drawn.
      layers: Number of layers.
      hidden: Hidden size.
      vocabulary: Vocabulary size.
      score: Replace the output embedding by a scalar head (a one-label
        Qwen2ForSequenceClassification).
      seed: Seed of the random weights.
      changes: Entries of config.json.
    """
    import safetensors.numpy

    folder.mkdir(parents=True, exist_ok=True)
    shape, rng = config(layers, hidden, vocabulary, **changes), np.random.default_rng(seed)
    kv = shape["num_key_value_heads"] * 64

    def normal(*size: int, std: float = 0.02) -> np.ndarray:
        return (std * rng.standard_normal(size)).astype(np.float32)

    embedding = normal(vocabulary, hidden)
    embedding[:, 0] = 1.0
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for i in range(layers):
        at = f"model.layers.{i}."
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            tensors |= {
                f"{at}self_attn.{name}_proj.weight": normal(rows, hidden),
                f"{at}self_attn.{name}_proj.bias": np.zeros(rows, np.float32),
            }
        # Layers add little, so that channel 0 keeps its share of the last norm's input.
        tensors |= {
            f"{at}self_attn.o_proj.weight": normal(hidden, hidden, std=0.002),
            f"{at}mlp.gate_proj.weight": normal(shape["intermediate_size"], hidden),
            f"{at}mlp.up_proj.weight": normal(shape["intermediate_size"], hidden),
            f"{at}mlp.down_proj.weight": normal(hidden, shape["intermediate_size"], std=0.002),
            f"{at}input_layernorm.weight": np.ones(hidden, np.float32),
            f"{at}post_attention_layernorm.weight": np.ones(hidden, np.float32),
        }
    if score:
        shape |= {
            "architectures": ["Qwen2ForSequenceClassification"],
            "num_labels": 1,
            "id2label": {"0": "score"},
            "label2id": {"score": 0},
        }
        tensors["score.weight"] = normal(1, hidden, std=(hidden + 1) ** -0.5)
    else:
        # After the last norm, channel 0 equals sqrt(hidden) times its share of the residual
        # stream's energy.
        output, at_eos = normal(vocabulary, hidden), -60.0
        if chance:
            # The other logits are normal with variance s2: their exponentials average exp(s2 / 2).
            at_eos = math.log(chance / (1 - chance) * (vocabulary - 2)) + hidden * 0.02**2 / 2
        share = math.sqrt(hidden) / math.sqrt(1 + hidden * 0.02**2)
        output[:, 0] = 0.0
        output[PAD, 0], output[EOS] = -60.0 / share, 0.0
        output[EOS, 0] = at_eos / share
        tensors["lm_head.weight"] = output
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape, indent=1))
    write_tokenizer(folder / "tokenizer", vocabulary)
    return folder


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a tokenizer with one word per token: `w2 w3 ...` for the ids 2, 3, ...

    A text of N words has N tokens in every library.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    # A separate folder, because next to a config.json AutoTokenizer picks the architecture's own
    # tokenizer instead.
    folder.mkdir(exist_ok=True)
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "pad_token": "<pad>",
                "eos_token": "<eos>",
                "padding_side": "left",
            }
        )
    )


def prompts(count: int, length: int, vocabulary: int = VOCABULARY, seed: int = 0) -> np.ndarray:
    """Return random prompts without PAD or EOS, int32 [count, length]."""
    return np.random.default_rng(seed).integers(2, vocabulary, (count, length)).astype(np.int32)


def text(tokens: Iterable[int]) -> str:
    """Return the text that the tokenizer maps to these tokens."""
    return " ".join(f"w{token}" for token in tokens)
