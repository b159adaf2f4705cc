"""The Python API of `~from jax_ppo import ...` with a small pretrained model."""

import functools
import importlib
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jax_ppo
from jax_ppo.config import plugins
from jax_ppo.errors import UserError
from jax_ppo.run import standalone_evaluation, token_scores
from jax_ppo.runtime import meshes
from jax_ppo.training.roles import SMALL_MODEL
from real_data import DATA, needs
from whole_run import run_python

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
        ([PROMPT], {"seed": None}, r"seed=None: expected"),
        ({"role": "user", "content": "x"}, {}, "prompts={.*}: expected a list of prompts"),
        ([PROMPT, 5], {}, r"prompts\[1\]=5: expected a text or a list of messages"),
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
    ("path", "message"),
    [
        ("./nothing", "there is no such folder"),
        ("run", "is the work directory of a run; it has exported no model"),
        ("~nouser/model", "not a usable path"),
    ],
)
def test_a_path_without_a_model_is_named(path, message, tmp_path, monkeypatch):
    (tmp_path / "run" / "training_metrics.csv").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=f"load_policy: path=.*{message}"):
        jax_ppo.load_policy(path)


def test_train_validates_a_config_that_was_built_by_hand(tmp_path):
    from jax_ppo.config.schema import Config

    with pytest.raises(UserError, match=r"config\.data\.train_files='': must be set"):
        jax_ppo.train(Config(), tmp_path)


ROWS = [{"instruction": "2+2?", "gold": 4}, {"instruction": "3+3?", "gold": 6}] * 8
DATA = {
    "model__path": str(SMALL_MODEL),
    "data__train_files": ROWS,
    "data__ground_truth_key": "gold",
    "data__train_batch_size": 16,
    "actor__ppo_mini_batch_size": 16,
}


def reads_gold(solution_str, ground_truth, **_):
    return float(ground_truth in solution_str)


def test_check_prints_the_report_and_returns_the_problems(capsys):
    config = jax_ppo.load_config(**DATA)
    assert "row 1-16: data_source=''" in jax_ppo.check(config)[0]
    assert jax_ppo.check(config, reward=reads_gold) == []
    assert capsys.readouterr().out.endswith("no problems for `train`\n")


@pytest.mark.parametrize(
    ("reward", "options", "message"),
    [
        ("my.py:f", {}, "reward='my.py:f': expected a function"),
        (lambda text: 1.0, {}, r"'memory:<lambda>@\w+': expected signature f\(data_source=\.\.\."),
        (reads_gold, {"reward__function": "my.py:f"}, "reads_gold: unset config.reward.function"),
        (reads_gold, {"reward__terms": "exact:1"}, "reads_gold: unset config.reward.terms"),
    ],
)
def test_a_reward_that_cannot_be_called_is_named(reward, options, message, tmp_path):
    config = jax_ppo.load_config(**DATA | options)
    with pytest.raises(UserError, match=message):
        jax_ppo.train(config, tmp_path, reward=reward)


def test_a_reward_without_source_text_is_noted(capsys):
    config = jax_ppo.load_config(**DATA)
    jax_ppo.check(config, reward=functools.partial(reads_gold))
    assert capsys.readouterr().out.startswith("note: reward=partial has no source text: a resumed")


@pytest.mark.parametrize(
    ("name", "runner", "folder"),
    [
        ("evaluate", (standalone_evaluation, "evaluate_model"), "output/mine-evaluation"),
        ("score", (token_scores, "score_file"), "output/mine-scores"),
    ],
)
def test_evaluate_and_score_are_functions_of_the_commands(
    name, runner, folder, monkeypatch, tmp_path
):
    def run(config, folder):
        function = plugins.load_plugin(config.reward.function, "", (), by_name=False)
        return {"rows": 1, "versions": {}, "function": function, "folder": folder}

    monkeypatch.setattr(*runner, run)
    monkeypatch.chdir(tmp_path)
    options = {"score__file": "rows.jsonl"} if name == "score" else {}
    config = jax_ppo.load_config(experiment_name="mine", **DATA, **options)
    result = getattr(jax_ppo, name)(config, reward=print)
    assert result == {"rows": 1, "function": print, "folder": pathlib.Path(folder)}
    assert result.workdir == folder and result.metrics == {}
    if name == "score":
        with pytest.raises(UserError, match=r"config\.score\.file='': must be set"):
            jax_ppo.score(jax_ppo.load_config(**DATA))


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, jax_ppo\n"
        "print(sorted({'jax', 'flax', 'numpy', 'transformers'} & set(sys.modules)))\n"
        "print(sorted(set(jax_ppo.__all__) - set(dir(jax_ppo))))"
    )
    assert run_python("-c", code).stdout.split() == ["[]", "[]"]


def test_every_public_name_resolves_and_functions_are_not_replaced_by_commands():
    assert all(getattr(jax_ppo, name) is not None for name in jax_ppo.__all__)
    for name in ("train", "evaluate", "score", "check"):
        command = importlib.import_module(f"jax_ppo.{name}")  # as `python -m jax_ppo` does
        assert callable(command.main)
        assert getattr(jax_ppo, name) is getattr(jax_ppo.api, name)
    assert jax_ppo.kernels.losses
    with pytest.raises(AttributeError, match="no attribute 'tran'"):
        jax_ppo.tran  # noqa: B018
