"""The bytes of tokens, compared with what tokenizers decode."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from jax_ppo.config.schema import RolloutOptions
from jax_ppo.data.token_bytes import token_bytes
from jax_ppo.data.tokenizer import load_tokenizer, train_tokenizer
from jax_ppo.demonstration import arithmetic
from jax_ppo.errors import UserError
from jax_ppo.ppo.rollout_engine import make_stop_search

TEXT = "Ana has 3 apples.\n\n  She buys 12 \u00e9clairs."


def test_a_byte_level_vocabulary(tmp_path):
    texts = [text for pair in arithmetic.generate_worked_solutions(50, 0.5, 0) for text in pair]
    tokenizer = train_tokenizer(texts, 600, tmp_path)
    contents = token_bytes(tokenizer, "config.rollout.stop")
    ids = tokenizer.encode(TEXT)
    assert b"".join(contents[index] for index in ids).decode() == TEXT
    assert contents[tokenizer.eos_token_id] == b""


def test_a_sentence_piece_vocabulary(real_data):
    tokenizer = load_tokenizer(str(real_data("tinystories-260k")))
    contents = token_bytes(tokenizer, "config.rollout.stop")
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(contents[index] for index in ids).decode().lstrip(" ") == TEXT
    assert b"\n" in contents


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.BPEDecoder(), None])
def test_another_vocabulary_is_refused(decoder):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    if decoder is not None:
        tokenizer.decoder = decoder
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    options = RolloutOptions(stop="b")
    message = r"^config\.rollout\.stop=\('b',\): strings cannot be searched for"
    with pytest.raises(UserError, match=message):
        make_stop_search(options, wrapped, vocab_size=3)


def test_marks_of_thoughts_have_bytes_as_they_have_text(tmp_path):
    tokenizer = train_tokenizer([TEXT], 512, tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[/THINK]", "<|im_end|>"]})
    contents = token_bytes(tokenizer, "config.rollout.stop")
    ids = tokenizer.convert_tokens_to_ids(["[/THINK]", "<|im_end|>"])
    assert [contents[index] for index in ids] == [b"[/THINK]", b""]
