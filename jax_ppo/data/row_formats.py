r"""Conversion of the rows of data sets to examples, by the names of their columns.

`columns.MEANINGS` says what each column means. A row has one prompt: the columns that could be it
must agree, or an option names one of them. It may have a response or a pair of them, and a
reference answer:

GSM8K:   an `answer` with `#### N`, what follows is the reference answer.
MATH:    `problem`, with `answer`, or a `solution` that has the answer in `\boxed{}`.
verl:    `reward_model` {style, ground_truth}, in SkyRL's data `reward_spec`, and optionally
         `extra_info`, whose entry `answer` may be a response to imitate.
HH-RLHF: `chosen` and `rejected`, two transcripts "\n\nHuman: ...\n\nAssistant: ..." with the
         same beginning. They are plain text, even if the tokenizer has a chat template. The prompt
         ends with the last "\n\nAssistant:" that both share.
"""

import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from jax_ppo.data import columns as names
from jax_ppo.data.columns import Columns, is_missing, parse_ground_truth
from jax_ppo.data.messages import (
    Messages,
    Prompt,
    drop_missing,
    from_json,
    join_contents,
    parse_prompt,
    quote_cell,
    response_text,
    user_message,
)
from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.types import Example

GSM8K = "openai/gsm8k"
MATH = "DigitalLearningGmbH/MATH-lighteval"
HH_RLHF = "Anthropic/hh-rlhf"
ASSISTANT = "\n\nAssistant:"

_GROUPED = re.compile(r"-?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")
_PROMPT_NAMES = (names.PROMPT, *names.CHATS, *names.REQUESTS)

Row = dict[str, Any]


class _Reading(NamedTuple):
    """A prompt, the column that holds it, and the responses in that column or pair."""

    column: str
    prompt: Prompt
    responses: tuple[str, ...] = ()


def parse_row(
    row: Row, location: str, columns: Columns | None = None, instruction: str = ""
) -> Example:
    """Convert a row, columns by name, to an example; messages name its location.

    The columns that options name take precedence. The instruction is added to a question, after a
    space.

    Raises:
      UserError: the row has no prompt or several, a column has the wrong type, or the row has
        images.
    """
    columns = columns or Columns()
    values = _known_values(row, location, columns)
    _refuse_unread_values(values, location)
    is_verl = not {"reward_model", "reward_spec"}.isdisjoint(values)
    for name in set(names.VERL) & values.keys():
        if is_verl or isinstance(from_json(values[name]), dict):
            values[name] = _require_object(values[name], location, name)
    if "reward_spec" in values:
        values.setdefault("reward_model", values.pop("reward_spec"))
    if columns.prompt in _own_extra_info(values):
        values.setdefault(columns.prompt, values["extra_info"][columns.prompt])
    pair = _read_pair(values, location, columns)
    reading, readings = _choose_prompt(row, values, pair, location, columns)
    prompt = _add_instruction(reading, values, instruction)
    prompt = _add_system_column(prompt, values, location)
    responses = _find_responses(values, pair, readings, location, columns)
    ground_truth, is_gsm8k = _find_ground_truth(values, location, columns)
    data_source = _require_text(values.get("data_source") or "", location, "data_source")
    if not data_source and reading.column == "chosen" and isinstance(prompt, str):
        data_source = HH_RLHF
    elif not data_source and is_gsm8k:
        data_source = GSM8K
    elif not data_source and "problem" in values and ground_truth:
        data_source = MATH
    response, rejected = (*responses, None, None)[:2]
    return Example(
        prompt=prompt,
        data_source=data_source,
        ground_truth=ground_truth,
        extra_info=_find_extra_info(row, values, reading),
        response=response,
        rejected=rejected,
        tools=_read_tools(values.get("tools"), location),
        location=location,
    )


