"""Whole runs: killed and resumed, in two processes, on eight devices, without recompilation."""

import collections
import contextlib
import dataclasses
import functools
import html
import io
import json
import pathlib
import re
import signal
import threading
import types

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ppo
import metrics_page
import tiny
from jax_ppo import errors
from jax_ppo.config import command_line, loading, schema
from jax_ppo.config.schema import Config, replace_options
from jax_ppo.data.sources import read_examples
from jax_ppo.errors import UserError
from jax_ppo.models.hf.load import read_architecture
from jax_ppo.models.hf.save import export_checkpoint
from jax_ppo.models.transformer import Transformer
from jax_ppo.reporting.files import read_samples
from jax_ppo.run import life_cycle, ppo_training, standalone_evaluation
from jax_ppo.runtime import compiled_programs, heartbeat, meshes, placement
from jax_ppo.runtime.compiled_programs import CompiledProgram
from llama_folder import write_arithmetic_llama
from waiting import HANG_SECONDS
from whole_run import (
    assert_equal_runs,
    read_evaluations,
    read_metrics,
    read_steps,
    run_command,
    run_two_processes,
)

CONFIG = """
from jax_ppo.config import default_config

def get_config(arg=None):
    config = default_config()
    config.model.path = {model!r}
    config.model.dtype = "float32"
    config.data.train_files = "arithmetic:64"
    config.data.val_files = "arithmetic:12:heldout"
    config.data.train_batch_size, config.data.val_batch_size = 8, 8
    config.data.max_prompt_length, config.data.max_response_length = 64, 12
    config.actor.ppo_mini_batch_size = 4
    config.actor.ppo_epochs = 2
    config.rollout.n = 2
    config.rollout.temperature = 0.8
    config.actor.optim.lr = config.critic.optim.lr = 1e-3
    config.algorithm.use_kl_in_reward = True
    config.algorithm.kl_ctrl.type = "adaptive"
    config.critic.normalize_values = True
    config.reward.normalize = "running"
    config.reward.function = {reward!r}
    config.reward.workers = 0  # starts sooner; tests/rewards/test_worker_pool.py tests the workers
    config.trainer.total_training_steps = 8
    config.trainer.save_freq = 2
    config.trainer.test_freq = 4
    config.trainer.log_rollouts_freq = 3
    config.trainer.critic_warmup = 1
    return config
"""
REWARD = '''
def reward(data_source, solution_str, ground_truth, extra_info):
    """The share of digits: a random model has something to find."""
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
'''


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Write a random tiny Llama with a tokenizer, a reward function and a configuration file."""
    folder = tmp_path_factory.mktemp("model")
    write_arithmetic_llama(folder, problems=200, vocab_size=196)
    (folder / "reward.py").write_text(REWARD)
    (folder / "config.py").write_text(
        CONFIG.format(model=str(folder / "llama"), reward=f"{folder}/reward.py:reward")
    )
    return folder


@pytest.fixture(scope="module")
def reward_model(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward_model")
    architecture = read_architecture(files / "llama")
    params = tiny.init_params(Transformer(architecture), jax.random.key(1), "scalar")
    params["score"]["kernel"] = jax.random.normal(
        jax.random.key(2), params["score"]["kernel"].shape
    )
    export_checkpoint(params, architecture, folder)
    return folder


def options_of(files, workdir, *overrides):
    return [f"--config={files}/config.py", f"--workdir={workdir}", *overrides]


def run(files, workdir, *overrides, **machine):
    """Train and return the output."""
    return run_command("train", *options_of(files, workdir, *overrides), **machine).stdout


def run_in_two(files, workdir, *overrides, **machine):
    """Train in two processes; return the finished process that started them."""
    options = options_of(files, workdir, *overrides)
    return run_two_processes(*options, logs=workdir.parent, **machine)


@pytest.fixture(scope="module")
def undisturbed(files, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed")
    output = run(files, workdir)
    return workdir, output


def test_a_run_writes_what_it_should(watched):
    workdir, output = watched.workdir, watched.output
    summary = json.loads((workdir / "summary.json").read_text())
    assert [entry["step"] for entry in summary["evaluations"]] == [0, 4, 8]
    assert summary["compilations"]["programs"] > 5 and summary["compilations"]["seconds"] > 0
    # The first evaluation precedes every reward, and rewards are in units of their spread.
    first, *_, last = summary["evaluations"]
    assert "critic/error" not in first
    assert {"critic/error", "reward_mean_low", "response_length"} <= last.keys()
    assert summary["steps"] == summary["training"]["last"]["step"] == 8
    rows = read_metrics(workdir)
    # One figure of each part of a step.
    expected = {"reward/std", "advantages/mean", "critic/returns_mean", "critic/clip_fraction"}
    expected |= {"response_length/truncated_share", "actor/entropy", "actor/grad_norm"}
    assert expected | {"update/loss", "update/padding"} <= rows[0].keys()
    with open(workdir / "training_metrics.csv") as file:
        header = set(file.readline().strip().split(","))
    assert metrics_page.unknown(header) == {"step"}
    steps = read_steps(workdir)
    assert all(0 < float(row["rollout/slot_use"]) <= 1 for row in steps)
    assert [int(row["step"]) for row in steps] == list(range(1, 9))
    assert abs(float(steps[0]["kl/reference"])) < 1e-6 < abs(float(steps[3]["kl/reference"]))
    assert all(float(row["actor/first_log_ratio"]) < 1e-5 for row in steps)
    assert float(steps[0]["actor/lr"]) == 0 < float(steps[1]["actor/lr"])
    assert list((workdir / "tensorboard").iterdir())
    assert (workdir / "report.html").stat().st_size > 1_000_000
    logged = {(kind, step): records for kind, step, records in read_samples(workdir)}
    kinds = [("evaluation", step) for step in (0, 4, 8)] + [
        ("training", step) for step in (1, 3, 6)
    ]
    assert sorted(logged) == kinds
    for record in logged["training", 6]:
        assert len(record["advantages"]) == len(record["kl"]) == len(record["response_ids"]) > 0
    assert "step 8/8" in output and "not at the default, see config.json" in output


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["", "actor", "checkpoints/8"])
def test_an_evaluation_by_itself_gives_the_figures_of_the_run(model, files, undisturbed, tmp_path):
    path = undisturbed[0] / model
    options = {"model.path": str(path), "trainer.compilation_cache": "off"}
    # The training data are not read, and their number does not matter.
    options |= {"data.train_files": "none/such.jsonl*2,x*1", "data.train_batch_size": 2000}
    config = loading.load_config(f"{files}/config.py", options)
    summary = standalone_evaluation.evaluate_model(config, tmp_path)
    last = read_evaluations(undisturbed[0])[-1]
    (alone,) = summary["evaluations"]
    # An evaluation by itself has no critic.
    last = {name: value for name, value in last.items() if not name.startswith("critic/")}
    assert alone | {"step": 8} == pytest.approx(last)
    assert len(list(read_samples(tmp_path))[0][2]) == 12


@pytest.mark.slow
def test_killed_and_resumed_is_bit_equal(files, undisturbed, tmp_path):
    killed, resumed = interrupt_and_resume(files, tmp_path / "run", IN_STEP_6, signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL and "resuming after step 4" in resumed.stdout
    (warning,) = json.loads((tmp_path / "run" / "report.json").read_text())["warnings"]
    assert re.search(r"ended: without a word \(killed\?\); .*, after step [45]$", warning)
    assert f"warning: {warning}\n" in resumed.stdout
    assert_equal_runs(tmp_path / "run", undisturbed[0])


@pytest.mark.exhaustive
def test_stopped_during_an_evaluation_and_resumed_is_bit_equal(files, undisturbed, tmp_path):
    """The evaluation ends between two batches; the resumed run begins with it."""
    stopped, resumed = interrupt_and_resume(
        files, tmp_path / "run", IN_THE_SECOND_EVALUATION, signal.SIGINT
    )
    assert stopped.returncode == 130, stopped.stderr
    assert stopped.stdout.endswith("\nstopped by SIGINT, saved step 4\n")
    assert "evaluation after step 4" not in stopped.stdout
    assert "evaluation after step 4" in resumed.stdout
    assert_equal_runs(tmp_path / "run", undisturbed[0])


# The number of a reward function's call, of which there are 12 in each evaluation and 16 in each
# step. A machine's speed does not change what a run has done by then. At the sixth step's rewards,
# the fourth step's checkpoint is the newest one, and a run one step off has sampled the seventh
# step's responses.
IN_THE_SECOND_EVALUATION = 12 + 4 * 16 + 5
IN_STEP_6 = 12 + 4 * 16 + 12 + 16 + 5
# A kill ends the writing of a checkpoint, too; its folder is renamed once it is complete.
SIGNALLING_REWARD = """
import os, pathlib, time
import jax
calls, marker, saved = 0, pathlib.Path(__file__).with_suffix(".signalled"), pathlib.Path({saved!r})

