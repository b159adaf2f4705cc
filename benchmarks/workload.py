"""The model and the prompts that every side of a benchmark is given: a Hugging Face folder that any of them loads.

The model decides its own lengths, so that no side needs a hook to force them. Channel 0 of the embedding is large and the same
for all tokens, so it survives every layer, and the output embedding of a token may put a constant on its logit through it.
EOS gets the chance that makes lengths geometric, cut off at the longest; or none, and then every response is the longest.
"""

import json
import math
from pathlib import Path

import numpy as np

PAD, EOS = 0, 1
VOCABULARY = 4096
VERL = {"mean": 307, "longest": 512}  # tokens a response: verl's published run on GSM8K


def eos_chance(mean: float, longest: int) -> float:
    """The chance p of EOS at each token with which lengths min(Geometric(p), longest) have this mean."""
    low, high = 1e-9, 1.0
    for _ in range(100):
        p = math.sqrt(low * high)
        low, high = (p, high) if (1 - (1 - p) ** longest) / p > mean else (low, p)
    return p


def typical_lengths(count: int, mean: int, longest: int) -> list[int]:
    """So many lengths spread evenly over that distribution: its quantiles, the shortest first."""
    p = eos_chance(mean, longest)
    return [
        min(math.ceil(math.log1p(-(i + 0.5) / count) / math.log1p(-p)), longest)
        for i in range(count)
    ]


def config(layers: int = 4, hidden: int = 256, vocabulary: int = VOCABULARY) -> dict:
    """config.json of a Qwen2 with heads of 64, two to a key, and an output embedding of its own."""
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
    }


def make_model(
    folder: Path,
    chance: float = 0.0,
    layers: int = 4,
    hidden: int = 256,
    vocabulary: int = VOCABULARY,
    score: bool = False,
    seed: int = 0,
) -> Path:
    """Writes config.json, model.safetensors and, in tokenizer/, a tokenizer.

    Args:
      chance: of EOS at each token; 0: never.
      score: with a scalar head (a Qwen2ForSequenceClassification of one label) in the output embedding's place.
    """
    import safetensors.numpy

    folder.mkdir(parents=True, exist_ok=True)
    shape, rng = config(layers, hidden, vocabulary), np.random.default_rng(seed)
    kv = shape["num_key_value_heads"] * 64

    def normal(*size, std=0.02):
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
        # What layers add is small, so that channel 0 keeps its share of what the last norm sees.
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
        # After the last norm channel 0 is sqrt(hidden) times its share of the residual stream's energy.
        output, at_eos = normal(vocabulary, hidden), -60.0
        if chance:
            # The other logits are normal with variance s2; the mean of their exponentials is exp(s2 / 2).
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
    """One word a token, `w2 w3 ...` for the ids 2, 3, ...: a text of N words is N tokens, whoever tokenises it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    # In a folder of its own: beside a config.json, AutoTokenizer takes the architecture's own tokenizer instead.
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
    """Random prompts; int32 [count, length], no PAD and no EOS."""
    return np.random.default_rng(seed).integers(2, vocabulary, (count, length)).astype(np.int32)


def text(tokens) -> str:
    """What the tokenizer reads as these tokens."""
    return " ".join(f"w{token}" for token in tokens)
