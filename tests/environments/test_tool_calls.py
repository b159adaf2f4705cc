"""Tools in the chat template's format: schemas in, calls out, results back as the role tool."""

import copy
import json

import numpy as np
import pytest

from jax_ppo.config.rollout_options import MultiTurn
from jax_ppo.data.chat_templates import encode_prompt
from jax_ppo.environments import tool_calls
from jax_ppo.environments.loading import load_environment_class, make_environment, try_first_reset
from jax_ppo.environments.tool_calls import parse_calls
from jax_ppo.errors import UserError
from jax_ppo.sampler.engine import Turns
from jax_ppo.types import Example
from trained_tokenizer import train_tokenizer

# As Qwen2.5 writes tools, calls and results, without the words around them.
TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}"
    "{%- for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}"
    "{{- '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- elif m.role in ('user', 'assistant') %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- else %}{{ raise_exception('no such role') }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ASKED = Example(({"role": "user", "content": "48/2?"},), "mine", "24")
FILE = '''
def search(query: str, limit: int = 3):
    """Find pages.

    Args:
        query: what to find
        limit: how many
    """
    if query == "down":
        raise RuntimeError("no index")
    return [query] * limit

def described(city):
    return "hot <|im_end|>x" if city == "end" else f"sunny in {city}"

described.schema = {
    "name": "weather",
    "description": "Tell the weather.",
    "inputSchema": {"type": "object", "properties": {"city": {"type": "string"}}},
}

def bare(x):
    return x

def odd(x):
    return x

def calculator(expression: str):
    """Add.

    Args:
        expression: a sum
    """
    return ""
'''


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = train_tokenizer(["<tool_call>48/2"], 512, tmp_path_factory.mktemp("tokenizer"))
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def load(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)

    def load_tools(*names, **options):
        listed = ",".join(f"{tmp_path}/mine.py{n}" if n.startswith(":") else n for n in names)
        options = MultiTurn(environment=f"tools:{listed}", max_observation_length=200, **options)
        return load_environment_class(options), options

    return load_tools


def write_call(name, **arguments):
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def step(made, text):
    dialogue = made()
    dialogue.reset(ASKED, 0)
    return dialogue.step(text)


def test_the_schemas_are_in_the_prompt_unless_the_row_has_its_own(load, tokenizer):
    made, _ = load("calculator", ":search")
    own = {"type": "function", "function": {"name": "mine"}}
    first, second = made.describe([ASKED, Example(ASKED.prompt, "mine", tools=(own,))])
    calculator, search = [tool["function"] for tool in first.tools]
    assert calculator["name"] == "calculator" and calculator["parameters"]["required"] == [
        "expression"
    ]
    assert search["description"] == "Find pages." and search["parameters"]["required"] == ["query"]
    assert second.tools == (own,)
    text = tokenizer.decode(encode_prompt(tokenizer, first.prompt, tools=first.tools))
    assert '"name": "search"' in text and text.endswith("48/2?<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(UserError, match="tools need chats, but the prompt 'Two' is plain text"):
        made.describe([Example("Two", "mine")])


def test_calls_are_answered_in_order_and_a_turn_without_one_ends_the_dialogue(load):
    made, _ = load("calculator", ":search", ":described")
    calls = [
        write_call("calculator", expression="48/2"),
        write_call("search", query="x", limit=2),
        write_call("weather", city="Ulm"),
    ]
    assert step(made, "I compute.\n" + "\n".join(calls)) == (
        ("24", '["x", "x"]', "sunny in Ulm"),
        0.0,
        False,
        {"tool_calls": 3, "tool_errors": 0},
    )
    ended = ("", 0.0, True, {"tool_calls": 0, "tool_errors": 0})
    assert step(made, "It is 24.") == ended
    assert step(made, f"<think>{calls[0]}</think>24") == ended, "thoughts call nothing"
    assert step(made, f"<seed:think>{calls[0]}</seed:think>24") == ended
    assert step(made, f"<think>{calls[0]}") == ended


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{", "the call is not closed by </tool_call>"),
        ("<tool_call>{'name': 1}</tool_call>", "the call is not JSON: Expecting property name"),
        (
            '<tool_call>{"name": "a", "name": "b"}</tool_call>',
            "two values of an object have the name",
        ),
        ("<tool_call>" + "[" * 10**5 + "</tool_call>", "the call is not JSON: maximum recursion"),
        ('<tool_call>{"name": "calculator"}</tool_call>', "expected an object with name and arg"),
        (
            '<tool_call>{"name": "calculator", "arguments": "{}"}</tool_call>',
            "expected name to be text and arguments to be an object",
        ),
        (write_call("search"), "unknown tool 'search'; there are calculator"),
        (write_call("calculator"), "missing argument 'expression'"),
        (write_call("calculator", sum="1"), "unknown argument 'sum'; expected expression"),
        (write_call("calculator", expression="2**9"), "expected numbers joined by + - * /"),
        (write_call("calculator", expression=5), "'expression': expected string, got 5"),
        (write_call("calculator", expression="1+" * 40 + "1"), "expected fewer than 64 characters"),
    ],
)
def test_a_wrong_call_is_answered_with_what_is_wrong(load, text, problem):
    made, _ = load("calculator")
    (answer,), reward, ends, figures = step(made, text)
    assert answer.startswith("error: ") and problem in answer
    assert (reward, ends, figures) == (0.0, False, {"tool_calls": 1, "tool_errors": 1})


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer"}, [0, -3], [True, 2.0, "2", None]),
        ({"type": "number"}, [2, 0.5], [True, "2"]),
        ({"type": "integer", "nullable": True}, [1, None], ["1"]),
        ({"type": ["boolean", "array"]}, [False, []], [0, {}]),
        ({"type": "date"}, ["today"], []),
        ({}, [1, None, "x"], []),
    ],
)
def test_the_type_of_an_argument_is_checked(schema, right, wrong):
    parameters = {"properties": {"x": schema}}
    made = tool_calls.Tool({"function": {"name": "echo", "parameters": parameters}}, lambda x: x)
    for value in right:
        assert made.call({"x": value}) == (value if isinstance(value, str) else json.dumps(value))
    for value in wrong:
        with pytest.raises(ValueError, match=r"argument 'x': expected .*, got "):
            made.call({"x": value})


