"""Tokenizers: loaded from a folder or the hub, or trained on the data; and prompts as token ids."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.storage import hub

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
FULL_ALPHABET = 512  # from this vocabulary size on every byte has a token

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spm.model",
    "vocab.json",
    "vocab.txt",
)
_FILES = [
    "tokenizer*",
    "*token*.json",
    "config.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.jinja",
    "*.model",
    "*.tiktoken",
]


def load_tokenizer(path: str, option: str = "config.model.tokenizer_path"):
    """The transformers tokenizer of a folder or, where there is no such folder, of a model on the Hugging Face hub.

    Args:
      path: folder, or on the hub OWNER/NAME or OWNER/NAME@REVISION.
      option: the option that holds the path, for the messages.

    Raises:
      UserError: no such folder or model, no tokenizer in it, one that needs code from the repository, or no network.
    """
    if not path:
        raise UserError(
            f"{option}='': must be set to a folder, or to a model's name on the Hugging Face hub"
        )
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = _from_hub(path, option)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        found = ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing"
        raise UserError(
            f"{option}={path!r}: no tokenizer can be loaded from {folder}, which holds {found}. Expected "
            f"tokenizer.json with tokenizer_config.json, and no code of its own: {error}"
        ) from error


def has_tokenizer(folder: Path) -> bool:
    """Whether one of the files is there that a tokenizer is loaded from."""
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def _from_hub(path, option):
    parent = Path(path).expanduser().parent
    if path.startswith((".", "/", "~")) or hub.split_revision(path)[0].count("/") > 1:
        siblings = (
            [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
        )
        raise UserError(
            f"{option}={path!r}: there is no such folder (looked from {Path.cwd()})."
            f"{did_you_mean(Path(path).name, siblings)}"
        )
    return hub.download_snapshot(path, _FILES, option)[0]


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: str | Path):
    """Trains a byte-level BPE on the texts, in which each digit is a token of its own, and saves it.

    Ids 0, 1, 2 are <pad>, <eos>, <unk>. Whatever is made of the bytes of the texts comes back unchanged from encoding
    and decoding; other bytes become <unk>, unless vocab_size is 512 or more, where every byte has a token.

    Args:
      texts: to learn from.
      vocab_size: tokens at most; there are fewer where the texts hold no more.
      folder: written with save_pretrained; AutoTokenizer.from_pretrained loads it to the same ids, also next to a
        Llama's config.json (but not next to a Qwen2's, for which transformers puts in another pre-tokenizer).

    Returns:
      The transformers tokenizer.

    Raises:
      UserError: vocab_size is too small for the characters of the texts.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = (
        pre_tokenizers.ByteLevel.alphabet() if vocab_size >= FULL_ALPHABET else list("0123456789")
    )
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[PAD, EOS, UNKNOWN],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    if tokenizer.get_vocab_size() > vocab_size:
        raise UserError(
            f"config.model.create.vocab_size={vocab_size}: the characters of the data alone need "
            f"{tokenizer.get_vocab_size()} tokens; set it to that or more"
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


def decode_continuation(tokenizer, before: int, ids: Sequence[int]) -> str:
    """The text of a response as it goes on behind the prompt's last token `before`, special tokens left out.

    Some tokenizers (Llama 2's) leave out the blank that a text begins with: decoded alone, the response would lose it.
    """
    start = tokenizer.decode([before], skip_special_tokens=True)
    whole = tokenizer.decode([before, *ids], skip_special_tokens=True)
    return (
        whole[len(start) :]
        if whole.startswith(start)
        else tokenizer.decode(list(ids), skip_special_tokens=True)
    )


def encode_prompt(
    tokenizer, prompt: str | tuple[dict[str, str], ...], chat_template: bool = True
) -> list[int]:
    """Token ids of a prompt, ready for the first token of the response.

    A chat, with a tokenizer that has a chat template: the template's text up to where the assistant speaks. The
    template writes every special token itself, so none is added.

    Anything else: the text, or the contents of the messages joined by line breaks, with the special tokens that the
    tokenizer itself puts around a text: Llama's has BOS in its post-processor, Qwen2's and GPT-2's put none there,
    although GPT-2's names a BOS, and their models were trained so. An EOS that it puts at the end is left out: the
    model is to go on, not to stop.

    Args:
      tokenizer: of transformers.
      prompt: text, or messages with role and content.
      chat_template: False leaves the template out.
    """
    return _encode(tokenizer, *_prompt_text(tokenizer, prompt, chat_template))


def encode_responses(
    tokenizer,
    prompt: str | tuple[dict[str, str], ...],
    responses: Sequence[str],
    chat_template: bool = True,
) -> list[list[int]]:
    """Token ids of each response as it goes on behind the prompt (see encode_prompt), and the EOS that ends it.

    They are those that the two texts have together, so that they are what a model that was asked would sample: some tokenizers
    (Llama 2's) put a blank before a text that stands alone. Where the two run into one token the response is encoded alone.
    """
    text, special = _prompt_text(tokenizer, prompt, chat_template)
    before, encoded = _encode(tokenizer, text, special), []
    for response in responses:
        ids = _encode(tokenizer, text + response, special)
        ids = (
            ids[len(before) :]
            if ids[: len(before)] == before
            else _encode(tokenizer, response, special=False)
        )
        encoded.append([*ids, tokenizer.eos_token_id])
    return encoded


def _prompt_text(tokenizer, prompt, chat_template):
    """The text, and whether the tokenizer puts special tokens around it."""
    if isinstance(prompt, str):
        return prompt, True
    if chat_template and tokenizer.chat_template:
        return tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, tokenize=False
        ), False
    return "\n".join(message["content"] for message in prompt), True


def _encode(tokenizer, text, special):
    ids, eos = (
        list(tokenizer.encode(text, add_special_tokens=special, verbose=False)),
        tokenizer.eos_token_id,
    )
    if special and ids and ids[-1] == eos and _encode(tokenizer, text, special=False)[-1:] != [eos]:
        ids.pop()  # but one that stands in the text itself stays
    return ids
