"""Reading, encoding and layout of responses from data files."""

import dataclasses

import numpy as np
import pytest

from jax_ppo.data import responses, sources
from jax_ppo.data.chat_templates import encode_prompt, encode_responses
from jax_ppo.data.columns import Columns
from jax_ppo.data.row_formats import parse_row
from jax_ppo.data.tokenize_prompts import PromptEncoding
from jax_ppo.data.tokenizer import load_tokenizer
from jax_ppo.errors import UserError
from jax_ppo.types import Example
from real_data import DATA, needs
from trained_tokenizer import train_tokenizer


def test_dialogues_of_a_pair_may_differ_before_their_last_turns():
    asked = "\n\nHuman: How many?\n\nAssistant: Whose?\n\nHuman: Tom's.\n\nAssistant:"
    later = " C\n\nHuman: D\n\nAssistant: E"
    pair = parse_row({"chosen": f"{asked} B", "rejected": f"{asked}{later}"}, "here")
    assert (pair.prompt, pair.response, pair.rejected) == (asked, " B", later)


def test_responses_of_verls_form_may_be_in_extra_info():
    verl = {"prompt": "1 + 1?", "reward_model": {"style": "rule", "ground_truth": "2"}}
    for more, key, response in (
        ({}, "", None),
        ({"extra_info": {"answer": "2!"}}, "", "2!"),
        ({"extra_info": {"answer": "2!"}, "answer": None}, "", "2!"),  # as Parquet returns it
        ({"answer": "two"}, "", "two"),
        ({"extra_info": {"solution": "II"}}, "solution", "II"),
    ):
        assert parse_row(verl | more, "here", Columns(response=key)).response == response
    message = "each message of config.supervised.response_key='solution' must have"
    with pytest.raises(UserError, match=message):
        parse_row(verl | {"solution": ["II"]}, "here", Columns(response="solution"))
    [problem] = sources.read_examples("arithmetic:1")
    assert problem.response == problem.extra_info["solution"]


def test_a_response_is_encoded_as_it_goes_on(trained):
    tokenizer, _ = trained
    prompt, response = "Tom has 3 apples.", " He buys 2 more."
    ids, ended = encode_responses(tokenizer, prompt, [response, response + "<eos>"])
    whole = [*tokenizer.encode(prompt + response), tokenizer.eos_token_id]
    # Regression: a text with the EOS got a second one.
    assert encode_prompt(tokenizer, prompt) + ids == whole and ended == ids
    # Where prompt and response would merge into one token, each is encoded separately.
    prompt, response = "How many appl", "es"
    assert tokenizer.encode(prompt + response) != tokenizer.encode(prompt) + tokenizer.encode(
        response
    )
    assert encode_responses(tokenizer, prompt, [response])[0] == [
        *tokenizer.encode(response),
        tokenizer.eos_token_id,
    ]


@needs("tinystories-260k")
def test_no_blank_is_put_before_a_response():
    """SentencePiece tokenizers put a blank before a text that is encoded separately."""
    tokenizer = load_tokenizer(str(DATA / "tinystories-260k"))
    prompt, response = "Once upon a time, there was a girl named Lily.", " She loved to play."
    ids = encode_prompt(tokenizer, prompt) + encode_responses(tokenizer, prompt, [response])[0]
    assert tokenizer.decode(ids, skip_special_tokens=True) == prompt + response
    assert (
        ids[0] == tokenizer.bos_token_id
        and ids[-1] == tokenizer.eos_token_id
        and tokenizer.bos_token_id not in ids[1:]
    )


def tokenize(examples, tokenizer, fields, longest=12):
    return responses.tokenize_responses(
        examples, tokenizer, fields, PromptEncoding(max_prompt_length=20), longest
    )


def test_pairs_lie_one_kind_behind_the_other(trained):
    tokenizer, _ = trained
    examples = [
        Example(f"Tom has {i} apples.", "x", response=" He has 1.", rejected=" He" * (i + 2))
        for i in range(3)
    ]
    data = tokenize(examples, tokenizer, responses.PREFERENCE_FIELDS)
    both = [
        len(tokenizer.encode(e.prompt + e.response))
        + len(tokenizer.encode(e.prompt + e.rejected))
        + 2
        for e in examples
    ]
    assert data.longest == max(both) and len(set(both)) > 1
    sequences = data.sequences([2, 0])
    assert sequences.tokens.shape == (4, 32)
    for sequence, (row, kind) in enumerate(
        [(2, "response"), (0, "response"), (2, "rejected"), (0, "rejected")]
    ):
        prompt, response = examples[row].prompt, getattr(examples[row], kind)
        expected = [*tokenizer.encode(prompt + response), tokenizer.eos_token_id]
        length = sequences.prompt_lengths[sequence] + sequences.lengths[sequence]
        assert (
            sequences.tokens[sequence, :length].tolist() == expected
            and not sequences.tokens[sequence, length:].any()
        )
        assert sequences.prompt_lengths[sequence] == len(tokenizer.encode(prompt))


