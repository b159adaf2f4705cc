"""System messages and templates around prompts."""

import pytest

from jax_ppo.data.messages import shape_prompt
from jax_ppo.errors import UserError
from jax_ppo.run.run_examples import read_template

USER = {"role": "user", "content": "2+2? {x}"}


def shape(prompt, system_prompt="", template=""):
    return shape_prompt(prompt, system_prompt, template, "here")


def test_a_template_surrounds_the_last_message_or_the_text():
    template = "1+1? 2\n{prompt} Think."
    assert shape("2+2?", template=template) == "1+1? 2\n2+2? Think."
    first = {"role": "user", "content": "Hi"}
    assert shape((first, USER), template=template) == (
        first,
        {"role": "user", "content": "1+1? 2\n2+2? {x} Think."},
    )


def test_a_template_leaves_the_beginning_of_the_response_alone():
    begun = {"role": "assistant", "content": "<think>"}
    filled = {"role": "user", "content": "2+2? {x} Think."}
    assert shape((USER, begun), template="{prompt} Think.") == (filled, begun)


def test_a_system_message_replaces_the_chats_own():
    system = {"role": "system", "content": "Be brief."}
    assert shape((USER,), "Be brief.") == (system, USER)
    assert shape(({"role": "system", "content": "Talk."}, USER), "Be brief.") == (system, USER)


def test_a_plain_text_takes_no_system_message():
    with pytest.raises(UserError, match="system_prompt='Be brief.'.*here is plain"):
        shape("Once upon", "Be brief.")


def test_a_template_may_be_in_a_file(tmp_path):
    path = tmp_path / "few_shot.txt"
    path.write_text("é\n{prompt}\n")
    assert read_template(f"@{path}") == "é\n{prompt}\n"
    path.write_text("nothing")
    for option in (f"@{path}", "nothing", f"@{tmp_path}/absent.txt", f"@{tmp_path}"):
        with pytest.raises(UserError, match="config.data.prompt_template="):
            read_template(option)
