"""Compile the programs of a step in the background, while weights load and the policy is evaluated.

A call finds the program that was compiled for arguments of its shapes and shardings: JAX keeps one
cache for both.
"""

import contextlib
import threading
from collections.abc import Iterator

import jax
import numpy as np

from jax_ppo.ppo.programs import StepPrograms, compile_programs
from jax_ppo.run.parts import PPORun
from jax_ppo.training.progress import Progress
from jax_ppo.training.random_streams import Stream
from jax_ppo.training.state import state_shapes

THREAD_NAME = "precompilation"


@contextlib.contextmanager
def precompile_in_background(run: PPORun, progress: Progress) -> Iterator[None]:
    """Compile beside what runs in the context, and wait at its end.

    If the context ends with an error, no further program is compiled.

    Args:
      run: the parts of the run.
      progress: how far the run has come; the sampler is compiled for the length bucket of the
        prompts of the next step.

    Raises:
      Exception: what the compiler raised, at the end of the context.
    """
    # Arrays are made in this thread: all processes must run their programs in one order, which
    # another thread would disturb.
    prompts = run.place_prompts(next(run.batches(progress.position, progress.solve_rates)).prompts)
    key = run.sample_keys(Stream.TRAINING, 0)
    # Plans have one shape for all lengths, so lengths of 1 stand for any.
    step = StepPrograms(
        config=run.config,
        mesh=run.mesh,
        nets=run.nets,
        engine=run.engine,
        sampling=run.sampling,
        total_steps=run.total_steps,
        reads_rollout=run.rules.reward_inputs is None,
    )
    packed = run.packer.pack(0, np.ones(step.samples, np.int32))
    state = state_shapes(run.config, run.nets, run.mesh)
    programs = compile_programs(step, state, prompts, key, packed)
    errors: list[Exception] = []
    stop = threading.Event()
    is_over = threading.Event()

    def compile_all() -> None:
        try:
            with jax.set_mesh(run.mesh):
                while not stop.is_set() and next(programs, None):
                    pass
        except Exception as error:
            errors.append(error)
        finally:
            is_over.set()

    # XLA compiles outside the interpreter lock, so the main thread keeps loading weights.
    thread = threading.Thread(target=compile_all, name=THREAD_NAME)
    thread.start()
    try:
        yield
    except BaseException:
        stop.set()
        is_over.wait()
        raise
    try:
        # Not `join`: if a signal interrupts it, Python 3.11 takes the thread for ended, exits
        # before it has returned from the compiler, and dies by "terminate called".
        is_over.wait()
    finally:
        stop.set()
    if errors:
        raise errors[0]