def reward(data_source, solution_str, ground_truth, extra_info):
    global calls
    calls += {counted}
    if calls == {call} and not marker.exists():
        while not saved.exists():
            time.sleep(0.01)
        marker.touch()
        os.kill(os.getpid(), {number})
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
"""


def signalling_reward(path, number, call, saved, counted="1"):
    """Return the option for a reward that signals its process in a call, once `saved` exists."""
    values = {"number": int(number), "call": call, "saved": str(saved), "counted": counted}
    path.write_text(SIGNALLING_REWARD.format(**values))
    return f"--config.reward.function={path}:reward"


def interrupt_and_resume(files, workdir, call, number, *overrides):
    """Run a command that signals itself in a call of its reward function, and run it again.

    It is killed only once the fourth step's checkpoint is there. Returns both processes.
    """
    saved = workdir / "checkpoints" / "4" if number == signal.SIGKILL else files
    reward = signalling_reward(workdir.with_suffix(".py"), number, call, saved)
    options = options_of(files, workdir, reward, *overrides)
    processes = [run_command("train", *options, check=False) for _ in range(2)]
    assert processes[1].returncode == 0, "".join(p.stdout + p.stderr for p in processes)
    return processes


COMPARED = ("reward/mean", "kl/reference", "critic/loss", "response_length/mean")


def assert_same_run(workdir, other):
    """Assert that runs differ by rounding alone."""
    for ours, theirs in zip(read_metrics(workdir), read_metrics(other), strict=True):
        for name in (*COMPARED, "actor/entropy", "eval/reward_mean"):
            if value := theirs.get(name):
                assert float(ours[name]) == pytest.approx(float(value), rel=1e-3, abs=1e-3), name


@pytest.mark.parametrize(
    "options",
    [
        # Training splits parameters over eight devices, decoding splits matrices over four.
        pytest.param("mesh.data=1 mesh.fsdp=8 rollout.mesh.model=4", marks=pytest.mark.exhaustive),
        pytest.param("mesh.stage=2 mesh.model=4 rollout.mesh.model=4", marks=pytest.mark.slow),
        # Two devices hold parts of the same rows, and decode different samples.
        pytest.param("mesh.context=2 mesh.fsdp=2 mesh.model=2", marks=pytest.mark.exhaustive),
    ],
)
def test_eight_devices_train_as_one_does(files, undisturbed, tmp_path, options):
    run(files, tmp_path, *(f"--config.{option}" for option in options.split()), devices=8)
    assert_same_run(tmp_path, undisturbed[0])


def signal_process_1(folder, number, call, saved=""):
    """Signal process 1 of two in a step, of whose responses it scores half."""
    counted = "jax.process_index() == 1 and extra_info['split'] == 'train'"
    return signalling_reward(folder / "reward.py", number, call, folder / saved, counted)


@pytest.mark.exhaustive
def test_a_run_moves_from_two_processes_to_one_and_from_eight_devices_to_one(
    files, undisturbed, tmp_path, monkeypatch
):
    """One goes on with four devices, three, which do not divide eight prompts, and one."""
    workdir = tmp_path / "run"
    # In the third step.
    reward = signal_process_1(tmp_path, signal.SIGTERM, call=2 * 8 + 5)
    options = reward, "--config.trainer.log_rollouts_freq=1"
    # Each host holds one half of the parameters.
    shape = "--config.mesh.data=1", "--config.mesh.fsdp=4", "--config.mesh.model=2"
    stopped = run_in_two(files, workdir, *options, *shape, devices=4, check=False)
    assert stopped.returncode == 143, stopped.stdout + stopped.stderr
    # Process 0 learns of the signal after this step or the next one.
    assert re.search(r"\nstopped by SIGTERM, saved step [34]\n$", stopped.stdout), stopped.stdout

    make_mesh = meshes.make_mesh
    moves = (
        (4, 5, ("--config.mesh.data=2", "--config.mesh.fsdp=2")),
        (3, 7, ("--config.mesh.data=3",)),
        (1, 8, ()),
    )
    for devices, last_step, shape in moves:
        monkeypatch.setattr(
            meshes, "make_mesh", functools.partial(make_mesh, devices=jax.devices()[:devices])
        )
        steps = f"--config.trainer.total_training_steps={last_step}"
        ppo_training.train_ppo(load_config(files, steps, *options, *shape), workdir)
    rows, expected = read_steps(workdir), read_steps(undisturbed[0])
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 9)]
    for ours, theirs in zip(rows, expected, strict=True):
        for name in COMPARED:
            assert float(ours[name]) == pytest.approx(float(theirs[name]), rel=1e-3, abs=1e-3)
    ours, theirs = drawn_tokens(workdir), drawn_tokens(undisturbed[0])
    assert max(theirs) >= 6
    assert {step: ours[step] for step in theirs} == theirs


def drawn_tokens(workdir):
    """Return the tokens of the recorded responses of each step of training."""
    return {
        step: [record["response_ids"] for record in records]
        for kind, step, records in read_samples(workdir)
        if kind == "training"
    }


def stop_and_resume(files, folder, *options):
    """Assert that a run that is stopped in its sixth step is resumed bit for bit; return its rows.

    The fourth step's checkpoint is older, and the eighth step's would be the next one.
    """
    options = *options, "--config.trainer.save_freq=4"
    run(files, folder / "undisturbed", *options)
    stopped, resumed = interrupt_and_resume(
        files, folder / "stopped", IN_STEP_6, signal.SIGTERM, *options
    )
    assert stopped.stdout.endswith("\nstopped by SIGTERM, saved step 6\n"), stopped.stderr
    assert stopped.returncode == 143 and "resuming after step 6" in resumed.stdout
    assert_equal_runs(folder / "stopped", folder / "undisturbed")
    return read_steps(folder / "undisturbed")


SAMPLED_AHEAD = "--config.rollout.max_staleness=1", "--config.algorithm.rollout_is=token"


@pytest.mark.exhaustive
def test_sampling_ahead_lags_weighs_and_is_resumed_bit_equal(files, tmp_path):
    """The batch sampled ahead is in the checkpoint that a signal asks for."""
    options = (*SAMPLED_AHEAD, "--config.trainer.total_training_steps=12")
    rows = stop_and_resume(files, tmp_path, *options)
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    for row in rows:
        step, weight = int(row["step"]), float(row["rollout/importance_mean"])
        assert int(float(row["rollout/staleness"])) == (step > 1)
        # The first step samples with the weights that are trained. The second one does too, since
        # the first one did not change them.
        same = step in (1, 2)
        assert (abs(weight - 1) < 1e-5) == same
        difference = float(row["rollout/logprob_difference"])
        assert difference < 1e-5 if same else difference > 1e-4
        # The ratio is relative to the policy that the update starts from.
        assert float(row["actor/first_log_ratio"]) < 1e-5


CONTINUED = (
    "--config.rollout.max_staleness=2",
    "--config.rollout.partial_length=2",
    "--config.algorithm.rollout_is=token",
)


@pytest.mark.exhaustive
def test_responses_that_continue_are_resumed_bit_equal(files, tmp_path):
    """The responses in progress are in the checkpoint that a signal asks for."""
    rows = stop_and_resume(files, tmp_path, *CONTINUED)
    oldest = [int(float(row["rollout/staleness_max"])) for row in rows]
    assert oldest[0] == 0 and 1 <= max(oldest) <= 2
    for row, age in zip(rows, oldest, strict=True):
        assert (float(row["rollout/continued_share"]) > 0) == (age > 0)
        assert 0 <= float(row["rollout/staleness"]) <= age
    # Log-probs under older weights differ from those of the trained ones.
    assert float(rows[0]["rollout/logprob_difference"]) < 1e-5
    assert float(rows[-1]["rollout/logprob_difference"]) > 1e-4


@pytest.mark.parametrize(
    ("devices", "mesh"),
    [
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(
            8,
            ("--config.mesh.data=1", "--config.mesh.fsdp=8", "--config.rollout.mesh.model=4"),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["one device", "a rollout mesh"],
)
def test_with_unchanged_weights_responses_that_continue_are_those_of_a_step(
    files, tmp_path, devices, mesh
):
    """What a step samples for its batch, a pool draws for its batch of the same number."""
    options = (
        "--config.actor.optim.lr=1e-30",  # changes no float32
        "--config.trainer.total_training_steps=3",
        "--config.trainer.log_rollouts=1000",
        "--config.trainer.log_rollouts_freq=1",
        "--config.trainer.save_freq=-1",
        "--config.data.val_files=",
    )
    responses = []
    for name, more in (("partial", CONTINUED), ("whole", ())):
        output = run(files, tmp_path / name, *options, *mesh, *more, devices=devices)
        is_named = re.search(r"responses to \d+ prompts were unfinished", output) is not None
        assert is_named == (name == "partial"), "the run says what it does not train"
        responses.append(
            {
                (record["address"]["step"], record["address"]["sample"]): record["response_ids"]
                for _, _, records in read_samples(tmp_path / name)
                for record in records
            }
        )
    partial, whole = responses
    assert len(partial) == len(whole) == 3 * 16
    common = partial.keys() & whole.keys()
    assert len(common) > 24
    assert all(partial[address] == whole[address] for address in common)


DICE = """
import random

