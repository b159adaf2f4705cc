"""Compile the programs of a step in the background, while weights load and the policy is evaluated.

A call finds the program that was compiled for arguments of its shapes and shardings: JAX keeps one
cache for both.
"""

import contextlib
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.ppo import scoring, update
from jax_ppo.ppo.experience import estimate_experience
from jax_ppo.ppo.experience_types import ExperienceOptions
from jax_ppo.ppo.plans import Plans
from jax_ppo.ppo.random_keys import TRAINING
from jax_ppo.ppo.setup import PPORun
from jax_ppo.runtime import sharding
from jax_ppo.runtime.compilation import compile_ahead
from jax_ppo.training.networks import full_parameters
from jax_ppo.training.state import state_shapes
from jax_ppo.types import Prompts

THREAD_NAME = "precompilation"


@contextlib.contextmanager
def precompile_in_background(run: PPORun, position: int) -> Iterator[None]:
    """Compile beside what runs in the context, and wait at its end.

    If the context ends with an error, no further program is compiled.

    Args:
      run: the parts of the run.
      position: of the first step in the training examples; the sampler is compiled for the length
        bucket of its prompts.

    Raises:
      Exception: what the compiler raised, at the end of the context.
    """
    # Arrays are made in this thread: all processes must run their programs in one order, which
    # another thread would disturb.
    prompts = run.place_prompts(next(run.batches(position)).prompts)
    key = run.sample_keys(TRAINING, 0)
    # Plans have one shape for all lengths, so lengths of 1 stand for any.
    plans = run.planner.plan(0, np.ones(_samples_per_step(run), np.int32))
    programs = _compile_programs(run, prompts, key, plans)
    errors: list[Exception] = []
    stop = threading.Event()

    def compile_all() -> None:
        try:
            with jax.set_mesh(run.mesh):
                while not stop.is_set() and next(programs, None):
                    pass
        except Exception as error:
            errors.append(error)

    # XLA compiles outside the interpreter lock, so the main thread keeps loading weights.
    thread = threading.Thread(target=compile_all, name=THREAD_NAME)
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


def _samples_per_step(run: PPORun) -> int:
    return run.config.data.train_batch_size * run.config.rollout.n


def _compile_programs(run: PPORun, prompts: Prompts, key: jax.Array, plans: Plans) -> Iterator[str]:
    """Compile one program at a time, in the order of the loop, and yield its name.

    The shapes that one program returns are the arguments of the next.
    """
    config, nets = run.config, run.nets
    state = state_shapes(config, nets, run.mesh)
    rollout = yield from run.engine.precompile(run.policy_params(state), prompts, key, run.sampling)
    sequences = compile_ahead(scoring.join_sequences, rollout, config.sequence_length)
    scores = []
    scoring_options = scoring.ScoringOptions.from_config(config)
    for function, arguments in scoring.scoring_programs(
        scoring_options, nets, state, sequences, *plans.scoring
    ):
        scores.append(compile_ahead(function, *arguments))
        yield "score"
    # The shapes of a reward model's own tokens depend on the texts.
    if nets.reward is not None and run.rules.reward_inputs is None:
        reward_params = full_parameters(nets.reward, state.reward, state.reference)
        compile_ahead(
            scoring.reward_model_scores,
            nets.reward,
            reward_params,
            sequences,
            *plans.scoring,
            config.reward.score_position,
        )
        yield "reward_model_scores"
    rows = sharding.rows(run.mesh)
    rewards = jax.ShapeDtypeStruct((_samples_per_step(run),), jnp.float32, sharding=rows)
    # Rewards arrive from the host, so no program's result has their shape.
    step_rewards = None
    if config.reward.process_rewards:
        step_rewards = jax.ShapeDtypeStruct(rollout.logprobs.shape, jnp.float32, sharding=rows)
    experience, _ = compile_ahead(
        estimate_experience,
        ExperienceOptions.from_config(config),
        state.step,
        state.control,
        sequences,
        rollout.logprobs,
        scoring.join_scores(scores),
        rewards,
        step_rewards,
    )
    yield "estimate"
    for function, arguments in update.update_programs(
        update.UpdateOptions.from_config(config),
        nets,
        run.total_steps,
        state,
        experience,
        plans.actor,
        plans.critic,
    ):
        compile_ahead(function, *arguments)
        yield "update"
