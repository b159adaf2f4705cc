"""Very long prompts and responses are dropped by their beginning, where that is certain."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jax_ppo.data import responses
from jax_ppo.data import tokenizer as tokenizer_lib
from jax_ppo.data.tokenize_prompts import PromptEncoding, tokenize_prompts
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


@pytest.mark.parametrize("characters", [300_000, 10_000_000])
def test_a_huge_prompt_is_dropped_by_its_beginning(trained, monkeypatch, characters):
    """Regression: 10 MB occupied the tokenizer for half a minute before they were dropped."""
    tokenizer, _ = trained
    encoded = count_encoded(monkeypatch, tokenizer)
    examples = [Example("Tom has 1." * (characters // 10), "x"), Example("Tom has 1.", "x")]
    data = tokenize_prompts(examples, tokenizer, PromptEncoding(max_prompt_length=32))
    assert data.examples == (examples[1],) and encoded == [100_000 + 16 * 32, 10]
    with pytest.raises(UserError, match="example 1: the prompt has more than 32 tokens"):
        tokenize_prompts(
            examples, tokenizer, PromptEncoding(max_prompt_length=32, filter_overlong_prompts=False)
        )


def test_a_huge_response_is_dropped_by_its_beginning(trained, monkeypatch):
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
    assert data.prompts.examples == (examples[1],) and max(encoded) == 100_000 + 16 * 8


def test_truncation_needs_the_tokens(trained, monkeypatch):
    monkeypatch.setattr(tokenizer_lib, "LONG_TEXT", 1)
    data = tokenize_prompts(
        [Example("Tom has 1." * 1000, "x")],
        trained[0],
        PromptEncoding(max_prompt_length=4, filter_overlong_prompts=False, truncation="left"),
    )
    assert len(data.tokens[0]) == 4


@pytest.mark.parametrize("name", ["trained", "tinystories"])
def test_only_a_text_with_more_tokens_certainly_has_more(name, trained, real_data, monkeypatch):
    monkeypatch.setattr(tokenizer_lib, "LONG_TEXT", 1)
    tokenizer = trained[0]
    if name == "tinystories":
        tokenizer = PreTrainedTokenizerFast.from_pretrained(real_data("tinystories-260k"))
    longest_token = max(tokenizer.get_vocab(), key=len)
    texts = ["Tom has 3 apples." * 9, longest_token * 50, " " * 500, "\u2603" * 300, "e\u0301" * 99]
    for text in texts:
        tokens = len(tokenizer.encode(text))
        assert not tokenizer_lib.certainly_exceeds(tokenizer, text, tokens)


def test_blanks_that_an_added_token_absorbs_exceed_nothing(trained, monkeypatch):
    monkeypatch.setattr(tokenizer_lib, "LONG_TEXT", 100)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(trained[1])
    text = " " * 2000 + "<mask>"
    assert tokenizer_lib.certainly_exceeds(tokenizer, text, 8)
    tokenizer.add_tokens(AddedToken("<mask>", lstrip=True))  # like RoBERTa's
    assert len(tokenizer.encode(text)) == 1
    assert not tokenizer_lib.certainly_exceeds(tokenizer, text, 8)


def test_a_tokenizer_that_fails_at_a_beginning_is_reported_with_the_row(trained, monkeypatch):
    def fail(self, text, **options):
        raise ValueError("no such character")

    monkeypatch.setattr(type(trained[0]), "encode", fail)
    expected = "^config.data.train_files, example 1: the prompt cannot be encoded: no such char"
    with pytest.raises(UserError, match=expected):
        tokenize_prompts([Example("x" * 2_000_000, "x")], trained[0], PromptEncoding(32))


def test_a_word_that_is_one_unknown_token_exceeds_nothing():
    """Letters beyond the beginning make it unknown; the beginning alone would have many tokens."""
    letters = {"[UNK]": 0, "x": 1, "##x": 2}
    word_piece = Tokenizer(models.WordPiece(letters, unk_token="[UNK]"))
    word_piece.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_piece)
    assert not tokenizer_lib.certainly_exceeds(tokenizer, "x" * 2_000_000, 8)
    assert tokenizer_lib.certainly_exceeds(tokenizer, "x x " * 2_000_000, 8)