class Dice:
    metric_names = ("throws",)

    def reset(self, example, seed):
        self.random, self.turns = random.Random(seed), 0

    def step(self, text):
        self.turns += 1
        thrown = self.random.randint(0, 9)
        reward = thrown / 10 + len(text) / 100
        return f"{thrown}", reward, self.turns == 3, {"throws": self.turns}
"""


@pytest.mark.exhaustive
def test_dialogues_are_resumed_bit_equal(files, tmp_path):
    """Also those sampled ahead, with chance on the host."""
    (tmp_path / "dice.py").write_text(DICE)
    options = (
        *SAMPLED_AHEAD,
        f"--config.rollout.multi_turn.environment={tmp_path}/dice.py:Dice",
        "--config.data.max_response_length=24",
        "--config.rollout.multi_turn.max_turn_length=3",
    )
    rows = stop_and_resume(files, tmp_path, *options)
    assert all(row["environment/throws"] == row["rollout/turns"] for row in rows)
    assert all(float(row["rollout/turns"]) > 2 for row in rows)
    # What the turns earned is part of the reward that is learned from.
    assert all(float(row["reward/mean"]) > float(row["reward/turns"]) > 1 for row in rows)


@pytest.mark.slow
def test_without_a_critic_none_is_kept(files, tmp_path):
    """A run with another loss and estimator, step rewards and initially measured moments."""
    (tmp_path / "steps.py").write_text(
        "def reward(data_source, solution_str, ground_truth, extra_info):\n"
        "    digits = [i + 1 for i, c in enumerate(solution_str) if c.isdigit()]\n"
        "    return {'score': 0.0, 'step_rewards': [(end, 1.0) for end in digits]}\n"
    )
    output = run(
        files,
        tmp_path / "run",
        f"--config.reward.function={tmp_path}/steps.py:reward",
        "--config.reward.process_rewards=True",
        "--config.algorithm.adv_estimator=grpo",
        "--config.actor.policy_loss=gspo",
        "--config.critic.normalize_values=False",
        "--config.trainer.critic_warmup=0",
        "--config.trainer.total_training_steps=3",
        "--config.trainer.warn_entropy_below=100",
    )
    assert output.count("the policy's entropy is") == 1  # although it is low in all three steps
    assert not list((tmp_path / "run").glob("checkpoints/*/critic"))
    steps = read_steps(tmp_path / "run")
    assert all(float(row["reward/shaped_mean"]) > 0.1 for row in steps)
    assert not any("critic/loss" in row for row in steps)


@pytest.mark.slow
def test_two_processes_train_as_one_does(files, undisturbed, tmp_path):
    workdir = tmp_path / "run"
    run_in_two(files, workdir)
    assert json.loads((workdir / "summary.json").read_text())["versions"]["process_count"] == 2
    assert_same_run(workdir, undisturbed[0])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            ("rollout.max_staleness=1", "rollout.mesh.model=1"),
            marks=pytest.mark.slow,
            id="one step ahead",
        ),
        # Each process learns with half of each layer, and decodes with half of each matrix.
        pytest.param(
            ("rollout.max_staleness=4", "rollout.partial_length=8", "mesh.data=1", "mesh.fsdp=2")
            + ("rollout.mesh.model=2",),
            marks=pytest.mark.exhaustive,
            id="partial rollouts",
        ),
    ],
)
def test_devices_of_two_processes_that_only_decode_change_no_bit(files, tmp_path, options):
    """Process 1 is killed in the third step, while the fourth is decoded, and the run resumed."""
    options += ("algorithm.rollout_is=token",)
    options += ("trainer.total_training_steps=4", "trainer.test_freq=2")
    options = [f"--config.{option}" for option in options]
    saved = "separate/checkpoints/2"
    options.append(signal_process_1(tmp_path, signal.SIGKILL, call=2 * 8 + 5, saved=saved))

    def start(name, devices, *more, check=True):
        workdir = tmp_path / name
        return run_in_two(files, workdir, *options, *more, devices=devices, check=check)

    killed = start("separate", 2, "--config.rollout.mesh.devices=2", check=False)
    assert killed.returncode != 0 and (tmp_path / "reward.signalled").exists(), killed.stderr
    resumed = start("separate", 2, "--config.rollout.mesh.devices=2")
    assert "resuming after step 2" in resumed.stdout
    start("shared", 1)
    assert_equal_runs(tmp_path / "separate", tmp_path / "shared")


UNEVEN = """

