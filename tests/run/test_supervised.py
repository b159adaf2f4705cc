"""Whole runs of sft, reward_model and PPO against the reward model, in parity with transformers."""

import json
import pathlib

import numpy as np
import pytest
import transformers

import metrics_page
from data_files import write_rows
from jax_ppo.config import command_line, loading, validation
from jax_ppo.data import sources
from jax_ppo.errors import UserError
from jax_ppo.run import supervised_loop, supervised_tasks
from llama_folder import write_llama
from whole_run import assert_equal_runs, read_evaluations, read_metrics, read_steps, run_command

CONFIG = """
from jax_ppo.config import default_config

def get_config(arg=None):
    config = default_config()
    config.model.path, config.model.dtype = "{folder}/llama", "float32"
    config.data.train_files = "{folder}/pairs.jsonl.gz[:32]"
    config.data.val_files = "{folder}/pairs.jsonl.gz[32:]"
    config.data.train_batch_size = config.data.val_batch_size = 8
    config.data.max_prompt_length, config.data.max_response_length = 32, 16
    config.supervised.optim.lr = 1e-2
    config.trainer.total_training_steps = 12
    config.trainer.test_freq, config.trainer.save_freq = 6, 3
    return config
"""
PPO = (
    "--config.actor.ppo_mini_batch_size=4",
    "--config.algorithm.use_kl_in_reward=True",
    "--config.algorithm.kl_ctrl.kl_coef=0.05",
    "--config.trainer.total_training_steps=2",
    "--config.trainer.test_freq=0",
    "--config.trainer.log_samples=0",
)


def generate_pairs():
    """Yield pairs whose chosen response counts apples and whose rejected one counts pears."""
    for i in range(37):  # the 5 held-out pairs do not fill a batch
        prompt = f"\n\nHuman: What has {'Tom Ann Ben'.split()[i % 3]}?\n\nAssistant:"
        yield {
            "chosen": f"{prompt} {i % 7} apples" + "." * (i % 3),
            "rejected": f"{prompt} {i % 5} pears" + "!" * (i % 4),
        }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Write a random tiny Llama with a tokenizer, pairs and a configuration file."""
    folder = tmp_path_factory.mktemp("files")
    write_rows(folder / "pairs.jsonl.gz", generate_pairs())
    texts = [text for row in generate_pairs() for text in row.values()]
    write_llama(folder, texts, tokens=100, vocab_size=112)
    (folder / "config.py").write_text(CONFIG.format(folder=folder))
    return folder


def run(command, files, workdir, *overrides):
    """Run a command and return its output."""
    options = f"--config={files}/config.py", f"--workdir={workdir}", *overrides
    return run_command(command, *options).stdout


@pytest.fixture(scope="module")
def sft(files, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("sft")
    return workdir, run("sft", files, workdir)


@pytest.fixture(scope="module")
def reward_model(files, sft, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("reward")
    return workdir, run("reward_model", files, workdir, f"--config.model.path={sft[0]}/actor")


def held_out(files, folder):
    """Yield (prompt, chosen, rejected) token ids of the held-out pairs by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for example in sources.read_examples(f"{files}/pairs.jsonl.gz[32:]"):
        prompt, eos = tokenizer.encode(example.prompt), [tokenizer.eos_token_id]
        yield (
            prompt,
            *(
                tokenizer.encode(example.prompt + text)[len(prompt) :] + eos
                for text in (example.response, example.rejected)
            ),
        )


@pytest.mark.slow
def test_sft_learns(sft):
    workdir, output = sft
    rows, evaluated = read_metrics(workdir), read_evaluations(workdir)
    assert [entry["step"] for entry in evaluated] == [0, 6, 12] and "step 12/12" in output
    assert evaluated[0]["loss"] > 4 and evaluated[2]["loss"] < evaluated[0]["loss"] - 1.5
    assert [int(row["step"]) for row in rows if row["train/loss"]] == list(range(1, 13))
    assert list((workdir / "tensorboard").iterdir()) and "12 steps of 8 (3 epochs)" in output


