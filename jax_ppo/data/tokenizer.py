"""Tokenizers, loaded or trained, and the encoding of prompts and responses."""

import datetime
import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from jax_ppo.data.messages import Messages, Prompt, add_response, is_prefilled, join_contents
from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.storage import downloads, hub, paths, remote
from jax_ppo.thoughts import find_opened, is_part_of_mark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD = "<pad>"
EOS = "<eos>"
UNKNOWN = "<unk>"
_LONGEST_CHARACTER = 8  # tokens, which may be single bytes
LONG_TEXT = 100_000  # characters; encoding ten times as many takes a second
_LONGEST_MARK = 64  # tokens of the mark of a thought, which may be single characters
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
# Whether the tokenizer's template renders chats, or the values of further variables in it.
ChatTemplate = bool | dict[str, Any]
Tools = Sequence[dict[str, Any]]


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


def opened_thought(tokenizer: Any, prompt: Prompt, ids: Sequence[int] | np.ndarray) -> str:
    """Return the mark of the thought that a prompt, `ids` as tokens, opens, "" if none."""
    begun = prompt[-1]["content"] if not isinstance(prompt, str) and is_prefilled(prompt) else ""
    (end,) = tokenizer.batch_decode([ids[-_LONGEST_MARK:]], skip_special_tokens=False)
    return find_opened(end, begun)


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt,
    chat_template: ChatTemplate = True,
    tools: Tools = (),
) -> list[int]:
    """Return the token ids of a prompt, up to the first token of the response.

    A chat, with a tokenizer that has a chat template, becomes the template's text up to the
    assistant's turn; if the chat ends with a message of the assistant, up to the end of that
    message, which the response continues. The template writes all special tokens itself.

    Anything else becomes the text, or the contents of the messages joined by line breaks, with the
    special tokens that the tokenizer itself adds: Llama's adds BOS in its post-processor; Qwen2's
    and GPT-2's add none (although GPT-2's defines a BOS), and their models were trained without. An
    EOS that the tokenizer appends is removed, because the model must continue instead of stop.
    """
    return encode_text(tokenizer, *render_prompt(tokenizer, prompt, chat_template, tools))


def encode_responses(
    tokenizer: Tokenizer,
    prompt: Prompt,
    responses: Sequence[str],
    chat_template: ChatTemplate = True,
    tools: Tools = (),
) -> list[list[int]]:
    """Return the token ids of each response as it continues the prompt, with its end.

    In a chat that a template renders, they encode the template's text up to the special token that
    ends the turn. Elsewhere, and if the template writes none, the EOS is the end.

    They are the ids that follow the prompt's when both are encoded together, and so the ones that a
    model would sample: some tokenizers (Llama 2's) put a space before a text encoded on its own.
    If prompt and response merge into one token, the response is encoded on its own.
    """
    # Prompt and response are encoded as one text, and the prompt's tokens are cut off.
    text, special = render_prompt(tokenizer, prompt, chat_template, tools)
    prompt_ids = encode_text(tokenizer, text, special)
    is_rendered = not isinstance(prompt, str) and not special
    ends = {tokenizer.eos_token_id}
    if is_rendered:
        added = tokenizer.added_tokens_decoder.items()
        special_added = (token for token, facts in added if facts.special)
        ends = {*tokenizer.all_special_ids, *special_added}
    encoded = []
    for response in responses:
        if is_rendered and not isinstance(prompt, str):
            response = _render_response(tokenizer, prompt, response, text, chat_template, tools)
        ids = encode_text(tokenizer, text + response, special)
        if ids[: len(prompt_ids)] == prompt_ids:
            ids = ids[len(prompt_ids) :]
        else:
            ids = encode_text(tokenizer, response, special=False)
        encoded.append(_end_turn(tokenizer, ids, ends) if is_rendered else [*ids, *ends])
    return encoded


