"""The Python API of `~from jax_ppo import ...` with a small pretrained model."""

import functools
import importlib
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jax_ppo
from jax_ppo.errors import UserError
from jax_ppo.runtime import meshes
from real_data import DATA, needs

FOLDER = DATA / "tinystories-260k"
PROMPT = "Once upon a time, there was a little girl named Lily."
STORY = " She loved to play outside in the park. One day, she saw a big, red ball."
needs_model = needs(FOLDER.name)


@pytest.fixture(scope="module")
def policy() -> jax_ppo.Policy:
    """Load it on one device, where programs compile sooner; run/test_train.py has more."""
    one_device = functools.partial(meshes.make_mesh, devices=jax.devices()[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes, "make_mesh", one_device)
        return jax_ppo.load_policy(FOLDER)


@needs_model
def test_greedy_samples_continue_the_prompts_in_order(policy):
    prompts = [PROMPT, "One day, a boy named Tim went to the", PROMPT]
    first, second, third = jax_ppo.sample(policy, prompts, max_response_length=32, temperature=0)
    assert first.startswith(STORY)
    assert third == first and second != first


@needs_model
def test_samples_depend_on_the_seed_and_the_index_but_not_on_other_prompts(policy):
    def draw(prompts: list[str], **options) -> list[str]:
        return jax_ppo.sample(policy, prompts, max_response_length=32, **options)

    pair = draw([PROMPT], n=2)
    assert pair == draw([PROMPT, "The end"], n=2)[:2]
    assert pair[0] != pair[1]
    assert pair != draw([PROMPT], n=2, seed=1)


@needs_model
def test_rows_of_the_embedding_without_a_token_are_never_drawn(policy, tmp_path):
    """64 copies of frequent tokens' rows would be drawn at once; without them nothing changes."""
    folder = shutil.copytree(FOLDER, tmp_path / "padded")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    copies = embedding[[261, 267, 262, 278, 269, 263] * 11][:64]
    tensors["model.embed_tokens.weight"] = np.concatenate([embedding, copies])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 576}
    (folder / "config.json").write_text(json.dumps(config))
    padded = jax_ppo.load_policy(folder)
    ours, expected = (
        jax_ppo.sample(each, [PROMPT], max_response_length=32, n=2) for each in (padded, policy)
    )
    assert ours == expected


@needs_model
def test_a_sample_ends_at_a_stop_string(policy):
    # As many prompts as above share a program.
    whole, *_ = jax_ppo.sample(policy, [PROMPT] * 3, max_response_length=32, temperature=0)
    stop = whole.split(" ")[3]
    options = {"max_response_length": 32, "temperature": 0, "stop": [stop, "no such text"]}
    (stopped,) = jax_ppo.sample(policy, [PROMPT], **options)
    assert whole.startswith(stopped) and len(stopped) < len(whole)
    assert stop in stopped and stop not in stopped[: -len(stop) - 1]


@needs_model
@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([PROMPT], {"stop": "."}, r"stop='\.': expected a list of texts"),
        (PROMPT, {}, "expected a list of prompts"),
        ([PROMPT], {"temperature": -1}, r"temperature=-1: expected at least 0"),
        ([PROMPT], {"max_response_length": 10_000}, r"prompts\[0\]: .* exceed the 512 tokens"),
        ([PROMPT], {"top_p": 2}, r"top_p=2: expected 0 to 1"),
        ([PROMPT], {"n": 1.5}, r"n=1.5: expected at least 1 in whole numbers"),
        ([PROMPT], {"temperature": "1"}, r"temperature='1': expected at least 0"),
        ([PROMPT], {"seed": None}, r"seed=None: expected"),
        ([PROMPT], {"stop": 5}, r"stop=5: expected a list of texts"),
        (None, {}, "prompts=None: expected a list of prompts"),
        ({"role": "user", "content": "x"}, {}, "prompts={.*}: expected a list of prompts"),
        ([PROMPT, 5], {}, r"prompts\[1\]=5: expected a text or a list of messages"),
        ([None], {}, r"prompts\[0\]=None: expected a text or a list"),
        ([{"role": "user", "content": "x"}], {}, r"prompts\[0\]={.*}: expected a text or a list"),
        (["a\ud83d"], {}, r"prompts\[0\]: .* half of a surrogate pair"),
        ([[{"role": "user", "content": "\ud83d"}]], {}, r"prompts\[0\]: .* half of a surrogate"),
        ([["x"]], {}, r"prompts\[0\]: each message of a chat must have role and content"),
    ],
)
def test_mistakes_in_sampling_are_named(policy, prompts, options, message):
    with pytest.raises(UserError, match=message):
        jax_ppo.sample(policy, prompts, **options)
    assert jax_ppo.sample(policy, []) == []


@pytest.mark.parametrize(
    ("create", "message"), [([], "load_policy: path"), (["checkpoints"], "exported no model")]
)
def test_a_folder_without_a_model_is_named(create, message, tmp_path):
    for name in create:
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=message):
        jax_ppo.load_policy(tmp_path if create else tmp_path / "nothing")


@pytest.mark.parametrize("path", ["~nouser/model", "x" * 5000])
def test_a_path_that_cannot_be_looked_up_is_named(path):
    with pytest.raises(UserError, match="load_policy: path=.*not a usable path") as error:
        jax_ppo.load_policy(path)
    assert len(str(error.value)) < 300


def test_train_validates_a_config_that_was_built_by_hand(tmp_path):
    from jax_ppo.config.schema import Config

    with pytest.raises(UserError, match=r"config\.data\.train_files='': must be set"):
        jax_ppo.train(Config(), tmp_path)


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, jax_ppo\n"
        "print(sorted({'jax', 'flax', 'numpy', 'transformers'} & set(sys.modules)))\n"
        "print(sorted(set(jax_ppo.__all__) - set(dir(jax_ppo))))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["[]", "[]"], result.stderr


def test_every_public_name_resolves_and_train_stays_a_function():
    assert all(getattr(jax_ppo, name) is not None for name in jax_ppo.__all__)
    command = importlib.import_module("jax_ppo.train")  # as `python -m jax_ppo train` does
    assert jax_ppo.train is command.train and callable(command.main)
    assert jax_ppo.kernels.losses
    with pytest.raises(AttributeError, match="no attribute 'tran'"):
        jax_ppo.tran  # noqa: B018
