import pytest

from character_tokenizer import CharacterTokenizer
from trained_tokenizer import train_tokenizer
from worked_solutions import generate_worked_solutions


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return a tokenizer trained on worked examples, and its folder."""
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [prompt + response for prompt, response in generate_worked_solutions(500, 0.25, seed=0)]
    return train_tokenizer(texts, 256, folder), folder


@pytest.fixture
def letters():
    """Return a tokenizer with one token per letter, and 0 for the end."""
    made = CharacterTokenizer()
    made.eos_token_id = 0
    return made


@pytest.fixture
def with_specials(tmp_path):
    """Return a tokenizer that puts <s> before and <eos> after a text.

    Its chat template writes <s> as well.
    """
    from tokenizers import processors

    made = train_tokenizer(
        ["[system] [user] [assistant] Be brief. Tom has 3 apples.\n"], 512, tmp_path
    )
    made.add_special_tokens({"bos_token": "<s>"})
    bos, eos = made.bos_token_id, made.eos_token_id
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <eos>", special_tokens=[("<s>", bos), ("<eos>", eos)]
    )
    made.chat_template = (
        "<s>{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert made.encode("Tom") == [bos, *made.encode("Tom", add_special_tokens=False), eos]
    return made
