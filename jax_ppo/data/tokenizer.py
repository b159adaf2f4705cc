"""Load tokenizers; encode texts as tokens and decode tokens as texts or bytes."""

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.storage import downloads, hub, local_files, remote
from jax_ppo.thoughts import is_part_of_mark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LONGEST_CHARACTER = 8  # tokens, which may be single bytes
_DATE = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")  # transformers' function
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a blank
_CHECKED_TOKENS = 500  # whose bytes are compared with what the tokenizer decodes

# A tokenizer can be loaded from a folder that has at least one of these files.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spm.model",
    "vocab.json",
    "vocab.txt",
)
_DOWNLOADED_FILES = (
    "tokenizer*",
    "*token*.json",
    "config.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.jinja",
    "*.model",
    "*.tiktoken",
)

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"  # of transformers, whose import takes seconds


def load_tokenizer(
    path: str, option: str = "config.model.tokenizer_path", date: str = ""
) -> Tokenizer:
    """Load the transformers tokenizer that an option names.

    It is in a folder, at an address such as gs://BUCKET/FOLDER, or on the hub as
    OWNER/NAME[@REVISION]. Its template writes the `date`, "" for today's. Raise `UserError` if
    there is none, it needs code from the repository, or the network is unavailable.
    """
    if remote.is_address(path):
        folder = downloads.download_folder(path, option, _DOWNLOADED_FILES)
    else:
        # An existing folder takes precedence over a model of the same name on the hub.
        folder = local_files.expand_local_path(path, option)
        if not folder.is_dir():
            folder = _download_tokenizer(path, option)
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        # Some wrong values in the files raise an error only when the tokenizer is used.
        tokenizer.decode(tokenizer.encode("a"))
        if date and isinstance(tokenizer.chat_template, str):
            write = datetime.date.fromisoformat(date).strftime
            template = _DATE.sub(lambda call: repr(write(call[2])), tokenizer.chat_template)
            tokenizer.chat_template = template
        return tokenizer
    except Exception as error:
        contents = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
        raise UserError(
            f"{option}={path!r}: no tokenizer can be loaded from {folder}, which holds {contents}. "
            "Expected tokenizer.json with tokenizer_config.json, and no Python code: "
            f"{' '.join(str(error).split())}"
        ) from error


def count_ids(tokenizer: Any) -> int:
    """Return the number of ids up to the tokenizer's last one."""
    return 1 + max(tokenizer.get_vocab().values())


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has any of the files that a tokenizer is loaded from."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def _download_tokenizer(path: str, option: str) -> Path:
    # A path that cannot be a name on the hub means a folder that does not exist.
    looks_local = path.startswith((".", "/", "~"))
    if looks_local or hub.split_revision(path)[0].count("/") > 1:
        siblings = [folder.name for folder in Path(path).expanduser().parent.glob("*/")]
        raise UserError(
            f"{option}={path!r}: there is no such folder (looked from {Path.cwd()})."
            f"{did_you_mean(Path(path).name, siblings)}"
        )
    return hub.download_snapshot(path, _DOWNLOADED_FILES, option).folder


def decode_continuation(tokenizer: Tokenizer, before: int, ids: Sequence[int]) -> str:
    """Return the text of a response as it continues its prompt, without special tokens.

    Some tokenizers (Llama 2's) drop the space at the beginning of a text, so that a response
    decoded on its own would lose it. `before` is the last token of the prompt.
    """
    prefix, text, alone = decode_texts(tokenizer, [[before], [before, *ids], ids])
    return text.removeprefix(prefix) if text.startswith(prefix) else alone


