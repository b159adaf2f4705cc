"""Worker of time_to_sums.py: jax_ppo until it adds two-digit numbers.

The argument is JSON: `options`, those of the configuration smollm2_sums, and `limits`, the
arguments of the clock. The only turn is a run, timed from the reading of the model on, of the
components of life_cycle.run_life_cycle.
"""

import json
import sys
import tempfile
from pathlib import Path

import clock
import harness
import jax

from jax_ppo.config import loading, schema
from jax_ppo.ppo import forward_passes
from jax_ppo.ppo.experience import estimate_experience
from jax_ppo.ppo.mini_batches import sample_lengths
from jax_ppo.ppo.objectives import UpdateOptions
from jax_ppo.ppo.reward_shaping import EarnedRewards
from jax_ppo.ppo.update import UpdateSetup, update_state
from jax_ppo.reporting import console
from jax_ppo.run.build import build_run
from jax_ppo.run.evaluation import evaluate_policy
from jax_ppo.run.parts import PPORun
from jax_ppo.runtime import meshes
from jax_ppo.training.random_streams import Stream


class Training:
    """The loop of life_cycle.run_life_cycle without metrics, checkpoints and progress bar."""

    def __init__(self, run: PPORun):
        self.run, self.batches, self.steps_done = run, run.batches(0), 0
        self.state = run.states.create(run.folders, console.make_loading_reporter)

    def step(self) -> None:
        run, config, state = self.run, self.run.config, self.state
        batch = next(self.batches)
        run.engine.update_weights(run.policy_params(state))
        rollout = run.engine.generate(
            run.place_prompts(batch.prompts),
            run.sample_keys(Stream.TRAINING, self.steps_done),
            run.sampling,
        )
        run.engine.release_weights()
        packed = run.packer.pack(self.steps_done, sample_lengths(batch, rollout))
        sequences = forward_passes.join_sequences(rollout, config.sequence_length)
        scores = forward_passes.run_forward_passes(
            forward_passes.ForwardOptions.from_config(config),
            run.nets,
            state,
            sequences,
            packed.forward,
        )
        rewarded = run.rules.score(batch, rollout)
        experience, _ = estimate_experience(
            run.step_options.experience,
            state.control,
            sequences,
            rollout.logprobs,
            scores,
            EarnedRewards(rewarded.scores),
        )
        setup = UpdateSetup(UpdateOptions.from_config(config), run.nets, run.total_steps)
        self.state, _ = update_state(setup, state, experience, packed.mini_batches)
        self.steps_done += 1

    def wait(self) -> None:
        jax.block_until_ready(self.state)

    def accuracy(self) -> float:
        return evaluate_policy(self.run, self.state).accuracy


def reach_limits(config: schema.Config, limits: dict) -> dict:
    """Run once, until the clock ends it, and time the loading of the model and compilation too."""
    watch, mesh = clock.Clock(**limits), meshes.make_mesh(config.mesh)
    with jax.set_mesh(mesh), tempfile.TemporaryDirectory() as workdir:
        training = Training(build_run(config, Path(workdir), mesh, console.print_on_main))
        return clock.until_target(watch, training.step, training.wait, training.accuracy)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    chosen = loading.load_config("smollm2_sums", arguments["options"])
    harness.serve(
        lambda: reach_limits(chosen, arguments["limits"]),
        packages=("jax", "jaxlib", "flax", "optax", "numpy", "tokenizers"),
    )
