"""Tools that the policy calls in the format of its chat template.

    assistant   <tool_call>
                {"name": "calculator", "arguments": {"expression": "48/2"}}
                </tool_call>
    tool        24
    assistant   48/2 is 24.

The schemas of the tools are described in the prompts by the template. A turn without a call ends
the dialogue. A call that is wrong, and a tool that raises, are answered with a line that begins
with "error:". The environment gives no rewards; the whole response gets one.
"""

import dataclasses
import functools
import json
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_ppo.config import parsing, plugins
from jax_ppo.config.rollout_options import MultiTurn
from jax_ppo.data.chat_templates import function_schema
from jax_ppo.data.files import unique_names
from jax_ppo.environments import sandbox
from jax_ppo.environments.calculator import LONGEST, calculate
from jax_ppo.environments.protocol import ENVIRONMENT_OPTION, FAILURES
from jax_ppo.errors import UserError, printable_lines, shorten
from jax_ppo.thoughts import after_thinking
from jax_ppo.types import Example

log = logging.getLogger(__name__)

TOOLS_PREFIX = "tools:"
PYTHON_TOOL = "python"
PYTHON_SECONDS = 5.0  # that a program of the tool may take
PYTHON_GIB = 1.0  # of address space
ROLE = "tool"  # of the messages with results

_OPENED, _CLOSED = "<tool_call>", "</tool_call>"
_LONGEST_ERROR = 500  # characters

