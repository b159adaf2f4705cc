"""Inputs of a reward model that has its own tokenizer: prompts and responses as its tokens."""

import bisect
from collections.abc import Sequence

from jax_ppo.data.messages import Prompt, add_response, join_contents, prompt_texts, user_message
from jax_ppo.data.tokenizer import Tokenizer


def tokenizers_match(tokenizer: Tokenizer, actor_tokenizer: Tokenizer) -> bool:
    """Return whether tokens mean the same to both: equal vocabularies, and chats rendered alike."""
    if tokenizer.chat_template not in (None, actor_tokenizer.chat_template):
        return False
    return tokenizer.get_vocab() == actor_tokenizer.get_vocab()


class RewardInputEncoder:
    """Encoder of prompts and responses as a reward model's tokens.

    The contents of a chat's messages are joined by line breaks unless the form is "chat". Special
    tokens come from the template; without one, the tokenizer adds them to a text.

    Attributes:
      form: "chat" renders prompt and response with the tokenizer's chat template, including the end
        of the answer. "pair" encodes prompt and response as the tokenizer's pair of texts. "text"
        encodes the response directly after the prompt; for a decoder an EOS follows, the token at
        which its score was trained.
      max_length: maximum number of tokens of an input.
      ends: the token that ends every input, if there is one.
    """

    def __init__(
        self, tokenizer: Tokenizer, form: str, longest: int, with_eos: bool = False
    ) -> None:
        """Create the encoder of a form; `with_eos` says whether a "text" ends in an EOS.

        Raise `ValueError` if the tokenizer does not support the form, or `longest` leaves no room.
        """
        if form == "chat" and not tokenizer.chat_template:
            raise ValueError("its tokenizer has no chat template")
        self.form = form
        self.max_length = longest
        self._tokenizer = tokenizer
        self._end: list[int] = []
        if with_eos and tokenizer.eos_token_id is not None:
            self._end = [tokenizer.eos_token_id]
        empty = self._encode_all([""], [""])[0]
        self.ends = tuple(empty[-1:])
        if len(empty) >= longest:
            raise ValueError(
                f"{len(empty)} tokens surround an empty prompt and response, and it reads at most "
                f"{longest}"
            )

    def encode(
        self, prompts: Sequence[Prompt], responses: Sequence[str]
    ) -> tuple[list[list[int]], list[bool]]:
        """Return the token ids of each input, 1..max_length, and whether it was truncated.

        One that is too long loses the beginning of its prompt, then the end of its response.
        """
        if not prompts:  # not every tokenizer takes an empty list
            return [], []
        inputs = self._encode_all(prompts, responses)
        truncated = [len(ids) > self.max_length for ids in inputs]
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            if truncated[row]:
                inputs[row] = self._encode_truncated(prompt, response)
            elif not inputs[row]:
                raise ValueError(
                    f"the prompt {prompt!r} and the response {response!r} have no tokens"
                )
        return inputs, truncated

    def _encode_all(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[list[int]]:
        if self.form == "pair":
            texts = list(map(join_contents, prompts))
            return self._tokenizer(texts, list(responses), verbose=False)["input_ids"]
        if self.form == "text":
            joined = [
                join_contents(prompt) + response
                for prompt, response in zip(prompts, responses, strict=True)
            ]
            encoded = self._tokenizer(joined, verbose=False)["input_ids"]
            # The tokenizer may have added the EOS itself.
            return [ids if ids[-1:] == self._end else ids + self._end for ids in encoded]
        rendered = []
        for prompt, response in zip(prompts, responses, strict=True):
            chat = user_message(prompt) if isinstance(prompt, str) else prompt
            messages = list(add_response(chat, response))
            try:
                rendered.append(self._tokenizer.apply_chat_template(messages, tokenize=False))
            # A chat template raises errors of any kind.
            except Exception as error:
                roles = ", ".join(message["role"] for message in messages)
                problem = f"its chat template renders no chat of the roles {roles}: {error}"
                raise ValueError(problem) from error
        return self._tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]

    def _encode_truncated(self, prompt: Prompt, response: str) -> list[int]:
        """Return the ids of as many characters as fit; of no character if none fit."""
        prompt_length = sum(map(len, prompt_texts(prompt)))

        def encode_without(drop: int) -> list[int]:
            shorter_prompt = _drop_characters(prompt, min(drop, prompt_length))
            kept = len(response) - max(0, drop - prompt_length)
            return self._encode_all([shorter_prompt], [response[:kept]])[0]

        def fits(drop: int) -> bool:
            return len(encode_without(drop)) <= self.max_length

        drops = range(prompt_length + len(response))
        return encode_without(bisect.bisect_left(drops, True, key=fits))


def _drop_characters(prompt: Prompt, drop: int) -> Prompt:
    """Drop the first characters of the contents, but no message: templates count on them."""
    if isinstance(prompt, str):
        return prompt[drop:]
    shortened = []
    for message in prompt:
        shortened.append({**message, "content": message["content"][drop:]})
        drop = max(0, drop - len(message["content"]))
    return tuple(shortened)
