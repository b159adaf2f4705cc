"""Supervised objectives, and one optimizer step on packed rows in one compiled, donated call.

As in PPO's update, the weight of each unit (a token, a pair) is fixed by its whole batch before the
batch is split into micro-batches or over devices, so neither split changes the gradient.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jax_ppo.config.schema import Supervised
from jax_ppo.kernels import preferences
from jax_ppo.models.heads import compute_scalars
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime.sharding import TRAIN_RULES, constrain_rows, constrain_tree
from jax_ppo.training import forward
from jax_ppo.training import packing as packing_lib
from jax_ppo.training.gradients import add_gradient
from jax_ppo.training.optimizer import descend, learning_rate, make_optimizer, rounding_keys
from jax_ppo.training.packing import Rows
from jax_ppo.training.stochastic_rounding import zero_gradients
from jax_ppo.types import Packing, Params, Sequences

Metrics = dict[str, jax.Array]
SumsFunction = Callable[[Supervised, Transformer, Params, Sequences, Rows], Metrics]


@dataclasses.dataclass(frozen=True)
class Objective:
    """Objective of a supervised step.

    Attributes:
      head: the head on the decoder, "lm" or "scalar".
      units: (sequences, packing of the whole batch) -> how many units the loss is a mean over.
      sums: (options, model, params, sequences, rows of a micro-batch) -> sums over its units by
        name, of which "loss" is minimized; and, with `options.router_aux_loss_coef`, "router_loss",
        the sum over sequences.
      names: the names of all sums.
    """

    head: str
    units: Callable[[Sequences, Packing], jax.Array]
    sums: SumsFunction
    names: tuple[str, ...]


def _count_response_tokens(sequences: Sequences, plan: Packing) -> jax.Array:
    return packing_lib.gather_rows(sequences, plan).mask.sum()


def _sum_negative_log_likelihood(
    options: Supervised, model: Transformer, params: Params, sequences: Sequences, rows: Rows
) -> Metrics:
    hidden, router_loss = _run_decoder(options, model, params, sequences, rows)
    # At temperature 1, and without the entropy, which this loss does not read.
    logprobs = forward.token_logprobs(model, params, hidden, rows, 1.0, with_entropy=False)[0]
    return {"loss": -logprobs.sum()} | router_loss


def _run_decoder(
    options: Supervised, model: Transformer, params: Params, sequences: Sequences, rows: Rows
) -> tuple[jax.Array, Metrics]:
    """Return hidden states and, if it is trained on, the sum of the sequences' router losses."""
    with_router_loss = options.router_aux_loss_coef > 0
    hidden, router_loss = forward.run_decoder(model, params, rows, with_router_loss)
    if router_loss is None:
        return hidden, {}
    weights = packing_lib.sequence_weights(sequences, rows)
    return hidden, {"router_loss": jnp.sum(weights * router_loss)}


def _packed_samples(sequences: Sequences, plan: Packing) -> jax.Array:
    """Return which samples a packing holds, bool [B]."""
    dropped = len(sequences.lengths)  # an index out of bounds, which the scatter ignores
    samples = jnp.where(plan.sample >= 0, plan.sample, dropped)
    return jnp.zeros(dropped, bool).at[samples].set(True, mode="drop")


