import datetime
import json
import shutil

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from jax_ppo.data.prompts import PromptEncoding, tokenize_prompts
from jax_ppo.data.responses import tokenize_responses
from jax_ppo.data.tokenizer import (
    decode_continuation,
    decode_texts,
    decode_tokens,
    encode_prompt,
    encode_responses,
    load_tokenizer,
    opened_thought,
    render_prompt,
    train_tokenizer,
    validate_chat_template,
)
from jax_ppo.demonstration import arithmetic
from jax_ppo.errors import UserError
from jax_ppo.thoughts import MARKS
from jax_ppo.types import Example

CHAT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Tom has 3 apples."},
)
TEMPLATE = (
    "<s>{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_trained_tokenizer_round_trips(trained):
    made, _ = trained
    for prompt, response in arithmetic.generate_worked_solutions(300, 0.5, seed=9):
        assert made.decode(made.encode(prompt + response)) == prompt + response
        assert made.encode(prompt) + made.encode(response) == made.encode(prompt + response)


def test_trained_tokenizer_keeps_spaces_before_punctuation(trained, tmp_path):
    made, _ = trained
    made.save_pretrained(tmp_path)
    for tokenizer in (made, load_tokenizer(str(tmp_path))):
        assert tokenizer.decode(tokenizer.encode("1 . 2 ?")) == "1 . 2 ?"


def test_trained_tokenizer_splits_digits_and_keeps_responses_short(trained):
    made, _ = trained
    assert made.convert_ids_to_tokens(made.encode("109")) == ["1", "0", "9"]
    lengths = {
        len(made.encode(arithmetic.generate_problem(i, "train").worked_solution))
        for i in range(300)
    }
    assert lengths == {15}
    assert [made.convert_tokens_to_ids(t) for t in ("<pad>", "<eos>", "<unk>")] == [0, 1, 2]
    assert (made.pad_token_id, made.eos_token_id) == (0, 1)
    assert len(made) <= 256


@pytest.mark.parametrize("model_type", [None, "llama"])
def test_trained_tokenizer_is_the_same_when_loaded(trained, tmp_path, model_type):
    made, folder = trained
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    if model_type:
        (tmp_path / "config.json").write_text(
            json.dumps({"model_type": model_type, "vocab_size": len(made)})
        )
    for loaded in (load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)):
        for index in range(100):
            text = arithmetic.generate_problem(index, "heldout").prompt
            assert loaded.encode(text) == made.encode(text)
        assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 1)


def test_a_large_vocabulary_holds_every_byte(tmp_path):
    made = train_tokenizer(["one two three"], 512, tmp_path)
    text = "Ünïcødé ☃ 10 \x00\n\t"
    assert made.decode(made.encode(text)) == text


def test_a_small_vocabulary_says_what_it_does_not_know(trained):
    made, _ = trained
    assert made.unk_token_id in made.encode("☃")


def test_a_vocabulary_too_small_for_the_characters_is_refused(tmp_path):
    with pytest.raises(UserError, match="vocab_size=32: .* need 39 tokens"):
        train_tokenizer(["abcdefghijklmnopqrstuvwxyz"], 32, tmp_path)


def test_tinystories_prompt_begins_with_bos(real_data):
    loaded = load_tokenizer(str(real_data("tinystories-260k")))
    ids = encode_prompt(loaded, "Once upon a time, there was a little girl named Lily.")
    assert ids == [1, 403, 407, 261, 378, 432, 383, 286, 261, 376, 298, 315, 421, 395, 317, 426]


@pytest.fixture
def with_specials(tmp_path):
    """Return a tokenizer that puts <s> before and <eos> after a text.

    Its chat template writes <s> as well.
    """
    from tokenizers import processors

    made = train_tokenizer(
        ["[system] [user] [assistant] Be brief. Tom has 3 apples.\n"], 512, tmp_path
    )
    made.add_special_tokens({"bos_token": "<s>"})
    bos, eos = made.bos_token_id, made.eos_token_id
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <eos>", special_tokens=[("<s>", bos), ("<eos>", eos)]
    )
    made.chat_template = TEMPLATE
    assert made.encode("Tom") == [bos, *made.encode("Tom", add_special_tokens=False), eos]
    return made


def test_a_prompt_has_the_tokenizers_bos_but_no_eos(with_specials):
    made = with_specials
    assert encode_prompt(made, "Tom") == [
        made.bos_token_id,
        *made.encode("Tom", add_special_tokens=False),
    ]
    assert encode_prompt(made, CHAT, chat_template=False) == encode_prompt(
        made, "Be brief.\nTom has 3 apples."
    )


def test_a_chat_template_writes_bos_once(with_specials):
    made = with_specials
    ids = encode_prompt(made, CHAT)
    assert ids.count(made.bos_token_id) == 1
    assert made.decode(ids) == "<s>[system] Be brief.\n[user] Tom has 3 apples.\n[assistant]"
    assert encode_prompt(made, "Tom")[1:] == made.encode("Tom", add_special_tokens=False), (
        "text is no chat"
    )


