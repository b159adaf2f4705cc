"""Whole runs in which some devices only decode, while the others learn."""

import itertools
import os
import random
import signal
import threading

import jax
import pytest

import tiny
from jax_ppo.environments.protocol import EnvironmentLost
from jax_ppo.errors import UserError
from jax_ppo.ppo import step
from jax_ppo.reporting.files import read_samples
from jax_ppo.run import ppo_training
from jax_ppo.runtime import signals
from jax_ppo.runtime.compiled_programs import runs_on_shapes
from jax_ppo.sampler.other_mesh import SeparateEngine
from llama_folder import write_arithmetic_llama
from waiting import HANG_SECONDS
from whole_run import read_metrics

STEPS = 4
AHEAD = {"rollout__max_staleness": 1, "algorithm__rollout_is": "token"}
CONTINUED = {
    "rollout__max_staleness": 2,
    "rollout__partial_length": 3,
    "algorithm__rollout_is": "token",
}


class Dice:
    """Throws three times."""

    def reset(self, example, seed):
        self.random, self.turns = random.Random(seed), 0

    def step(self, text):
        self.turns += 1
        thrown = self.random.randint(1, 6)
        return str(thrown), thrown / 6 + len(text) / 10, self.turns == 3


GONE = "JAX_PPO_TEST_SERVER_IS_GONE"


class Served(Dice):
    """Throws for as long as its server is there."""

    def step(self, text):
        if GONE in os.environ:
            raise EnvironmentLost("the server is gone")
        return super().step(text)


class Overlap:
    """Lets an update begin once decoding has begun, and decoding end once the update has ended.

    So a run goes on only if neither waits for the other.
    """

    def __init__(self, monkeypatch, signal_in=0):
        """With `signal_in`, SIGTERM comes from the decoding thread of that decoding."""
        self.began, self.ended = threading.Semaphore(0), threading.Semaphore(0)
        self.overlapping = 0
        decode_ahead, update_state = SeparateEngine.decode_ahead, step.update_state

        def decode_beside_update(engine, decode):
            if runs_on_shapes():
                return decode_ahead(engine, decode)
            self.overlapping += 1

            def decode_until_update_ends():
                self.began.release()
                if self.overlapping == signal_in:
                    os.kill(os.getpid(), signal.SIGTERM)
                result = decode()
                assert self.ended.acquire(timeout=HANG_SECONDS), "the update waits for decoding"
                return result

            return decode_ahead(engine, decode_until_update_ends)

        def update_beside_decoding(*arguments):
            if runs_on_shapes():
                return update_state(*arguments)
            if self.overlapping > self.updates:
                assert self.began.acquire(timeout=HANG_SECONDS), "decoding waits for the update"
            result = jax.block_until_ready(update_state(*arguments))
            if self.overlapping > self.updates:
                self.updates += 1
                self.ended.release()
            return result

        self.updates = 0
        monkeypatch.setattr(SeparateEngine, "decode_ahead", decode_beside_update)
        monkeypatch.setattr(step, "update_state", update_beside_decoding)


def train(monkeypatch, devices, folder, workdir, **changes):
    """Train in this process on its first devices; return metrics and samples of each step."""
    config = tiny.config(
        model__path=str(folder / "llama"),
        data__train_files="arithmetic:32",
        data__max_prompt_length=80,
        reward__terms="length[5:200]:1",
        algorithm__adv_estimator="rloo",
        rollout__n=2,
        trainer__export=False,
        trainer__log_rollouts_freq=1,
        trainer__save_freq=1,
        trainer__max_checkpoints=STEPS,
        trainer__total_training_steps=STEPS,
        **changes,
    )
    available = jax.devices()[:devices]
    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: available)
        ppo_training.train_ppo(config, workdir)
    samples = {number: records for _, number, records in read_samples(workdir)}
    return {int(row["step"]): (row, samples[int(row["step"])]) for row in read_metrics(workdir)}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [AHEAD, CONTINUED], ids=["one step ahead", "partial rollouts"])
def test_an_update_ends_while_the_next_step_is_decoded_and_results_stay(
    changes, tmp_path, monkeypatch
):
    """Two devices learn and two decode; then two do both. A resumed run has the same results."""
    write_arithmetic_llama(tmp_path)
    shared = train(monkeypatch, 2, tmp_path, tmp_path / "shared", **changes)
    separate = changes | {"rollout__mesh__devices": 2}
    overlap = Overlap(monkeypatch)
    steps = train(monkeypatch, 4, tmp_path, tmp_path / "separate", **separate)
    assert steps == shared and list(steps) == [1, 2, 3, 4]
    # Of partial rollouts, the last step has a stage of those that would have gone on, too.
    beside = STEPS - (changes["rollout__max_staleness"] == 1)
    assert overlap.updates == overlap.overlapping == beside
    # A signal while the fourth step is decoded beside the third one's update.
    stopped, lines = tmp_path / "stopped", []
    with monkeypatch.context() as patch, signals.handle_stop_signals(ends_process=False):
        Overlap(patch, signal_in=3)
        assert list(train(patch, 4, tmp_path, stopped, **separate)) == [1, 2, 3]
        with pytest.raises(SystemExit, match="143"):
            signals.raise_if_stopped(lines.append)
    assert lines == ["stopped by SIGTERM, saved step 3"]
    assert train(monkeypatch, 4, tmp_path, stopped, **separate) == shared


@pytest.mark.exhaustive
def test_dialogues_that_ended_as_their_server_was_lost_are_not_saved(tmp_path, monkeypatch):
    """It is lost after the second step's rewards, while responses of the third are decoded."""
    write_arithmetic_llama(tmp_path)
    changes = AHEAD | {
        "rollout__multi_turn__environment": f"{__file__}:Served",
        "rollout__multi_turn__max_turn_length": 2,
        "rollout__mesh__devices": 1,
    }
    undisturbed = train(monkeypatch, 2, tmp_path, tmp_path / "undisturbed", **changes)
    assert list(undisturbed) == [1, 2, 3, 4]
    disturbed, updates = tmp_path / "disturbed", threading.Semaphore(0)
    decode_ahead, update_state = SeparateEngine.decode_ahead, step.update_state
    decodings = itertools.count(1)

    def decode_after_rewards(engine, decode):
        if runs_on_shapes():
            return decode_ahead(engine, decode)
        number = next(decodings)

        def decode_then():
            if number <= 2:
                assert updates.acquire(timeout=HANG_SECONDS), "no update begins"
            if number == 2:
                patch.setenv(GONE, "")
            return decode()

        return decode_ahead(engine, decode_then)

    def update_after_rewards(*arguments):
        if not runs_on_shapes():
            updates.release()
        return update_state(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(SeparateEngine, "decode_ahead", decode_after_rewards)
        patch.setattr(step, "update_state", update_after_rewards)
        with pytest.raises(UserError, match="environment: the server is gone"):
            train(patch, 2, tmp_path, disturbed, **changes)
    assert [path.name for path in (disturbed / "checkpoints").iterdir()] == ["1"]
    assert train(monkeypatch, 2, tmp_path, disturbed, **changes) == undisturbed