def _count_pairs(sequences: Sequences, plan: Packing) -> jax.Array:
    is_packed = _packed_samples(sequences, plan)
    # Both sequences of a pair are packed or neither is: the first half counts pairs.
    return is_packed[: len(is_packed) // 2].sum()


def _sum_preferences(
    options: Supervised, model: Transformer, params: Params, sequences: Sequences, rows: Rows
) -> Metrics:
    """Sum the Bradley-Terry loss over pairs.

    The sequences of pair b are b and pairs + b; both are in one row (`packing.split_pairs`).
    """
    hidden, router_loss = _run_decoder(options, model, params, sequences, rows)
    scores_RxL = compute_scalars(params, hidden)
    zeros = jnp.zeros(len(sequences.lengths), jnp.float32)
    # The exported model is read at these positions, by transformers and by PPO.
    positions_B = forward.score_positions(sequences, model.architecture.pad_id)
    scores_B = forward.write_values_at(scores_RxL, rows, positions_B, zeros)
    chosen, rejected = jnp.split(scores_B, 2)
    # Only the pairs in these rows count: the tokens at which they are scored are here.
    has_end = forward.write_values_at(jnp.ones_like(scores_RxL), rows, positions_B, zeros) > 0
    is_in_rows = has_end[: len(chosen)]
    centering = preferences.centering_penalty(chosen, rejected)
    losses = preferences.bradley_terry(chosen, rejected) + options.center_coef * centering
    values = {
        "loss": losses,
        "accuracy": (jnp.sign(chosen - rejected) + 1) / 2,
        "margin": chosen - rejected,
        "score": (chosen + rejected) / 2,
    }
    return {name: jnp.where(is_in_rows, x, 0).sum() for name, x in values.items()} | router_loss


# The mean negative log-likelihood of response tokens; prompts are masked.
LANGUAGE = Objective(
    head="lm",
    units=_count_response_tokens,
    sums=_sum_negative_log_likelihood,
    names=("loss",),
)
# The mean of kernels.preferences.bradley_terry over pairs. `accuracy` is the share of pairs whose
# chosen response has the higher score; equal scores count half.
PREFERENCE = Objective(
    head="scalar",
    units=_count_pairs,
    sums=_sum_preferences,
    names=("loss", "accuracy", "margin", "score"),
)


@functools.partial(
    jax.jit,
    static_argnums=(0, 1, 2, 3),
    static_argnames="rounding_seed",
    donate_argnums=(4, 5),
)
def train_step(
    objective: Objective,
    options: Supervised,
    model: Transformer,
    total_steps: int,
    params: Params,
    optimizer_state: optax.OptState,
    step: jax.Array,
    sequences: Sequences,
    plan: Packing,
    micro_batches: jax.Array,
    *,
    rounding_seed: int = 0,
) -> tuple[Params, optax.OptState, Metrics]:
    """Take one optimizer step on a batch.

    Args:
      objective: what is minimized; static, like the next three.
      options: `config.supervised`.
      model: the network.
      total_steps: number of steps of the run, for the learning rate's schedule.
      params: the parameters; donated.
      optimizer_state: the optimizer's state; donated.
      step: int32 scalar, the number of completed steps.
      sequences: the batch.
      plan: packing [A, R, L].
      micro_batches: int32 scalar, how many of the A micro-batches hold tokens.
      rounding_seed: see `optimizer.rounding_seed`; static.

    Returns:
      Parameters, optimizer state, and metrics: scalars on the mesh.
    """
    stored_key, sum_key = rounding_keys(rounding_seed, "supervised", optimizer_state)
    grads, metrics = gradients(
        objective, options, model, params, sequences, plan, micro_batches, sum_key
    )
    rate = learning_rate(options.optim, step, total_steps)
    transform = make_optimizer(options.optim, options.grad_clip)
    params, optimizer_state, norm, is_finite = descend(
        transform, params, optimizer_state, grads, rate, key=stored_key
    )
    # Otherwise the compiler splits what the table replicates, and the next call would compile
    # another program.
    params, optimizer_state = constrain_tree((params, optimizer_state), TRAIN_RULES)
    metrics = metrics | {
        "lr": rate,
        "grad_norm": norm,
        "skipped": (~is_finite).astype(jnp.float32),
        "tokens": (plan.sample >= 0).sum(),
    }
    return params, optimizer_state, metrics


def gradients(
    objective: Objective,
    options: Supervised,
    model: Transformer,
    params: Params,
    sequences: Sequences,
    plan: Packing,
    micro_batches: jax.Array,
    key: jax.Array | None = None,
) -> tuple[Params, Metrics]:
    """Return the gradient of the mean loss, and the means, summed over micro-batches.

    Arguments are those of `train_step`, and `key`, the second of `rounding_keys`.
    """
    # Counted over the whole batch, before anything is cut into micro-batches.
    units = objective.units(sequences, plan)
    divisors = dict.fromkeys(objective.names, units)
    if options.router_aux_loss_coef:
        divisors["router_loss"] = _packed_samples(sequences, plan).sum()

    def micro_batch(i: jax.Array, carry: tuple[Params, Metrics]) -> tuple[Params, Metrics]:
        rows = _gather_micro_batch(sequences, plan, i)

        def loss(params: Params) -> tuple[jax.Array, Metrics]:
            sums = objective.sums(options, model, params, sequences, rows)
            means = {name: x / divisors[name] for name, x in sums.items()}
            router_loss = means.get("router_loss", 0)
            return means["loss"] + options.router_aux_loss_coef * router_loss, means

        gradient_sum, mean_sums = carry
        sum_key = None if key is None else jax.random.fold_in(key, i)
        gradient_sum, means = add_gradient(loss, params, gradient_sum, sum_key)
        return gradient_sum, jax.tree.map(jnp.add, mean_sums, means)

    zeros = (
        zero_gradients(params, options.optim.gradient_dtype),
        dict.fromkeys(divisors, jnp.float32(0)),
    )
    return jax.lax.fori_loop(0, micro_batches, micro_batch, zeros)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def measure_batch(
    objective: Objective,
    options: Supervised,
    model: Transformer,
    params: Params,
    sequences: Sequences,
    plan: Packing,
    micro_batches: jax.Array,
) -> Metrics:
    """Return the objective's sums over a batch, and the number of its `units`.

    Arguments are those of `train_step`. The routers' loss is none of them.
    """
    options = dataclasses.replace(options, router_aux_loss_coef=0.0)

    def micro_batch(i: jax.Array, sums: Metrics) -> Metrics:
        rows = _gather_micro_batch(sequences, plan, i)
        return jax.tree.map(jnp.add, sums, objective.sums(options, model, params, sequences, rows))

    zeros = dict.fromkeys(objective.names, jnp.float32(0))
    sums = jax.lax.fori_loop(0, micro_batches, micro_batch, zeros)
    return sums | {"units": objective.units(sequences, plan)}


def _gather_micro_batch(sequences: Sequences, plan: Packing, i: jax.Array) -> Rows:
    return packing_lib.gather_rows(sequences, jax.tree.map(lambda x: constrain_rows(x[i]), plan))
