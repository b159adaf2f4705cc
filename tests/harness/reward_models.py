"""Small random reward models with their own tokenizers, and their scores by transformers."""

import collections
import math
import pathlib

import numpy as np
import transformers

import recorded

TEXTS = [
    "Tom has 3 apples. He buys 2 more and gives 1 away.",
    "How many apples does he have now?",
    "Question: Answer:",
    "#### 4",
    "3+2=5\n5-1=4",
    "Ann finds 7 coins and then loses 6. The answer is not 11 but 1.",
    "0123456789 + - = # ?",
] * 4
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_unigrams(folder: pathlib.Path) -> int:
    """Write a tokenizer of DeBERTa-v3's kind, and return its size.

    It has SentencePiece's unigrams and encodes [CLS] A [SEP] B [SEP].
    """
    words = ["\u2581" + word for text in TEXTS for word in text.split()]
    counts = collections.Counter(letter for word in words for letter in (word[:2], *word))
    special = [(piece, 0.0) for piece in ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")]
    pieces = [(piece, math.log(n / counts.total())) for piece, n in sorted(counts.items())]
    tokenizer = transformers.DebertaV2Tokenizer(vocab=special + pieces, unk_id=3)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def deberta(folder: pathlib.Path, **changes) -> pathlib.Path:
    """Write a DeBERTa-v3 with its kind of tokenizer."""
    config = {
        "vocab_size": write_unigrams(folder) + 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "relative_attention": True,
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
        "type_vocab_size": 0,
        "pad_token_id": 0,
        "num_labels": 1,
    }
    name = "DebertaV2ForSequenceClassification"
    recorded.write_checkpoint(folder, name, config | changes, std=0.2)
    return folder


def decoder(folder: pathlib.Path, tokenizer=None, **changes) -> pathlib.Path:
    """Write a Llama with a scalar head, and its own tokenizer or the passed one."""
    from trained_tokenizer import train_tokenizer

    own_tokenizer = tokenizer or train_tokenizer(TEXTS, 120, folder)
    own_tokenizer.save_pretrained(folder)
    config = {
        "vocab_size": 192,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "num_labels": 1,
        "pad_token_id": 0,
    }
    recorded.write_checkpoint(folder, "LlamaForSequenceClassification", config | changes, std=0.2)
    return folder


def load_tokenizer(folder):
    """Return the tokenizer of transformers."""
    return transformers.AutoTokenizer.from_pretrained(folder)


def scores(folder, inputs, position=None) -> list[float]:
    """Return the scores of inputs, each alone and without padding.

    Args:
        folder: folder of the reward model.
        inputs: the arguments of each call: lists of token ids by name.
        position: "last_token" to read the score there although it is a pad token.
    """
    return recorded.value(
        "scores", lambda: live_scores(folder, inputs, position), folder, inputs, position
    )


def live_scores(folder, inputs, position=None):
    """Compute the scores with torch."""
    import torch

    name = "AutoModelForSequenceClassification"
    model = recorded.Checkpoint(folder, name).load()
    if position == "last_token":
        model.config.pad_token_id = None  # it reads the last token of a single input then
    with torch.no_grad():
        return [
            float(model(**{k: torch.tensor([ids]) for k, ids in row.items()}).logits[0, 0])
            for row in inputs
        ]


def pair_inputs(tokenizer, pairs):
    """Return the inputs of pairs as the model cards of OpenAssistant's reward models do.

    They are made with lists: without lists an empty answer would be taken for a missing one.
    """
    encoded = [tokenizer([question], [answer]) for question, answer in pairs]
    return [{name: ids[0] for name, ids in row.items()} for row in encoded]


def assert_close(ours, theirs):
    assert np.std(theirs) > 0.02
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)