def to_plain_python(value: Any) -> Any:
    """Convert a TFDS value to plain Python: bytes decoded as UTF-8, arrays as lists."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, dict):
        return {key: to_plain_python(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return to_plain_python(value.tolist())
    if isinstance(value, (list, tuple)):
        return [to_plain_python(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return value


def _known_values(row: Row, location: str, columns: Columns) -> Row:
    """Return the columns that have values; a known name is in lower case."""
    explicit = {columns.prompt, columns.response, columns.ground_truth}
    values = {}
    for name, value in row.items():
        if is_missing(value):
            continue
        lowered = str(name).strip().lower()
        if lowered in names.KNOWN and name not in explicit:
            name = lowered
        if name in values:
            raise UserError(f"{location}: two columns have the name {name}, in upper or lower case")
        values[name] = value
    return values


def _refuse_unread_values(values: Row, location: str) -> None:
    """Raise `UserError` if a row has images, audio or video."""
    for name, value in values.items():
        is_media = names.MEDIA.fullmatch(str(name).lower()) is not None
        is_file = isinstance(value, dict) and {"bytes", "path"} == value.keys()
        if value and (is_media or is_file):
            raise UserError(
                f"{location}: the column {name} has {quote_cell(value)}; images, audio and video "
                "are not supported. Use rows without them"
            )


def _require_object(value: Any, location: str, name: str) -> Row:
    """Return a column of verl's form: an object, also as JSON text."""
    if isinstance(value, str) and value.startswith("{"):
        value = from_json(value)
    if not isinstance(value, dict):
        expected = "named values" if name == "extra_info" else "style and ground_truth"
        raise UserError(f"{location}: {name} must have {expected}, got {quote_cell(value)}")
    return value


def _choose_prompt(
    row: Row, values: Row, pair: _Reading | None, location: str, columns: Columns
) -> tuple[_Reading, list[_Reading]]:
    """Return the reading of the prompt, and all readings that agree with it."""
    readings = []
    for name in _prompt_columns(values, columns, pair, location):
        readings.append(_read_prompt(name, values, location, columns))
    if pair is not None and pair.prompt:
        # A pair precedes plain text, which is then the user's message of the same chat.
        readings.append(pair)
    if not readings:
        raise _missing_prompt_error(row, pair, location)
    if columns.prompt:
        reading, *others = readings
        # A whole chat must answer the prompt that the option names.
        agree = all(
            _agrees(reading.prompt, other.prompt) or _agrees(other.prompt, reading.prompt)
            for other in others
        )
    else:
        # Messages before text, and text before requests.
        readings.sort(key=_rank)
        for reading in readings:
            agree = all(_agrees(reading.prompt, other.prompt) for other in readings)
            if agree:
                break
    if not agree:
        prompts = [(reading.column, reading.prompt) for reading in readings]
        raise _disagreement(prompts, "prompt", "config.data.prompt_key", location)
    if reading.column in names.REQUESTS and not columns.prompt:
        for name in names.parts_of_questions(values):
            raise UserError(
                f"{location}: the column {name} would be missing from the prompt, which is the "
                f"{reading.column}; write both to a column `prompt`, or name the column to sample "
                "from with config.data.prompt_key"
            )
    return reading, readings


def _rank(reading: _Reading) -> int:
    if reading.column == names.PROMPT:
        return 2 if isinstance(reading.prompt, str) else 0
    return 3 if reading.column in names.REQUESTS else 1


def _prompt_columns(
    values: Row, columns: Columns, pair: _Reading | None, location: str
) -> list[str]:
    """Return the columns that could be the prompt, in order of precedence."""
    key = columns.prompt
    if key == "chosen":
        return []
    if key:
        if key not in values:
            raise UserError(
                f"{location}: config.data.prompt_key={key!r} names none of the columns with a "
                f"value, {', '.join(map(str, values))}.{did_you_mean(key, values)}"
            )
        return [key]
    # verl's form without the prompt is a mistake, even if another column could be the prompt.
    if "reward_model" in values and names.PROMPT not in values:
        raise UserError(
            f"{location}: found the columns {', '.join(values)}, which lack verl's prompt; name "
            f"its column with config.data.prompt_key.{did_you_mean(names.PROMPT, values)}"
        )
    present = [name for name in _PROMPT_NAMES if name in values]
    # `input` is the request only if nothing else is.
    if len(present) > 1 or (pair is not None and pair.prompt):
        present = [name for name in present if name not in names.CONTEXTS]
    return present


