"""Compiles the programs of a step in the background, while weights load and the first evaluation runs.

A program compiled for shapes and places is the one that a call with such arrays finds: JAX keeps it for both.
"""

import contextlib
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.ppo import scoring, update
from jax_ppo.ppo.experience import estimate
from jax_ppo.ppo.setup import TRAINING, Experiment, Plans
from jax_ppo.runtime import sharding
from jax_ppo.runtime.compilation import compile_ahead
from jax_ppo.training.networks import full_parameters
from jax_ppo.training.state import state_shapes
from jax_ppo.types import Prompts


@contextlib.contextmanager
def during(run: Experiment, position: int) -> Iterator[None]:
    """Compiles beside what is done in the context, and waits at its end. Raises there what the compiler raised.

    If the context ends with an error, what is being compiled is the last.

    Args:
      position: in the training examples, of the first step; its prompts' bucket is what the sampler is compiled for.
    """
    # Arrays are made here: several processes must run what they run in one order, and a thread would come in between.
    prompts, key = run.on_mesh(next(run.batches(position)).prompts), run.key(TRAINING, 0)
    plans = run.plan(0, np.ones(_samples(run), np.int32))
    programs, errors, stop = _programs(run, prompts, key, plans), [], threading.Event()

    def compile_all():
        try:
            with jax.set_mesh(run.mesh):
                while not stop.is_set() and next(programs, None):
                    pass
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=compile_all, name="rehearsal")
    thread.start()
    try:
        yield
    except BaseException:
        stop.set()
        raise
    finally:
        thread.join()
    if errors:
        raise errors[0]


def _samples(run):
    return run.config.data.train_batch_size * run.config.rollout.n


def _programs(run: Experiment, prompts: Prompts, key, plans: Plans) -> Iterator[str]:
    """Compiles one program at a time, in the order of ppo.train, and yields its name. What one gives, the next is given."""
    config, nets = run.config, run.nets
    state = state_shapes(config, nets, run.mesh)
    rollout = yield from run.engine.precompile(run.policy(state), prompts, key, run.sampling)
    sequences = compile_ahead(scoring.join, rollout, config.sequence_length)
    scores = []
    for function, arguments in scoring.programs(config, nets, state, sequences, *plans.scoring):
        scores.append(compile_ahead(function, *arguments))
        yield "score"
    if nets.reward is not None and run.reward_inputs is None:  # else its shape depends on the texts
        of_reward = full_parameters(nets.reward, state.reward, state.reference)
        compile_ahead(
            scoring.reward_model_scores, nets.reward, of_reward, sequences, *plans.scoring
        )
        yield "reward_model_scores"
    rewards = jax.ShapeDtypeStruct((_samples(run),), jnp.float32, sharding=sharding.rows(run.mesh))
    steps = None
    if config.reward.process_rewards:
        steps = jax.ShapeDtypeStruct(
            rollout.logprobs.shape, jnp.float32, sharding=sharding.rows(run.mesh)
        )
    experience, _ = compile_ahead(
        estimate,
        config,
        state.step,
        state.control,
        sequences,
        rollout.logprobs,
        scoring.join_scores(scores),
        rewards,
        steps,
    )
    yield "estimate"
    for function, arguments in update.programs(
        config, nets, run.total_steps, state, experience, plans.actor, plans.critic
    ):
        compile_ahead(function, *arguments)
        yield "update"
