"""Tokenize prompts; drop, truncate or reject prompts that are too long.

Worker processes do it where this process alone would take long.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np

from jax_ppo import processes
from jax_ppo.data.chat_templates import (
    ChatTemplate,
    render_prompt,
    template_variables,
    validate_chat_template,
)
from jax_ppo.data.messages import prompt_texts
from jax_ppo.data.tokenizer import Tokenizer, encode_text
from jax_ppo.errors import UserError, counted, shorten
from jax_ppo.types import Example

log = logging.getLogger(__name__)

_CHUNK = 256  # prompts between two reports of progress
_PATIENCE_SECONDS = 20.0  # that this process alone may take for the remaining prompts


@dataclasses.dataclass(frozen=True)
class PromptDataset:
    """Examples with the token ids of their prompts."""

    examples: Sequence[Example]  # none where nothing is trained
    tokens: Sequence[np.ndarray]  # int32 [length] per example, length 1..max_prompt_length
    max_prompt_length: int  # tokens; no batch is wider
    name: str = "config.data.train_files"  # the option that names the data, for messages
    first_row: int | None = None  # of the first example in the list that environments get, if any

    def __len__(self) -> int:
        return len(self.examples)

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Return the number of `rows` and a hash of contents and order, without file names."""
        digest = hashlib.sha256()
        # Not the tokens: a chat template may write today's date.
        for example in self.examples:
            facts = {name: x for name, x in vars(example).items() if name != "location"}
            digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
        return {"rows": len(self), "memory": digest.hexdigest()[:32]}


@dataclasses.dataclass(frozen=True)
class PromptEncoding:
    """Conversion of prompts to tokens."""

    max_prompt_length: int  # tokens
    filter_overlong_prompts: bool = True  # drop longer prompts
    # Otherwise, what to do with longer prompts: "error" raises; "left" keeps the last tokens,
    # "right" the first, "middle" the first half and the last half.
    truncation: str = "error"
    # Apply the tokenizer's chat template if it has one and the prompt is a chat; a dict has
    # variables for the template.
    chat_template: ChatTemplate = True


def tokenize_prompts(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    encoding: PromptEncoding,
    name: str = "config.data.train_files",
    on_progress: Callable[[int, int], None] = lambda tokenized, total: None,
) -> PromptDataset:
    """Encode every prompt as `encode_prompts` does; log the number of dropped prompts.

    A worker per core does what would take this process longer than 20 seconds. `name` is the data's
    option, for messages. `on_progress` is called with the prompts tokenized so far and in total; it
    may end the work by raising. Raise `UserError` if a prompt is empty, cannot be encoded, or is
    too long with truncation "error", or if none is left.
    """
    validate_chat_template(tokenizer, encoding.chat_template)
    _report_unread_parts(examples, tokenizer, encoding.chat_template, name)
    encoded: list[np.ndarray | None] = []
    for chunk in _encode_chunks(examples, tokenizer, encoding, name):
        encoded += chunk
        on_progress(len(encoded), len(examples))
    kept = [(e, ids) for e, ids in zip(examples, encoded, strict=True) if ids is not None]
    longest = encoding.max_prompt_length
    longer = f"longer than config.data.max_prompt_length={longest} tokens"
    report_dropped(name, "prompt", len(examples), len(kept), longer)
    return PromptDataset(tuple(e for e, _ in kept), [ids for _, ids in kept], longest, name)


def _encode_chunks(
    examples: Sequence[Example], tokenizer: Tokenizer, encoding: PromptEncoding, name: str
) -> Iterator[list[np.ndarray | None]]:
    """Yield the results of `encode_prompts` for consecutive chunks of the examples."""
    starts = range(0, len(examples), _CHUNK)
    chunks = [(examples[start : start + _CHUNK], name, start + 1) for start in starts]
    cores = len(os.sched_getaffinity(0))
    started = time.monotonic()
    for done, (chunk, _, first_row) in enumerate(chunks):
        seconds_left = (time.monotonic() - started) / max(done, 1) * (len(chunks) - done)
        if done and cores > 1 and seconds_left > _PATIENCE_SECONDS:
            yield from _encode_in_workers(chunks[done:], tokenizer, encoding, cores)
            return
        yield list(encode_prompts(chunk, tokenizer, encoding, name, first_row))