def _read_prompt(name: str, values: Row, location: str, columns: Columns) -> _Reading:
    prompt = parse_prompt(values[name], location, name)
    if name.lower() in names.CHATS:
        return _Reading(name, *_split_last_answer(prompt, location, name, columns))
    if name.lower() not in names.REQUESTS or not isinstance(prompt, str):
        return _Reading(name, prompt)
    for context in names.CONTEXTS:
        if values.get(context) and context != name:
            prompt += f"\n\n{_require_text(values[context], location, context)}"
    return _Reading(name, user_message(prompt))


def _split_last_answer(
    messages: Prompt, location: str, name: str, columns: Columns
) -> tuple[Messages, tuple[str, ...]]:
    """Return the messages before a final one of the assistant, and the text of that one."""
    if isinstance(messages, str):
        raise UserError(
            f"{location}: {name} must be a list of messages, got {quote_cell(messages)}"
        )
    if messages[-1]["role"] != "assistant":
        return messages, ()
    if len(messages) == 1:
        raise UserError(
            f"{location}: {name} has a message of the assistant but no prompt before it"
        )
    return messages[:-1], (response_text(messages[-1], location, name, _learns(columns, name)),)


def _learns(columns: Columns, name: str) -> bool:
    """Return whether the response in a column is one to imitate."""
    return columns.reads_responses and columns.response in ("", name)


def _agrees(prompt: Prompt, other: Prompt) -> bool:
    """Return whether a prompt equals the other one, or contains that one's only message."""
    if prompt == other:
        return True
    if not isinstance(other, str):
        if len([m for m in other if m["role"] != "system"]) > 1:
            return False
    if not isinstance(prompt, str) and len([m for m in prompt if m["role"] == "user"]) > 1:
        return False
    return _flatten(other) in _flatten(prompt)


def _flatten(prompt: Prompt) -> str:
    """Return the text of a prompt with single spaces as its only white space."""
    return " ".join(join_contents(prompt).split())


def _disagreement(
    found: Iterable[tuple[str, Prompt]], meaning: str, option: str, location: str
) -> UserError:
    described = ", ".join(f"{column} ({quote_cell(_flatten(value))})" for column, value in found)
    return UserError(
        f"{location}: these columns hold different {meaning}s: {described}; set {option} to the "
        "one to use"
    )


def _missing_prompt_error(row: Row, pair: _Reading | None, location: str) -> UserError:
    found = ", ".join(
        f"{name} (no value)" if is_missing(value) else str(name) for name, value in row.items()
    )
    if pair is not None:
        return UserError(
            f"{location}: chosen and rejected have no prompt before them, and of the columns "
            f"{found} none is known to be it; name it with config.data.prompt_key"
        )
    return UserError(
        f"{location}: found the columns {found or '(none)'}; expected a prompt as "
        f"{', '.join(_PROMPT_NAMES)}, or chosen and rejected; name another column with "
        f"config.data.prompt_key.{did_you_mean(names.PROMPT, map(str, row))}"
    )


def _read_pair(values: Row, location: str, columns: Columns) -> _Reading | None:
    """Return both responses of a preference, with their prompt if they contain it, else ""."""
    given = [name for name in names.PAIR if name in values]
    if len(given) < len(names.PAIR):
        if given and columns.reads_responses:
            raise UserError(f"{location}: chosen and rejected must both be set")
        return None
    chosen, rejected = (parse_prompt(values[name], location, name) for name in names.PAIR)
    if isinstance(chosen, str) and isinstance(rejected, str):
        has_prompt = columns.prompt or any(name in values for name in _PROMPT_NAMES)
        if not has_prompt or columns.prompt == "chosen":
            return _split_transcripts(chosen, rejected, location)
        return _Reading("chosen", "", (chosen, rejected))
    prompts, responses = zip(
        *(
            _split_chat(messages, location, name, _learns(columns, name))
            for messages, name in ((chosen, "chosen"), (rejected, "rejected"))
        ),
        strict=True,
    )
    if prompts[0] != prompts[1]:
        raise UserError(f"{location}: chosen and rejected must differ only in their last message")
    return _Reading("chosen", prompts[0], responses)