def _render_response(
    tokenizer: Tokenizer,
    prompt: Messages,
    response: str,
    text: str,
    chat_template: ChatTemplate,
    tools: Tools,
) -> str:
    """Return what the chat template writes after the prompt's text for a response."""

    def render(answer: str) -> str:
        return _apply_template(tokenizer, add_response(prompt, answer), chat_template, tools)

    whole = render(response)
    # A thought that the prompt has opened is not opened again.
    opened = find_opened(text)
    if opened and response.lstrip().startswith(opened):
        response = response.lstrip().removeprefix(opened).lstrip()
    is_kept = "".join(response.split()) in "".join(whole[len(text) :].split())
    if whole.startswith(text) and is_kept:
        return whole[len(text) :]
    # Templates that begin the assistant's turn with more than they keep in a finished one, or drop
    # the thoughts of a finished one: the response follows the prompt, as when it is sampled.
    mark = "response-mark"
    return response + render(mark).rpartition(mark)[2]


def _end_turn(tokenizer: Tokenizer, ids: list[int], ends: set[int]) -> list[int]:
    """Return a turn up to the special token at its end, or with an EOS if it has none."""
    for length in range(len(ids), 0, -1):
        if ids[length - 1] in ends:
            return ids[:length]
        # A template may write white space after the end of the turn.
        if str(tokenizer.decode(ids[length - 1 :])).strip():
            break
    return [*ids, tokenizer.eos_token_id]


def render_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt,
    chat_template: ChatTemplate,
    tools: Tools = (),
) -> tuple[str, bool]:
    """Return the text, and whether the tokenizer adds its special tokens to it."""
    if isinstance(prompt, str):
        return prompt, True
    if chat_template is not False and tokenizer.chat_template:
        if is_prefilled(prompt) and len(prompt) > 1 and not prompt[-1]["content"].strip():
            return render_prompt(tokenizer, prompt[:-1], chat_template, tools)  # nothing is begun
        kind = "continue_final_message" if is_prefilled(prompt) else "add_generation_prompt"
        text = _apply_template(tokenizer, prompt, chat_template, tools, **{kind: True})
        if is_prefilled(prompt):
            # transformers may cut the white space at its end, which the response continues.
            content = prompt[-1]["content"]
            text = text.rstrip() + content[len(content.rstrip()) :]
        return text, False
    return join_contents(prompt), True


def _apply_template(
    tokenizer: Tokenizer,
    messages: Messages,
    chat_template: ChatTemplate,
    tools: Tools,
    **ending: bool,
) -> str:
    variables = chat_template if isinstance(chat_template, dict) else {}
    arguments = {**variables, **ending, "tools": list(tools) or None}
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **arguments))


def validate_chat_template(tokenizer: Any, chat_template: ChatTemplate) -> None:
    """Raise `UserError` if the chat template does not read the variables that an option sets."""
    if not isinstance(chat_template, dict) or not chat_template:
        return
    option = f"config.data.chat_template_kwargs={chat_template}"
    if not tokenizer.chat_template:
        raise UserError(f"{option}: the tokenizer has no chat template that could read them")
    reserved = {
        *inspect.signature(tokenizer.apply_chat_template).parameters,
        *("messages", "raise_exception", "strftime_now", "namespace", "range"),
        *tokenizer.special_tokens_map,
    }
    known = sorted(template_variables(tokenizer) - reserved)
    for name in chat_template:
        if name not in known:
            raise UserError(
                f"{option}: the tokenizer's chat template has no variable {name!r}; it reads "
                f"{', '.join(known) or 'none'}.{did_you_mean(name, known)}"
            )


def template_variables(tokenizer: Any) -> set[str]:
    """Return the names that the tokenizer's chat template reads; none without a template."""
    import jinja2.ext
    import jinja2.meta

    template = tokenizer.chat_template
    if not template:
        return set()
    if isinstance(template, dict):  # several by name
        template = "".join(template.values())
    # As transformers parses templates, except for its tag {% generation %}, which has no variables.
    environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols])
    template = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    return jinja2.meta.find_undeclared_variables(environment.parse(template))


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