def _encode_in_workers(
    chunks: Sequence[tuple[Sequence[Example], str, int]],
    tokenizer: Tokenizer,
    encoding: PromptEncoding,
    cores: int,
) -> Iterator[list[np.ndarray | None]]:
    workers = min(cores, len(chunks))
    with processes.explained_semaphores():
        pool = concurrent.futures.ProcessPoolExecutor(
            workers,
            mp_context=processes.WorkerContext(),
            initializer=_initialize_worker,
            initargs=(os.getpid(), tokenizer, encoding),
        )
    try:
        for future in [pool.submit(_encode_chunk, *chunk) for chunk in chunks]:
            yield future.result()
    except BrokenProcessPool as error:
        raise UserError(
            f"{chunks[0][1]}: a worker process that tokenizes prompts was killed, which happens "
            f"when memory runs out; {workers} were running at once"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_of_worker: Any = None  # tokenizer and encoding of a worker process


def _initialize_worker(parent: int, tokenizer: Tokenizer, encoding: PromptEncoding) -> None:
    global _of_worker
    _of_worker = tokenizer, encoding
    # Ctrl-C reaches all processes of the command, but the run ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.end_with_parent(parent)


def _encode_chunk(
    examples: Sequence[Example], name: str, first_row: int
) -> list[np.ndarray | None]:
    tokenizer, encoding = _of_worker
    return list(encode_prompts(examples, tokenizer, encoding, name, first_row))


def encode_prompts(
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    encoding: PromptEncoding,
    name: str,
    first_row: int = 1,
) -> Iterator[np.ndarray | None]:
    """Yield the token ids of each prompt, int32 [length], or `None` if it is dropped.

    Messages name the option `name` and count rows from `first_row`. Raise as `tokenize_prompts`.
    """
    limit = encoding.max_prompt_length
    for row, example in enumerate(examples, first_row):
        location = example.describe_location(row, name)
        text, special = _render_example(example, tokenizer, encoding.chat_template, location)
        try:
            ids = encode_text(tokenizer, text, special)
        except Exception as error:
            raise UserError(f"{location}: the prompt cannot be encoded: {error}") from error
        if not ids:
            raise UserError(f"{location}: the prompt has no tokens: {text[:80]!r}")
        if len(ids) > limit:
            if encoding.filter_overlong_prompts:
                yield None
                continue
            ids = _truncate(ids, limit, encoding.truncation, location)
        yield np.asarray(ids, np.int32)


def report_dropped(name: str, unit: str, total: int, left: int, which: str) -> None:
    """Log how many rows of an option are dropped, and which; raise `UserError` if none is left."""
    dropped = total - left
    if dropped:
        log.warning("%s: dropped %d of %d %ss, %s", name, dropped, total, unit, which)
    if not left:
        raise UserError(
            f"{name}: no {unit} is left of {total}; {dropped} are dropped, {which}. Change that, "
            "or use other data"
        )


def _report_unread_parts(
    examples: Sequence[Example], tokenizer: Any, chat_template: ChatTemplate, name: str
) -> None:
    """Log how many prompts have roles or tools that the model does not see."""
    chats = sum(len(e.prompt) > 1 for e in examples if not isinstance(e.prompt, str))
    if chats and chat_template is True and not tokenizer.chat_template:
        log.warning(
            "%s: the tokenizer has no chat template: the messages of %s are joined by line "
            "breaks, without their roles (config.data.chat_template=False confirms this)",
            name,
            counted(chats, "chat"),
        )
    with_tools = [example for example in examples if example.tools]
    if with_tools and chat_template is not False and "tools" in template_variables(tokenizer):
        with_tools = [example for example in with_tools if isinstance(example.prompt, str)]
    if with_tools:
        log.warning(
            "%s: ignored the tools of %d prompts, which are plain text or have no chat template "
            "that describes tools",
            name,
            len(with_tools),
        )


def _render_example(
    example: Example, tokenizer: Tokenizer, chat_template: ChatTemplate, location: str
) -> tuple[str, bool]:
    """Return the text of a prompt, and whether the tokenizer adds its special tokens to it."""
    # Checked before rendering, since a chat template renders an empty prompt as text.
    if not any(text.strip() for text in prompt_texts(example.prompt)):
        raise UserError(f"{location}: the prompt is empty")
    try:
        text, special = render_prompt(tokenizer, example.prompt, chat_template, example.tools)
    except Exception as error:
        raise UserError(
            f"{location}: the prompt cannot be encoded "
            f"(config.data.chat_template={chat_template}): {error}"
        ) from error
    for message in () if isinstance(example.prompt, str) else example.prompt:
        # Of what tools and assistants said before, templates may write another form.
        calls: Any = message.get("tool_calls", [])
        said = [str(call.get("function", call).get("name", "")) for call in calls]
        if message["role"] not in ("assistant", "tool", "function", "ipython"):
            said = [message["content"].strip()]
        if not all(part in text for part in said):
            raise UserError(
                f"{location}: the chat template leaves out a message of the role "
                f"{message['role']!r}, {shorten(str(said))}; write it in a form that it renders"
            )
    return text, special


def _truncate(ids: list[int], width: int, truncation: str, location: str) -> list[int]:
    if truncation == "left":
        return ids[-width:]
    if truncation == "right":
        return ids[:width]
    if truncation == "middle":
        # `first - width` is negative: it counts the tokens at the end.
        first = width // 2
        return ids[:first] + ids[first - width :]
    raise UserError(
        f"{location}: the prompt has {len(ids)} tokens, and config.data.max_prompt_length={width}. "
        "Set that higher, config.data.filter_overlong_prompts=True to drop such prompts, or "
        "config.data.truncation to left, right or middle to truncate them"
    )