def chat_ml(made, end="<|im_end|>\n", opening=""):
    """Give a tokenizer a template like Qwen's, whose turns do not end in the tokenizer's EOS."""
    made.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    made.chat_template = (
        "{% if tools %}{{ tools[0].name }}: {% endif %}"
        "{% for m in messages %}[{{ m.role }}]"
        "{% if m.role == 'assistant' and brief %} Briefly:{% endif %} {{ m.content }}"
        + end
        + "{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% if brief %} Briefly:{% endif %}"
        + opening
        + "{% endif %}"
    )
    return made


ASKED = ({"role": "user", "content": "Tom"},)


def test_a_chat_that_ends_with_the_assistant_is_continued(with_specials):
    """Regression: its turn was closed, and another one opened."""
    made = chat_ml(with_specials)
    begun = (*ASKED, {"role": "assistant", "content": "<think>\nThree and\n"})
    text = "[user] Tom<|im_end|>\n[assistant] <think>\nThree and\n"
    assert render_prompt(made, begun, True) == (text, False)
    assert render_prompt(made, begun, False) == ("Tom\n<think>\nThree and\n", True)
    assert made.decode(encode_responses(made, begun, ["two"])[0]) == "two<|im_end|>"
    empty = (*ASKED, {"role": "assistant", "content": ""})
    assert render_prompt(made, empty, True) == render_prompt(made, ASKED, True)


@pytest.mark.parametrize(
    ("opening", "brief", "trained"),
    [
        ("", False, " has 3<|im_end|>"),
        ("", True, " has 3<|im_end|>"),
        ("<t>", True, "has 3<|im_end|>"),
    ],
)
def test_a_trained_turn_is_what_the_template_renders(with_specials, opening, brief, trained):
    """Regression: the tokenizer's EOS ended it, and no blank was before it."""
    made = chat_ml(with_specials, opening=opening)
    (ids,) = encode_responses(made, ASKED, ["has 3"], {"brief": brief})
    assert made.decode(ids) == trained
    assert made.decode(encode_prompt(made, ASKED, {"brief": brief})).endswith(
        "[assistant]" + " Briefly:" * brief + opening
    )


@pytest.mark.parametrize("opening", ["", "<think>\n"])
@pytest.mark.parametrize("content", ["m.content.split('</think>')[-1]", "m.content"])
def test_a_thought_is_trained_once_whatever_the_template_keeps_of_it(
    with_specials, opening, content
):
    """Regression: templates like R1's dropped it, and one that opens it had it opened twice."""
    made = chat_ml(with_specials, opening=opening)
    made.chat_template = made.chat_template.replace("m.content", content)
    for thought in ("<think>\n3 or 4</think> 3", "<think>3 or 4</think>3"):
        (ids,) = encode_responses(made, ASKED, [thought])
        prompt = made.decode(encode_prompt(made, ASKED))
        trained = f"{prompt}{made.decode(ids)}"
        assert trained.count("<think>") == 1 and trained.endswith("3<|im_end|>")
        assert "3 or 4</think>" in trained


def test_responses_end_where_an_exported_model_stops(with_specials):
    made = chat_ml(with_specials)
    rows = [Example(ASKED, "x", response="has"), Example("Tom", "x", response=" has")]
    dataset = tokenize_responses(
        rows, made, ("response",), PromptEncoding(max_prompt_length=64), max_response_length=64
    )
    assert dataset.end_ids == (made.eos_token_id, made.convert_tokens_to_ids("<|im_end|>"))


def test_a_template_without_an_end_leaves_the_eos(with_specials):
    made = chat_ml(with_specials, end="")
    assert made.decode(encode_responses(made, ASKED, ["has 3"])[0]) == " has 3<eos>"
    made.chat_template = None
    assert made.decode(encode_responses(made, ASKED, ["has"])[0]) == "has<eos>"


def test_tools_and_variables_reach_the_template(with_specials):
    made = chat_ml(with_specials)
    text, _ = render_prompt(made, ASKED, {"brief": True}, ({"name": "add"},))
    assert text == "add: [user] Tom<|im_end|>\n[assistant] Briefly:"
    validate_chat_template(made, {"brief": True})
    for wrong in ({"breif": True}, {"add_generation_prompt": False}, {"m": 1}):
        with pytest.raises(UserError, match=r"has no variable .*; it reads brief\."):
            validate_chat_template(made, wrong)
    made.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        validate_chat_template(made, {"brief": True})


def test_tools_that_no_template_reads_are_named_once(with_specials, caplog):
    rows = [Example(prompt, "x", tools=({"name": "add"},)) for prompt in (ASKED, ASKED, "text")]
    for made, ignored in ((chat_ml(with_specials), 1), (with_specials, 3)):
        caplog.clear()
        if ignored == 3:
            made.chat_template = TEMPLATE
        tokenize_prompts(rows, made, PromptEncoding(max_prompt_length=64))
        assert f"ignored the tools of {ignored} prompts" in caplog.text


