"""Messages for users are one line of printable characters, whatever input they quote."""

import copy
import io
import os
import sys

import pytest

from jax_ppo import errors
from jax_ppo.errors import LONGEST_MESSAGE, UserError, exit_on_user_error


def test_line_breaks_and_escape_sequences_of_an_input_are_replaced():
    assert str(UserError("x='a\r\nb\x1b[31m\ud800'")) == "x='a b·[31m·'"


def test_a_long_message_keeps_its_beginning_and_its_end():
    text = str(UserError(f"config.a={'x' * 10_000}: expected y"))
    assert len(text) < LONGEST_MESSAGE + 10
    assert text.startswith("config.a=xxx") and text.endswith("xxx: expected y")


def test_details_keep_their_lines_below_the_message():
    error = UserError("it failed", details="line 1\n  line\x07 2")
    assert str(error) == "it failed\nline 1\n  line· 2"
    assert str(copy.copy(error)) == str(error)  # as on the way between processes


def test_an_output_whose_reader_has_gone_ends_nothing_and_is_noted(monkeypatch):
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(errors, "closed_outputs", [])
    errors.print_any_text()
    os.close(reader)
    for _ in range(2):
        print("a step", flush=True)
    assert errors.closed_outputs == [str(writer)]
    stream.close()


def test_characters_that_the_output_lacks_have_a_readable_form(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    errors.print_any_text()
    print("accuracy 0.4 → 0.9, 1+1⏎…猫", end="", flush=True)
    assert stream.buffer.getvalue() == b"accuracy 0.4 -> 0.9, 1+1|...?"


def test_a_command_that_is_interrupted_ends_in_one_line(capsys):
    with pytest.raises(SystemExit) as end, exit_on_user_error():
        raise KeyboardInterrupt
    assert end.value.code == 130 and capsys.readouterr().err == "stopped by SIGINT\n"
