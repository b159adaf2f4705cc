"""What a reward model with a tokenizer of its own reads: prompts and responses as text, in tokens of that tokenizer."""

from collections.abc import Callable, Sequence

FORMS = ("chat", "pair", "text")

Prompt = str | tuple[dict[str, str], ...]


def tokenizers_match(tokenizer, actors) -> bool:
    """Whether sampled tokens mean to one tokenizer what they mean to the other: the vocabularies are equal, and a chat looks no
    other way."""
    templates = tokenizer.chat_template, actors.chat_template
    return templates[0] in (None, templates[1]) and tokenizer.get_vocab() == actors.get_vocab()


class RewardInputEncoder:
    """Turns prompts and responses into a reward model's tokens.

    Attributes:
      form: "chat": the tokenizer's chat template around prompt and response, the answer closed. "pair": the prompt's text and
        the response as the tokenizer's pair of texts. "text": the response right behind the prompt's text. A chat's text is the
        contents of its messages joined by line breaks. Special tokens are the template's, or else those that the tokenizer
        itself puts around a text, and behind a "text" that a decoder reads the EOS, at which its score was learned.
      longest: tokens of an input.
    """

    def __init__(self, tokenizer, form: str, longest: int, with_eos: bool = False):
        """`with_eos`: whether a "text" ends with one. Raises ValueError where the tokenizer can not do this."""
        if form == "chat" and not tokenizer.chat_template:
            raise ValueError("its tokenizer has no chat template")
        self.form, self.max_length, self._tokenizer = form, longest, tokenizer
        self._end = (
            [tokenizer.eos_token_id] if with_eos and tokenizer.eos_token_id is not None else []
        )
        least = len(self._encode([""], [""])[0])
        if least >= longest:
            raise ValueError(
                f"{least} tokens stand around an empty prompt and response, and it reads {longest} at most"
            )

    def encode(
        self, prompts: Sequence[Prompt], responses: Sequence[str]
    ) -> tuple[list[list[int]], int]:
        """Token ids of each input, 1..longest of them; and how many inputs were too long.

        Those lose the beginning of their prompt, and once there is no prompt left, the end of their response.
        """
        ids, cut = self._encode(prompts, responses), 0
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            if len(ids[row]) > self.max_length:
                ids[row], cut = self._fitted(prompt, response), cut + 1
            elif not ids[row]:
                raise ValueError(
                    f"the prompt {prompt!r} and the response {response!r} have no tokens"
                )
        return ids, cut

    def _encode(self, prompts, responses) -> list[list[int]]:
        if self.form == "pair":
            return self._tokenizer(
                [_text(prompt) for prompt in prompts], list(responses), verbose=False
            )["input_ids"]
        if self.form == "text":
            joined = [
                _text(prompt) + response
                for prompt, response in zip(prompts, responses, strict=True)
            ]
            encoded = self._tokenizer(joined, verbose=False)["input_ids"]
            return [ids if ids[-1:] == self._end else ids + self._end for ids in encoded]
        chats = [
            [*_messages(prompt), {"role": "assistant", "content": response}]
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        texts = [self._tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        return self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def _fitted(self, prompt, response):
        def with_prompt(drop):
            return self._encode([_without(prompt, drop)], [response])[0]

        def with_response(drop):
            return self._encode(
                [_without(prompt, len(_contents(prompt)))], [response[: len(response) - drop]]
            )[0]

        ids = self._shortest_drop(with_prompt, len(_contents(prompt)))
        return (
            ids
            if len(ids) <= self.max_length
            else self._shortest_drop(with_response, len(response))
        )

    def _shortest_drop(self, encode: Callable[[int], list[int]], most: int) -> list[int]:
        """The ids with as few characters left out as make them fit, or, where none do, with all left out."""
        low, high, fitting = 1, most, encode(most)
        while low < high:
            middle = (low + high) // 2
            ids = encode(middle)
            if len(ids) <= self.max_length:
                high, fitting = middle, ids
            else:
                low = middle + 1
        return fitting


def _messages(prompt):
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _text(prompt):
    return (
        prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    )


def _contents(prompt):
    return prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)


def _without(prompt, drop):
    """The prompt without the first `drop` characters of its contents. Messages stay, be they empty: templates count on them."""
    if isinstance(prompt, str):
        return prompt[drop:]
    shorter = []
    for message in prompt:
        shorter.append({**message, "content": message["content"][drop:]})
        drop = max(0, drop - len(message["content"]))
    return tuple(shorter)
