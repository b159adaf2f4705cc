"""Supervised objectives against plain ones on unpacked sequences, for every batch cut."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
import tiny_update
from jax_ppo.config import schema, training_options
from jax_ppo.models import heads
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import placement, sharding
from jax_ppo.training import forward, packing
from jax_ppo.training.optimizer import make_optimizer
from jax_ppo.training.supervised_step import (
    LANGUAGE,
    PREFERENCE,
    SupervisedStep,
    make_learner,
    measure_batch,
    train_step,
)
from jax_ppo.types import MiniBatches, Packing, Sequences

# Adam alone would hide any scale.
OPTIONS = schema.Supervised(training_options.CriticOptim(lr=1e-2, eps=1e-3), center_coef=0.1)
MODEL = Transformer(tiny.ARCHITECTURE, jnp.float32)
N = 6  # examples
OBJECTIVES = pytest.mark.parametrize(
    "objective",
    [pytest.param(LANGUAGE, marks=pytest.mark.exhaustive), PREFERENCE],
    ids=["language", "preference"],
)


def sequences_per_example(objective):
    return 2 if objective is PREFERENCE else 1


def make_sequences(objective, seed=0):
    """Return random sequences and parameters; the scalar head is not zero."""
    r = np.random.default_rng(seed)
    count = N * sequences_per_example(objective)
    prompts = np.resize(r.integers(2, 9, N), count).astype(np.int32)
    lengths = r.integers(1, 11, count).astype(np.int32)
    tokens = r.integers(2, 32, (count, 18)).astype(np.int32) * (
        np.arange(18) < (prompts + lengths)[:, None]
    )
    params = tiny.init_params(MODEL, jax.random.key(seed), objective.head)
    params = jax.tree.map(lambda x: 5 * x if x.ndim > 1 else x, params)
    if "score" in params:
        params["score"]["kernel"] = jax.random.normal(
            jax.random.key(1), params["score"]["kernel"].shape
        )
    sequences = Sequences(
        tokens=tokens,
        prompt_lengths=prompts,
        lengths=lengths,
        truncated=np.zeros(count, bool),
        action_mask=np.arange(10) < lengths[:, None],
    )
    return sequences, params


def pack_rows(objective, sequences, rows, packed=True):
    lengths = (sequences.prompt_lengths + sequences.lengths).reshape(
        sequences_per_example(objective), -1
    )
    packed, counts = packing.pack_samples(lengths.sum(0), np.arange(N)[None], rows, 40, packed)
    packed = jax.tree.map(lambda x: x[0], packed)
    if len(lengths) > 1:
        packed = packing.split_pairs(packed, lengths[0])
    members = np.ones(len(sequences.lengths), bool)
    return sequences, MiniBatches(packed, counts[0], members)


def gradients(objective, sequences, params, rows=2, packed=True, options=OPTIONS, model=MODEL):
    def compute(params, sequences, batch):
        learner = make_learner(SupervisedStep(objective, options, model), sequences)
        return learner.gradients(params, batch)

    return jax.jit(compute)(params, *pack_rows(objective, sequences, rows, packed))


def hidden_states_unpacked(sequences, params):
    """Return hidden states [B, S, D] of each sequence computed in a separate row."""
    positions = np.broadcast_to(np.arange(sequences.tokens.shape[1]), sequences.tokens.shape)
    return MODEL.apply(
        {"params": params}, sequences.tokens, positions, np.zeros_like(positions)
    ).hidden


@jax.jit
def plain_language_loss(params, sequences):
    logprobs = jax.nn.log_softmax(
        heads.compute_logits(
            tiny.ARCHITECTURE, params, hidden_states_unpacked(sequences, params)[:, :-1]
        )
    )
    losses = -jnp.take_along_axis(logprobs, sequences.tokens[:, 1:, None], axis=-1)[..., 0]
    place = np.arange(1, 18)
    is_response = (place >= sequences.prompt_lengths[:, None]) & (
        place < (sequences.prompt_lengths + sequences.lengths)[:, None]
    )
    return jnp.where(is_response, losses, 0).sum() / sequences.lengths.sum()


@jax.jit
def plain_preference_loss(params, sequences):
    last = sequences.prompt_lengths + sequences.lengths - 1
    hidden = hidden_states_unpacked(sequences, params)
    scores = heads.compute_scalars(params, hidden)[np.arange(2 * N), last]
    chosen, rejected = scores[:N], scores[N:]
    return (jnp.log(1 + jnp.exp(rejected - chosen)) + 0.1 * (chosen + rejected) ** 2).mean(), (
        chosen,
        rejected,
    )


assert_close = functools.partial(tiny_update.assert_close, tolerance=1e-4)


def test_the_language_loss_and_its_gradient():
    sequences, params = make_sequences(LANGUAGE)
    ours, means = gradients(LANGUAGE, sequences, params)
    expected, theirs = jax.value_and_grad(plain_language_loss)(params, sequences)
    assert set(means) == {"loss"}
    assert float(means["loss"]) == pytest.approx(float(expected), rel=1e-5)
    assert_close(ours, theirs)


def test_the_preference_loss_and_its_gradient():
    sequences, params = make_sequences(PREFERENCE)
    ours, means = gradients(PREFERENCE, sequences, params)
    (expected, scores), theirs = jax.value_and_grad(plain_preference_loss, has_aux=True)(
        params, sequences
    )
    chosen, rejected = map(np.asarray, scores)
    assert float(means["loss"]) == pytest.approx(float(expected), rel=1e-5)
    assert float(means["accuracy"]) == pytest.approx((chosen > rejected).mean())
    assert 0 < float(means["accuracy"]) < 1
    assert float(means["margin"]) == pytest.approx((chosen - rejected).mean(), rel=1e-4)
    assert float(means["score"]) == pytest.approx((chosen + rejected).mean() / 2, rel=1e-4)
    assert_close(ours, theirs)


def test_preferences_are_learned_at_the_token_where_the_exported_model_is_read():
    """Where the pad token is the EOS, that is the token before it."""
    sequences, params = make_sequences(PREFERENCE)
    lengths = np.maximum(sequences.lengths, 2)
    tokens = np.where(sequences.tokens == 0, 3, sequences.tokens)
    ends = (sequences.prompt_lengths + lengths - 1)[:, None]
    tokens[np.arange(18) == ends] = tiny.ARCHITECTURE.pad_id
    ended = dataclasses.replace(sequences, tokens=tokens, lengths=lengths)
    without_end = dataclasses.replace(ended, lengths=lengths - 1)
    losses = []
    for rows in (ended, without_end):
        setup = SupervisedStep(PREFERENCE, OPTIONS, MODEL)
        sums = measure_batch(setup, params, *pack_rows(PREFERENCE, rows, 2))
        losses.append(float(sums["loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_losses_by_hand_where_nothing_is_known():
    """A model of zeros gives all 32 tokens, and both responses, the same probability."""
    for objective, expected in ((LANGUAGE, math.log(32)), (PREFERENCE, math.log(2))):
        sequences, params = make_sequences(objective)
        _, means = gradients(objective, sequences, jax.tree.map(jnp.zeros_like, params))
        assert float(means["loss"]) == pytest.approx(expected, rel=1e-6)
    assert float(means["accuracy"]) == 0.5


def test_prompt_tokens_carry_no_gradient(monkeypatch):
    """The loss uses only positions before response tokens, not those before prompt tokens."""
    sequences, params = make_sequences(LANGUAGE)
    packed = pack_rows(LANGUAGE, sequences, rows=1)[1].packing
    rows = packing.gather_rows(sequences, Packing(packed.sample[0], packed.position[0]))
    hidden = forward.hidden_states(MODEL, params, rows)
    monkeypatch.setattr(forward, "run_decoder", lambda model, params, *_: (params["hidden"], None))

    def loss(hidden):
        setup = SupervisedStep(LANGUAGE, OPTIONS, MODEL)
        return LANGUAGE.sums(setup, params | {"hidden": hidden}, sequences, rows)["loss"]

    slopes = jax.grad(loss)(hidden)
    predicts_response = np.zeros(rows.tokens.shape, bool)
    for at, sample in np.ndenumerate(packed.sample[0]):
        next_position = packed.position[0][at] + 1
        if sample >= 0:
            start = sequences.prompt_lengths[sample]
            predicts_response[at] = start <= next_position < start + sequences.lengths[sample]
    moved = np.abs(np.asarray(slopes)).max(-1) > 0
    np.testing.assert_array_equal(moved, predicts_response)
    assert predicts_response.any() and not predicts_response.all()


@OBJECTIVES
def test_packing_and_micro_batches_change_nothing(objective):
    sequences, params = make_sequences(objective)
    expected = gradients(objective, sequences, params, rows=N, packed=False)
    for rows, packed in ((1, True), (4, False)):
        assert_close(gradients(objective, sequences, params, rows, packed), expected)


@pytest.mark.slow
def test_the_loss_of_a_router_is_a_mean_over_sequences_however_they_are_cut():
    sequences, _ = make_sequences(LANGUAGE)
    model = Transformer(tiny.MIXTURE, jnp.float32)
    params = tiny.init_params(model, jax.random.key(0), "lm")
    params = jax.tree.map(lambda x: 5 * x if x.ndim > 1 else x, params)

    def run(coef, rows, packed):
        options = dataclasses.replace(OPTIONS, router_aux_loss_coef=coef)
        return gradients(LANGUAGE, sequences, params, rows, packed, options, model)

    grads, means = run(0.5, rows=N, packed=False)
    assert_close(run(0.5, rows=1, packed=True), (grads, means))
    # Each sequence in a separate row, with its tail as a separate segment.
    columns = np.broadcast_to(np.arange(18), sequences.tokens.shape)
    lengths = (sequences.prompt_lengths + sequences.lengths)[:, None]
    output = jax.jit(model.clone(router_loss=True).apply)(
        {"params": params}, sequences.tokens, columns, columns < lengths
    )
    losses = output.auxiliary["router_loss"].mean(0)
    expected = (np.where(columns < lengths, losses, 0).sum(1) / lengths[:, 0]).mean()
    assert means["router_loss"] == pytest.approx(expected, rel=1e-4)
    without, plain_means = run(0.0, rows=N, packed=False)
    assert plain_means.keys() == {"loss"} and plain_means["loss"] == pytest.approx(means["loss"])
    router = [tree["layers"]["mlp"]["router"]["kernel"] for tree in (grads, without)]
    assert np.abs(router[0] - router[1]).max() > 1e-3


@pytest.mark.slow
@OBJECTIVES
def test_eight_devices_take_the_step_of_one(objective):
    sequences, params = make_sequences(objective)

    def take_step(**shape):
        mesh = tiny.make_mesh(math.prod(shape.values()), **shape)
        with jax.set_mesh(mesh):
            _, batch = pack_rows(objective, sequences, 4)
            packed = placement.place(batch.packing, sharding.rows(mesh, axis=1))
            shardings_for = functools.partial(
                sharding.tree_shardings, mesh, rules=sharding.TRAIN_RULES
            )
            placed_params = jax.device_put(jax.device_get(params), shardings_for(params))
            optimizer = make_optimizer(OPTIONS).init(placed_params)
            optimizer = jax.device_put(optimizer, shardings_for(optimizer))
            after, metrics = train_step(
                SupervisedStep(objective, OPTIONS, MODEL, total_steps=10),
                {"params": placed_params, "optimizer": optimizer},
                np.int32(0),
                placement.place(sequences, sharding.replicated(mesh)),
                dataclasses.replace(batch, packing=packed),
            )
            # The norm is measured before clipping.
            return jax.device_get((after["params"], metrics["loss"], metrics["grad_norm"]))

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
        take_step(data=2, fsdp=2, model=2),
        take_step(data=1),
    )


@OBJECTIVES
def test_measured_sums_are_those_that_are_learned_from(objective):
    sequences, params = make_sequences(objective)
    _, means = gradients(objective, sequences, params)
    setup = SupervisedStep(objective, OPTIONS, MODEL)
    sums = measure_batch(setup, params, *pack_rows(objective, sequences, 2))
    units = float(sums.pop("units"))
    assert units == (N if objective is PREFERENCE else sequences.lengths.sum())
    for name, mean in means.items():
        assert float(sums[name]) / units == pytest.approx(float(mean), rel=1e-5), name


def test_split_pairs_by_hand():
    # A pair of 2 + 1 tokens and a pair of 1 + 2 tokens in a row of 7.
    row = Packing(
        np.array([[0, 0, 0, 1, 1, 1, -1]], np.int32), np.array([[0, 1, 2, 0, 1, 2, 0]], np.int32)
    )
    split = packing.split_pairs(row, [2, 1])
    assert split.sample.tolist() == [[0, 0, 2, 1, 3, 3, -1]] and split.position.tolist() == [
        [0, 1, 0, 0, 0, 1, 0]
    ]