def _split_chat(messages: Prompt, location: str, name: str, is_learned: bool) -> tuple[Prompt, str]:
    """Return the prompt of a whole chat, "" if there is none, and its response."""
    if isinstance(messages, str):
        return "", messages
    if messages[-1]["role"] != "assistant":
        raise UserError(f"{location}: the last message of {name} must be the assistant's")
    return messages[:-1] or "", response_text(messages[-1], location, name, is_learned)


def _split_transcripts(chosen: str, rejected: str, location: str) -> _Reading:
    # The answers may begin with the same words, so the prompt ends at the last shared turn.
    shared = os.path.commonprefix([chosen, rejected])
    last_turn = shared.rfind(ASSISTANT)
    if last_turn < 0:
        raise UserError(
            f"{location}: chosen and rejected do not begin with the same dialogue up to "
            f"{ASSISTANT!r}; if another column is their prompt, name it with config.data.prompt_key"
        )
    end = last_turn + len(ASSISTANT)
    return _Reading("chosen", chosen[:end], (chosen[end:], rejected[end:]))


def _add_instruction(reading: _Reading, values: Row, instruction: str) -> Prompt:
    """Return the prompt with the instruction if it is nothing but a question."""
    prompt = reading.prompt
    if not instruction or isinstance(prompt, str) or len(prompt) != 1:
        return prompt
    questions = [user_message(values[name]) for name in names.QUESTIONS if name in values]
    if reading.column in names.QUESTIONS or prompt in questions:
        return user_message(f"{prompt[0]['content']} {instruction}")
    return prompt


def _add_system_column(prompt: Prompt, values: Row, location: str) -> Prompt:
    """Return the prompt with the system message of a column."""
    for name in names.SYSTEMS:
        if not values.get(name):
            continue
        text = _require_text(values[name], location, name)
        if isinstance(prompt, str):
            raise UserError(
                f"{location}: the prompt is plain text and cannot have the column {name} as its "
                "system message; write the prompt as messages, or as a column `question`"
            )
        if prompt[0]["role"] != "system":
            prompt = ({"role": "system", "content": text}, *prompt)
        if prompt[0]["content"] != text:
            raise UserError(
                f"{location}: the column {name} ({quote_cell(text)}) is not the chat's own system "
                f"message ({quote_cell(prompt[0]['content'])}); remove one"
            )
    return prompt


def _find_responses(
    values: Row, pair: _Reading | None, readings: list[_Reading], location: str, columns: Columns
) -> tuple[str, ...]:
    """Return the response of a row, both of a pair, or none."""
    key = columns.response
    extra_info = _own_extra_info(values)
    if key:
        value = values.get(key, extra_info.get(key))
        if value is None:
            return ()
        response = _read_response(value, location, f"config.supervised.response_key={key!r}")
        return (response,)
    if pair is not None:
        return pair.responses
    found = [(reading.column, reading.responses[0]) for reading in readings if reading.responses]
    for name in names.RESPONSES:
        if name in values:
            is_text = isinstance(values[name], str)
            # PPO reads no responses: theirs may have any form.
            if is_text or columns.reads_responses:
                found.append((name, _read_response(values[name], location, name)))
    if columns.reads_responses and len({text.strip() for _, text in found}) > 1:
        raise _disagreement(found, "response", "config.supervised.response_key", location)
    answer = values.get("answer", extra_info.get("answer"))
    if not found and isinstance(answer, str):
        return (answer,)
    return tuple(text for _, text in found[:1])