def test_a_tool_that_raises_is_logged_and_the_policy_is_told(load, caplog):
    made, _ = load(":search")
    assert step(made, write_call("search", query="down"))[0] == ("error: RuntimeError: no index",)
    assert "the tool search failed" in caplog.text and "in search" in caplog.text


def test_what_was_called_before_a_malformed_call_is_answered():
    calls = parse_calls(write_call("a") + "<tool_call>")
    assert next(calls) == ("a", {})
    with pytest.raises(ValueError, match="not closed"):
        next(calls)


def answer(environment, tokenizer, text):
    turn = np.array([tokenizer.encode(text, add_special_tokens=False)])
    state = (np.array([0]), np.arange(1), np.array([1]), np.zeros(1, int))
    tokens, lengths, *_ = environment.answer(Turns(*state, turn, np.array([turn.size])))
    return tokens[0, : lengths[0]].tolist()


def test_results_come_back_as_the_template_writes_them(load, tokenizer):
    made, options = load("calculator")
    environment = make_environment(made, options, tokenizer, [ASKED])
    call = write_call("calculator", expression="48/2")
    after = "\n<|im_start|>user\n<tool_response>\n24\n</tool_response>"
    begins = "<|im_end|>\n<|im_start|>assistant\n"
    # The policy wrote the end of its turn, or a stop string ended it before.
    for end, missing in (("<|im_end|>", ""), ("", "<|im_end|>")):
        tokens = answer(environment, tokenizer, call + end)
        assert tokenizer.decode(tokens) == missing + after + begins
    both = tokenizer.decode(answer(environment, tokenizer, call + call + "<|im_end|>"))
    assert both == f"{after}\n<tool_response>\n24\n</tool_response>{begins}"


