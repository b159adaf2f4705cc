"""Supervised objectives, and one optimizer step on packed rows in one compiled, donated call.

The weight of each unit (a token, a pair) is fixed by its whole batch, see `training.learner`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_ppo.config.schema import Supervised
from jax_ppo.kernels.losses import bradley_terry, centering_penalty
from jax_ppo.models.heads import compute_scalars, param_shapes
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import sharding
from jax_ppo.runtime.compiled_programs import program
from jax_ppo.runtime.sharding import constrain_tree
from jax_ppo.training import forward
from jax_ppo.training import packing as packing_lib
from jax_ppo.training.learner import Learner, LossAndMetrics, Metric, Metrics, gather_micro_batch
from jax_ppo.training.optimizer import learning_rate, make_optimizer
from jax_ppo.training.packing import Rows
from jax_ppo.training.random_streams import Stream
from jax_ppo.types import MiniBatches, Params, Sequences

State = dict[str, Any]  # "params" and "optimizer", as a checkpoint names them


@dataclasses.dataclass(frozen=True)
class SupervisedObjective:
    """The loss of a supervised command; a static argument of compiled functions."""

    head: str  # the head on the decoder, "lm" or "scalar"
    # (sequences, the whole batch) -> how many units the loss is a mean over.
    units: Callable[[Sequences, MiniBatches], jax.Array]
    # (constants, params, sequences, rows) -> sums over the units of the rows by name: "loss" is
    # minimized; with `options.router_aux_loss_coef` also "router_loss", the sum over sequences.
    sums: "Callable[[SupervisedStep, Params, Sequences, Rows], Metrics]"
    names: tuple[str, ...]  # the names of all sums


@dataclasses.dataclass(frozen=True)
class SupervisedStep:
    """The constants of a run's steps; a static argument of compiled functions."""

    objective: SupervisedObjective
    options: Supervised
    model: Transformer
    total_steps: int = 1  # of the run, by which the learning rate is scheduled
    rounding_seed: int = 0  # see `optimizer.rounding_seed`


def _sum_negative_log_likelihood(
    setup: SupervisedStep, params: Params, sequences: Sequences, rows: Rows
) -> Metrics:
    hidden, router_loss = _run_decoder(setup, params, sequences, rows)
    # At temperature 1, and without the entropy, which this loss does not read.
    logprobs = forward.target_logprobs(
        setup.model, params, hidden, rows, temperature=1.0, with_entropy=False
    )[0]
    return {"loss": -logprobs.sum()} | router_loss


def _run_decoder(
    setup: SupervisedStep, params: Params, sequences: Sequences, rows: Rows
) -> tuple[jax.Array, Metrics]:
    """Return hidden states and, if it is trained on, the sum of the sequences' router losses."""
    with_router_loss = setup.options.router_aux_loss_coef > 0
    hidden, router_loss = forward.run_decoder(setup.model, params, rows, with_router_loss)
    if router_loss is None:
        return hidden, {}
    weights = packing_lib.sequence_weights(sequences, rows)
    return hidden, {"router_loss": jnp.sum(weights * router_loss)}


def _sum_preferences(
    setup: SupervisedStep, params: Params, sequences: Sequences, rows: Rows
) -> Metrics:
    """Sum the Bradley-Terry loss over pairs; both sequences of a pair are in one row."""
    hidden, router_loss = _run_decoder(setup, params, sequences, rows)
    scores_RxL = compute_scalars(params, hidden)
    zeros = jnp.zeros(len(sequences.lengths), jnp.float32)
    # The exported model is read at these positions, by transformers and by PPO.
    positions_B = forward.score_positions(sequences, setup.model.architecture.pad_id)
    scores_B = forward.write_values_at(scores_RxL, rows, positions_B, zeros)
    chosen, rejected = jnp.split(scores_B, 2)
    # Only the pairs in these rows count: the tokens at which they are scored are here.
    has_end = forward.write_values_at(jnp.ones_like(scores_RxL), rows, positions_B, zeros) > 0
    is_in_rows = has_end[: len(chosen)]
    centering = centering_penalty(chosen, rejected)
    losses = bradley_terry(chosen, rejected) + setup.options.center_coef * centering
    values = {
        "loss": losses,
        "accuracy": (jnp.sign(chosen - rejected) + 1) / 2,
        "margin": chosen - rejected,
        "score": (chosen + rejected) / 2,
    }
    return {name: jnp.where(is_in_rows, x, 0).sum() for name, x in values.items()} | router_loss


