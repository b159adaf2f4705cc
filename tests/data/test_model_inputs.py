"""The inputs of a reward model that has its own tokenizer."""

import logging

import pytest

import reward_models
from jax_ppo.data import tokenizer as tokenizer_lib
from jax_ppo.data.model_inputs import RewardInputEncoder, tokenizers_match
from trained_tokenizer import train_tokenizer

CHAT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many apples?"})


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return reward_models.load_tokenizer(reward_models.deberta(tmp_path_factory.mktemp("deberta")))


@pytest.fixture(scope="module")
def decoder_tokenizer(tmp_path_factory):
    """A decoder's tokenizer with a chat template."""
    tokenizer = train_tokenizer(reward_models.TEXTS, 600, tmp_path_factory.mktemp("own"))
    tokenizer.chat_template = reward_models.CHAT
    return tokenizer


def test_a_pair_is_what_the_tokenizer_makes_of_question_and_answer(encoder):
    ids, cut = RewardInputEncoder(encoder, "pair", 64).encode(
        ["How many apples?", CHAT], ["#### 4", "3+2=5"]
    )
    assert not any(cut)
    assert ids == [
        encoder("How many apples?", "#### 4")["input_ids"],
        encoder("Be brief.\nHow many apples?", "3+2=5")["input_ids"],
    ]
    assert ids[0][0] == encoder.cls_token_id and ids[0].count(encoder.sep_token_id) == 2


def test_a_chat_is_closed_by_the_models_own_template(decoder_tokenizer):
    ids, _ = RewardInputEncoder(decoder_tokenizer, "chat", 200).encode(
        ["Hi", CHAT, (*CHAT[1:], {"role": "assistant", "content": "So "})], ["#### 4", "5", "6"]
    )
    texts = [
        "<user>Hi</s><assistant>#### 4</s>",
        "<system>Be brief.</s><user>How many apples?</s><assistant>5</s>",
        "<user>How many apples?</s><assistant>So 6</s>",
    ]
    assert ids == [decoder_tokenizer.encode(text, add_special_tokens=False) for text in texts]


def test_a_text_goes_on_where_the_prompt_ends(decoder_tokenizer):
    ids, _ = RewardInputEncoder(decoder_tokenizer, "text", 200).encode(
        ["How many apples?", CHAT], [" #### 4", "5"]
    )
    assert ids == [
        decoder_tokenizer.encode("How many apples? #### 4"),
        decoder_tokenizer.encode("Be brief.\nHow many apples?5"),
    ]


@pytest.mark.parametrize("form", ["chat", "pair", "text"])
def test_what_is_too_long_loses_the_start_of_its_prompt(decoder_tokenizer, encoder, form):
    tokenizer, end = encoder if form == "pair" else decoder_tokenizer, "3+2=5"
    prompt = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "apples " * 40 + "How many?"},
    )
    whole = RewardInputEncoder(tokenizer, form, 10_000).encode([prompt], [end])[0][0]
    _, cut = RewardInputEncoder(tokenizer, form, len(whole)).encode([prompt], [end])
    assert cut == [False], "it fits exactly"
    longest = len(whole) // 2
    [short, other], cut = RewardInputEncoder(tokenizer, form, longest).encode(
        [prompt, "Now?"], [end, end]
    )
    assert cut == [True, False] and longest - 8 < len(short) <= longest and len(other) < longest
    text = tokenizer.decode(short, skip_special_tokens=True)
    assert (
        "How many?" in text
        and text.endswith(end if form != "chat" else end + "</s>")
        and "Be brief" not in text
    )
    if form == "chat":  # the message that was first is empty, not missing
        assert text.startswith("<system></s><user>")


@pytest.mark.parametrize("form", ["chat", "pair", "text"])
def test_transformers_does_not_warn_of_inputs_that_are_truncated(
    decoder_tokenizer, encoder, form, monkeypatch, caplog
):
    tokenizer = encoder if form == "pair" else decoder_tokenizer
    monkeypatch.setattr(tokenizer, "model_max_length", 40)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    RewardInputEncoder(tokenizer, form, 40).encode(["How many?" * 40], ["3+2=5"])
    assert caplog.text == ""


def test_without_any_prompt_a_response_loses_its_end(encoder):
    [ids], cut = RewardInputEncoder(encoder, "pair", 20).encode(["How many?"], ["5-1=4 " * 30])
    assert cut == [True] and 16 <= len(ids) <= 20
    assert ids[0] == encoder.cls_token_id and ids[-1] == encoder.sep_token_id
    assert encoder.decode(ids, skip_special_tokens=True).strip().startswith("5-1=4 5-1=4")


def test_what_can_not_be_read_is_refused(encoder):
    with pytest.raises(ValueError, match="its tokenizer has no chat template"):
        RewardInputEncoder(encoder, "chat", 64)
    with pytest.raises(
        ValueError, match="tokens surround an empty prompt and response, and it reads at most 3"
    ):
        RewardInputEncoder(encoder, "pair", 3)


def test_same_tokens_means_same_words_and_no_other_template(decoder_tokenizer, encoder, tmp_path):
    decoder_tokenizer.save_pretrained(tmp_path)
    other = tokenizer_lib.load_tokenizer(str(tmp_path))
    assert tokenizers_match(other, decoder_tokenizer)
    other.chat_template = None
    assert tokenizers_match(other, decoder_tokenizer) and not tokenizers_match(
        decoder_tokenizer, other
    )
    other.chat_template = reward_models.CHAT.replace("</s>", "|")
    assert not tokenizers_match(other, decoder_tokenizer)
    other.chat_template = None
    other.add_tokens(["apples"])
    assert not tokenizers_match(other, decoder_tokenizer) and not tokenizers_match(
        encoder, decoder_tokenizer
    )
