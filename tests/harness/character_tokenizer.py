"""A tokenizer whose tokens are characters."""


class CharacterTokenizer:
    """Encodes and decodes text by its code points."""

    chat_template = None
    eos_token_id = None
    added_tokens_decoder = {}

    def batch_decode(self, rows, skip_special_tokens):
        return ["".join(map(chr, row)) for row in rows]

    def decode(self, ids, clean_up_tokenization_spaces):
        return "".join(map(chr, ids))

    def encode(self, text, add_special_tokens=True, verbose=True):
        return list(map(ord, text))
