"""Rows of prompts with responses, usable or refused by file and row number, as a data set.

A row has its prompt and response as texts, in one of the forms of `row_formats`; or as the tokens
`prompt_ids` and `response_ids`, like the files that a run writes to `rollouts/`, where it may also
have `action_mask`, `turn_starts`, `turn_rewards`, `truncated` and `sampled_logprobs`. Tokens are
used as they are.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_ppo.data import files
from jax_ppo.data.chat_templates import ChatTemplate, encode_prompt, encode_responses
from jax_ppo.data.prompt_batches import PromptBatch
from jax_ppo.data.tokenize_prompts import PromptDataset
from jax_ppo.data.tokenizer import Tokenizer
from jax_ppo.errors import UserError, shorten
from jax_ppo.types import Example, Rollout


@dataclasses.dataclass(frozen=True)
class ResponseRow:
    """A prompt with its response as tokens."""

    location: str  # "FILE:LINE" or "FILE, row N", counted from 1
    number: int  # the row of all files, counted from 1
    example: Example  # the prompt and what rules read
    prompt_ids: np.ndarray  # int32 [length]
    response_ids: np.ndarray  # int32 [length], length at least 1
    action_mask: np.ndarray  # bool [length], True on the tokens that the policy chose
    turn_starts: np.ndarray  # bool [length], True on the first of them in each turn
    truncated: bool = False  # whether the response was cut off
    reward: float | None = None  # of the whole response in the file; `None` if it is not read
    turn_rewards: np.ndarray | None = None  # float32 [length], within the response, if any
    logprobs: np.ndarray | None = None  # float32 [length], of the policy that drew them, if known


@dataclasses.dataclass(frozen=True)
class GivenResponses(PromptDataset):
    """Prompts with one given response each."""

    rows: Sequence[ResponseRow] = ()  # the row of each example
    max_response_length: int = 0  # tokens
    has_rewards: bool = False  # whether the rows have the rewards of whole responses

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[ResponseRow],
        max_prompt_length: int,
        max_response_length: int,
        name: str = "",
    ) -> "GivenResponses":
        """Return the data set of rows; `name` is the option that names their files."""
        return cls(
            examples=tuple(row.example for row in rows),
            tokens=[row.prompt_ids for row in rows],
            max_prompt_length=max_prompt_length,
            name=name,
            rows=rows,
            max_response_length=max_response_length,
            has_rewards=rows[0].reward is not None,
        )

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Return facts that differ if the rows do: see `PromptDataset`."""
        digest = hashlib.sha256()
        for row in self.rows:
            example = row.example
            texts = (example.prompt, example.data_source, example.ground_truth)
            facts = (*texts, row.truncated, row.reward)
            digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
            masks = (row.action_mask, row.turn_starts)
            for array in (row.prompt_ids, row.response_ids, *masks, row.turn_rewards, row.logprobs):
                digest.update(b"|" if array is None else b"%d|" % len(array) + array.tobytes())
        return {"rows": len(self), "memory": digest.hexdigest()[:32]}

    @functools.cached_property
    def _optional(self) -> dict[str, Any]:
        """Return the types of further arrays that all rollouts have, since some row needs them."""
        needed = {
            "turn_rewards": (np.float32, any(row.turn_rewards is not None for row in self.rows)),
            "turn_starts": (bool, any(row.turn_starts.sum() > 1 for row in self.rows)),
        }
        return {name: dtype for name, (dtype, is_needed) in needed.items() if is_needed}

    def rollout(self, batch: PromptBatch) -> Rollout:
        """Return the responses of a batch, on the host; unknown log-probs are NaN."""
        rows = [self.rows[index] for index in batch.indices]
        optional: dict[str, Any] = {
            name: self._pad(rows, name, dtype) for name, dtype in self._optional.items()
        }
        return Rollout(
            prompts=batch.prompts,
            responses=self._pad(rows, "response_ids", np.int32),
            lengths=np.array([len(row.response_ids) for row in rows], np.int32),
            logprobs=self._pad(rows, "logprobs", np.float32, missing=np.nan),
            truncated=np.array([row.truncated for row in rows]),
            action_mask=self._pad(rows, "action_mask", bool),
            **optional,
        )

    def rewards(self, batch: PromptBatch) -> np.ndarray:
        """Return the rewards of whole responses, float32 [B]."""
        return np.array([self.rows[index].reward for index in batch.indices], np.float32)

    def _pad(
        self, rows: Sequence[ResponseRow], name: str, dtype: Any, missing: float = 0
    ) -> np.ndarray:
        """Return an attribute of the responses' tokens, [B, T], 0 past their lengths."""
        padded = np.zeros((len(rows), self.max_response_length), dtype)
        for target, row in zip(padded, rows, strict=True):
            value = getattr(row, name)
            target[: len(row.response_ids)] = missing if value is None else value
        return padded