@pytest.mark.slow
@pytest.mark.parity
def test_transformers_measures_the_loss_after_sft(files, sft):
    import torch

    workdir, _ = sft
    evaluated = read_evaluations(workdir)
    model = transformers.AutoModelForCausalLM.from_pretrained(workdir / "actor").eval()
    losses = []
    for prompt, chosen, _ in held_out(files, workdir / "actor"):
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + chosen])).logits[0].log_softmax(-1)
        losses += [-float(logprobs[len(prompt) + i - 1, token]) for i, token in enumerate(chosen)]
    assert evaluated[2]["loss"] == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.slow
def test_a_reward_model_learns_to_prefer(reward_model):
    workdir, output = reward_model
    evaluated = read_evaluations(workdir)
    assert [entry["step"] for entry in evaluated] == [0, 6, 12]
    assert evaluated[0]["loss"] == pytest.approx(np.log(2)) and evaluated[0]["accuracy"] == 0.5
    assert evaluated[2]["accuracy"] == 1 and evaluated[2]["loss"] < 0.3
    assert metrics_page.unknown(set(read_metrics(workdir)[0])) == {"step"}
    assert "evaluation after step 12: loss" in output and "accuracy 1.000" in output


@pytest.mark.slow
@pytest.mark.parity
def test_transformers_gives_the_scores_of_the_reward_model(files, reward_model):
    import torch

    workdir, _ = reward_model
    evaluated = read_evaluations(workdir)
    loader = transformers.AutoModelForSequenceClassification
    model = loader.from_pretrained(workdir / "reward_model").eval()
    margins = []
    for prompt, chosen, rejected in held_out(files, workdir / "reward_model"):
        with torch.no_grad():
            scores = [
                float(model(torch.tensor([prompt + response])).logits[0, 0])
                for response in (chosen, rejected)
            ]
        margins.append(scores[0] - scores[1])
    assert evaluated[2]["margin"] == pytest.approx(np.mean(margins), rel=1e-4)


@pytest.mark.exhaustive
def test_ppo_against_the_trained_reward_model(files, sft, reward_model, tmp_path):
    reward = f"{reward_model[0]}/reward_model"
    models = {"model.path": f"{sft[0]}/actor", "reward.model_path": reward, "critic.path": reward}
    paths = [f"--config.{option}={path}" for option, path in models.items()]
    output = run("train", files, tmp_path, *paths, *PPO)
    steps = read_steps(tmp_path)
    assert len(steps) == 2 and all(float(row["reward/std"]) > 0.1 for row in steps)
    assert "step 2/2" in output and (tmp_path / "actor" / "model.safetensors").exists()
    evaluations = read_evaluations(tmp_path)
    assert evaluations
    assert all(x["accuracy"] is None and abs(x["reward_mean"]) > 1e-3 for x in evaluations)