class Uneven(Dice):
    def reset(self, example, seed):
        super().reset(example, seed)
        self.last = 1 + seed % 6

    def step(self, text):
        observation, reward, _, figures = super().step(text)
        return observation, reward, self.turns == self.last, figures
"""
FEW_PROGRAMS = (
    "--config.algorithm.adv_estimator=rloo",
    "--config.algorithm.use_kl_in_reward=False",
    "--config.algorithm.kl_ctrl.type=fixed",
    "--config.critic.normalize_values=False",
    "--config.trainer.critic_warmup=0",
)


@pytest.mark.exhaustive
def test_devices_of_two_processes_hold_the_dialogues_of_shared_ones(files, tmp_path):
    """Threads that decode ask each process's host; so do those of one process with all devices."""
    (tmp_path / "dice.py").write_text(DICE + UNEVEN)
    saved = "separate/checkpoints/1"
    options = (
        *SAMPLED_AHEAD,
        *FEW_PROGRAMS,
        signal_process_1(tmp_path, signal.SIGKILL, call=8 + 5, saved=saved),
        f"--config.rollout.multi_turn.environment={tmp_path}/dice.py:Uneven",
        "--config.rollout.multi_turn.max_turn_length=3",
        "--config.data.max_response_length=24",
        "--config.trainer.total_training_steps=3",
        "--config.trainer.save_freq=1",
        "--config.trainer.log_rollouts_freq=1",
        "--config.data.val_files=",
    )
    separate = *options, "--config.rollout.mesh.devices=2"

    killed = run_in_two(files, tmp_path / "separate", *separate, devices=2, check=False)
    assert killed.returncode != 0 and (tmp_path / "reward.signalled").exists(), killed.stderr
    resumed = run_in_two(files, tmp_path / "separate", *separate, devices=2)
    assert "resuming after step 1" in resumed.stdout
    run_in_two(files, tmp_path / "shared", *options)
    assert_equal_runs(tmp_path / "separate", tmp_path / "shared")
    run(files, tmp_path / "one", *separate, devices=4)
    assert_equal_runs(tmp_path / "separate", tmp_path / "one")
    rows = read_steps(tmp_path / "separate")
    assert all(row["environment/throws"] == row["rollout/turns"] for row in rows)
    assert all(float(row["rollout/turns"]) > 2 for row in rows)


