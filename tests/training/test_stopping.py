"""A run that a signal asks to end: all of its processes save the same step and stop."""

import contextlib
import os
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ppo.config.schema import Config, Trainer
from jax_ppo.run.life_cycle import (
    EvaluationFailed,
    EvaluationInterrupted,
    StepLoop,
    interrupt_evaluation,
    should_stop,
)
from jax_ppo.runtime import signals
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.training.progress import Progress
from waiting import finish_all
from whole_run import start_processes


def test_a_signal_asks_for_an_end_at_the_next_step(tmp_path):
    with signals.handle_stop_signals(ends_process=False), Checkpointer(tmp_path) as checkpoints:
        assert not should_stop()
        interrupt_evaluation()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(EvaluationInterrupted):
            interrupt_evaluation()
        assert should_stop() and should_stop()
        checkpoints.save(2, {"actor": {"w": jnp.ones(2)}}, {})
        checkpoints.wait()
        lines = []
        with pytest.raises(SystemExit, match="143"):
            signals.raise_if_stopped(lines.append)
    assert lines == ["stopped by SIGTERM, saved step 2"]


PROCESSES = """
import os, sys, time, jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_ppo.config import schema
from jax_ppo.runtime import distributed, faults, signals
from jax_ppo.training.checkpoint import Checkpointer
from jax_ppo.run.life_cycle import should_stop

def main():
    with signals.handle_stop_signals(ends_process=True):
        train()
        signals.raise_if_stopped(print)

def train():
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
    step_fn = jax.jit(lambda w: w + 1, out_shardings=NamedSharding(mesh, P("fsdp")))
    weights = step_fn(jnp.zeros((8, 4)))
    with Checkpointer(sys.argv[1]) as checkpoints:
        if len(sys.argv) > 2:
            print(0, flush=True)
            time.sleep(3600)  # as if it compiled
        for step in range(1, 100_000):
            weights = step_fn(weights)
            weights.block_until_ready()
            print(step, flush=True)
            if should_stop():
                checkpoints.save(step, {"actor": {"w": weights}}, {"step": step})
                return
            time.sleep(0.01)
        raise TimeoutError("nobody sent SIGTERM")

distributed.initialize(schema.Distributed())
faults.run_or_abort(main)
"""


def start_two_processes(coordinator_address, *arguments):
    return start_processes("-c", PROCESSES, *arguments, address=coordinator_address)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_to_one_of_two_processes_saves_the_same_step_in_both(
    tmp_path, number, coordinator_address
):
    processes = start_two_processes(coordinator_address, tmp_path)
    while processes[1].stdout.readline() != "5\n":
        assert processes[1].poll() is None
    processes[1].send_signal(number)
    outputs = [output for output, _ in finish_all(processes)]
    assert [process.returncode for process in processes] == [128 + number] * 2
    with Checkpointer(tmp_path) as checkpoints:
        step = checkpoints.latest_step()
        for output in outputs:
            assert output.endswith(f"stopped by {number.name}, saved step {step}\n")
        mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
        expected = jax.ShapeDtypeStruct(
            (8, 4), jnp.float32, sharding=NamedSharding(mesh, P("fsdp"))
        )
        arrays, meta = checkpoints.restore(step, {"actor": {"w": expected}})
    assert meta == {"step": step}
    np.testing.assert_array_equal(np.asarray(arrays["actor"]["w"]), step + 1)


@pytest.mark.slow
def test_a_signal_to_both_processes_before_the_first_step_ends_both_at_once(
    tmp_path, coordinator_address
):
    processes = start_two_processes(coordinator_address, tmp_path, "slow start")
    for process in processes:
        while process.stdout.readline() != "0\n":
            assert process.poll() is None
    for process in processes:
        process.send_signal(signal.SIGTERM)
    outputs = [output for output, _ in finish_all(processes)]
    assert [process.returncode for process in processes] == [143, 143]
    assert outputs == ["", ""]


def test_a_step_whose_evaluation_fails_is_saved_and_its_evaluation_is_pending():
    saved = []

    def fail(*_):
        raise EvaluationFailed("no response was scored")

    loop = StepLoop(
        training=types.SimpleNamespace(
            can_evaluate=True,
            total_steps=8,
            position=4,
            evaluate=fail,
            fingerprints=dict,
            checkpoint_trees=lambda state: {"actor": state},
        ),
        config=Config(trainer=Trainer(test_freq=1, save_freq=0)),
        checkpoints=types.SimpleNamespace(
            save=lambda step, trees, meta, quality: saved.append((step, trees, meta, quality)),
            wait=lambda: saved.append("waited"),
        ),
        command="train",
        choice=None,
        progress=Progress(),
        journal=types.SimpleNamespace(
            write_pending_report=lambda: None,
            restart_clock=lambda: None,
            phase=lambda name: contextlib.nullcontext(),
        ),
    )
    loop.completed_steps = 3
    with pytest.raises(EvaluationFailed):
        loop._evaluate_if_due("state")
    (step, trees, meta, quality), waited = saved
    assert (step, trees, quality, waited) == (3, {"actor": "state"}, None, "waited")
    assert meta["evaluation_pending"] and meta["position"] == 4