# The mean negative log-likelihood of response tokens; prompts are masked.
LANGUAGE = SupervisedObjective(
    head="lm",
    units=lambda sequences, batch: packing_lib.gather_rows(sequences, batch.packing).mask.sum(),
    sums=_sum_negative_log_likelihood,
    names=("loss",),
)
# The mean of kernels.losses.bradley_terry over pairs. `accuracy` is the share of pairs whose
# chosen response has the higher score; equal scores count half.
PREFERENCE = SupervisedObjective(
    head="scalar",
    # Both sequences of a pair are packed or neither is.
    units=lambda sequences, batch: batch.members.sum() // 2,
    sums=_sum_preferences,
    names=("loss", "accuracy", "margin", "score"),
)


@dataclasses.dataclass(frozen=True)
class BatchObjective:
    """A supervised objective on one batch: a `learner.Objective`."""

    setup: SupervisedStep
    sequences: Sequences

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """Return how each metric is reduced."""
        names = self.setup.objective.names
        if self.setup.options.router_aux_loss_coef:
            names = (*names, "router_loss")
        return dict.fromkeys(names, Metric.MEAN)

    def has_tokens(self, batch: MiniBatches) -> jax.Array:
        """Return whether the batch holds anything, bool scalar."""
        return jnp.any(batch.members)

    def weigh(self, batch: MiniBatches) -> Metrics:
        """Return the divisors of all sums, counted before the batch is split."""
        units = self.setup.objective.units(self.sequences, batch)
        return {
            name: batch.members.sum() if name == "router_loss" else units for name in self.metrics
        }

    def loss(self, params: Params, rows: Rows, weights: Metrics) -> LossAndMetrics:
        """Return the share of the mean loss, and of all means, that some rows contribute."""
        setup = self.setup
        sums = setup.objective.sums(setup, params, self.sequences, rows)
        means = {name: x / weights[name] for name, x in sums.items()}
        router_loss = means.get("router_loss", 0)
        return means["loss"] + setup.options.router_aux_loss_coef * router_loss, means


def make_learner(setup: SupervisedStep, sequences: Sequences) -> Learner:
    """Return the learner of a batch with these sequences."""
    return Learner(
        rounding_stream=Stream.SUPERVISED_ROUNDING,
        objective=BatchObjective(setup, sequences),
        options=setup.options,
        rounding_seed=setup.rounding_seed,
    )


@program(static_argnames="setup", donate_argnames="state")
def train_step(
    setup: SupervisedStep, state: State, step: jax.Array, sequences: Sequences, batch: MiniBatches
) -> tuple[State, Metrics]:
    """Take one optimizer step on a batch, after `step` others; the state is donated."""
    rate = learning_rate(setup.options.optim, step, setup.total_steps)
    params, optimizer_state, metrics, _ = make_learner(setup, sequences).take_optimizer_step(
        state["params"], state["optimizer"], rate, True, batch
    )
    # Otherwise the compiler splits what is replicated, and the next call compiles another program.
    params, optimizer_state = constrain_tree((params, optimizer_state))
    metrics |= {"lr": rate, "tokens": (batch.packing.sample >= 0).sum()}
    return {"params": params, "optimizer": optimizer_state}, metrics


@program(static_argnames="setup")
def measure_batch(
    setup: SupervisedStep, params: Params, sequences: Sequences, batch: MiniBatches
) -> Metrics:
    """Return the objective's sums over a batch, without routers' loss, and its number of units."""
    options = dataclasses.replace(setup.options, router_aux_loss_coef=0.0)
    setup, objective = dataclasses.replace(setup, options=options), setup.objective

    def micro_batch(i: jax.Array, sums: Metrics) -> Metrics:
        rows = gather_micro_batch(sequences, batch.packing, i)
        added = objective.sums(setup, params, sequences, rows)
        return jax.tree.map(jnp.add, sums, added)

    zeros = dict.fromkeys(objective.names, jnp.float32(0))
    sums = jax.lax.fori_loop(0, batch.counts, micro_batch, zeros)
    return sums | {"units": objective.units(sequences, batch)}


def trained_shapes(options: Supervised, model: Transformer, head: str, mesh: Mesh) -> State:
    """Return shapes and shardings of the state."""
    dtype = jnp.dtype(options.optim.param_dtype)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), param_shapes(model, head))
    optimizer = jax.eval_shape(make_optimizer(options).init, params)
    return sharding.with_layout(
        mesh, {"params": params, "optimizer": optimizer}, sharding.TRAIN_RULES
    )