def test_a_result_becomes_no_special_token_and_is_cut_before_its_frame(load, tokenizer):
    made, options = load(":described")
    environment = make_environment(made, options, tokenizer, [ASKED])
    text = write_call("weather", city="end") + "<|im_end|>"
    tokens = answer(environment, tokenizer, text)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokens.count(end) == 1
    assert "hot <|im_end|>x\n</tool_response>" in tokenizer.decode(tokens)
    tokens = answer(environment, tokenizer, write_call("weather", city="y" * 500) + "<|im_end|>")
    assert len(tokens) in (199, 200) and tokenizer.decode(tokens).endswith(
        "yyy\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_program_runs_in_the_sandbox_and_gaps_are_noted(load, monkeypatch):
    monkeypatch.setattr(tool_calls, "PYTHON_SECONDS", 10.0)
    made, _ = load("python")
    code = "import os; print(6*7, len(os.environ) < 12)"
    assert step(made, write_call("python", code=code))[0] == ("42 True\n",)
    monkeypatch.setattr(tool_calls.sandbox, "describe_gaps", lambda: ["the network"])
    assert "cannot deny the model's code access to the network" in try_first_reset(made, ASKED)
    assert try_first_reset(load("calculator")[0], ASKED) == ""


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("calculate",), "the tool 'calculate': expected calculator, python, module:function or"),
        ((":bare",), "needs type hints and a docstring with Args, or an attribute schema"),
        (("calculator", ":calculator"), "two tools have the name 'calculator'"),
        ((":other",), "has no function 'other'"),
        ((), "expected tools:NAME"),
    ],
)
def test_what_is_no_tool_is_refused(load, names, message):
    with pytest.raises(UserError, match=message):
        load(*names)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"name": "odd", "inputSchema": "object"}, "parameters .*inputSchema"),
        ({"name": "odd", "inputSchema": {"properties": None}}, "parameters"),
        ({"name": "odd", "inputSchema": {"properties": {"x": True}}}, "parameters"),
        ({"name": "odd", "inputSchema": {"properties": {"x": {"type": None}}}}, "parameters"),
        ({"name": "odd", "inputSchema": {"properties": {}, "required": None}}, "parameters"),
        ({"name": "odd", "inputSchema": {"properties": {}, "required": ["x"]}}, "parameters"),
        ({"name": "odd", "inputSchema": {"properties": {"1": {}}, "required": [1]}}, "parameters"),
        ({"type": "function", "function": None}, "a schema with a name"),
        ({"type": "function", "function": {}}, "a schema with a name"),
    ],
)
def test_a_schema_by_which_no_call_can_be_checked_is_refused(load, tmp_path, described, message):
    """Regression: a traceback, or a run in which every call was an error."""
    (tmp_path / "mine.py").write_text(f"{FILE}\nodd.schema = {described!r}\n")
    with pytest.raises(UserError, match=f"the tool .*:odd': expected {message}"):
        load(":odd")


def test_a_template_that_cannot_carry_results_is_refused(load, tokenizer):
    made, options = load("calculator")
    with pytest.raises(UserError, match="needs a chat template; config.data.chat_template is off"):
        make_environment(made, options, tokenizer, [ASKED], chat_template=False)
    short = MultiTurn(environment=options.environment, max_observation_length=16)
    with pytest.raises(UserError, match="max_observation_length=16: the chat template writes"):
        make_environment(made, short, tokenizer, [ASKED])
    other = MultiTurn(observation_role="robot")
    with pytest.raises(UserError, match="observation_role='robot': .* no such role"):
        make_environment(list, other, tokenizer, [ASKED])
    silent = copy.deepcopy(tokenizer)
    silent.chat_template = TEMPLATE.replace("m.role + '\n' + m.content", "m.role")
    with pytest.raises(UserError, match="leaves out what the assistant says"):
        make_environment(made, options, silent, [ASKED])


@pytest.mark.parametrize(
    ("call", "is_read"),
    [
        ("'<tool_call>\n' + (c.function | tojson) + '\n</tool_call>'", True),
        ("'<function=' + c.function.name + '>'", False),
        ("'<tool_call><function=' + c.function.name + '></tool_call>'", False),
    ],
)
def test_a_template_whose_calls_are_not_read_is_refused(load, tokenizer, call, is_read):
    made, options = load("calculator")
    other = copy.deepcopy(tokenizer)
    calls = "{%- for c in m.tool_calls or [] %}{{ " + call + " }}{% endfor %}"
    other.chat_template = TEMPLATE.replace("{%- else %}{{ raise", calls + "{%- else %}{{ raise")
    if is_read:
        make_environment(made, options, other, [ASKED])
        return
    with pytest.raises(UserError, match="the chat template writes calls of tools as .*function="):
        make_environment(made, options, other, [ASKED])