class RefusedRow(NamedTuple):
    """A row that cannot be used: where it is, why not, and its text."""

    location: str
    reason: str
    row: str


@dataclasses.dataclass(frozen=True)
class ResponseReader:
    """Conversion of rows to tokens."""

    tokenizer: Tokenizer
    parse: Callable[[dict[str, Any], str], Example]  # example of a row of texts and its location
    chat_template: ChatTemplate  # as `encode_prompt` takes it
    vocab_size: int  # number of the model's tokens
    max_prompt_length: int  # tokens of the longest prompt
    max_response_length: int  # tokens of the longest response, with its end
    reward_key: str  # column of the reward of the whole response; "" reads none
    find_obstacle: Callable[[Example], str]  # why no rule can score an example; "" if one can

    def read(self, path: Path, option: str) -> Iterator[ResponseRow | RefusedRow]:
        """Yield each row of `find_response_files`, in order; raise `UserError` for a bad file."""
        paths = find_response_files(path, option)
        # Lines are parsed here, so that a wrong one does not end the file.
        raw_rows: Iterator[tuple[str, bytes | dict[str, Any]]] = itertools.chain.from_iterable(
            files.read_jsonl_lines(file)
            if file.name.lower().endswith((".jsonl", ".jsonl.gz"))
            else files.read_rows(file, option)
            for file in paths
        )
        for number, (location, raw) in enumerate(raw_rows, start=1):
            try:
                row = raw if isinstance(raw, dict) else files.parse_jsonl_line(raw, location)
                yield self._convert(row, location, number)
            except UserError as error:
                reason = str(error).removeprefix(f"{location}: ")
                if isinstance(raw, bytes):
                    text = raw.decode("utf-8", errors="replace").rstrip("\r\n")
                else:
                    text = json.dumps(raw, ensure_ascii=False, default=str)
                yield RefusedRow(location, reason, text)

    def _convert(self, row: dict[str, Any], location: str, number: int) -> ResponseRow:
        truncated = _is_truncated(row)
        if {"prompt_ids", "response_ids"} <= row.keys():
            # In a row of texts, a column of this name has something else, such as passages.
            if any(row.get("contexts") or ()):
                raise UserError("has several contexts, which jax_ppo 0.1 reads")
            example = _sampled_example(row)
            prompt_ids = _token_ids(row, "prompt_ids", self.vocab_size)
            response_ids = _token_ids(row, "response_ids", self.vocab_size)
        else:
            example = self.parse(row, location)
            prompt_ids, response_ids = self._encode(example, truncated)
        for name, length, longest in (
            ("prompt", len(prompt_ids), self.max_prompt_length),
            ("response", len(response_ids), self.max_response_length),
        ):
            if not length:
                raise UserError(f"the {name} is empty")
            if length > longest:
                raise UserError(
                    f"the {name} has {length} tokens, and config.data.max_{name}_length={longest}"
                )
        if obstacle := self.find_obstacle(example):
            raise UserError(obstacle)
        columns = ("action_mask", "turn_starts", "turn_rewards", "sampled_logprobs")
        mask, starts, turn_rewards, logprobs = (_numbers(row, name, length) for name in columns)
        action_mask = np.ones(length, bool) if mask is None else mask != 0
        if not action_mask.any():
            raise UserError("action_mask has no token that the policy chose")
        # By default, consecutive action tokens form a turn.
        turn_starts = action_mask & ~np.append(False, action_mask[:-1])
        if starts is not None:
            turn_starts |= action_mask & (starts != 0)
        reward = None
        if self.reward_key:
            reward = _finite(row.get(self.reward_key), self.reward_key)
            if turn_rewards is not None:
                reward -= float(turn_rewards.sum())  # a logged score has both
        return ResponseRow(
            location=location,
            number=number,
            example=example,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            action_mask=action_mask,
            turn_starts=turn_starts,
            truncated=truncated,
            reward=reward,
            turn_rewards=turn_rewards,
            logprobs=logprobs,
        )

    def _encode(self, example: Example, truncated: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of prompt and response; one that was cut off has no end."""
        if example.response is None:
            raise UserError("has no response")
        if not example.response.strip():
            raise UserError("the response is empty")
        chat, options = (self.tokenizer, example.prompt), (self.chat_template, example.tools)
        try:
            prompt_ids = encode_prompt(*chat, *options)
            [ids] = encode_responses(*chat, [example.response], *options)
        # A chat template raises errors of any kind.
        except Exception as error:
            raise UserError(f"cannot be encoded: {error}") from error
        return np.array(prompt_ids, np.int32), np.array(ids[: len(ids) - truncated], np.int32)


def find_response_files(path: Path, option: str) -> list[Path]:
    """Return the files of a pattern with `*` or `?`, of a run's rollouts/, or the file itself.

    Of rollouts/ only responses of training are read. Raise `UserError` if there is no such file.
    """
    if any(mark in str(path) for mark in "*?"):
        return files.find_matching_files(path, option)
    if path.is_dir():
        if found := sorted(path.glob("training_*.jsonl")):
            return found
        raise files.folder_error(path, option)
    if not files.has_suffix(path.name):
        raise UserError(f"{option}={str(path)!r}: expected a name in {', '.join(files.SUFFIXES)}")
    files.require_file(path, option)
    return [path]


def _sampled_example(row: dict[str, Any]) -> Example:
    for name in ("prompt", "data_source"):
        if not isinstance(row.get(name, ""), str):
            raise UserError(f"{name} must be text, got {shorten(repr(row[name]))}")
    return Example(
        prompt=row.get("prompt", ""),
        data_source=row.get("data_source", ""),
        ground_truth="" if row.get("ground_truth") is None else row["ground_truth"],
        extra_info=row,
    )


def _is_truncated(row: dict[str, Any]) -> bool:
    # Text in a CSV file.
    truncated = "" if row.get("truncated") is None else str(row["truncated"]).lower()
    if truncated not in ("", "0", "false", "1", "true"):
        raise UserError(f"truncated: expected true or false, got {shorten(repr(row['truncated']))}")
    return truncated in ("1", "true")


def _token_ids(row: dict[str, Any], name: str, vocab_size: int) -> np.ndarray:
    ids = row[name]
    is_valid = isinstance(ids, list) and all(type(i) is int and 0 <= i < vocab_size for i in ids)
    if not is_valid:
        raise UserError(
            f"{name}: expected a list of the model's tokens, 0 to {vocab_size - 1}, got "
            f"{shorten(repr(ids))}"
        )
    return np.array(ids, np.int32)


def _numbers(row: dict[str, Any], name: str, length: int) -> np.ndarray | None:
    values = row.get(name)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != length:
        raise UserError(f"{name}: expected {length} numbers, one per token of the response")
    return np.array([_finite(value, name) for value in values], np.float32)


def _finite(value: Any, name: str) -> float:
    """Return a number, which is text in a CSV file."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, (int, float)) and math.isfinite(value):
        return float(value)
    raise UserError(f"{name}: expected a finite number, got {shorten(repr(value))}")
