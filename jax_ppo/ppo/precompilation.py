"""Compile the programs of a step in the background, while weights load and the policy is evaluated.

A call finds the program that was compiled for arguments of its shapes and shardings: JAX keeps one
cache for both.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Generator, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ppo.config.schema import Config
from jax_ppo.ppo import scoring, update
from jax_ppo.ppo.experience import estimate_experience
from jax_ppo.ppo.experience_types import ExperienceOptions
from jax_ppo.ppo.plans import Plans, ScoringPlan
from jax_ppo.ppo.run import PPORun
from jax_ppo.ppo.sample_selection import compile_selection
from jax_ppo.runtime import sharding
from jax_ppo.runtime.compilation import compile_ahead
from jax_ppo.sampler.engine import RolloutEngine, SamplingOptions
from jax_ppo.training.networks import Networks, full_parameters
from jax_ppo.training.progress import Progress
from jax_ppo.training.random_streams import Stream
from jax_ppo.training.state import TrainState, policy_params
from jax_ppo.training.state_shapes import state_shapes
from jax_ppo.types import Experience, Prompts, Rollout, Sequences

THREAD_NAME = "precompilation"


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """The inputs that determine the programs of a step: no data, tokenizer or weights.

    Attributes:
      config: all options.
      mesh: the mesh to compile for.
      nets: each role's model.
      engine: generates responses.
      sampling: how it samples for training.
      total_steps: number of steps of the whole run.
      reads_rollout: whether the reward model, if there is one, reads the sampled tokens; the shapes
        of its own tokens depend on the texts.
    """

    config: Config
    mesh: Mesh
    nets: Networks
    engine: RolloutEngine
    sampling: SamplingOptions
    total_steps: int
    reads_rollout: bool

    @property
    def samples(self) -> int:
        """Return the number of samples that a step learns from."""
        return self.config.data.train_batch_size * self.config.responses_per_prompt


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
    plans = run.planner.plan(0, np.ones(step.samples, np.int32))
    state = state_shapes(run.config, run.nets, run.mesh)
    programs = compile_programs(step, state, prompts, key, plans)
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


def compile_programs(
    step: StepPrograms, state: TrainState, prompts: Prompts, key: jax.Array, plans: Plans
) -> Iterator[str]:
    """Compile one program at a time, in the order of the loop, and yield its name.

    The shapes that one program returns are the arguments of the next. Everything but `step` may be
    arrays or shapes with shardings.

    Args:
      step: what the programs depend on.
      state: the train state.
      prompts: the prompts of a step.
      key: the base key of a step's samples.
      plans: the packing of a rollout.
    """
    config = step.config
    nets = step.nets
    params = policy_params(nets, state)
    rollout = yield from step.engine.precompile(params, prompts, key, step.sampling)
    if config.selects_samples:
        rollout = compile_selection(step.mesh, config, rollout)
        yield "select"
    sequences = compile_ahead(scoring.join_sequences, rollout, config.sequence_length)
    scores = yield from _compile_scoring(step, state, sequences, plans.scoring)
    experience = _compile_experience(step, state, sequences, rollout, scores)
    yield "estimate"
    updates = update.update_programs(
        update.UpdateOptions.from_config(config),
        nets,
        step.total_steps,
        state,
        experience,
        plans.actor,
        plans.critic,
    )
    # The second, if there is one, is that of a separate critic.
    for role, (function, arguments) in zip(("actor", "critic"), updates, strict=False):
        compile_ahead(function, *arguments)
        yield f"update_{role}"


def _compile_scoring(
    step: StepPrograms, state: TrainState, sequences: Sequences, plan: ScoringPlan
) -> Generator[str, None, scoring.Scores]:
    """Compile the scoring passes, yield their names, and return the shapes of the scores."""
    nets = step.nets
    options = scoring.ScoringOptions.from_config(step.config)
    programs = scoring.scoring_programs(options, nets, state, sequences, *plan)
    scores = []
    for part, (function, arguments) in zip(options.parts, programs, strict=True):
        scores.append(compile_ahead(function, *arguments))
        yield f"score_{part}"
    if nets.reward is not None and step.reads_rollout:
        reward_params = full_parameters(nets.reward, state.reward, state.reference)
        compile_ahead(
            scoring.reward_model_scores,
            nets.reward,
            reward_params,
            sequences,
            *plan,
            step.config.reward.score_position,
        )
        yield "score_reward"
    return scoring.join_scores(scores)


def _compile_experience(
    step: StepPrograms,
    state: TrainState,
    sequences: Sequences,
    rollout: Rollout,
    scores: scoring.Scores,
) -> Experience:
    """Compile the estimation of advantages, and return the shapes of the experience."""
    # Rewards arrive from the host, so no program's result has their shape.
    rows = sharding.batch_rows(step.mesh, step.samples)
    rewards = jax.ShapeDtypeStruct((step.samples,), jnp.float32, sharding=rows)
    step_rewards = None
    if step.config.has_step_rewards:
        step_rewards = jax.ShapeDtypeStruct(rollout.logprobs.shape, jnp.float32, sharding=rows)
    experience: Experience = compile_ahead(
        estimate_experience,
        ExperienceOptions.from_config(step.config),
        state.step,
        state.control,
        sequences,
        rollout.logprobs,
        scores,
        rewards,
        step_rewards,
    )[0]
    return experience