@pytest.mark.slow
def test_a_reward_that_always_fails_stops_the_run(files, tmp_path):
    """Regression: `sys.exit()` in it ended the run as a success, and errors trained on."""
    (tmp_path / "bad.py").write_text(
        "import sys\n"
        "def reward(data_source, solution_str, ground_truth, extra_info):\n"
        "    sys.exit()\n"
    )
    arguments = (
        f"--config.reward.function={tmp_path}/bad.py:reward",
        "--config.reward.workers=1",
        "--config.trainer.val_before_train=False",
    )
    process = run_command("train", *options_of(files, tmp_path / "work", *arguments), check=False)
    assert process.returncode == 1
    last = process.stderr[process.stderr.rindex("error: config.reward.function=") :]
    for words in (
        "failed on every response of 3 consecutive steps.",
        "The first failure of step 3 was row 0 of the batch, data_source='arithmetic'",
        "SystemExit",
    ):
        assert words in last
    # The third step's update was not made.
    assert len(read_steps(tmp_path / "work")) == 2


@pytest.mark.exhaustive
def test_a_reward_that_hangs_ends_the_run_at_its_first_evaluation(files, tmp_path):
    """Of a step's 16 responses, and of two held-out batches of 8, two each are tried."""
    (tmp_path / "hangs.py").write_text(
        "import pathlib, time\n"
        "def reward(data_source, solution_str, ground_truth, extra_info):\n"
        "    with open(pathlib.Path(__file__).with_name('calls'), 'a') as calls: calls.write('x')\n"
        "    time.sleep(3600)\n"
    )
    arguments = (
        f"--config.reward.function={tmp_path}/hangs.py:reward",
        "--config.reward.workers=1",
        "--config.reward.timeout=0.2",
        "--config.reward.max_timeouts=2",
        "--config.trainer.val_before_train=False",
        "--config.trainer.test_freq=1",
    )
    process = run_command("train", *options_of(files, tmp_path / "work", *arguments), check=False)
    assert process.returncode == 1
    last = process.stderr[process.stderr.rindex("error: ") :]
    assert "the reward function failed on all 12 responses of the evaluation" in last
    assert "no result within config.reward.timeout=0.2 seconds" in last
    # A worker may have begun the next one.
    assert 6 <= len((tmp_path / "calls").read_text()) <= 9
    # The step that led there is not lost: once the function is repaired, the run goes on from it.
    (tmp_path / "hangs.py").write_text(REWARD)
    output = run(files, tmp_path / "work", *arguments, "--config.reward.timeout=60")
    assert "step 1/8" not in output
    assert output.index("evaluation after step 1:") < output.index("step 2/8")


