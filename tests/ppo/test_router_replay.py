"""Routing replay: the sampler records each token's experts, and the actor's passes repeat them."""

import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tiny
from answering import Answering
from jax_ppo.errors import UserError
from jax_ppo.models.experts import ExpertMLP
from jax_ppo.models.layer_stack import unroll_params
from jax_ppo.models.layers import apply_gate
from jax_ppo.models.quantization import quantize_kernels
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo import forward_passes
from jax_ppo.run import ppo_training
from jax_ppo.sampler.decode_loop import sampler_program
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.types import Prompts
from llama_folder import write_arithmetic_llama
from tiny_update import assert_close, run_gradients
from whole_run import read_rows

E, K = 16, 4
# Of many experts, some are nearly equally probable.
MIXTURE = dataclasses.replace(tiny.MIXTURE, num_experts=E, experts_per_token=K)
P, T = tiny.P, tiny.T
OPTIONS = SamplingOptions(T, 1.0, n=2, eos_ids=(1,), slots=3, returns_routed_experts=True)


@pytest.fixture(scope="module", autouse=True)
def mixture():
    """Make every role of this module a mixture of experts."""
    patch = pytest.MonkeyPatch()
    patch.setattr(tiny, "ARCHITECTURE", MIXTURE)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def params():
    return tiny.random_params(MIXTURE, 0, 0, "lm")


def sample(params, options, **changes):
    """Return a rollout of prompts of 1 to P tokens, two responses to each."""
    model = Transformer(MIXTURE, unrolled=True, **changes)
    lengths = np.array([3, 8, 1, 5], np.int32)
    tokens = np.random.default_rng(0).integers(2, 32, (4, P)).astype(np.int32)
    prompts = Prompts(tokens, lengths, rows=np.arange(4, dtype=np.int32))
    rollout = sampler_program(model, options)(params, prompts, jax.random.key(0))
    return jax.tree.map(np.asarray, rollout)


def expected_routing(params, rollout):
    """Return the experts of each token of whole sequences, from one forward pass."""
    sequences = forward_passes.join_sequences(rollout, P + T)
    positions = np.broadcast_to(np.arange(P + T), sequences.tokens.shape)
    model = Transformer(MIXTURE, returns_routed_experts=True)
    run = jax.jit(lambda *x: model.apply(*x).auxiliary["routed_experts"])
    experts = run({"params": params}, sequences.tokens, positions, np.zeros_like(positions))
    lengths = rollout.prompts.lengths + rollout.lengths
    return np.moveaxis(experts, 0, 2), np.arange(P + T) < lengths[:, None] - 1


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.exhaustive),
        {
            "environment": Answering(lambda turn: [20, 21], observation_length=2),
            "max_turn_length": 3,
        },
    ],
    ids=["one turn", "dialogues"],
)
def test_the_record_is_what_one_pass_over_the_whole_sequence_selects(params, changes):
    """Prompt tokens and observations are recorded, too; the last token is not run."""
    rollout = sample(unroll_params(params), dataclasses.replace(OPTIONS, **changes))
    expected, was_run = expected_routing(params, rollout)
    assert rollout.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(rollout.routed_experts[was_run], expected[was_run])
    # An environment's slot runs the last token of a turn while it waits for the answer.
    if "environment" not in changes:
        assert (rollout.routed_experts[~was_run] == E).all()
    # All experts are used, and not always the same ones.
    assert len(np.unique(expected[was_run].reshape(-1, K), axis=0)) > E


@pytest.mark.exhaustive
def test_with_int8_decoding_replay_brings_the_trainer_closer_to_the_sampler(params):
    """Rounded weights select other experts for some tokens."""
    weights = quantize_kernels(unroll_params(params), jnp.float32)
    rollout = sample(weights, OPTIONS, quantized=True)
    own, was_run = expected_routing(params, rollout)
    differs = (np.sort(own) != np.sort(rollout.routed_experts)).any(-1)[was_run]
    assert 0.01 < differs.mean() < 0.5
    # Only the actor is scored.
    alone = {
        "algorithm__adv_estimator": "reinforce_plus_plus",
        "algorithm__use_kl_in_reward": False,
        "algorithm__use_reference": False,
    }
    config, mesh = tiny.config(**alone), tiny.make_mesh()
    with jax.set_mesh(mesh):
        state = tiny.make_state(config, mesh)

        def score(rollout):
            _, metrics = tiny.make_experience(config, mesh, state, rollout)
            return float(metrics["rollout/logprob_difference"])

        replayed = score(rollout)
        selected = score(dataclasses.replace(rollout, routed_experts=None))
    # What remains is the rounding of everything else.
    assert replayed < 0.7 * selected