def _read_response(value: Any, location: str, name: str) -> str:
    """Return a response given as text, or as the last message of an assistant."""
    if not isinstance(value, (str, list, dict)):
        raise UserError(f"{location}: {name} must be text, got {quote_cell(value)}")
    messages = parse_prompt(value, location, name)
    if isinstance(messages, str):
        return messages
    is_chat = any(chat in name for chat in names.CHATS)
    if messages[-1]["role"] != "assistant" or (len(messages) > 1 and not is_chat):
        raise UserError(
            f"{location}: {name} must be text or one message of the assistant, got "
            f"{quote_cell(value)}"
        )
    return response_text(messages[-1], location, name, is_learned=True)


def _find_ground_truth(values: Row, location: str, columns: Columns) -> tuple[Any, bool]:
    """Return the reference answer, and whether it follows GSM8K's mark."""
    key = columns.ground_truth
    reward_model = values.get("reward_model")
    if key and key in values and key != "reward_model":
        return _read_answer(values[key], location)
    # What reward_model holds is named by either of its names.
    if key and not (reward_model and key in ("reward_model", "ground_truth")):
        raise UserError(
            f"{location}: config.data.ground_truth_key={key!r} names none of the columns with a "
            f"value, {', '.join(map(str, values))}.{did_you_mean(key, values)}"
        )
    truths = {name: parse_ground_truth(values.get(name)) for name in names.GROUND_TRUTHS}
    if reward_model:
        truths = {"reward_model": parse_ground_truth(reward_model.get("ground_truth")), **truths}
    texts = {name: str(truth) for name, truth in truths.items() if truth != ""}
    if not key and len(set(texts.values())) > 1:
        option = "config.data.ground_truth_key"
        raise _disagreement(texts.items(), "reference answer", option, location)
    if texts:
        return truths[next(iter(texts))], False
    if reward_model:
        return "", False
    if "answer" in values:
        return _read_answer(values["answer"], location)
    # The rule extracts the boxed answer from the solution.
    solution = values.get("solution")
    if isinstance(solution, str) and ("problem" in values or "\\boxed" in solution):
        return solution, False
    return "", False


def _read_answer(answer: Any, location: str) -> tuple[Any, bool]:
    if not isinstance(answer, str) or "####" not in answer:
        return parse_ground_truth(answer), False
    # The last mark counts: a worked solution may contain it earlier. What follows is kept whole.
    gold_answer = answer.rpartition("####")[2].strip().rstrip(".")
    if not gold_answer:
        raise UserError(f"{location}: the answer has no `#### N` (it ends in {answer[-60:]!r})")
    if _GROUPED.fullmatch(gold_answer):
        gold_answer = gold_answer.replace(",", "")  # as verl writes it
    return gold_answer, True


def _find_extra_info(row: Row, values: Row, reading: _Reading) -> Row:
    """Return what reward functions get besides the prompt: the row's own extra_info, if any.

    Except in verl's form, unknown columns are added to it.
    """
    if "reward_model" in values:
        return _own_extra_info(values)
    if own := _own_extra_info(values):
        return {name: x for name, x in values.items() if name not in names.KNOWN} | own
    parsed = {names.PROMPT, *names.CHATS, *names.PAIR, "completion"}
    if reading.column not in names.REQUESTS:
        parsed.add(reading.column)
    return {name: value for name, value in row.items() if name not in parsed}


def _own_extra_info(values: Row) -> Row:
    extra_info = values.get("extra_info")
    return extra_info if isinstance(extra_info, dict) else {}


def _read_tools(value: Any, location: str) -> tuple[Any, ...]:
    """Return the functions of a column, a list that may be given as JSON text."""
    if isinstance(value, str) and value.strip():
        value = from_json(value)
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UserError(f"{location}: tools must be a list of objects, got {quote_cell(value)}")
    tools = drop_missing(value)
    return tuple(function_schema(tool) if "inputSchema" in tool else tool for tool in tools)


def function_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as chat templates read it: one of MCP, or a bare function, is wrapped."""
    if "function" in tool or "name" not in tool:
        return tool
    function = {"parameters" if name == "inputSchema" else name: x for name, x in tool.items()}
    return {"type": "function", "function": function}


def _require_text(value: Any, location: str, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{location}: {name} must be text, got {quote_cell(value)}")
    return value
