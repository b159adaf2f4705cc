import json
import shutil

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from jax_ppo.config.schema import RolloutOptions
from jax_ppo.data.tokenizer import (
    decode_continuation,
    decode_texts,
    decode_tokens,
    load_tokenizer,
    token_bytes,
)
from jax_ppo.demonstration import arithmetic
from jax_ppo.errors import UserError
from jax_ppo.ppo.step_parts import make_stop_search
from real_data import DATA, needs
from trained_tokenizer import train_tokenizer
from worked_solutions import generate_worked_solutions


@pytest.mark.parametrize("model_type", [None, "llama"])
def test_a_tokenizer_is_the_same_when_loaded(trained, tmp_path, model_type):
    made, folder = trained
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    if model_type:
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": model_type, "vocab_size": len(made)})
        )
    loaded = load_tokenizer(str(tmp_path))
    for index in range(100):
        text = arithmetic.generate_problem(index, "heldout").prompt
        assert loaded.encode(text) == made.encode(text)
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)


def test_a_folder_that_is_missing(tmp_path):
    (tmp_path / "tiny-model").mkdir()
    with pytest.raises(UserError) as error:
        load_tokenizer(f"{tmp_path}/tiny-modle", option="config.model.path")
    assert str(error.value).startswith(
        f"config.model.path='{tmp_path}/tiny-modle': there is no such folder"
    )
    assert str(error.value).endswith("Did you mean 'tiny-model'?")


def test_a_folder_without_a_tokenizer(tmp_path):
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(UserError, match="which holds model.safetensors. Expected tokenizer.json"):
        load_tokenizer(str(tmp_path))


def test_code_of_a_repository_is_not_run(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["mine.Mine", None]}, "tokenizer_class": "Mine"})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine"}))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n")
    with pytest.raises(UserError, match="no Python code"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def make_byte_level_tokenizer():
    """Return one whose tokens are single bytes, as GPT-2's are of rare characters."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pieces = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=pieces)


def make_sentencepiece_tokenizer():
    """Return one like Llama 2's: blanks begin tokens, unknown characters are bytes."""
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "▁is", *"abis"]
    pieces = tokenizers.Tokenizer(
        tokenizers.models.Unigram(
            [(piece, -1.0 - (len(piece) == 1)) for piece in vocabulary],
            unk_id=0,
            byte_fallback=True,
        )
    )
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    pieces.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=pieces, unk_token="<unk>")


BYTE_LEVEL, SENTENCEPIECE = make_byte_level_tokenizer(), make_sentencepiece_tokenizer()


@pytest.mark.parametrize("made", [BYTE_LEVEL, SENTENCEPIECE], ids=["bytes", "sentencepiece"])
@given(text=st.text(alphabet="ab is½…猫\U0001f408\n", min_size=1))
def test_the_texts_of_tokens_are_the_text_of_a_response_in_parts(made, text):
    before, *ids = made.encode("a" + text)
    if made is SENTENCEPIECE:
        before, *ids = made.encode("a a" + text)
    texts = decode_tokens(made, before, ids)
    whole = made.decode([before, *ids])
    assert "".join(texts) == whole[len(made.decode([before])) :]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(texts) and len(texts) == len(ids)


def test_a_token_keeps_its_blank_and_a_character_of_several_tokens_is_whole():
    before, *ids = SENTENCEPIECE.encode("a is a")
    assert decode_tokens(SENTENCEPIECE, before, ids) == [" is", " a"]
    before, *ids = BYTE_LEVEL.encode("a猫b")
    assert decode_tokens(BYTE_LEVEL, before, ids) == ["", "", "猫", "b"]
    # Bytes that are no character, as an untrained model draws them, are shown where they end.
    texts = decode_tokens(BYTE_LEVEL, before, [ids[0]] * 20)
    assert len(texts) == 20 and "".join(texts).count("\N{REPLACEMENT CHARACTER}") == 20


def test_a_response_keeps_the_blank_before_its_first_word():
    """The tokenizer drops a blank at the beginning of a text, as Llama 2's does."""
    before, *ids = SENTENCEPIECE.encode("a is a")
    assert SENTENCEPIECE.decode(ids) == "is a"
    assert decode_continuation(SENTENCEPIECE, before, ids) == " is a"
    # After a special token a text begins.
    assert decode_continuation(SENTENCEPIECE, SENTENCEPIECE.unk_token_id, ids) == "is a"


def test_texts_keep_the_marks_of_thoughts_though_they_are_special_tokens(with_specials):
    """Regression: rules read an answer in Magistral's thought, whose marks were dropped."""
    made = with_specials
    made.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]", "<|im_end|>"]})
    ids = made.encode("[THINK]Tom[/THINK]has 3<|im_end|>", add_special_tokens=False)
    assert decode_texts(made, [ids, ids[:1]]) == ["[THINK]Tom[/THINK]has 3", "[THINK]"]
    assert decode_continuation(made, made.bos_token_id, ids) == "[THINK]Tom[/THINK]has 3"


TEXT = "Ana has 3 apples.\n\n  She buys 12 \u00e9clairs."


def test_a_byte_level_vocabulary(tmp_path):
    texts = [text for pair in generate_worked_solutions(50, 0.5, 0) for text in pair]
    tokenizer = train_tokenizer(texts, 600, tmp_path)
    contents = token_bytes(tokenizer, "config.rollout.stop", ())
    ids = tokenizer.encode(TEXT)
    assert b"".join(contents[index] for index in ids).decode() == TEXT
    assert contents[tokenizer.eos_token_id] == b""


@needs("tinystories-260k")
def test_a_sentence_piece_vocabulary():
    tokenizer = load_tokenizer(str(DATA / "tinystories-260k"))
    contents = token_bytes(tokenizer, "config.rollout.stop", ())
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(contents[index] for index in ids).decode().lstrip(" ") == TEXT
    assert b"\n" in contents


@pytest.mark.parametrize(
    "decoder", [tokenizers.decoders.WordPiece(), tokenizers.decoders.BPEDecoder(), None]
)
def test_another_vocabulary_is_refused(decoder):
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>")
    )
    if decoder is not None:
        tokenizer.decoder = decoder
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    options = RolloutOptions(stop="b")
    message = r"^config\.rollout\.stop=\('b',\): strings cannot be searched for"
    with pytest.raises(UserError, match=message):
        make_stop_search(options, wrapped, vocab_size=3)


def test_marks_of_thoughts_and_special_tokens_in_the_string_have_bytes(tmp_path):
    """Regression: `rollout.stop=<|im_end|>` ended no response."""
    tokenizer = train_tokenizer([TEXT], 512, tmp_path)
    names = ["[/THINK]", "<|im_end|>", "<|end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    contents = token_bytes(tokenizer, "config.rollout.stop", ["<|im_end|>\n"])
    ids = tokenizer.convert_tokens_to_ids(names)
    assert [contents[index] for index in ids] == [b"[/THINK]", b"<|im_end|>", b""]