def test_roles_that_no_template_writes_are_named_once(with_specials, caplog):
    """Regression: a system prompt and a question were silently one text."""
    alone = ({"role": "user", "content": "Tom"},)
    chat = ({"role": "system", "content": "Ann"}, *alone)
    rows = [Example(prompt, "x") for prompt in (chat, chat, alone, "text")]
    for template, chat_template, count in ((None, True, 1), (None, False, 0), (TEMPLATE, True, 0)):
        caplog.clear()
        with_specials.chat_template = template
        encoding = PromptEncoding(max_prompt_length=64, chat_template=chat_template)
        tokenize_prompts(rows, with_specials, encoding)
        assert caplog.text.count("the messages of 2 chats are joined") == count


def test_a_message_that_the_template_leaves_out_is_refused(with_specials):
    """As Qwen's templates do with the role of developers."""
    with_specials.chat_template = (
        "{% for m in messages if m.role != 'developer' %}[{{ m.role }}] {{ m.content|trim }}"
        "{% endfor %}[assistant]"
    )
    user = {"role": "user", "content": " Tom\n"}
    tokenize_prompts([Example((user,), "x")], with_specials, PromptEncoding(max_prompt_length=64))
    rows = [Example(({"role": "developer", "content": "Be brief."}, user), "x")]
    with pytest.raises(UserError, match="example 1: the chat template leaves out .*'developer'"):
        tokenize_prompts(rows, with_specials, PromptEncoding(max_prompt_length=64))
    tokenize_prompts(rows, with_specials, PromptEncoding(64, chat_template=False))
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    rows = [Example((user, called, {"role": "tool", "content": "4"}), "x")]
    with pytest.raises(UserError, match=r"leaves out .*'assistant', \['add'\]"):
        tokenize_prompts(rows, with_specials, PromptEncoding(max_prompt_length=64))
    with_specials.chat_template = "{{ messages[1].tool_calls }}" + with_specials.chat_template
    tokenize_prompts(rows, with_specials, PromptEncoding(max_prompt_length=64))


def test_a_named_bos_is_not_added_where_the_tokenizer_adds_none(trained):
    """GPT-2 and Qwen2 name tokens that their models never saw at the beginning of a text."""
    made, folder = trained
    loaded = AutoTokenizer.from_pretrained(folder, bos_token="<eos>")
    assert loaded.bos_token_id == 1
    assert encode_prompt(loaded, "Tom has 3 apples") == made.encode("Tom has 3 apples")


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


def test_no_path():
    with pytest.raises(UserError, match="config.model.tokenizer_path='': must be set"):
        load_tokenizer("")


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
    return PreTrainedTokenizerFast(tokenizer_object=pieces)


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


def test_texts_keep_the_marks_of_thoughts_though_they_are_special_tokens(with_specials):
    """Regression: rules read an answer in Magistral's thought, whose marks were dropped."""
    made = with_specials
    made.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]", "<|im_end|>"]})
    ids = made.encode("[THINK]Tom[/THINK]has 3<|im_end|>", add_special_tokens=False)
    assert decode_texts(made, [ids, ids[:1]]) == ["[THINK]Tom[/THINK]has 3", "[THINK]"]
    assert decode_continuation(made, made.bos_token_id, ids) == "[THINK]Tom[/THINK]has 3"


@pytest.mark.parametrize("mark", ["<think>", "[THINK]"])
def test_a_prompt_opens_a_thought_by_its_template_or_its_last_message(with_specials, mark):
    made = chat_ml(with_specials, opening=f" {mark}\n")
    made.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "[THINK]", "[/THINK]"]})

    def opened(prompt, chat_template=True):
        return opened_thought(made, prompt, encode_prompt(made, prompt, chat_template))

    assert opened(ASKED) == mark
    assert opened(ASKED, False) == ""
    assert opened(f"Tom {mark}") == mark
    begun = {"role": "assistant", "content": f"{mark}Three and"}
    assert opened((*ASKED, begun)) == mark
    assert opened((*ASKED, begun | {"content": f"{begun['content']}{MARKS[mark]}"})) == ""
    assert opened(({"role": "user", "content": f"Begin with {mark}"},), False) == mark


def test_a_template_writes_the_date_that_a_run_keeps(with_specials, tmp_path):
    """Regression: a run that was resumed on another day trained on other prompts."""
    made = with_specials
    made.chat_template = (
        "\n{% macro day() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}"
        "{% if strftime_now is defined %}{{ day() }}{% endif %} {{ messages[0].content }}"
    )
    made.save_pretrained(tmp_path)
    kept = load_tokenizer(str(tmp_path), date="2026-02-03")
    assert render_prompt(kept, ASKED, True) == ("\n03 Feb 2026 Tom", False)
    validate_chat_template(kept, True)
    today = render_prompt(load_tokenizer(str(tmp_path)), ASKED, True)[0]
    assert today == f"\n{datetime.date.today():%d %b %Y} Tom"