def test_long_responses_are_dropped(trained, caplog):
    tokenizer, _ = trained
    examples = [Example("Tom", "x", response=" has 1."), Example("Ann", "x", response=" 1" * 50)]
    data = tokenize(examples, tokenizer, responses.DEMONSTRATION_FIELDS)
    assert data.prompts.examples == (examples[0],) and len(data.prompts.tokens) == len(data) == 1
    assert "dropped 1 of 2 examples" in caplog.text
    np.testing.assert_array_equal(
        data.responses[0][0], encode_responses(tokenizer, "Tom", [" has 1."])[0]
    )
    with pytest.raises(
        UserError, match="no example is left of 2.*config.data.max_response_length=2"
    ):
        tokenize(examples, tokenizer, responses.DEMONSTRATION_FIELDS, 2)


@pytest.mark.parametrize("long_field", responses.PREFERENCE_FIELDS)
def test_a_pair_is_dropped_if_one_side_is_too_long(trained, caplog, long_field):
    short = Example("Tom", "x", response=" has 1.", rejected=" has 2.")
    long = dataclasses.replace(short, **{long_field: " 1" * 50})
    data = tokenize([long, short], trained[0], responses.PREFERENCE_FIELDS)
    assert data.prompts.examples == (short,) and [len(field) for field in data.responses] == [1, 1]
    assert "dropped 1 of 2 examples" in caplog.text


def test_a_missing_response_is_told():
    with pytest.raises(UserError, match="val_files, example 2 .*'y'.* has no rejected"):
        responses.validate_responses(
            [Example("A", "x", response="a", rejected="b"), Example("B", "y", response="a")],
            responses.PREFERENCE_FIELDS,
            "config.data.val_files",
            "answer",
        )
    with pytest.raises(UserError, match="response_key='solutoin' names. Did you mean 'solution'?"):
        responses.validate_responses(
            [Example("A", "x", extra_info={"solution": "b"})],
            responses.DEMONSTRATION_FIELDS,
            "train",
            "solutoin",
        )


def test_empty_and_equal_responses_are_dropped(trained, caplog):
    """Regression: the accuracy of equal responses was 0 or 1, by rounding."""
    rejected = (" ", " has 1.", " 2")
    examples = [Example("Tom", "x", response=" has 1.", rejected=text) for text in rejected]
    data = tokenize(examples, trained[0], responses.PREFERENCE_FIELDS)
    assert data.prompts.examples == (examples[2],)
    assert "dropped 2 of 3 examples, which have an empty response, or two equal" in caplog.text
    with pytest.raises(UserError, match="no example is left of 2; 2 are dropped, which"):
        tokenize(examples[:2], trained[0], responses.PREFERENCE_FIELDS)


def test_a_plain_reply_closes_the_thought_that_its_prompt_opens(tmp_path, caplog):
    """Regression: it was trained within the thought, which no template renders."""
    made = train_tokenizer(["[user] [assistant] How many? <think> Is it 2."], 512, tmp_path)
    made.chat_template = (
        "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]\n<think>\n{% endif %}"
    )
    asked = ({"role": "user", "content": "How many?"},)
    thought = "Is it 3?\n</think>\n\n2."
    examples = [Example(asked, "x", response=text) for text in ("2.", thought)]
    examples += [
        Example(asked, "x", response=thought, rejected="2."),
        Example((*asked, {"role": "assistant", "content": "<think>Is"}), "x", response="2."),
        Example("How many?\n<think>", "x", response="2."),
        Example("How many?", "x", response="2."),
    ]
    encoding = PromptEncoding(max_prompt_length=64)

    def trained(rows, fields):
        dataset = responses.tokenize_responses(rows, made, fields, encoding, 64)
        return [[made.decode(ids) for ids in field] for field in dataset.responses]

    closed = "\n</think>\n\n2.<eos>"
    assert trained(examples, ("response",)) == [
        [closed, f"{thought}<eos>", f"{thought}<eos>", closed, closed, "2.<eos>"]
    ]
    line = "closed the thought that a prompt opens before the replies of 3 of 6 examples"
    assert line in caplog.text
    assert trained(examples[2:3], ("response", "rejected")) == [[f"{thought}<eos>"], [closed]]