Turn = tuple[str | tuple[str, ...], float, bool, dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool."""

    schema: dict[str, Any]  # {"type": "function", "function": {name, description, parameters}}
    function: Callable[..., Any]  # called with arguments by name; returns text, or becomes JSON

    @property
    def name(self) -> str:
        """Return the name by which the policy calls it."""
        return str(self.schema["function"]["name"])

    def call(self, arguments: dict[str, Any]) -> str:
        """Return the result; raise `ValueError` for arguments that the schema does not allow."""
        parameters = self.schema["function"].get("parameters", {})
        known, required = parameters.get("properties", {}), parameters.get("required", ())
        if unknown := [name for name in arguments if name not in known]:
            raise ValueError(f"unknown argument {unknown[0]!r}; expected {', '.join(known)}")
        if missing := [name for name in required if name not in arguments]:
            raise ValueError(f"missing argument {missing[0]!r}")
        for name, value in arguments.items():
            _require_type(name, value, known[name])
        result = self.function(**arguments)
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _require_type(name: str, value: Any, schema: dict[str, Any]) -> None:
    """Raise `ValueError` unless an argument has a type that its JSON schema names, if any."""
    expected = schema.get("type", [])
    types = [expected] if isinstance(expected, str) else [*expected]
    if types and schema.get("nullable"):  # transformers' schemas of `int | None`
        types.append("null")
    is_boolean = isinstance(value, bool)
    has_type = {
        "number": isinstance(value, (int, float)) and not is_boolean,
        "integer": isinstance(value, int) and not is_boolean,
        "string": isinstance(value, str),
        "boolean": is_boolean,
        "array": isinstance(value, list),
        "object": isinstance(value, dict),
        "null": value is None,
    }
    if types and not any(has_type.get(one, True) for one in types):
        raise ValueError(
            f"argument {name!r}: expected {' or '.join(types)}, got {json.dumps(value)}"
        )


def parse_calls(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and arguments of a turn's calls; raise `ValueError` for a malformed one."""
    for part in after_thinking(text).split(_OPENED)[1:]:
        body, closed, _ = part.partition(_CLOSED)
        if not closed:
            raise ValueError(f"the call is not closed by {_CLOSED}")
        try:
            call = json.loads(body, object_pairs_hook=unique_names)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the call is not JSON: {error}") from None
        if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
            raise ValueError("expected an object with name and arguments, and nothing else")
        if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
            raise ValueError("expected name to be text and arguments to be an object")
        yield call["name"], call["arguments"]


class ToolEnvironment:
    """Tools of all dialogues, with their `schemas`; a call makes the environment of one.

    `metric_names` are calls of a dialogue, and those that were answered with an error.
    """

    metric_names = ("tool_calls", "tool_errors")

    def __init__(self, options: MultiTurn) -> None:
        """Find the tools that `tools:NAME,FILE.py:FUNCTION` names.

        Raise `UserError` if one cannot be loaded, has no schema, or has another one's name.
        """
        self._name = options.environment
        self._tools: dict[str, Tool] = {}
        setting = f"config.{ENVIRONMENT_OPTION}={self._name!r}"
        for name in parsing.parse_names(self._name.removeprefix(TOOLS_PREFIX)):
            tool = _load_tool(name, options)
            if tool.name in self._tools:
                raise UserError(f"{setting}: two tools have the name {tool.name!r}")
            self._tools[tool.name] = tool
        if not self._tools:
            raise UserError(f"{setting}: expected tools:NAME, such as tools:calculator")
        self.schemas = tuple(tool.schema for tool in self._tools.values())

    def __str__(self) -> str:
        return self._name

    def __call__(self) -> "ToolDialogue":
        """Return the environment of a dialogue."""
        return ToolDialogue(self._tools)

    def describe(self, examples: Sequence[Example]) -> list[Example]:
        """Return examples with the tools, or a row's own; raise `UserError` for a plain prompt."""
        described = []
        for example in examples:
            if isinstance(example.prompt, str):
                raise UserError(
                    f"config.{ENVIRONMENT_OPTION}={self._name!r}: tools need chats, but the prompt "
                    f"{shorten(example.prompt)!r} is plain text"
                )
            tools = example.tools or self.schemas
            described.append(dataclasses.replace(example, tools=tools))
        return described

    def describe_gaps(self) -> str:
        """Return a note of what code that the policy writes is not denied; "" if it runs none."""
        gaps = sandbox.describe_gaps() if PYTHON_TOOL in self._tools else []
        if not gaps:
            return ""
        return (
            f"the tool {PYTHON_TOOL}: this system cannot deny the model's code access to "
            f"{', nor to '.join(gaps)}; run it in a container that can"
        )


class ToolDialogue:
    """A `TextEnvironment` that answers calls with the results of tools."""

    def __init__(self, tools: dict[str, Tool]) -> None:
        self._tools = tools
        self._calls = self._errors = 0

    def reset(self, example: Example, seed: int) -> None:
        """Do nothing: tools have no state."""

    def step(self, text: str) -> Turn:
        """Answer the calls of a turn, in order, up to one that is malformed."""
        results = []
        try:
            for name, arguments in parse_calls(text):
                results.append(self._answer(name, arguments))
        except ValueError as error:
            results.append(self._count_error(error))
        self._calls += len(results)
        figures: dict[str, float] = {"tool_calls": self._calls, "tool_errors": self._errors}
        return tuple(results) or "", 0.0, not results, figures

    def _answer(self, name: str, arguments: dict[str, Any]) -> str:
        try:
            if name not in self._tools:
                raise ValueError(f"unknown tool {name!r}; there are {', '.join(self._tools)}")
            return self._tools[name].call(arguments)
        except ValueError as error:
            return self._count_error(error)
        except FAILURES as error:
            _report_fault(name, printable_lines(traceback.format_exc(limit=-4)))
            return self._count_error(RuntimeError(f"{type(error).__name__}: {error}"))

    def _count_error(self, error: Exception) -> str:
        self._errors += 1
        return f"error: {shorten(str(error), _LONGEST_ERROR)}"


@functools.lru_cache(maxsize=64)
def _report_fault(name: str, cause: str) -> None:
    """Log an exception of a tool, equal ones once."""
    log.warning("the tool %s failed, and the policy is told so: %s", name, cause)


def _built_in_tools(options: MultiTurn) -> dict[str, Tool]:
    def calculator(expression: str) -> str:
        if len(expression) >= LONGEST:
            raise ValueError(f"expected fewer than {LONGEST} characters")
        result = calculate(f"{expression}=")
        if not result:
            raise ValueError("expected numbers joined by + - * / and parentheses")
        return result

    def python(code: str) -> str:
        return sandbox.run_code(code, min(PYTHON_SECONDS, 0.9 * options.timeout), PYTHON_GIB)

    tools = {}
    # Function, description, and name and description of the argument. No docstrings, which
    # `python -OO` removes.
    for function, description, argument, meaning in (
        (calculator, "Evaluate arithmetic.", "expression", "such as (3+4)*2 or 48/2"),
        (python, "Run a Python program.", "code", "the program; print what you need"),
    ):
        name = function.__name__
        parameters = {
            "type": "object",
            "properties": {argument: {"type": "string", "description": meaning}},
            "required": [argument],
        }
        facts = {"name": name, "description": description, "parameters": parameters}
        tools[name] = Tool({"type": "function", "function": facts}, function)
    return tools


def _load_tool(name: str, options: MultiTurn) -> Tool:
    setting = f"config.{ENVIRONMENT_OPTION}: the tool {name!r}"
    built_in = _built_in_tools(options)
    if name in built_in:
        return built_in[name]
    if ":" not in name:
        raise UserError(
            f"{setting}: expected {', '.join(built_in)}, module:function or file.py:function"
        )

    def arguments(function: Callable[..., Any]) -> tuple[str, ...]:
        parameters = _schema_of(function, setting)["function"].get("parameters", {})
        return tuple(parameters.get("properties", {}))

    function = plugins.load_plugin(
        name, ENVIRONMENT_OPTION, (), by_name=True, other_arguments=arguments
    )
    return Tool(_schema_of(function, setting), function)


def _schema_of(function: Callable[..., Any], setting: str) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        schema = getattr(function, "schema", None) or get_json_schema(function)
    except Exception as error:
        raise UserError(
            f"{setting}: needs type hints and a docstring with Args, or an attribute schema: "
            f"{error}"
        ) from error
    if isinstance(schema, dict):
        schema = function_schema(schema)
    described = schema.get("function") if isinstance(schema, dict) else None
    if not isinstance(described, dict) or not isinstance(described.get("name"), str):
        raise UserError(f"{setting}: expected a schema with a name, got {shorten(repr(schema))}")
    if not _is_readable(described.get("parameters", {})):
        raise UserError(
            f"{setting}: expected parameters (MCP: inputSchema) with properties, an object of "
            "objects, whose names `required` lists, got "
            f"{shorten(repr(described['parameters']))}"
        )
    return schema


def _is_readable(parameters: Any) -> bool:
    """Return whether calls can be checked by a JSON schema of arguments."""
    if not isinstance(parameters, dict):
        return False
    known, required = parameters.get("properties", {}), parameters.get("required", ())
    if not isinstance(known, dict) or not isinstance(required, (list, tuple)):
        return False
    types = (one.get("type", "") if isinstance(one, dict) else None for one in known.values())
    are_listed = all(isinstance(name, str) and name in known for name in required)
    return are_listed and all(isinstance(one, (str, list)) for one in types)
