"""Runs whose responses come from a server, killed and resumed."""

import json
import signal

import pytest

import fake_rollout_server
from llama_folder import write_arithmetic_llama
from whole_run import assert_equal_runs, read_metrics, run_python

PROGRAM = """
import json, sys
import numpy as np
from jax_ppo import train
from jax_ppo.config import loading
from jax_ppo.sampler.engines import external

external.MAX_DIFFERENCE = np.inf  # the server's log-probs are no model's
train(loading.load_config(None, json.loads(sys.argv[2])), sys.argv[1])
"""
# At the third step's rewards, the second step's checkpoint is the newest one.
KILLING_REWARD = """
import os, pathlib, time
calls, marker = 0, pathlib.Path({marker!r})

def reward(data_source, solution_str, ground_truth, extra_info):
    global calls
    calls += 1
    if calls == 2 * 8 + 3 and not marker.exists():
        while not (marker.with_suffix("") / "checkpoints" / "2").exists():
            time.sleep(0.01)
        marker.touch()
        os.kill(os.getpid(), 9)
    return len(solution_str) % 7
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("engine", ["openai", "vllm"])
def test_killed_and_resumed_is_bit_equal(engine, tmp_path):
    write_arithmetic_llama(tmp_path)
    options = {
        "model.path": f"{tmp_path}/llama",
        "model.dtype": "float32",
        "data.train_files": "arithmetic:32",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 80,
        "data.max_response_length": 10,
        "actor.ppo_mini_batch_size": 2,
        "actor.optim.lr": 1e-3,
        "reward.workers": 0,
        "rollout.engine": engine,
        "rollout.n": 2,
        "trainer.total_training_steps": 4,
        "trainer.save_freq": 1,
    }
    if engine == "vllm":  # which the run starts
        options["rollout.vllm.python"] = fake_rollout_server.write_interpreter(tmp_path / "python")

    def run(workdir, marker):
        reward = tmp_path / f"{workdir.name}.py"
        reward.write_text(KILLING_REWARD.format(marker=str(marker)))
        arguments = json.dumps(options | {"reward.function": f"{reward}:reward"})
        return run_python("-c", PROGRAM, workdir, arguments, check=False)

    with fake_rollout_server.FakeServer("SGLang") as fake:
        if engine == "openai":
            options["rollout.url"] = fake.url
        (tmp_path / "never").touch()
        undisturbed = run(tmp_path / "undisturbed", tmp_path / "never")
        assert undisturbed.returncode == 0, undisturbed.stdout + undisturbed.stderr
        killed = run(tmp_path / "killed", tmp_path / "killed.marker")
        assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
        resumed = run(tmp_path / "killed", tmp_path / "killed.marker")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resuming after step 2 of 4" in resumed.stdout
    assert len(read_metrics(tmp_path / "killed")) == 4
    assert_equal_runs(tmp_path / "killed", tmp_path / "undisturbed")
