"""Small random reward models with their own tokenizers, and their scores by transformers."""

import json
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

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


def deberta(folder: pathlib.Path, **changes) -> pathlib.Path:
    """Write a DeBERTa-v3 with its kind of tokenizer.

    The tokenizer has SentencePiece's unigrams and encodes [CLS] A [SEP] B [SEP].
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    pieces = Tokenizer(models.Unigram())
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    pieces.train_from_iterator(
        TEXTS,
        trainers.UnigramTrainer(
            vocab_size=90,
            special_tokens=["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"],
            unk_token="[UNK]",
            show_progress=False,
        ),
    )
    vocabulary = [tuple(entry) for entry in json.loads(pieces.to_str())["model"]["vocab"]]
    tokenizer = transformers.DebertaV2Tokenizer(vocab=vocabulary, unk_id=3)
    tokenizer.save_pretrained(folder)
    save(
        transformers.DebertaV2ForSequenceClassification(
            transformers.DebertaV2Config(
                **{
                    "vocab_size": len(tokenizer) + 3,
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
                | changes
            )
        ),
        folder,
    )
    return folder


def decoder(folder: pathlib.Path, tokenizer=None, **changes) -> pathlib.Path:
    """Write a Llama with a scalar head, and its own tokenizer or the passed one."""
    from jax_ppo.data.tokenizer import train_tokenizer

    own_tokenizer = tokenizer or train_tokenizer(TEXTS, 120, folder)
    own_tokenizer.save_pretrained(folder)
    save(
        transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(
                **{
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
                | changes
            )
        ),
        folder,
    )
    return folder


def save(model, folder):
    """Write a model after moving every parameter far from its initial value."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2, generator=generator)
            if "norm" in name.lower() and name.endswith("weight"):
                parameter += 1
    model.save_pretrained(folder)


def load(folder):
    """Return the model and tokenizer of transformers."""
    return (
        transformers.AutoModelForSequenceClassification.from_pretrained(
            folder, dtype="float32"
        ).eval(),
        transformers.AutoTokenizer.from_pretrained(folder),
    )


def score(model, **inputs) -> float:
    """Return the score of one input, alone and without padding."""
    with torch.no_grad():
        return float(
            model(**{name: torch.tensor([ids]) for name, ids in inputs.items()}).logits[0, 0]
        )


def pair_score(model, tokenizer, question, answer) -> float:
    """Score a pair as the model cards of OpenAssistant's reward models do, but with lists.

    Without lists an empty answer would be taken for a missing one.
    """
    with torch.no_grad():
        return float(model(**tokenizer([question], [answer], return_tensors="pt")).logits[0, 0])


def assert_close(ours, theirs):
    assert np.std(theirs) > 0.02
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)
