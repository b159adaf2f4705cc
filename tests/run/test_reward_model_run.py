"""The command trains an actor with a DeBERTa reward model that has its own tokenizer."""

import json
import pathlib

import numpy as np
import pytest

import reward_models
from jax_ppo.config import command_line
from jax_ppo.errors import UserError
from jax_ppo.run import ppo_training
from llama_folder import write_llama
from whole_run import read_evaluations, read_rows, run_command, run_two_processes

CONFIG = """
from jax_ppo.config import default_config

def get_config(arg=None):
    config = default_config()
    config.model.path, config.model.dtype = {model!r}, "float32"
    config.data.train_files, config.data.val_files = "{folder}/train.jsonl", "{folder}/val.jsonl"
    config.data.train_batch_size = config.actor.ppo_mini_batch_size = config.data.val_batch_size = 4
    config.data.max_prompt_length, config.data.max_response_length = 64, 12
    config.rollout.n = 2
    config.actor.optim.lr = config.critic.optim.lr = 1e-2
    config.reward.function = "{folder}/note.py:note"
    config.reward.model_path = {reward!r}
    config.trainer.total_training_steps, config.trainer.test_freq = 2, 0
    return config
"""
NOTE = '''
import json

def note(data_source, solution_str, ground_truth, extra_info):
    """Nothing is earned here: it writes down what was sampled."""
    with open("{folder}/sampled.jsonl", "a") as file:
        print(json.dumps([extra_info["question"], solution_str]), file=file)
    return 0.0
'''


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Write a random tiny Llama, a DeBERTa, rows of both kinds of prompt, and a configuration."""
    folder = tmp_path_factory.mktemp("run")
    write_llama(folder, reward_models.TEXTS, tokens=120, vocab_size=128)
    for name, start, count in (("train", 0, 8), ("val", 8, 6)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for i in range(start, start + count):
                question = f"Tom has {i} apples. How many" + " more" * (i % 3) + "?"
                prompt = question if i % 2 else [{"role": "user", "content": question}]
                row = {
                    "data_source": "apples",
                    "prompt": prompt,
                    "reward_model": {"style": "model", "ground_truth": ""},
                    "extra_info": {"question": question},
                }
                print(json.dumps(row), file=file)
    reward = reward_models.deberta(folder / "deberta")
    (folder / "note.py").write_text(NOTE.format(folder=folder))
    (folder / "config.py").write_text(
        CONFIG.format(folder=folder, model=str(folder / "llama"), reward=str(reward))
    )
    return folder


def run(files, workdir, *overrides, devices=1):
    """Return the output of the command, the sampled texts and the rows of the CSV file."""
    (files / "sampled.jsonl").unlink(missing_ok=True)
    options = f"--config={files}/config.py", f"--workdir={workdir}", *overrides
    output = run_command("train", *options, devices=devices).stdout
    sampled = (files / "sampled.jsonl").read_text().splitlines()
    return output, list(map(json.loads, sampled)), read_rows(workdir)


@pytest.mark.parity
@pytest.mark.slow
def test_the_rewards_are_those_of_transformers(files, tmp_path):
    output, sampled, rows = run(files, tmp_path)
    tokenizer = reward_models.load_tokenizer(files / "deberta")
    inputs = reward_models.pair_inputs(tokenizer, sampled)
    scores = reward_models.live_scores(files / "deberta", inputs)
    # An evaluation of six prompts, two steps of 4 x 2, an evaluation.
    first, one, two, last = np.split(np.array(scores), [6, 14, 22])
    assert len(last) == 6 and np.std(scores) > 0.02
    steps = [row for row in rows if row["reward/mean"]]
    for row, expected in zip(steps, (one, two), strict=True):
        assert float(row["reward/mean"]) == pytest.approx(expected.mean(), rel=1e-4, abs=1e-6)
        assert float(row["reward/std"]) == pytest.approx(expected.std(), rel=1e-3)
        assert float(row["reward/model_inputs_cut"]) == 0
    evaluations = read_evaluations(tmp_path)
    for entry, expected in zip(evaluations, (first, last), strict=True):
        assert entry["reward_mean"] == pytest.approx(expected.mean(), rel=1e-4, abs=1e-6)
    assert "the reward model reads prompt and response as pair, in at most 128 of its" in output
    assert f"evaluation after step 0: reward {first.mean():.3f}" in output
    for expected in first[:2]:  # the table of samples shows them as well
        assert f"{expected:8.3f}" in output


@pytest.mark.exhaustive
def test_two_processes_and_eight_devices_score_the_same(files, tmp_path):
    options = "--config.trainer.total_training_steps=1", "--config.data.val_files="
    _, _, [one] = run(files, tmp_path / "one", *options)
    mesh = "--config.mesh.fsdp=2", "--config.mesh.model=2"
    _, _, [eight] = run(files, tmp_path / "eight", *options, *mesh, devices=8)
    arguments = [f"--config={files}/config.py", f"--workdir={tmp_path}/two", *options]
    run_two_processes(*arguments, logs=tmp_path)
    [two] = read_rows(tmp_path / "two")
    for other in (eight, two):
        for name in ("reward/mean", "reward/std", "critic/loss"):
            assert float(other[name]) == pytest.approx(float(one[name]), rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("model_path={files}/llama", "no score.weight in it: it is not a sequence-classification"),
        ("model_input=chat", r"reward\.model_input='chat'.*its tokenizer has no chat template"),
    ],
)
def test_mistakes_are_told_before_weights_load(files, tmp_path, option, message, no_weights):
    sizes = [f"--config.data.{part}_batch_size=8" for part in ("train", "val")]
    option = f"--config.reward.{option.format(files=files)}"
    arguments = ["train", f"--config={files}/config.py", option, *sizes]
    config, _ = command_line.read_command_line(arguments)
    with pytest.raises(UserError, match=message):
        ppo_training.train_ppo(config, tmp_path)
