"""Tokenizers, loaded or trained; texts as tokens, and tokens as texts."""

import datetime
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.storage import downloads, hub, paths, remote
from jax_ppo.thoughts import is_part_of_mark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD = "<pad>"
EOS = "<eos>"
UNKNOWN = "<unk>"
_LONGEST_CHARACTER = 8  # tokens, which may be single bytes
LONG_TEXT = 100_000  # characters; encoding ten times as many takes a second
_DATE = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")  # transformers' function
FULL_ALPHABET = 512  # from this vocabulary size on, every byte has a token

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

# Of transformers, whose import takes seconds.
Tokenizer: TypeAlias = "PreTrainedTokenizerBase"


def load_tokenizer(
    path: str, option: str = "config.model.tokenizer_path", date: str = ""
) -> Tokenizer:
    """Load the transformers tokenizer that an option names.

    It is in an existing folder, at an address such as gs://BUCKET/FOLDER, or on the hub as
    OWNER/NAME or OWNER/NAME@REVISION. Its template writes the `date`, "" for today's.

    Raises:
      UserError: there is no such folder or model, it has no tokenizer or one that needs code from
        the repository, or the network is unavailable.
    """
    if not path:
        raise UserError(
            f"{option}='': must be set to a folder, or to a model's name on the Hugging Face hub"
        )
    if remote.is_address(path):
        folder = downloads.download_folder(path, option, _DOWNLOADED_FILES)
    else:
        # An existing folder takes precedence over a model of the same name on the hub.
        folder = paths.expand_local_path(path, option)
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
        parent = Path(path).expanduser().parent
        siblings = []
        if parent.is_dir():
            siblings = [entry.name for entry in parent.iterdir() if entry.is_dir()]
        raise UserError(
            f"{option}={path!r}: there is no such folder (looked from {Path.cwd()})."
            f"{did_you_mean(Path(path).name, siblings)}"
        )
    return hub.download_snapshot(path, _DOWNLOADED_FILES, option).folder


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: str | Path) -> Tokenizer:
    """Train a byte-level BPE on the texts, in which each digit is a token; save and return it.

    Ids 0, 1, 2 are <pad>, <eos>, <unk>. There are at most `vocab_size` tokens. Text made of bytes
    that occur in the training texts is unchanged by encoding and decoding. Other bytes become
    <unk>, unless vocab_size is at least FULL_ALPHABET. AutoTokenizer loads the same ids from the
    folder, also next to a Llama's config.json (but not next to a Qwen2's, for which transformers
    replaces the pre-tokenizer).

    Raises:
      UserError: vocab_size is too small for the characters of the texts.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    # Digits are separate tokens, so that numbers are spelled the same everywhere.
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if vocab_size >= FULL_ALPHABET:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        alphabet = list("0123456789")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS, UNKNOWN],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() > vocab_size:
        raise UserError(
            f"vocab_size={vocab_size}: the characters of the texts alone need "
            f"{tokenizer.get_vocab_size()} tokens"
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    wrapped.save_pretrained(str(folder))
    return wrapped


def decode_continuation(tokenizer: Tokenizer, before: int, ids: Sequence[int]) -> str:
    """Return the text of a response as it continues its prompt, without special tokens.

    Some tokenizers (Llama 2's) drop the space at the beginning of a text, so that a response
    decoded on its own would lose it. `before` is the last token of the prompt.
    """
    # Decode with the prompt's last token in front, then cut its text off.
    prefix = _decode(tokenizer, [before])
    text = _decode(tokenizer, [before, *ids])
    if text.startswith(prefix):
        return text[len(prefix) :]
    return _decode(tokenizer, list(ids))


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


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return decode_texts(tokenizer, [ids])[0]


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


def certainly_exceeds(tokenizer: Tokenizer, text: str, tokens: int) -> bool:
    """Return whether a very long text has more than `tokens` tokens, judged by its beginning.

    What follows a beginning changes only its last tokens, unless an added token absorbs the white
    space before it. `False` if that is not certain.
    """
    beginning = text[: LONG_TEXT + 16 * tokens]
    if len(text) < 2 * len(beginning):
        return False
    if any(added.lstrip for added in tokenizer.added_tokens_decoder.values()):
        return False
    return len(encode_text(tokenizer, beginning, special=False)) > 2 * tokens + 100