@functools.partial(jax.jit, static_argnames="is_normalized")
def dense_gradient(variables, x, experts, slope, is_normalized):
    """Return the gradient by the parameters and x: every expert computes every token."""

    def loss(variables, x):
        kernels = {name: entry["kernel"] for name, entry in variables["experts"].items()}
        gate, up = (
            jnp.einsum("rld,edf->rlef", x, kernels[f"{name}_proj"]) for name in ("gate", "up")
        )
        outputs = jnp.einsum("rlef,efd->rled", jax.nn.silu(gate) * up, kernels["down_proj"])
        logits = x @ variables["router"]["kernel"]
        is_used = jax.nn.one_hot(experts, E).sum(-2)
        if is_normalized:
            weights = jax.nn.softmax(jnp.where(is_used > 0, logits, -jnp.inf))
        else:
            weights = jax.nn.softmax(logits) * is_used
        return jnp.sum(slope * jnp.einsum("rle,rled->rld", weights, outputs))

    return jax.grad(loss, argnums=(0, 1))(variables, x)


@pytest.mark.parametrize("is_normalized", [True, False])
def test_the_gradient_of_replayed_experts_is_that_of_a_softmax_over_them(is_normalized):
    """Though they are not those that the router would select: weights and router still learn."""
    rng = np.random.default_rng(0)
    architecture = dataclasses.replace(MIXTURE, normalized_expert_weights=is_normalized)
    mlp = ExpertMLP(architecture, jnp.float32, functools.partial(apply_gate, architecture))
    x, slope = rng.normal(size=(2, 2, 6, architecture.hidden_size)).astype(np.float32)
    drawn = [rng.choice(E, K, replace=False) for _ in range(x[..., 0].size)]
    experts = np.reshape(drawn, (2, 6, K)).astype(np.uint8)
    variables = mlp.init(jax.random.key(0), x, None, None)["params"]
    variables = jax.tree.map(lambda v: 20 * v, variables)

    def loss(variables, x):
        return jnp.sum(slope * mlp.apply({"params": variables}, x, None, experts)[0])

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(variables, x)
    expected = dense_gradient(variables, x, experts, slope, is_normalized)
    assert np.abs(expected[0]["router"]["kernel"]).max() > 0.1
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max()),
        gradients,
        expected,
    )


@pytest.fixture
def recorded(monkeypatch):
    """Give the tiny rollout a record that no router would make, different for each token."""
    make_rollout = tiny.make_rollout

    def make_recorded(mesh, *arguments):
        rollout = make_rollout(mesh, *arguments)
        return dataclasses.replace(rollout, routed_experts=tiny.random_routing(mesh))

    monkeypatch.setattr(tiny, "make_rollout", make_recorded)


@pytest.mark.slow
def test_packing_and_micro_batches_do_not_change_what_is_replayed(recorded):
    padded = tiny.config(packing__enabled=False)
    expected, metrics = run_gradients(padded, tiny.make_mesh(), rows=8, roles=("actor",))
    packed, packed_metrics = run_gradients(tiny.config(), tiny.make_mesh(), 1, roles=("actor",))
    assert_close(expected, packed)
    assert packed_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    # Log-probs before and after the move follow the recorded experts.
    assert metrics["actor/ratio_max"] > 1.01

    def exchange_records(experience):
        rolled = jnp.roll(experience.sequences.routed_experts, 1, axis=0)
        sequences = dataclasses.replace(experience.sequences, routed_experts=rolled)
        return dataclasses.replace(experience, sequences=sequences)

    others, _ = run_gradients(padded, tiny.make_mesh(), 8, exchange_records, roles=("actor",))
    with pytest.raises(AssertionError):
        assert_close(expected, others, tolerance=0.1)


def test_what_an_engine_does_not_record_cannot_be_replayed():
    with pytest.raises(UserError, match="mode='R3': .*rollout.engine='a:B' does not record it"):
        tiny.config(actor__router_replay__mode="R3", rollout__engine="a:B")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm__adv_estimator": "grpo", "rollout__n": 4, "rollout__keep": 2},
        {"rollout__max_staleness": 1, "algorithm__rollout_is": "token"},
    ],
    ids=["selected", "sampled ahead"],
)
def test_a_run_replays_the_routing_of_its_own_samples(changes, tmp_path):
    """In float32 both programs compute the same, unless the record is another sample's."""
    mixture = {"family": "mixtral", "num_experts": E, "experts_per_token": K, "tied": False}
    write_arithmetic_llama(tmp_path, **mixture, normalized_expert_weights=True)
    config = tiny.config(
        model__path=str(tmp_path / "llama"),
        data__train_files="arithmetic:32",
        data__max_prompt_length=80,
        actor__router_replay__mode="R3",
        trainer__export=False,
        trainer__save_freq=1,
        trainer__max_checkpoints=4,
        trainer__total_training_steps=4,
        **changes,
    )
    workdir = tmp_path / "run"

    def run():
        ppo_training.train_ppo(config, workdir)
        return [float(row["rollout/logprob_difference"]) for row in read_rows(workdir)]

    differences = run()
    # Sampled ahead, weights are older than the trained ones from the third step on.
    exact = differences[:2] if config.rollout.max_staleness else differences
    assert len(differences) == 4 and max(exact) < 1e-5
    # The second step's checkpoint holds what had been sampled for the third one.
    for step in (3, 4):
        shutil.rmtree(workdir / "checkpoints" / str(step))
    assert run() == differences
