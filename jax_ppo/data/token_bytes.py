"""The bytes that each token adds to a text."""

import functools
import json
import re
from typing import Any

from jax_ppo.data.tokenizer import Tokenizer
from jax_ppo.errors import UserError
from jax_ppo.thoughts import is_part_of_mark

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a blank
_CHECKED_TOKENS = 500


def token_bytes(tokenizer: Tokenizer, option: str) -> list[bytes]:
    """Return the bytes that each token adds to a text; special ones add only marks of thoughts.

    The vocabulary is a byte-level or a SentencePiece one.

    Raises:
      UserError: the tokenizer joins its tokens in an unsupported way.
    """
    decoder = _decoder_types(tokenizer)
    if "ByteLevel" in decoder:
        to_bytes = _read_byte_level
    elif {"Metaspace", "ByteFallback", "Replace"} & decoder:
        to_bytes = _read_sentence_piece
    else:
        raise _unsupported(option, f"its decoder is {', '.join(sorted(decoder)) or 'unknown'}")
    added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
    special = set(tokenizer.all_special_ids)
    contents = [b""] * (max(tokenizer.get_vocab().values()) + 1)
    for text, index in tokenizer.get_vocab().items():
        if index in special and not is_part_of_mark(text):
            continue
        if index in added:
            contents[index] = added[index].encode()
        else:
            contents[index] = to_bytes(text)
    _compare_with_decoding(tokenizer, contents, option)
    return contents


def _decoder_types(tokenizer: Tokenizer) -> set[str]:
    """Return the types of the steps that join tokens to a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return set()
    decoder: dict[str, Any] = json.loads(backend.to_str())["decoder"] or {}
    return {step["type"] for step in decoder.get("decoders", [decoder]) if step}


def _read_byte_level(text: str) -> bytes:
    values = _byte_level_alphabet()
    return b"".join(values.get(character, character.encode()) for character in text)


@functools.cache
def _byte_level_alphabet() -> dict[str, bytes]:
    """Return the byte that each character of a byte-level token stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: bytes([byte]) for byte, character in bytes_to_unicode().items()}


def _read_sentence_piece(text: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(text):
        return bytes.fromhex(byte[1])
    return text.replace(_BLANK, " ").encode()


def _compare_with_decoding(tokenizer: Tokenizer, contents: list[bytes], option: str) -> None:
    """Raise `UserError` unless the tokenizer decodes tokens to these bytes."""
    # Tokens of whole characters, spread over the vocabulary.
    ascii_ids = [index for index, content in enumerate(contents) if content and content.isascii()]
    ids = ascii_ids[:: max(1, len(ascii_ids) // _CHECKED_TOKENS)]
    joined = b"".join(contents[index] for index in ids).decode()
    # Some tokenizers drop a blank at the beginning.
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    if str(decoded).lstrip(" ") != joined.lstrip(" "):
        raise _unsupported(option, "its tokens are not pieces of the text that they decode to")


def _unsupported(option: str, reason: str) -> UserError:
    return UserError(
        f"{option}: strings cannot be searched for with this tokenizer: {reason}; leave it unset, "
        "or use a tokenizer with a byte-level or SentencePiece vocabulary"
    )
