"""Moments of the first policy's rewards, by which `reward.normalize=reference` divides."""

import dataclasses

import jax
import jax.numpy as jnp

from jax_ppo.errors import UserError
from jax_ppo.kernels.masked_statistics import Moments, moments_std, update_moments
from jax_ppo.reporting import console
from jax_ppo.run.evaluation import response_rewards
from jax_ppo.run.parts import PPORun
from jax_ppo.training.random_streams import Stream
from jax_ppo.training.state import TrainState


def measure_first_rewards(run: PPORun, state: TrainState) -> TrainState:
    """Return the state with the moments of the rewards that its policy earns.

    They are measured on `reward.normalize_samples` responses, rounded up to whole batches.

    Raises:
      UserError: the reward function failed on all of these responses.
    """
    config = run.config
    samples_per_batch = config.data.train_batch_size * config.rollout.n
    num_batches = -(-config.reward.normalize_samples // samples_per_batch)
    # The first training prompts, with a random stream that training never draws from.
    batches = run.batches(0)
    moments = state.control.moments["rewards"]
    failures = scored = 0
    run.engine.update_weights(run.policy_params(state))
    for number in range(num_batches):
        batch = next(batches)
        rollout = run.engine.generate(
            run.place_prompts(batch.prompts),
            run.sample_keys(Stream.REFERENCE, number),
            run.sampling,
        )
        rule_rewards = run.rules.score(batch, rollout)
        failures += rule_rewards.failures
        scored += rule_rewards.scored
        # `reward.normalize` applies to scores of whole responses alone, not to rewards within them.
        rewards = response_rewards(run, state, batch, rollout, rule_rewards)
        moments = _add_moments(moments, rewards)
    run.engine.release_weights()
    if failures == scored:
        raise UserError(
            f"config.reward.normalize='reference': the reward function failed on all {scored} "
            "responses from which rewards would be normalized"
        )
    console.print_on_main(
        f"the first policy's rewards: mean {float(moments.mean):.4g}, "
        f"deviation {float(moments_std(moments)):.4g}"
        + (f"; {failures} of {scored} have config.reward.fallback_score" if failures else "")
    )
    control = dataclasses.replace(
        state.control, moments=state.control.moments | {"rewards": moments}
    )
    return dataclasses.replace(state, control=control)


@jax.jit
def _add_moments(moments: Moments, values: jax.Array) -> Moments:
    return update_moments(moments, values, jnp.ones(values.shape, bool))
