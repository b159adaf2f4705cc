"""Recognition of overlong texts by their number of characters, without encoding them."""

import functools
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Shorter texts are encoded in less time than it takes to read the tokenizer's definition.
LONG_TEXT = 100_000

# The maximum number of characters that a normalizer merges into one. A canonical decomposition has
# at most four characters, and a text is at most as long as its decomposition.
_CHARACTERS_PER_NORMALIZED = {"NFC": 4, "NFD": 1, "Prepend": 1, "ByteLevel": 1}
# Pre-tokenizers that never drop characters. Split and Punctuation are in `_keeps_characters`.
_LOSSLESS_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace")


class LengthBound:
    """Lower bounds on the number of tokens of texts, for one tokenizer.

    A text cannot have fewer tokens than its characters divided by the longest token's. That
    holds only for tokenizers that drop no characters and never merge unknown ones. For others, such
    as WordPiece, which has one token for any long word, there is no bound.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Create the bound of a transformers tokenizer."""
        self._tokenizer = tokenizer

    def certainly_exceeds(self, text: str, tokens: int) -> bool:
        """Return whether a text has more than `tokens` tokens; `False` if that is not certain.

        An appended EOS, which prompts lose, does not count.
        """
        if len(text) < LONG_TEXT or self._characters_per_token is None:
            return False
        return len(text) > self._characters_per_token * (tokens + 1)

    @functools.cached_property
    def _characters_per_token(self) -> int | None:
        """Return the most characters that one token represents; `None` without a bound."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        parts = json.loads(backend.to_str())
        normalizers = _steps(parts["normalizer"], "normalizers")
        pre_tokenizers = _steps(parts["pre_tokenizer"], "pretokenizers")
        vocabulary = self._tokenizer.get_vocab()
        is_byte_level = any(step["type"] == "ByteLevel" for step in normalizers + pre_tokenizers)
        # A token that strips may absorb any amount of white space.
        strips = any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
        if (
            strips
            or not all(map(_keeps_characters, pre_tokenizers))
            or not _encodes_every_character(parts["model"], vocabulary, is_byte_level)
        ):
            return None
        longest = max(map(len, vocabulary))
        for step in normalizers:
            factor = _characters_per_normalized(step)
            if factor is None:
                return None
            longest *= factor
        return longest


def _steps(part: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, with nested sequences flattened."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for member in part[members] for step in _steps(member, members)]
    return [part]


def _characters_per_normalized(step: dict[str, Any]) -> int | None:
    """Return the maximum number of characters that become one; `None` if they may vanish."""
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String")
        if pattern and len(step["content"]) >= len(pattern):
            return 1
        return None
    return _CHARACTERS_PER_NORMALIZED.get(step["type"])


def _keeps_characters(step: dict[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    return step["type"] in _LOSSLESS_PRE_TOKENIZERS


def _encodes_every_character(
    model: dict[str, Any], vocabulary: dict[str, int], is_byte_level: bool
) -> bool:
    """Return whether each character has its own token, or its own part of one."""
    from tokenizers import pre_tokenizers

    if model["type"] != "BPE":
        return False
    if is_byte_level and set(pre_tokenizers.ByteLevel.alphabet()) <= vocabulary.keys():
        return True
    if model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return True
    return bool(model["unk_token"]) and not model["fuse_unk"]
