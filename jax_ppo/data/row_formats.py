r"""Conversion of the rows of data sets to examples, by the names of their columns.

`columns` says what each column means. A row has one prompt: the columns that could be it
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

from jax_ppo.data import columns as names
from jax_ppo.data.chat_templates import function_schema
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

    @property
    def rank(self) -> int:
        """Return its place in order of precedence: messages before text, text before requests."""
        if self.column == names.PROMPT:
            return 2 if isinstance(self.prompt, str) else 0
        return 3 if self.column in names.REQUESTS else 1


def parse_row(
    row: Row, location: str, columns: Columns | None = None, instruction: str = ""
) -> Example:
    """Convert a row, columns by name, to an example; messages name its location.

    The columns that options name take precedence. The instruction is added to a question, after a
    space. Raise `UserError` for no prompt or several, a column of the wrong type, or images.
    """
    return _RowReader(row, location, columns or Columns()).read_example(instruction)


class _RowReader:
    """A row, and its columns with values, of which those that are known are in lower case."""

    def __init__(self, row: Row, location: str, columns: Columns) -> None:
        self.row, self.location, self.columns = row, location, columns
        self.values = values = self._known_values()
        for name, value in values.items():
            is_media = names.MEDIA.fullmatch(str(name).lower()) is not None
            is_file = isinstance(value, dict) and {"bytes", "path"} == value.keys()
            if value and (is_media or is_file):
                raise self._error(
                    f"the column {name} has {quote_cell(value)}; images, audio and video are not "
                    "supported. Use rows without them"
                )
        is_verl = not {"reward_model", "reward_spec"}.isdisjoint(values)
        for name in [name for name in names.VERL if name in values]:
            value = from_json(values[name])
            if isinstance(value, dict):
                values[name] = value
            elif is_verl:
                expected = "named values" if name == "extra_info" else "style and ground_truth"
                raise self._error(f"{name} must have {expected}, got {quote_cell(values[name])}")
        if "reward_spec" in values:
            values.setdefault("reward_model", values.pop("reward_spec"))
        extra_info = values.get("extra_info")
        self.extra_info: Row = extra_info if isinstance(extra_info, dict) else {}
        if columns.prompt in self.extra_info:
            values.setdefault(columns.prompt, self.extra_info[columns.prompt])

    def read_example(self, instruction: str) -> Example:
        """Return the row as an example."""
        values = self.values
        pair = self._read_pair()
        reading, readings = self._choose_prompt(pair)
        prompt = self._add_system_column(self._add_instruction(reading, instruction))
        responses = self._find_responses(pair, readings)
        ground_truth, is_gsm8k = self._find_ground_truth()
        data_source = self._require_text("data_source") if values.get("data_source") else ""
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
            extra_info=self._find_extra_info(reading),
            response=response,
            rejected=rejected,
            tools=self._read_tools(),
            location=self.location,
        )

    def _error(self, problem: str) -> UserError:
        return UserError(f"{self.location}: {problem}")

    def _known_values(self) -> Row:
        columns = self.columns
        explicit = {columns.prompt, columns.response, columns.ground_truth}
        values: Row = {}
        for name, value in self.row.items():
            if is_missing(value):
                continue
            lowered = str(name).strip().lower()
            if lowered in names.KNOWN and name not in explicit:
                name = lowered
            if name in values:
                raise self._error(f"two columns have the name {name}, in upper or lower case")
            values[name] = value
        return values

    def _require_text(self, name: str) -> str:
        value = self.values[name]
        if not isinstance(value, str):
            raise self._error(f"{name} must be text, got {quote_cell(value)}")
        return value

    def _choose_prompt(self, pair: _Reading | None) -> tuple[_Reading, list[_Reading]]:
        """Return the reading of the prompt, and all readings that agree with it."""
        readings = [self._read_prompt(name) for name in self._prompt_columns(pair)]
        if pair is not None and pair.prompt:
            # A pair precedes plain text, which is then the user's message of the same chat.
            readings.append(pair)
        if not readings:
            raise self._missing_prompt_error(pair)
        if self.columns.prompt:
            reading, *others = readings
            # A whole chat must answer the prompt that the option names.
            agree = all(
                _agrees(reading.prompt, other.prompt) or _agrees(other.prompt, reading.prompt)
                for other in others
            )
        else:
            readings.sort(key=lambda reading: reading.rank)
            for reading in readings:
                agree = all(_agrees(reading.prompt, other.prompt) for other in readings)
                if agree:
                    break
        if not agree:
            prompts = [(reading.column, reading.prompt) for reading in readings]
            raise self._disagreement(prompts, "prompt", "config.data.prompt_key")
        if reading.column in names.REQUESTS and not self.columns.prompt:
            for name in names.parts_of_questions(self.values):
                raise self._error(
                    f"the column {name} would be missing from the prompt, which is the "
                    f"{reading.column}; write both to a column `prompt`, or name the column to "
                    "sample from with config.data.prompt_key"
                )
        return reading, readings

    def _prompt_columns(self, pair: _Reading | None) -> list[str]:
        """Return the columns that could be the prompt, in order of precedence."""
        key, values = self.columns.prompt, self.values
        if key == "chosen":
            return []
        if key and key in values:
            return [key]
        if key:
            raise self._no_column_error(key, "prompt_key")
        # verl's form without the prompt is a mistake, even if another column could be the prompt.
        if "reward_model" in values and names.PROMPT not in values:
            raise self._error(
                f"found the columns {', '.join(values)}, which lack verl's prompt; name its column "
                f"with config.data.prompt_key.{did_you_mean(names.PROMPT, values)}"
            )
        present = [name for name in _PROMPT_NAMES if name in values]
        # `input` is the request only if nothing else is.
        if len(present) > 1 or (pair is not None and pair.prompt):
            present = [name for name in present if name not in names.CONTEXTS]
        return present

    def _no_column_error(self, key: str, option: str) -> UserError:
        return self._error(
            f"config.data.{option}={key!r} names none of the columns with a value, "
            f"{', '.join(map(str, self.values))}.{did_you_mean(key, self.values)}"
        )

    def _read_prompt(self, name: str) -> _Reading:
        prompt = parse_prompt(self.values[name], self.location, name)
        if name.lower() in names.CHATS:
            return self._split_last_answer(name, prompt)
        if name.lower() not in names.REQUESTS or not isinstance(prompt, str):
            return _Reading(name, prompt)
        for context in names.CONTEXTS:
            if self.values.get(context) and context != name:
                prompt += f"\n\n{self._require_text(context)}"
        return _Reading(name, user_message(prompt))

    def _split_last_answer(self, name: str, messages: Prompt) -> _Reading:
        """Return a chat as the messages before a final one of the assistant, and its text."""
        if isinstance(messages, str):
            raise self._error(f"{name} must be a list of messages, got {quote_cell(messages)}")
        if messages[-1]["role"] != "assistant":
            return _Reading(name, messages)
        if len(messages) == 1:
            raise self._error(f"{name} has a message of the assistant but no prompt before it")
        return _Reading(name, messages[:-1], (self._said(messages, name),))

    def _said(self, messages: Messages, name: str) -> str:
        """Return the text of a column's last message, which may be one to imitate."""
        if messages[-2:-1] and messages[-2]["role"] == "assistant":
            raise self._error(f"{name} ends with two messages of the assistant; join them into one")
        is_learned = self.columns.reads_responses and self.columns.response in ("", name)
        return response_text(messages[-1], self.location, name, is_learned)

    def _disagreement(
        self, found: Iterable[tuple[str, Prompt]], meaning: str, option: str
    ) -> UserError:
        described = ", ".join(f"{column} ({quote_cell(_flatten(x))})" for column, x in found)
        return self._error(
            f"these columns hold different {meaning}s: {described}; set {option} to the one to use"
        )

    def _missing_prompt_error(self, pair: _Reading | None) -> UserError:
        found = ", ".join(
            f"{name} (no value)" if is_missing(value) else str(name)
            for name, value in self.row.items()
        )
        if pair is not None:
            return self._error(
                "chosen and rejected begin without a prompt, and none of the columns "
                f"{found} is known to hold it; name one with config.data.prompt_key"
            )
        return self._error(
            f"found the columns {found or '(none)'}; expected a prompt as "
            f"{', '.join(_PROMPT_NAMES)}, or chosen and rejected; name another column with "
            f"config.data.prompt_key.{did_you_mean(names.PROMPT, map(str, self.row))}"
        )

    def _read_pair(self) -> _Reading | None:
        """Return both responses of a preference, with their prompt if they contain it, else ""."""
        given = [name for name in names.PAIR if name in self.values]
        if len(given) < len(names.PAIR):
            if given and self.columns.reads_responses:
                raise self._error("chosen and rejected must both be set")
            return None
        parsed = [parse_prompt(self.values[name], self.location, name) for name in names.PAIR]
        texts = [messages for messages in parsed if isinstance(messages, str)]
        if len(texts) == len(parsed):
            has_prompt = self.columns.prompt or any(name in self.values for name in _PROMPT_NAMES)
            if not has_prompt or self.columns.prompt == "chosen":
                return self._split_transcripts(*texts)
            return _Reading("chosen", "", tuple(texts))
        prompts: list[Prompt] = []
        responses = []
        for name, messages in zip(names.PAIR, parsed, strict=True):
            if isinstance(messages, str):
                prompts.append("")
                responses.append(messages)
                continue
            if messages[-1]["role"] != "assistant":
                raise self._error(f"the last message of {name} must be the assistant's")
            prompts.append(messages[:-1] or "")
            responses.append(self._said(messages, name))
        if prompts[0] != prompts[1]:
            raise self._error("chosen and rejected must differ only in their last message")
        return _Reading("chosen", prompts[0], tuple(responses))

    def _split_transcripts(self, chosen: str, rejected: str) -> _Reading:
        # The answers may begin with the same words, so the prompt ends at the last shared turn.
        shared = os.path.commonprefix([chosen, rejected])
        last_turn = shared.rfind(ASSISTANT)
        if last_turn < 0:
            raise self._error(
                "chosen and rejected do not begin with the same dialogue up to "
                f"{ASSISTANT!r}; if another column is their prompt, name it with "
                "config.data.prompt_key"
            )
        end = last_turn + len(ASSISTANT)
        return _Reading("chosen", chosen[:end], (chosen[end:], rejected[end:]))

    def _add_instruction(self, reading: _Reading, instruction: str) -> Prompt:
        """Return the prompt with the instruction if it is nothing but a question."""
        prompt, values = reading.prompt, self.values
        if not instruction or isinstance(prompt, str) or len(prompt) != 1:
            return prompt
        questions = [user_message(values[name]) for name in names.QUESTIONS if name in values]
        if reading.column in names.QUESTIONS or prompt in questions:
            return user_message(f"{prompt[0]['content']} {instruction}")
        return prompt

    def _add_system_column(self, prompt: Prompt) -> Prompt:
        for name in filter(self.values.get, names.SYSTEMS):
            text = self._require_text(name)
            if isinstance(prompt, str):
                raise self._error(
                    f"the prompt is plain text and cannot have the column {name} as its system "
                    "message; write the prompt as messages, or as a column `question`"
                )
            if prompt[0]["role"] != "system":
                prompt = ({"role": "system", "content": text}, *prompt)
            if prompt[0]["content"] != text:
                raise self._error(
                    f"the column {name} ({quote_cell(text)}) is not the chat's own system message "
                    f"({quote_cell(prompt[0]['content'])}); remove one"
                )
        return prompt

    def _find_responses(self, pair: _Reading | None, readings: list[_Reading]) -> tuple[str, ...]:
        """Return the response of a row, both of a pair, or none."""
        key, values = self.columns.response, self.values
        if key:
            value = values.get(key, self.extra_info.get(key))
            name = f"config.supervised.response_key={key!r}"
            return () if value is None else (self._read_response(name, value),)
        if pair is not None:
            return pair.responses
        found = [(column, responses[0]) for column, _, responses in readings if responses]
        for name in names.RESPONSES:
            # PPO reads no responses: theirs may have any form.
            if name in values and (isinstance(values[name], str) or self.columns.reads_responses):
                found.append((name, self._read_response(name, values[name])))
        if self.columns.reads_responses and len({text.strip() for _, text in found}) > 1:
            raise self._disagreement(found, "response", "config.supervised.response_key")
        answer = values.get("answer", self.extra_info.get("answer"))
        if not found and isinstance(answer, str):
            return (answer,)
        return tuple(text for _, text in found[:1])

    def _read_response(self, name: str, value: Any) -> str:
        if not isinstance(value, (str, list, dict)):
            raise self._error(f"{name} must be text, got {quote_cell(value)}")
        messages = parse_prompt(value, self.location, name)
        if isinstance(messages, str):
            return messages
        is_chat = any(chat in name for chat in names.CHATS)
        if messages[-1]["role"] != "assistant" or (len(messages) > 1 and not is_chat):
            raise self._error(
                f"{name} must be text or one message of the assistant, got {quote_cell(value)}"
            )
        return response_text(messages[-1], self.location, name, is_learned=True)

    def _find_ground_truth(self) -> tuple[Any, bool]:
        """Return the reference answer, and whether it follows GSM8K's mark."""
        key, values = self.columns.ground_truth, self.values
        reward_model = values.get("reward_model")
        if key and key in values and key != "reward_model":
            return self._read_answer(values[key])
        # What reward_model holds is named by either of its names.
        if key and not (reward_model and key in ("reward_model", "ground_truth")):
            raise self._no_column_error(key, "ground_truth_key")
        given = {name: values.get(name) for name in names.GROUND_TRUTHS}
        if reward_model:
            given = {"reward_model": reward_model.get("ground_truth"), **given}
        truths = {name: parse_ground_truth(value) for name, value in given.items()}
        texts = {name: str(truth) for name, truth in truths.items() if truth != ""}
        if not key and len(set(texts.values())) > 1:
            option = "config.data.ground_truth_key"
            raise self._disagreement(texts.items(), "reference answer", option)
        if texts:
            return truths[next(iter(texts))], False
        if reward_model:
            return "", False
        if "answer" in values:
            return self._read_answer(values["answer"])
        # The rule extracts the boxed answer from the solution.
        solution = values.get("solution")
        if isinstance(solution, str) and ("problem" in values or "\\boxed" in solution):
            return solution, False
        return "", False

    def _read_answer(self, answer: Any) -> tuple[Any, bool]:
        if not isinstance(answer, str) or "####" not in answer:
            return parse_ground_truth(answer), False
        # The last mark counts, as a worked solution may contain it too. What follows is kept whole.
        gold_answer = answer.rpartition("####")[2].strip().rstrip(".")
        if not gold_answer:
            raise self._error(f"the answer has no `#### N` (it ends in {answer[-60:]!r})")
        if _GROUPED.fullmatch(gold_answer):
            gold_answer = gold_answer.replace(",", "")  # as verl writes it
        return gold_answer, True

    def _find_extra_info(self, reading: _Reading) -> Row:
        """Return the row's extra_info; except in verl's form, unknown columns are added to it."""
        if "reward_model" in self.values:
            return self.extra_info
        if self.extra_info:
            unknown = {name: x for name, x in self.values.items() if name not in names.KNOWN}
            return unknown | self.extra_info
        parsed = {names.PROMPT, *names.CHATS, *names.PAIR, "completion"}
        if reading.column not in names.REQUESTS:
            parsed.add(reading.column)
        return {name: value for name, value in self.row.items() if name not in parsed}

    def _read_tools(self) -> tuple[Any, ...]:
        """Return the functions of a column, a list that may be given as JSON text."""
        value = from_json(self.values.get("tools"))
        if not value:
            return ()
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise self._error(f"tools must be a list of objects, got {quote_cell(value)}")
        tools = drop_missing(value)
        return tuple(function_schema(tool) if "inputSchema" in tool else tool for tool in tools)


def _agrees(prompt: Prompt, other: Prompt) -> bool:
    """Return whether a prompt equals the other one, or contains that one's only message."""
    if prompt == other:
        return True
    if not isinstance(other, str) and len([m for m in other if m["role"] != "system"]) > 1:
        return False
    if not isinstance(prompt, str) and len([m for m in prompt if m["role"] == "user"]) > 1:
        return False
    return _flatten(other) in _flatten(prompt)


def _flatten(prompt: Prompt) -> str:
    """Return the text of a prompt with single spaces as its only white space."""
    return " ".join(join_contents(prompt).split())
