"""Columns of data sets: what their names mean, and the options that name other ones.

A name's meaning does not depend on upper and lower case. `row_formats` reads rows by this table.
"""

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

# Of several columns of one kind, the earlier one takes precedence.
PROMPT = "prompt"  # text that is sampled from as it is, or messages of a chat
CHATS = ("messages", "conversations", "conversation")  # a last one of the assistant: the response
QUESTIONS = ("question", "problem", "query")
REQUESTS = ("instruction", *QUESTIONS, "input")  # a user's message; `input` if there is no other
CONTEXTS = ("input", "context")  # added to the request after an empty line
SYSTEMS = ("system", "system_prompt")  # system message of the chat
PAIR = ("chosen", "rejected")  # two responses: text, a message, or a whole chat
RESPONSES = ("completion", "response", "output", "solution")  # response to imitate
GROUND_TRUTHS = ("ground_truth", "expected_answer", "final_answer")  # reference answer
# `ground_truth` of the first or second is the reference answer.
VERL = ("reward_model", "reward_spec", "extra_info")
# `answer` is a reference answer, and a response if there is no other; `data_source` selects the
# rule; `tools` are functions that the chat template describes.
KNOWN = frozenset(
    (PROMPT, *CHATS, *REQUESTS, *CONTEXTS, *SYSTEMS, *PAIR, *RESPONSES, *GROUND_TRUTHS, *VERL)
) | {"answer", "data_source", "tools"}
# Whether the response is one to imitate, as KTO's data say (TRL's, LLaMA-Factory's).
LABELS = ("label", "kto_tag")
# Columns of choices and passages: unread they would be missing from the prompt of a question.
CHOICES = ("choices", "options", "passage", "article", "body", "history")
_SINGLE_CHOICE = re.compile(r"(op|option|choice|ending)s?_?([a-j]|\d+)")
MEDIA = re.compile(r"(decoded_)?(images?|videos?|audios?)(_\d+)?")
# Columns that describe a row and change neither prompt nor responses.
_HARMLESS = re.compile(
    r"|unnamed: \d+|__index_level_\d+__"  # as pandas names row numbers
    r"|ability|category|dataset|date|difficulty|domain|hash|id|idx|index|level|license|metadata"
    r"|model|num_turns|seed|source|split|style|subject|subset|tags|task|timestamp|title|topic|type"
    r"|url|uuid"
    r"|year|scores?|ratings?|.*_(id|ids|idx|index|uuid|scores?|ratings?|type|source|model|tokens)"
    r"|(score|rating|num|is)_.*"
)


@dataclasses.dataclass(frozen=True)
class Columns:
    """Names of columns that options set; "" leaves the choice to the names above."""

    prompt: str = ""  # column of the prompt
    response: str = ""  # the response to imitate, or its entry in extra_info of verl's form
    ground_truth: str = ""  # column of the reference answer
    reads_responses: bool = True  # whether they are trained on, so must be unambiguous


def ignored_columns(names: Iterable[str], columns: Columns) -> list[str]:
    """Return the columns with values that are neither prompt, response nor reference answer."""
    known = {name.strip().lower(): name for name in names}
    explicit = {columns.prompt, columns.response, columns.ground_truth}
    prompts = [PROMPT, *CHATS, *REQUESTS]
    # Images are refused unless they are empty.
    unread = {name for name in known if name not in KNOWN and not MEDIA.fullmatch(name)}
    if columns.prompt:
        unread |= set(prompts) - {name.lower() for name in explicit}
    has_own_prompt = columns.prompt.lower() not in ("", *REQUESTS) or {PROMPT, *CHATS} & set(known)
    if has_own_prompt:
        unread |= set(CONTEXTS)
    return [
        name
        for lowered, name in known.items()
        if lowered in unread and name not in explicit and not _HARMLESS.fullmatch(lowered)
    ]


def find_label(row: dict[str, Any], columns: Columns) -> str | None:
    """Return the column that says whether the row's response is one to imitate, if there is one."""
    names = {str(name).strip().lower(): name for name in row}
    for name in (names[label] for label in LABELS if label in names):
        is_flag = str(row[name]).lower() in ("true", "false")
        if is_flag and name not in (columns.response, columns.ground_truth):
            return name
    return None


def parts_of_questions(values: dict[str, Any]) -> list[str]:
    """Return the columns with values that a question needs: its choices, or what it is about."""
    names = {str(name).lower(): name for name, value in values.items() if value}
    parts = [names[name] for name in names if name in CHOICES or _SINGLE_CHOICE.fullmatch(name)]
    # Single letters are choices if there are at least three.
    if not parts and {"A", "B", "C"} <= values.keys():
        return ["A"]
    return parts


def parse_ground_truth(value: Any) -> Any:
    """Return a reference answer as text; "" if there is none.

    Dicts, for user-defined reward functions, are returned unchanged. Of a list, whose entries are
    all right answers, those without a value are left out.
    """
    if is_missing(value):
        return ""
    if isinstance(value, list):
        entries = [entry for entry in value if not is_missing(entry)]
        return [parse_ground_truth(x) if isinstance(x, float | bytes) else x for x in entries]
    if isinstance(value, (str, dict)):
        return value
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    # Data frames store integers as floats if a value is missing.
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    # A number of six digits that was stored in 32 bits has many more in 64.
    short = float(f"{value:.6g}") if isinstance(value, float) else value
    is_written_short = len(str(short)) + 5 < len(str(value)) and float(np.float32(short)) == value
    return str(short if is_written_short else value)


def is_missing(value: Any) -> bool:
    """Return whether a column has no value in a row."""
    return value is None or (isinstance(value, float) and math.isnan(value))