@pytest.mark.exhaustive
def test_an_error_in_one_process_ends_both(files, tmp_path):
    (tmp_path / "bad.py").write_text(
        "import jax\n"
        "def reward(data_source, solution_str, ground_truth, extra_info):\n"
        "    if jax.process_index() == 1: raise KeyboardInterrupt('reward service is gone')\n"
        "    return 0.0\n"
    )
    bad = f"--config.reward.function={tmp_path}/bad.py:reward"
    process = run_in_two(files, tmp_path / "work", bad, check=False)
    assert process.returncode != 0
    output = (
        process.stdout + process.stderr + "".join(p.read_text() for p in tmp_path.rglob("*.log"))
    )
    error = f"KeyboardInterrupt('reward service is gone') was raised at {tmp_path}/bad.py:3, not by"
    for line in (
        f"process 1 of 2 ends the run: error: {error}",
        f"process 0 of 2 ends the run: process 1: error: {error}",
    ):
        assert line in output
    assert "Traceback" not in output


@dataclasses.dataclass
class WatchedRun:
    """A run of eight steps on eight devices, with rows and reward of the Python API."""

    workdir: pathlib.Path
    output: str
    result: jax_ppo.RunResult
    compiled: list[float]  # seconds of each compilation
    compiled_at_step: dict[int, int]  # number of compilations by the end of each step
    # Calls of functions that transfer arrays by the end of each step.
    calls_at_step: dict[int, collections.Counter[str]]
    unnamed: list[str]  # those that a heartbeat could not have named the phase of


def share_of_digits(solution_str, ground_truth, **_):
    assert ground_truth and threading.current_thread() is not threading.main_thread()
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)


def load_own_config(files: pathlib.Path) -> Config:
    """Return the configuration with the rows of a program, and without a reward function."""
    rows = [
        {"prompt": example.prompt, "ground_truth": example.ground_truth}
        for example in read_examples("arithmetic:64")
    ]
    options = ("--config.mesh.data=2", "--config.mesh.fsdp=4", "--config.trainer.save_freq=0")
    options += ("--config.reward.function=", "--config.reward.workers=1")
    config = load_config(files, *options, "--config.trainer.compilation_cache=off")
    return replace_options(config, {"data.train_files": loading.keep_rows(rows, "rows")})


