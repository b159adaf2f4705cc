import datetime

import pytest
from transformers import AutoTokenizer

from jax_ppo.data.chat_templates import (
    encode_prompt,
    encode_responses,
    opened_thought,
    render_prompt,
    validate_chat_template,
)
from jax_ppo.data.responses import tokenize_responses
from jax_ppo.data.tokenize_prompts import PromptEncoding, tokenize_prompts
from jax_ppo.data.tokenizer import load_tokenizer
from jax_ppo.errors import UserError
from jax_ppo.thoughts import MARKS
from jax_ppo.types import Example

CHAT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Tom has 3 apples."},
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
    ids, ended = encode_responses(made, ASKED, ["has 3", "has 3<|im_end|>"], {"brief": brief})
    assert made.decode(ids) == trained and ended == ids
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
    without = with_specials.chat_template
    made = chat_ml(with_specials)
    for template, ignored in ((made.chat_template, 1), (without, 3)):
        caplog.clear()
        made.chat_template = template
        tokenize_prompts(rows, made, PromptEncoding(max_prompt_length=64))
        assert f"ignored the tools of {ignored} prompts" in caplog.text


def test_roles_that_no_template_writes_are_named_once(with_specials, caplog):
    """Regression: a system prompt and a question were silently one text."""
    alone = ({"role": "user", "content": "Tom"},)
    chat = ({"role": "system", "content": "Ann"}, *alone)
    rows = [Example(prompt, "x") for prompt in (chat, chat, alone, "text")]
    made = with_specials.chat_template
    for template, chat_template, count in ((None, True, 1), (None, False, 0), (made, True, 0)):
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
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": 7}}]}
    rows = [Example((user, called, {"role": "tool", "content": "4"}), "x")]
    with pytest.raises(UserError, match=r"leaves out .*'assistant', \['7'\]"):
        tokenize_prompts(rows, with_specials, PromptEncoding(max_prompt_length=64))
    with_specials.chat_template = "{{ messages[1].tool_calls }}" + with_specials.chat_template
    tokenize_prompts(rows, with_specials, PromptEncoding(max_prompt_length=64))
    # Regression: the response was followed by the whole chat.
    rows = [Example((user,), "x", response="a")]
    for more, problem in (("raise_exception('no turns') if messages[1:]", "no"), ("1", "the chat")):
        with_specials.chat_template = f"Tom{{{{ {more} }}}}"
        with pytest.raises(UserError, match=f"1: the response cannot be encoded: {problem}"):
            tokenize_responses(rows, with_specials, ("response",), PromptEncoding(64), 64)


def test_a_named_bos_is_not_added_where_the_tokenizer_adds_none(trained):
    """GPT-2 and Qwen2 name tokens that their models never saw at the beginning of a text."""
    made, folder = trained
    loaded = AutoTokenizer.from_pretrained(folder, bos_token="<eos>")
    assert loaded.bos_token_id == 1
    assert encode_prompt(loaded, "Tom has 3 apples") == made.encode("Tom has 3 apples")


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
