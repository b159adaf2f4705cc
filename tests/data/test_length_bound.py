"""Prompts of megabytes are dropped without encoding them, but only where that is certain."""

import json

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jax_ppo.data import length_bound, responses
from jax_ppo.data.length_bound import LengthBound
from jax_ppo.data.prompts import PromptEncoding, tokenize_prompts
from jax_ppo.errors import UserError
from jax_ppo.types import Example


def count_encoded(monkeypatch, tokenizer):
    """Return a list that receives the number of characters of each text that is encoded."""
    lengths = []
    encode = type(tokenizer).encode

    def counted(self, text, **options):
        lengths.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(type(tokenizer), "encode", counted)
    return lengths


def test_a_huge_prompt_is_dropped_without_encoding_it(trained, monkeypatch):
    """Regression: 10 MB occupied the tokenizer for half a minute before they were dropped."""
    tokenizer, _ = trained
    encoded = count_encoded(monkeypatch, tokenizer)
    examples = [Example("Tom has 1." * 1_000_000, "x"), Example("Tom has 1.", "x")]
    data = tokenize_prompts(examples, tokenizer, PromptEncoding(max_prompt_length=32))
    assert data.examples == (examples[1],) and encoded == [10]
    with pytest.raises(UserError, match="example 1: the prompt has more than 32 tokens"):
        tokenize_prompts(
            examples, tokenizer, PromptEncoding(max_prompt_length=32, filter_overlong_prompts=False)
        )


def test_a_huge_response_is_dropped_without_encoding_it(trained, monkeypatch):
    tokenizer, _ = trained
    encoded = count_encoded(monkeypatch, tokenizer)
    examples = [Example("Tom", "x", response=" 1" * 5_000_000), Example("Ann", "x", response=" 1")]
    data = responses.tokenize_responses(
        examples,
        tokenizer,
        responses.DEMONSTRATION_FIELDS,
        PromptEncoding(max_prompt_length=8),
        max_response_length=8,
    )
    assert data.prompts.examples == (examples[1],) and max(encoded) < 10


def test_truncation_needs_the_tokens(trained, monkeypatch):
    monkeypatch.setattr(length_bound, "LONG_TEXT", 1)
    data = tokenize_prompts(
        [Example("Tom has 1." * 1000, "x")],
        trained[0],
        PromptEncoding(max_prompt_length=4, filter_overlong_prompts=False, truncation="left"),
    )
    assert len(data.tokens[0]) == 4


@pytest.mark.parametrize("name", ["trained", "tinystories"])
def test_the_bound_is_never_above_the_number_of_tokens(name, trained, real_data, monkeypatch):
    monkeypatch.setattr(length_bound, "LONG_TEXT", 1)
    tokenizer = trained[0]
    if name == "tinystories":
        tokenizer = PreTrainedTokenizerFast.from_pretrained(real_data("tinystories-260k"))
    bound = LengthBound(tokenizer)
    longest_token = max(tokenizer.get_vocab(), key=len)
    texts = ["Tom has 3 apples." * 9, longest_token * 50, " " * 500, "\u2603" * 300, "e\u0301" * 99]
    for text in texts:
        tokens = len(tokenizer.encode(text))
        assert not bound.certainly_exceeds(text, tokens)
        assert bound.certainly_exceeds(text * 1000, tokens)


def byte_pairs(**options):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {"<unk>": 0} | {letter: i for i, letter in enumerate(sorted(alphabet), 1)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], **options))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def exceeds(tokenizer, **options):
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
    return LengthBound(wrapped).certainly_exceeds("x" * 1_000_000, 8)


def test_there_is_no_bound_where_a_tokenizer_drops_or_merges_characters():
    assert exceeds(byte_pairs())
    composing = byte_pairs()
    composing.normalizer = normalizers.Sequence([normalizers.NFC()])
    assert exceeds(composing)
    # "<unk>" has 5 characters, and NFC makes one of up to 4.
    assert json.loads(composing.to_str())["normalizer"]["normalizers"] == [{"type": "NFC"}]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=composing)
    assert LengthBound(wrapped)._characters_per_token == 20

    stripping = byte_pairs()
    stripping.normalizer = normalizers.Strip()
    splitting = byte_pairs()
    splitting.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel()]
    )
    word_piece = Tokenizer(models.WordPiece({"[UNK]": 0, "x": 1}, unk_token="[UNK]"))
    fused = Tokenizer(models.BPE({"<unk>": 0}, [], unk_token="<unk>", fuse_unk=True))
    dropped = Tokenizer(models.BPE({"a": 0}, []))
    for tokenizer in (stripping, splitting, word_piece, fused, dropped):
        assert not exceeds(tokenizer)
