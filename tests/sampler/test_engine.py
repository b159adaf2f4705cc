"""The PPO loop runs with any rollout engine; the built-in one shares weights and programs."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

import fake_rollout_server
import tiny
from jax_ppo.config import loading, rollout_options
from jax_ppo.errors import UserError
from jax_ppo.models.transformer import Transformer
from jax_ppo.run import ppo_training
from jax_ppo.sampler import engine as engine_lib
from jax_ppo.sampler.built_in import BuiltInEngine, resolve_engine
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.engines import external
from llama_folder import write_arithmetic_llama
from tiny_actor import ARCHITECTURE, T
from whole_run import read_rows

LENGTH = 3  # length of every response of the engine below
ENGINE = f'''
import json, os
import jax, numpy as np
from jax_ppo.runtime import placement, sharding
from jax_ppo.types import Prompts, Rollout

class FixedResponses:
    """Returns tokens 4, 5, 6 to every prompt and writes down the calls."""

    def __init__(self, mesh, actor, params):
        self.rows, self.vocabulary = sharding.rows(mesh), actor.architecture.vocab_size
        assert params["embed"]["embedding"].shape[0] == self.vocabulary
        self.calls = ["init"]

    def start(self):
        self.calls.append("start")

    def update_weights(self, params):
        self.weights = float(params["norm"]["scale"].sum())
        self.calls.append("update_weights")

    def generate(self, prompts, key, options, first_sample_index=None):
        self.calls.append(
            f"generate temperature={{options.temperature}} first={{first_sample_index}}"
        )
        tokens, lengths = (
            np.repeat(placement.to_host(x), options.n, axis=0)
            for x in (prompts.tokens, prompts.lengths)
        )
        B, T = len(lengths), options.max_response_length
        responses = np.zeros((B, T), np.int32)
        responses[:, :{LENGTH}] = range(4, 4 + {LENGTH})
        logprobs = np.where(responses > 0, -np.log(self.vocabulary), 0).astype(np.float32)
        rollout = Rollout(
            prompts=Prompts(tokens=tokens, lengths=lengths), responses=responses,
            lengths=np.full(B, {LENGTH}, np.int32), logprobs=logprobs, truncated=np.zeros(B, bool),
            action_mask=responses > 0)
        return placement.place(rollout, self.rows)

    def release_weights(self):
        del self.weights
        self.calls.append("release_weights")

    def stop(self):
        self.calls.append("stop")
        with open(os.path.join(os.path.dirname(__file__), "calls.json"), "w") as file:
            json.dump(self.calls, file)
'''
OPTIONS = {
    "model.dtype": "float32",
    "data.train_files": "arithmetic:16",
    "data.val_files": "arithmetic:12:heldout",
    "data.train_batch_size": 8,
    "data.val_batch_size": 8,
    "data.max_prompt_length": 80,
    "data.max_response_length": 4,
    "actor.ppo_mini_batch_size": 8,
    "rollout.reuse_logprobs": "never",
    "rollout.temperature": 0.5,
    "rollout.val_kwargs.temperature": 0.0,
    "reward.workers": 0,
    "trainer.total_training_steps": 1,
    "trainer.save_freq": 0,
    "trainer.val_before_train": False,
    "trainer.export": False,
}


@pytest.fixture
def config(tmp_path):
    """Return the options of one PPO step of a random tiny model with the engine above.

    Each response has reward 1.
    """
    (tmp_path / "fixed.py").write_text(ENGINE)
    (tmp_path / "reward.py").write_text(
        "def reward(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    own = {
        "model.path": str(write_arithmetic_llama(tmp_path)),
        "rollout.engine": f"{tmp_path}/fixed.py:FixedResponses",
        "reward.function": f"{tmp_path}/reward.py:reward",
    }
    return loading.load_config(None, OPTIONS | own)


@pytest.mark.slow
def test_a_ppo_step_with_an_engine_named_by_an_option(config, tmp_path):
    """The loop transfers weights once per step, and evaluation uses its own options."""
    summary = ppo_training.train_ppo(config, tmp_path / "run")
    assert json.loads((tmp_path / "calls.json").read_text()) == [
        "init",
        "start",
        "update_weights",
        "generate temperature=0.5 first=None",
        "release_weights",
        "update_weights",
        "generate temperature=0.0 first=0",
        "generate temperature=0.0 first=8",
        "release_weights",
        "stop",
    ]
    assert summary["steps"] == 1
    (step,) = read_rows(tmp_path / "run")
    assert float(step["response_length/mean"]) == LENGTH
    assert float(step["reward/mean"]) == 1
    assert "rollout/slot_use" not in step  # this engine has no slots to count


@pytest.mark.exhaustive
def test_a_run_whose_server_is_killed_is_the_same_run(config, tmp_path, monkeypatch):
    """The server kills itself after every third response; steps and samples stay the same."""
    monkeypatch.setattr(external, "MAX_DIFFERENCE", np.inf)  # its log-probs are no model's
    python = fake_rollout_server.write_interpreter(tmp_path / "python")
    rows = []
    for deaths in ("--die-after=3", ""):
        # The tokenizer has all of these ids.
        vllm = rollout_options.VLLM(python=python, arguments=f"--vocabulary=100 {deaths}")
        rollout = dataclasses.replace(
            config.rollout, engine="vllm", vllm=vllm, reuse_logprobs="auto"
        )
        trainer = dataclasses.replace(config.trainer, total_training_steps=2)
        workdir = tmp_path / f"run{deaths}"
        summary = ppo_training.train_ppo(
            dataclasses.replace(config, rollout=rollout, trainer=trainer), workdir
        )
        assert summary["steps"] == 2
        rows.append(read_rows(workdir))
    for killed, lived in zip(*rows, strict=True):
        for name in ("response_length/mean", "rollout/logprob_difference", "actor/grad_norm"):
            assert float(killed[name]) == float(lived[name]), name
    assert float(rows[0][-1]["actor/grad_norm"]) > 0


def test_an_engine_is_stopped_after_an_error():
    calls = []
    engine = types.SimpleNamespace(
        start=lambda: calls.append("start"), stop=lambda: calls.append("stop")
    )
    with pytest.raises(KeyError), engine_lib.running(engine):
        raise KeyError
    assert calls == ["start", "stop"]


def test_an_engine_that_cannot_be_constructed_is_refused(tmp_path):
    (tmp_path / "mine.py").write_text("class Engine:\n    def __init__(self, url):\n        pass\n")
    with pytest.raises(UserError, match=r"config\.rollout\.engine.*mesh"):
        resolve_engine(f"{tmp_path}/mine.py:Engine")


class TestBuiltInEngine:
    OPTIONS = SamplingOptions(T, 1.0, eos_ids=(3, 7, 11), slots=4)

    @pytest.fixture
    def engine(self, actor):
        engine = BuiltInEngine(tiny.make_mesh(), Transformer(ARCHITECTURE), actor.stacked)
        with engine_lib.running(engine):
            yield engine

    def test_samples_from_stacked_weights_with_any_options(self, actor, engine, prompts):
        """One update_weights serves calls with different options."""
        engine.update_weights(actor.stacked)
        for options in (self.OPTIONS, SamplingOptions(T, 0.0)):
            rollout = engine.generate(prompts, jax.random.key(0), options)
            expected = actor.sampler(options)(actor.params, prompts, jax.random.key(0))
            for ours, theirs in zip(
                jax.tree.leaves(rollout), jax.tree.leaves(expected), strict=True
            ):
                np.testing.assert_allclose(ours, theirs, atol=1e-5)

    def test_weights_are_those_of_the_last_update(self, actor, engine, prompts):
        greedy = SamplingOptions(T, 0.0)
        engine.update_weights(jax.tree.map(lambda x: -x, actor.stacked))
        other = engine.generate(prompts, jax.random.key(0), greedy)
        engine.update_weights(actor.stacked)
        ours = engine.generate(prompts, jax.random.key(0), greedy)
        assert (np.asarray(other.responses) != np.asarray(ours.responses)).any()
        np.testing.assert_array_equal(
            ours.responses, actor.sample(prompts, temperature=0.0).responses
        )

    def test_without_weights_it_refuses(self, actor, engine, prompts):
        engine.update_weights(actor.stacked)
        engine.release_weights()
        with pytest.raises(RuntimeError, match="update_weights"):
            engine.generate(prompts, jax.random.key(0), self.OPTIONS)