def load(files, *overrides, command="sft"):
    mesh = "--config.mesh.data=1", "--config.mesh.fsdp=8"
    arguments = [command, f"--config={files}/config.py", *mesh, *overrides]
    return command_line.read_command_line(arguments, command)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "task"),
    [("sft", supervised_tasks.SFT), ("reward_model", supervised_tasks.REWARD_MODEL)],
)
def test_resumed_is_bit_equal(files, tmp_path, command, task, monkeypatch, capsys):
    """The run is stopped in the evaluation after step 4, which the resumed run repeats."""
    options = load(files, "--config.trainer.test_freq=4", command=command)
    supervised_loop.train_supervised(options, tmp_path / "whole", task)
    answers = iter([False] * 4)  # after each of the first three steps, and after a save
    monkeypatch.setattr("jax_ppo.run.life_cycle.should_stop", lambda: next(answers, True))
    supervised_loop.train_supervised(options, tmp_path / "halves", task)
    assert not (tmp_path / "halves" / task.output).exists()
    monkeypatch.undo()
    supervised_loop.train_supervised(options, tmp_path / "halves", task)
    assert "resuming after step 4 of 12" in capsys.readouterr().out
    assert_equal_runs(tmp_path / "halves", tmp_path / "whole")
    # A finished run keeps the options that its steps have used.
    saved = json.loads((tmp_path / "halves" / "config.json").read_text())
    changed = load(files, "--config.actor.optim.lr=1e-7", command=command)
    supervised_loop.train_supervised(changed, tmp_path / "halves", task)
    assert "done: 12 steps; to" in capsys.readouterr().out
    assert json.loads((tmp_path / "halves" / "config.json").read_text()) == saved


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", ["sft", "reward_model"])
def test_parts_of_rows_train_as_one_device_does(files, sft, reward_model, tmp_path, command):
    task, model, (whole, _) = {
        "sft": (supervised_tasks.SFT, files / "llama", sft),
        "reward_model": (supervised_tasks.REWARD_MODEL, sft[0] / "actor", reward_model),
    }[command]
    mesh = "--config.mesh.fsdp=2", "--config.mesh.context=4"
    options = load(files, *mesh, f"--config.model.path={model}", command=command)
    supervised_loop.train_supervised(options, tmp_path, task)
    for ours, theirs in zip(read_evaluations(tmp_path), read_evaluations(whole), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-3)
    ours, theirs = (
        [float(row["train/loss"]) for row in read_metrics(folder) if row["train/loss"]]
        for folder in (tmp_path, whole)
    )
    assert len(ours) == 12 and ours == pytest.approx(theirs, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(
    ("command", "override", "message"),
    [
        ("sft", "model.path=", "config.model.path='': must be set"),
        ("reward_model", "packing.row_length=64", "row_length=64: a row must hold the two resp"),
        ("sft", "supervised.center_coef=0.1", "center_coef=0.1: only jax_ppo.reward_model reads"),
        ("sft", "model.lora.rank=4", "model.lora.rank=4: jax_ppo.sft trains all parameters"),
        ("reward_model", "model.lora.path=x", "lora.path='x': jax_ppo.reward_model trains all"),
    ],
)
def test_wrong_options_are_told(files, command, override, message):
    with pytest.raises(UserError, match=message):
        load(files, f"--config.{override}", command=command)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train_files=arithmetic:64", "train_files, example 1 .*'arithmetic'.* has no rejected.*"),
        ("max_response_length=100", "the model takes 128 tokens at most"),
        ("train_batch_size=64", "has 32 prompts, fewer than a step's .*train_batch_size=64"),
    ],
)
def test_mistakes_are_told_before_weights_load(files, tmp_path, override, message, no_weights):
    options = load(files, f"--config.data.{override}", command="reward_model")
    with pytest.raises(UserError, match=message):
        supervised_loop.train_supervised(options, tmp_path, supervised_tasks.REWARD_MODEL)


def test_a_run_that_could_not_export_is_refused_before_it_trains(files, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "jax_ppo.run.supervised_loop.build_training", lambda *_: pytest.fail("the run was set up")
    )
    (tmp_path / supervised_tasks.SFT.output).mkdir()
    (tmp_path / supervised_tasks.SFT.output / "notes.txt").touch()
    with pytest.raises(UserError, match="exists and holds something other than an export"):
        supervised_loop.train_supervised(load(files), tmp_path, supervised_tasks.SFT)


def test_what_another_command_alone_reads_is_noted():
    values = loading.default_config()
    values.data.train_files, values.model.path = "x.jsonl", "llama"
    values.actor.optim.lr, values.supervised.response_key = 1e-3, "solution"
    rate = "config.actor.optim.lr=0.001 is not read: it belongs to jax_ppo.train"
    key = "config.supervised.response_key='solution' is not read: it belongs to jax_ppo.sft"
    for command, notes in (("sft", [rate]), ("reward_model", [rate, key])):
        config = loading.from_config_dict(values, command)
        assert list(validation.note_unread_options(config, command)) == notes
    assert validation.train_notes(loading.from_config_dict(values)) == [key]