@pytest.fixture(scope="module")
def watched(files: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> WatchedRun:
    """Train while implicit transfers are refused in steps 5 and 6, which nothing interrupts."""
    compiled: list[float] = []
    calls: collections.Counter[str] = collections.Counter()
    unnamed: list[str] = []
    compiled_at_step, calls_at_step = {}, {}

    def listen(event: str, seconds: float, **_: object) -> None:
        if event == compiled_programs.COMPILED:
            compiled.append(seconds)

    def count_calls(patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        function = getattr(owner, name)

        def call(*args):
            calls[name] += 1
            if not heartbeat.describe_activities(0.0):
                unnamed.append(name)
            return function(*args)

        patch.setattr(owner, name, call)

    evaluate_if_due = life_cycle.StepLoop._evaluate_if_due

    def evaluate_and_count(loop, state):
        quality = evaluate_if_due(loop, state)
        completed_steps = loop.completed_steps
        compiled_at_step[completed_steps] = len(compiled)
        calls_at_step[completed_steps] = calls.copy()
        guard = "disallow" if completed_steps in (4, 5) else "allow"
        jax.config.update("jax_transfer_guard", guard)
        return quality

    workdir = tmp_path_factory.mktemp("watched")
    output = io.StringIO()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
            patch.setattr(life_cycle.StepLoop, "_evaluate_if_due", evaluate_and_count)
            for name in ("place", "to_host", "local_rows"):
                count_calls(patch, placement, name)
            count_calls(patch, jax, "device_get")
            errors.closed_outputs.append("<stdout>")  # as after `| head`
            result = jax_ppo.train(load_own_config(files), workdir, reward=share_of_digits)
    finally:
        jax.config.update("jax_transfer_guard", "allow")
        # Switched off for the run; the other tests of this process keep programs on disk.
        jax.config.update("jax_enable_compilation_cache", True)
        jax.monitoring.clear_event_listeners()
    return WatchedRun(
        workdir, output.getvalue(), result, compiled, compiled_at_step, calls_at_step, unnamed
    )


def test_whatever_a_run_does_has_a_name_on_the_console(watched: WatchedRun):
    """Regression: minutes of compilation were "... starting (167 s)"."""
    assert watched.calls_at_step[8].total() > 50 and not watched.unnamed


def test_nothing_is_compiled_after_the_second_step(watched: WatchedRun):
    compiled, at_step = watched.compiled, watched.compiled_at_step
    assert at_step[1] > 5
    # The evaluation after the fourth step is the first that reads the critic.
    assert at_step[3] == at_step[2] and at_step[8] == at_step[4], at_step
    compilations = json.loads((watched.workdir / "summary.json").read_text())["compilations"]
    assert compilations["programs"] == len(compiled)
    assert compilations["seconds"] == pytest.approx(sum(compiled))


def test_train_returns_the_main_entries_of_the_summary_and_a_table(watched: WatchedRun):
    result, summary = watched.result, json.loads((watched.workdir / "summary.json").read_text())
    assert any("the reader of <stdout> has gone" in text for text in result["warnings"])
    assert result.items() >= {name: summary[name] for name in ("steps", "seconds")}.items()
    last = result["evaluations"][-1]
    assert list(last) == ["step", "accuracy", "reward_mean", "response_length", "figures"]
    assert {**last, **last["figures"]} == {**summary["evaluations"][-1], "figures": last["figures"]}
    assert result.metrics["step"] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert result.metrics["reward/mean"][-1] == summary["training"]["last"]["reward/mean"] > 0
    assert np.isnan(result.metrics["reward/mean"][0])  # of the evaluation before the first step


def test_a_notebook_shows_the_report_of_a_run(watched: WatchedRun, monkeypatch):
    report = (watched.workdir / "report.html").read_text()
    assert f'srcdoc="{html.escape(report)}"' in watched.result._repr_html_()
    monkeypatch.chdir(watched.workdir.parent)
    assert f'src="{watched.workdir.name}/report.html"' in watched.result._repr_html_()


def test_a_resumed_run_compares_the_rows_and_the_source_of_a_program(
    files: pathlib.Path, watched: WatchedRun, capsys
):
    assert "config.reward.timeout=60 counts as failed, but cannot be ended" in watched.output
    config = load_own_config(files)
    jax_ppo.train(config, watched.workdir, reward=share_of_digits)
    assert "until the checkpoint" not in capsys.readouterr().out
    jax_ppo.train(config, watched.workdir, reward=lambda **_: 1.0)
    change = "function was 'memory:share_of_digits@.* until .* is 'memory:<lambda>@"
    assert re.search(change, capsys.readouterr().out)
    other = loading.keep_rows([{"prompt": "1 + 1", "ground_truth": "2"}] * 64, "rows")
    changed = replace_options(config, {"data.train_files": other})
    with pytest.raises(UserError, match="train_files='memory:list@.*: the training data have"):
        jax_ppo.train(changed, watched.workdir, reward=share_of_digits)


def test_the_folder_of_a_run_is_a_policy(watched: WatchedRun):
    assert json.loads((watched.workdir / "config.json").read_text())["seed"] == 0
    trained = jax_ppo.load_policy(watched.workdir)
    assert trained.folder == watched.workdir / "actor"
    assert any(jax_ppo.sample(trained, ["What is 1 + 2?"], n=8, max_response_length=4))


@pytest.mark.parametrize(
    ("with_model", "devices"),
    [
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((0, 1), (0, 8), (1, 1))),
        pytest.param(1, 8, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_compiled_in_the_precompilation_alone(
    files, reward_model, tmp_path, caplog, monkeypatch, with_model, devices
):
    """Precompiled shapes and shardings equal the run's; otherwise programs compile twice."""
    threads = collections.defaultdict(list)
    options = (*SAMPLED_AHEAD, f"--config.reward.model_path={reward_model}") if with_model else ()
    options += ("--config.mesh.fsdp=2", "--config.mesh.model=2") if devices > 1 else ()
    monkeypatch.setattr(
        meshes, "make_mesh", functools.partial(meshes.make_mesh, devices=jax.devices()[:devices])
    )
    jax.config.update("jax_log_compiles", True)
    try:
        ppo_training.train_ppo(
            load_config(
                files,
                "--config.trainer.total_training_steps=2",
                "--config.trainer.val_before_train=False",
                "--config.data.val_files=",
                "--config.data.train_batch_size=16",
                *options,
            ),
            tmp_path,
        )
    finally:
        jax.config.update("jax_log_compiles", False)
    for record in caplog.records:
        if match := re.match(r"Finished XLA compilation of jit\((\w+)\)", record.getMessage()):
            threads[match[1]].append(record.threadName)
    # The policy's and the critic's.
    assert threads["forward_part"] == ["precompilation_0"] * 2, threads
    once = ("estimate_experience", "update_actor", "update_critic")
    for name in (*once, "reward_model_scores") if with_model else once:
        assert threads[name] == ["precompilation_0"], (name, threads)
    # These programs do not depend on the options, so another test may have compiled them.
    for name in ("unroll_params", "generate_from", "join"):
        assert threads[name] in ([], ["precompilation_0"]), (name, threads)


def test_an_error_stops_the_precompilation(monkeypatch):
    """It stops after the program in progress; a compiler error is raised only without another."""
    started, first, release = [], threading.Event(), threading.Event()

    def compile_program(name, *program):
        started.append(name)
        first.set()
        release.wait(HANG_SECONDS)

    def take_step():
        for name in ("one", "two"):
            CompiledProgram(jnp.negative, name)(jax.ShapeDtypeStruct((), jnp.float32))
        raise ValueError("out of memory")

    class Event(threading.Event):
        """The program ends once the error has been noticed."""

        def set(self):
            super().set()
            release.set()

    threads = types.SimpleNamespace(Thread=threading.Thread, Event=Event)
    monkeypatch.setattr(life_cycle, "threading", threads)
    mesh = meshes.make_mesh(schema.MeshShape())
    background = functools.partial(
        life_cycle.compile_in_background, take_step, mesh, compile_program
    )
    with pytest.raises(KeyError), background():
        first.wait(HANG_SECONDS)
        raise KeyError
    assert started == ["one"]
    with pytest.raises(ValueError, match="out of memory"), background():
        pass


def test_a_warm_step_transfers_only_what_it_says(watched: WatchedRun):
    """There are no implicit transfers to the mesh, and explicit ones move a handful of arrays."""
    # To the device: prompts, the two numbers of the key, the packings of scoring and update with
    # three counts and members, two columns of rewards. To the host: lengths for packing, responses
    # and their lengths for the rewards, and metrics of the previous step.
    assert watched.calls_at_step[6] - watched.calls_at_step[5] == {
        "place": 10,
        "to_host": 1,
        "local_rows": 2,
        "device_get": 2,  # one of them in to_host
    }


def load_config(files, *overrides):
    return command_line.read_command_line(["train", f"--config={files}/config.py", *overrides])[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_response_length=100", "the actor takes 128 tokens at most"),
        ("data.train_files=arithmetic:4", "has 4 prompts, fewer than .*train_batch_size=8"),
        ("model.path=/nowhere/model", "config.model.path"),
        ("reward.function=jax_ppo.nothing:reward", "config.reward.function"),
        ("mesh.stage=8", "config.mesh.stage=8: must divide"),
    ],
)
def test_mistakes_are_told_before_weights_load(files, tmp_path, override, message, no_weights):
    with pytest.raises(UserError, match=message):
        ppo_training.train_ppo(load_config(files, f"--config.{override}"), tmp_path)