def decode_tokens(tokenizer: Tokenizer, before: int, ids: Sequence[int]) -> list[str]:
    """Return the text that each token of a response adds; joined, they are the text after `before`.

    A token by itself may lack the blank that it begins with (SentencePiece), or be a part of a
    character only: the last token of a character has its text, the others have "". Special tokens
    have theirs.
    """

    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    texts = []
    # Tokens of the last complete text, and those after it: a short window, for long responses.
    complete, pending = [before], list[int]()
    for place, token in enumerate(ids, start=1):
        pending.append(token)
        text = decode([*complete, *pending])
        is_part = text.endswith("\N{REPLACEMENT CHARACTER}") and len(pending) < _LONGEST_CHARACTER
        if is_part and place < len(ids):
            texts.append("")
            continue
        known = decode(complete)
        texts.append(text.removeprefix(known) if text.startswith(known) else decode(pending))
        complete, pending = pending, []
    return texts


def decode_texts(
    tokenizer: Any, rows: Sequence[Sequence[int] | np.ndarray], **options: bool
) -> list[str]:
    """Return the texts of responses, without special tokens other than the marks of thoughts."""
    added = tokenizer.added_tokens_decoder.items()
    special = {index: is_part_of_mark(str(token)) for index, token in added if token.special}
    has_marks = any(special.values())
    if has_marks:
        rows = [[index for index in row if special.get(index, True)] for row in rows]
    return list(tokenizer.batch_decode(rows, skip_special_tokens=not has_marks, **options))


def encode_text(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    """Return the token ids of a text, with the tokenizer's special tokens except an added EOS."""
    ids = list(tokenizer.encode(text, add_special_tokens=special, verbose=False))
    eos = tokenizer.eos_token_id
    if special and ids and ids[-1] == eos:
        # An EOS in the text itself stays; only one that the tokenizer appended is removed.
        text_ends_in_eos = encode_text(tokenizer, text, special=False)[-1:] == [eos]
        if not text_ends_in_eos:
            ids.pop()
    return ids


def token_bytes(tokenizer: Tokenizer, option: str, searched: Sequence[str]) -> list[bytes]:
    """Return the bytes of each token in texts that are `searched` for strings.

    Special tokens have none, except for those in marks of thoughts or in one of the strings.

    Raise `UserError` unless the vocabulary is a byte-level or a SentencePiece one.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder: dict[str, Any] = (json.loads(backend.to_str())["decoder"] if backend else None) or {}
    steps = {step["type"] for step in decoder.get("decoders", [decoder]) if step}
    if "ByteLevel" in steps:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        alphabet = {character: bytes([byte]) for byte, character in bytes_to_unicode().items()}
    elif {"Metaspace", "ByteFallback", "Replace"} & steps:
        alphabet = {_BLANK: b" "}
    else:
        raise _unsearchable(option, f"its decoder is {', '.join(sorted(steps)) or 'unknown'}")

    def to_bytes(text: str) -> bytes:
        if (byte := _BYTE_TOKEN.fullmatch(text)) and "ByteLevel" not in steps:
            return bytes.fromhex(byte[1])
        return b"".join(alphabet.get(character, character.encode()) for character in text)

    added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
    special = set(tokenizer.all_special_ids)
    contents = [b""] * count_ids(tokenizer)
    for text, index in tokenizer.get_vocab().items():
        is_text = index not in special or is_part_of_mark(text)
        if is_text or any(text in string for string in searched):
            contents[index] = added[index].encode() if index in added else to_bytes(text)
    # Tokens of whole characters, spread over the vocabulary, must decode to their bytes.
    ascii_ids = [index for index, content in enumerate(contents) if content and content.isascii()]
    ids = ascii_ids[:: max(1, len(ascii_ids) // _CHECKED_TOKENS)]
    joined = b"".join(contents[index] for index in ids).decode()
    # Some tokenizers drop a blank at the beginning.
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if str(decoded).lstrip(" ") != joined.lstrip(" "):
        raise _unsearchable(option, "its tokens are not pieces of the text that they decode to")
    return contents


def _unsearchable(option: str, reason: str) -> UserError:
    return UserError(
        f"{option}: strings cannot be searched for with this tokenizer: {reason}; leave it unset, "
        "or use a tokenizer with a byte-level or SentencePiece vocabulary"
    )
