"""Learning from given responses: the two objectives, and one optimizer step on packed rows, in one compiled, donated call.

As in PPO's update each unit's weight (a token's, a pair's) is fixed by its whole batch before anything is cut into
micro-batches or spread over devices, so that neither changes the gradient.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_ppo.config.schema import Supervised
from jax_ppo.kernels import preferences
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime.sharding import TRAIN_RULES, constrain_rows, constrain_tree
from jax_ppo.training import forward
from jax_ppo.training import packing as packing_lib
from jax_ppo.training.optimizer import descend, learning_rate, make_optimizer
from jax_ppo.types import Packing, Sequences


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a model learns from a batch.

    Attributes:
      head: what stands on the decoder, "lm" or "scalar".
      units: of (sequences, packing of the whole batch): how many there are of what the loss is a mean over.
      sums: of (options, model, params, sequences, rows of a micro-batch): sums over the units there, by name; "loss" is what is
        minimised. `names` are all of them.
    """

    head: str
    units: Callable
    sums: Callable
    names: tuple[str, ...]


def _response_tokens(sequences: Sequences, plan: Packing):
    return packing_lib.gather_rows(sequences, plan).mask.sum()


def _negative_log_likelihood(
    options: Supervised, model: Transformer, params, sequences: Sequences, rows: packing_lib.Rows
):
    hidden = forward.hidden_states(model, params, rows)
    logprobs, _ = forward.token_logprobs(model, params, hidden, rows, 1.0, with_entropy=False)
    return {"loss": -logprobs.sum()}


def _pairs(sequences: Sequences, plan: Packing):
    samples = len(sequences.lengths)
    there = (
        jnp.zeros(samples, bool)
        .at[jnp.where(plan.sample >= 0, plan.sample, samples)]
        .set(True, mode="drop")
    )
    return there[: samples // 2].sum()


def _preferences(
    options: Supervised, model: Transformer, params, sequences: Sequences, rows: packing_lib.Rows
):
    """Pair b's sequences are b and pairs + b, and stand in one row (packing.split_pairs)."""
    scores_RxL = forward.scalar_outputs(model, params, rows)
    zeros = jnp.zeros(len(sequences.lengths), jnp.float32)
    chosen, rejected = jnp.split(forward.write_last_values(scores_RxL, rows, sequences, zeros), 2)
    here, _ = jnp.split(
        forward.write_last_values(jnp.ones_like(scores_RxL), rows, sequences, zeros) > 0, 2
    )
    losses = preferences.bradley_terry(
        chosen, rejected
    ) + options.center_coef * preferences.centering_penalty(chosen, rejected)
    sums = {
        "loss": losses,
        "accuracy": (jnp.sign(chosen - rejected) + 1) / 2,
        "margin": chosen - rejected,
        "score": (chosen + rejected) / 2,
    }
    return {name: jnp.where(here, values, 0).sum() for name, values in sums.items()}


# The mean negative log-likelihood of response tokens; prompts are masked.
LANGUAGE = Objective("lm", _response_tokens, _negative_log_likelihood, ("loss",))
# The mean of kernels.preferences.bradley_terry over pairs. accuracy: the chosen one scores higher (equal scores count half).
PREFERENCE = Objective("scalar", _pairs, _preferences, ("loss", "accuracy", "margin", "score"))


def optimizer(options: Supervised):
    return make_optimizer(options.optim, options.grad_clip)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(4, 5))
def step(
    objective: Objective,
    options: Supervised,
    model: Transformer,
    total_steps: int,
    params,
    optimizer_state,
    number,
    sequences: Sequences,
    plan: Packing,
    micro_batches,
):
    """One optimizer step on a batch.

    Args:
      objective, options, model, total_steps: static; the last for the learning rate's schedule.
      params, optimizer_state: donated.
      number: int32 scalar, steps done.
      sequences: the batch.
      plan: Packing [A, R, L], of which the first `micro_batches` (int32 scalar) hold something.

    Returns:
      parameters, optimizer state, and figures: scalars on the mesh.
    """
    slope, figures = gradients(objective, options, model, params, sequences, plan, micro_batches)
    rate = learning_rate(options.optim, number, total_steps)
    params, optimizer_state, norm, finite = descend(
        optimizer(options), params, optimizer_state, slope, rate
    )
    # Left to itself the compiler splits what the table repeats, and the next call would be another program.
    params, optimizer_state = constrain_tree((params, optimizer_state), TRAIN_RULES)
    return (
        params,
        optimizer_state,
        figures
        | {
            "lr": rate,
            "grad_norm": norm,
            "skipped": (~finite).astype(jnp.float32),
            "tokens": (plan.sample >= 0).sum(),
        },
    )


def gradients(objective, options, model, params, sequences, plan, micro_batches):
    """Gradient of the mean loss, and the means, summed over micro-batches."""
    units = objective.units(sequences, plan)

    def micro_batch(i, carry):
        rows = packing_lib.gather_rows(
            sequences, jax.tree.map(lambda x: constrain_rows(x[i]), plan)
        )

        def loss(params):
            means = {
                name: x / units
                for name, x in objective.sums(options, model, params, sequences, rows).items()
            }
            return means["loss"], means

        return jax.tree.map(jnp.add, carry, jax.grad(loss, has_aux=True)(params))

    zeros = jax.tree.map(jnp.zeros_like, params), dict.fromkeys(objective.names, jnp.float32(0))
    return jax.lax.fori_loop(0, micro_batches, micro_batch, zeros)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def measure(
    objective: Objective,
    options: Supervised,
    model: Transformer,
    params,
    sequences: Sequences,
    plan: Packing,
    micro_batches,
) -> dict:
    """Sums over a batch, and its `units`. Arguments as for `step`."""

    def micro_batch(i, sums):
        rows = packing_lib.gather_rows(
            sequences, jax.tree.map(lambda x: constrain_rows(x[i]), plan)
        )
        return jax.tree.map(jnp.add, sums, objective.sums(options, model, params, sequences, rows))

    sums = jax.lax.fori_loop(
        0, micro_batches, micro_batch, dict.fromkeys(objective.names, jnp.float32(0))
    )
    return sums | {"units": objective.units(sequences, plan)}
