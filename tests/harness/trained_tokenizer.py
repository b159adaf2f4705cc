"""A small tokenizer that is trained on the texts of a test or benchmark."""

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FULL_ALPHABET = 512  # from this vocabulary size on, every byte has a token


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, folder: str | Path
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the texts, in which each digit is a token; save and return it.

    Ids 0, 1, 2 are <pad>, <eos>, <unk>. Text made of bytes that occur in the training texts is
    unchanged by encoding and decoding. Other bytes become <unk>, unless vocab_size is at least
    FULL_ALPHABET. AutoTokenizer loads the same ids from the folder, also next to a Llama's
    config.json (but not next to a Qwen2's, for which transformers replaces the pre-tokenizer).
    """
    special = dict(pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    has_all = vocab_size >= FULL_ALPHABET
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if has_all else list("0123456789"),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() <= vocab_size, "the characters of the texts need more tokens"
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special
    )
    wrapped.save_pretrained(str(folder))
    return wrapped
