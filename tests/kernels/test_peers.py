"""Our kernels compute what verl, TRL, tunix and OpenRLHF compute, values and gradients.

tests/expected/kernels/peers.npz holds one random rollout (8 responses of 1 to 10 tokens, arbitrary
numbers in masked positions) and what the functions of verl 0.9.1, TRL 1.12.0, tunix 0.1.7 and
OpenRLHF 0.11.2 returned for it in float64. The programs that called them are in the history
(benchmarks/oracles.py, removed by the commit that added this file). benchmarks/README.md lists
where the peers differ.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ppo.kernels import advantages, importance, kl, logprobs, losses, vocabulary_kl
from jax_ppo.kernels import masked_statistics as masked
from jax_ppo.kernels.losses import Clip
from jax_ppo.kernels.vocabulary_chunks import LogitOptions
from jax_ppo.ppo.reward_shaping import soft_overlong_penalty
from jax_ppo.registries import AGGREGATIONS
from kernels_by_name import KL, LEVELS
from padded_loss import padded_loss

STORED = Path(__file__).parents[1] / "expected" / "kernels" / "peers.npz"
TOKENS, SUM, MEAN, NORM = AGGREGATIONS
GROUP, GAMMA, LAM, TEMPERATURE, VALUE_CLIP = 4, 0.97, 0.9, 0.7, 0.3
EVEN, PLAIN, DUAL = Clip(0.2, 0.2), Clip(0.2, 0.28), Clip(0.2, 0.28, 3.0)
LOGITS = LogitOptions(TEMPERATURE, chunk_size=5)
PEERS = ("verl", "trl", "tunix", "openrlhf")
# Relative to the largest number. Peers add 1e-8 to counts; some compute in float32 throughout.
TOLERANCES = {"verl": 1e-7, "trl": 1e-7, "tunix": 1e-5, "openrlhf": 1e-5}
FLOAT32 = ("log-prob", "entropy", "KL of the whole", "overlong", "adaptive", "vectorised")


class Comparison(NamedTuple):
    """What we compute, and the peers' functions that return the same, as "peer: function"."""

    peers: tuple[str, ...]
    compute: Callable[[jax.Array], jax.Array]  # of the array that is named
    at: str
    cotangents: bool = False  # whether the peers' gradient is of a sum weighted by these


def comparisons(case: dict[str, jax.Array]) -> Iterator[Comparison]:
    """Yield what is compared on one rollout."""
    yield from compare_advantages(case)
    yield from compare_policy_losses(case)
    yield from compare_reductions(case)
    yield from compare_divergences(case)
    yield from compare_importance_weights(case)


def compare_advantages(case: dict[str, jax.Array]) -> Iterator[Comparison]:
    mask = case["mask"]

    def gae(rewards: jax.Array) -> tuple[jax.Array, jax.Array]:
        estimate = jax.vmap(lambda *sequence: advantages.gae(*sequence, GAMMA, LAM))
        return estimate(rewards, case["old_values"], mask)

    def last_rewards(scores: jax.Array) -> jax.Array:
        last = jnp.arange(mask.shape[1]) == mask.sum(1, keepdims=True) - 1
        return last * scores[:, None]

    def to_tokens(x: jax.Array) -> jax.Array:
        return jnp.where(mask.astype(bool), x[:, None], 0.0)

    def to_go(rewards: jax.Array) -> jax.Array:
        return jax.vmap(advantages.reward_to_go, in_axes=(0, 0, None))(rewards, mask, GAMMA)

    def grpo(scores: jax.Array, by_std: bool = False) -> jax.Array:
        return advantages.grpo(scores, GROUP, by_std=by_std)

    def rloo(scores: jax.Array) -> jax.Array:
        return advantages.rloo(scores, GROUP)

    def baseline(scores: jax.Array) -> jax.Array:
        return to_tokens(advantages.group_mean_baseline(scores, GROUP))

    def whitened(x: jax.Array) -> jax.Array:
        return masked.whiten(x, mask)

    returns = ("verl: GAE: returns", "tunix: GAE: returns")
    yield Comparison(returns, lambda x: gae(x)[1], "rewards")
    yield Comparison(("verl: GAE: advantages before whitening",), lambda x: gae(x)[0], "rewards")
    for peer, compute in (
        ("GAE: returns", lambda x: gae(last_rewards(x))[1]),
        ("GAE: advantages", lambda x: whitened(gae(last_rewards(x))[0])),
        ("reinforce: advantages", lambda x: whitened(to_go(last_rewards(x)))),
        ("reinforce_baseline: advantages", lambda x: whitened(baseline(x))),
        ("rloo: advantages", lambda x: to_tokens(rloo(x))),
        ("dr_grpo: advantages", lambda x: to_tokens(grpo(x))),
    ):
        yield Comparison((f"openrlhf: {peer}",), compute, "scores")
    yield Comparison(("verl: REINFORCE++: returns",), to_go, "rewards")
    by_std = ("verl: GRPO", "verl: GRPO, vectorised")
    yield Comparison(by_std, lambda x: to_tokens(grpo(x, by_std=True)), "scores")
    without = ("verl: GRPO without the division",)
    yield Comparison(without, lambda x: to_tokens(grpo(x)), "scores")
    yield Comparison(("tunix: GRPO: advantages",), lambda x: grpo(x, by_std=True), "scores")
    without = ("tunix: Dr. GRPO: advantages", "trl: GRPOTrainer: advantages, scale_rewards none")
    yield Comparison(without, grpo, "scores")
    loo = ("verl: RLOO", "verl: RLOO, vectorised")
    yield Comparison(loo, lambda x: to_tokens(rloo(x)), "scores")
    loo = ("tunix: RLOO: advantages", "trl: RLOOTrainer: advantages")
    yield Comparison(loo, rloo, "scores")


def policy_loss(
    case: dict[str, jax.Array],
    name: str,
    mode: str,
    clip: Clip,
    *,
    of: str = "advantages",
    old: str = "old_logprobs",
    weights: jax.Array | float = 1.0,
) -> Callable[[jax.Array], jax.Array]:
    """Return one of our policy losses as a function of the log-probs."""
    mask, A = case["mask"], case[of]
    A = A if A.ndim == 2 else jnp.broadcast_to(A[:, None], mask.shape)

    def loss(logprobs: jax.Array) -> jax.Array:
        batch = losses.padded_batch(logprobs, case[old], A, mask)
        per_token = weights * padded_loss(name, batch, clip).loss
        return aggregate(per_token, mask, mode, mask.shape[1])

    return loss


def aggregate(per_token: jax.Array, mask: jax.Array, mode: str, scale: int) -> jax.Array:
    """Return the loss of a mini-batch."""
    weights = losses.loss_weights(mask.sum(1), AGGREGATIONS[mode].function, scale)[:, None]
    return jnp.sum(weights * masked.zero_outside(per_token, mask))


def compare_policy_losses(case: dict[str, jax.Array]) -> Iterator[Comparison]:
    def vanilla(peers: tuple[str, ...], mode: str, clip: Clip, **arguments) -> Comparison:
        return Comparison(peers, policy_loss(case, "vanilla", mode, clip, **arguments), "logprobs")

    wide, far, responses = (
        {"old": "wide_logprobs"},
        {"old": "far_logprobs"},
        {"of": "response_advantages"},
    )
    far_clip = ("verl: vanilla, log-ratios beyond 20",)
    far_clip += ("openrlhf: PPO: policy loss, log-ratios beyond 20",)
    far_clip += ("tunix: GRPO: policy loss, log-ratios beyond 20",)
    weighted = {"weights": case["importance"]}
    for mode in AGGREGATIONS:
        yield vanilla((f"verl: vanilla, {mode}",), mode, DUAL)
    yield vanilla(
        (
            "verl: vanilla, ratios far off",
            "trl: GRPOTrainer: dapo, delta",
            "tunix: PPO: policy loss",
            "openrlhf: PPO: policy loss, token level",
        ),
        TOKENS,
        DUAL,
        **wide,
    )
    yield vanilla(far_clip, TOKENS, PLAIN, **far)
    weighted_peers = (
        "verl: vanilla, importance weights",
        "tunix: GRPO: policy loss, importance weights",
    )
    yield vanilla(weighted_peers, TOKENS, DUAL, **weighted)
    yield vanilla(("trl: GRPOTrainer: dapo, importance weights",), TOKENS, PLAIN, **weighted)
    yield vanilla(("trl: PPOTrainer: policy loss",), TOKENS, EVEN)
    trl = {"grpo": MEAN, "bnpo": TOKENS, "dapo": TOKENS, "dr_grpo": NORM, "luspo": SUM}
    for kind, mode in trl.items():
        yield vanilla((f"trl: GRPOTrainer: {kind}",), mode, PLAIN)
    tunix = {"token-mean": TOKENS, "sequence-mean-token-mean": MEAN}
    tunix |= {"sequence-mean-token-scale": NORM, "seq-mean-token-sum": SUM}
    for name, mode in tunix.items():
        yield vanilla((f"tunix: GRPO: policy loss, {name}",), mode, DUAL, **responses)
    yield vanilla(("openrlhf: PPO: policy loss, sample level",), MEAN, PLAIN)
    for name, mode, clip, peers, arguments in (
        ("gspo", MEAN, Clip(0.1, 0.15), ("verl: gspo, seq-mean-token-mean",), {}),
        (
            "gspo",
            MEAN,
            Clip(0.1, 0.15),
            ("trl: GRPOTrainer: sequence weights (GSPO)", "openrlhf: gspo"),
            responses,
        ),
        (
            "gspo",
            TOKENS,
            PLAIN,
            (
                "verl: gspo, token-mean, advantages of tokens",
                "trl: GRPOTrainer: sequence_token weights (GSPO-token)",
            ),
            {},
        ),
        ("gspo", MEAN, DUAL, ("tunix: GRPO: gspo-token",), wide | responses),
        ("gmpo", MEAN, PLAIN, ("verl: geo_mean", "trl: GMPOTrainer"), responses),
        ("cispo", TOKENS, PLAIN, ("verl: cispo",), {}),
        ("cispo", TOKENS, PLAIN, ("verl: cispo, log-ratios beyond 20",), far),
        ("cispo", TOKENS, Clip(1.0, 0.28), ("trl: GRPOTrainer: cispo",), {}),
        ("reinforce", TOKENS, PLAIN, ("verl: gpg",), {}),
        ("reinforce", SUM, PLAIN, ("verl: reinforce, importance weights",), weighted),
    ):
        yield Comparison(peers, policy_loss(case, name, mode, clip, **arguments), "logprobs")


def compare_reductions(case: dict[str, jax.Array]) -> Iterator[Comparison]:
    mask = case["mask"]
    mean = ("verl: masked mean",)
    yield Comparison(mean, lambda x: masked.masked_mean(x, mask), "losses")
    modes = {f"verl: aggregation: {mode}": mode for mode in AGGREGATIONS}
    modes |= {
        "tunix: aggregation: token-mean": TOKENS,
        "tunix: aggregation: sequence-mean-token-mean": MEAN,
        "tunix: aggregation: sequence-mean-token-scale": NORM,
        "tunix: aggregation: sequence-mean-token-sum-norm": NORM,
        "tunix: aggregation: seq-mean-token-sum": SUM,
        "openrlhf: aggregation: token level": TOKENS,
        "openrlhf: aggregation: sample level": MEAN,
    }
    for peer, mode in modes.items():

        def compute(x: jax.Array, mode: str = mode) -> jax.Array:
            return aggregate(x, case["absent_mask"], mode, 16)

        yield Comparison((peer,), compute, "losses")
    whole = ("verl: token-mean in two micro-batches, global count",)
    yield Comparison(whole, lambda x: aggregate(x, mask, TOKENS, 16), "losses")

    def value_loss(clip: float | None, mode: str) -> Callable[[jax.Array], jax.Array]:
        def compute(values: jax.Array) -> jax.Array:
            arguments = (case["old_values"], case["returns"], mask, clip)
            return aggregate(losses.value_loss(values, *arguments).loss, mask, mode, 16)

        return compute

    peers = ("verl: value loss", "tunix: PPO: value loss", "openrlhf: value loss")
    yield Comparison(peers, value_loss(VALUE_CLIP, TOKENS), "values")
    unclipped = ("openrlhf: value loss, not clipped, sample level",)
    yield Comparison(unclipped, value_loss(None, MEAN), "values")
    for peers, factor in (
        (("trl: soft overlong punishment",), 1.0),
        (("openrlhf: overlong penalty",), 2.0),
    ):

        def penalize(mask: jax.Array, factor: float = factor) -> jax.Array:
            return soft_overlong_penalty(mask.sum(1), 12, 5, factor)

        yield Comparison(peers, penalize, "mask")
    for peers, centering in (
        (("openrlhf: preferences",), 0.0),
        (("trl: RewardTrainer: loss, centred",), 0.01),
    ):

        def rank(chosen: jax.Array, centering: float = centering) -> jax.Array:
            pair = chosen, case["response_advantages"]
            penalty = centering * losses.centering_penalty(*pair)
            return jnp.mean(losses.bradley_terry(*pair) + penalty)

        yield Comparison(peers, rank, "scores")


def compare_divergences(case: dict[str, jax.Array]) -> Iterator[Comparison]:
    mask = case["mask"]

    def estimate(kind: str, reference: str) -> Callable[[jax.Array], jax.Array]:
        return lambda logprobs: kl.kl_estimate(logprobs, case[reference], mask, KL[kind])

    for peer, kinds, far in (
        ("verl", ("k1", "abs", "k2", "k3", "k3+"), ("k1", "abs", "k2", "k3", "k3+")),
        ("tunix", ("k1", "k2", "k3"), ()),
        ("openrlhf", ("k1", "k2", "k3", "k3+"), ("k3", "k3+")),
    ):
        for kind in kinds:
            compute = estimate(kind, "ref_logprobs")
            yield Comparison((f"{peer}: KL {kind}",), compute, "logprobs", cotangents=True)
        for kind in far:
            name = (f"{peer}: KL {kind}, log-ratios beyond 20",)
            yield Comparison(name, estimate(kind, "far_logprobs"), "logprobs", cotangents=True)
    for kind in ("k1", "k3"):
        name = (f"trl: PPOTrainer: KL {kind} in the reward",)
        yield Comparison(name, estimate(kind, "ref_logprobs"), "old_logprobs")
    in_loss = ("trl: GRPOTrainer: KL in the loss",)
    of_tokens = estimate("k3", "ref_logprobs")
    yield Comparison(in_loss, lambda x: aggregate(of_tokens(x), mask, TOKENS, 16), "logprobs")

    def adapt(kls: jax.Array) -> jax.Array:
        coefficients = [jnp.asarray(0.05)]
        for current in kls:
            arguments = (coefficients[-1], current, 0.1, 200.0, len(mask))
            coefficients.append(kl.adaptive_kl_coef(*arguments))
        return jnp.stack(coefficients[1:])

    peers = ("verl: adaptive KL coefficient", "openrlhf: adaptive KL coefficient")
    yield Comparison(peers, adapt, "kls")

    def outputs(hidden: jax.Array) -> tuple[jax.Array, ...]:
        arguments = (case["unembedding"], case["targets"], mask, LOGITS)
        return logprobs.token_logprobs(hidden, *arguments)

    for i, name in enumerate(("log-prob", "entropy")):
        peers = tuple(f"{peer}: {name}" for peer in PEERS)

        def compute(hidden: jax.Array, i: int = i) -> jax.Array:
            return outputs(hidden)[i]

        yield Comparison(peers, compute, "hidden", cotangents=True)

    def whole(hidden: jax.Array) -> jax.Array:
        E = case["unembedding"]
        arguments = (E, case["ref_hidden"], E, mask, LOGITS)
        return vocabulary_kl.full_kl(hidden, *arguments)

    peers = ("trl: GKDTrainer: KL of the whole vocabulary",)
    yield Comparison(peers, whole, "hidden", cotangents=True)


def compare_importance_weights(case: dict[str, jax.Array]) -> Iterator[Comparison]:
    def weights(level: str, old: str, **bounds) -> Callable[[jax.Array], jax.Array]:
        return lambda logprobs: importance.importance_weights(
            logprobs, case[old], case["mask"], LEVELS[level], 2.0, **bounds
        )

    for level in ("token", "sequence"):
        name = f"importance weights, {level}"
        peers = (f"verl: {name}", f"trl: GRPOTrainer: {name}")
        yield Comparison(peers, weights(level, "wide_logprobs"), "logprobs")
        far = (f"verl: {name}, log-ratios beyond 20",)
        yield Comparison(far, weights(level, "far_logprobs"), "logprobs")
        masks = weights(level, "old_logprobs", lower=0.1, masks=True)
        yield Comparison((f"verl: {name}, masked (IcePop)",), masks, "logprobs")
        for kind, masks in (("truncated at both ends", False), ("masked", True)):
            bounded = weights(level, "wide_logprobs", lower=0.1, masks=masks)
            yield Comparison((f"trl: GRPOTrainer: {name}, {kind}",), bounded, "logprobs")
    size = ("verl: importance weights, effective sample size",)
    truncated = weights("token", "wide_logprobs")
    yield Comparison(
        size, lambda x: importance.effective_sample_size(truncated(x), case["mask"]), "logprobs"
    )
    for name, key in (
        ("mean |p - q|", "prob_difference_mean"),
        ("max |p - q|", "prob_difference_max"),
        ("correlation", "prob_correlation"),
    ):

        def compute(logprobs: jax.Array, key: str = key) -> jax.Array:
            return importance.mismatch(logprobs, case["wide_logprobs"], case["mask"])[key]

        yield Comparison((f"verl: sampler and trainer: {name}",), compute, "logprobs")


@pytest.fixture(scope="module")
def differences() -> dict[str, float]:
    """Return the largest difference to each peer's function, relative to its largest number."""
    with np.load(STORED, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    with jax.enable_x64(True):
        inputs = {k.removeprefix("case/"): x for k, x in arrays.items() if k.startswith("case/")}
        found = {}

        @jax.jit
        def compute_all(case):
            results = []
            for row in comparisons(case):
                x = case[row.at]
                if jnp.issubdtype(x.dtype, jnp.integer):
                    results.append((row.compute(x), None))
                    continue
                values, pull = jax.vjp(row.compute, x)
                seed = case["cotangents"] if row.cotangents else jnp.ones_like(values)
                results.append((values, pull(seed.astype(values.dtype))[0]))
            return results

        results = compute_all(inputs)
        for row, (values, gradient) in zip(comparisons(inputs), results, strict=True):
            for peer in row.peers:
                found[peer] = difference(values, arrays[peer])
                if f"{peer}, gradient" in arrays:
                    of_gradient = difference(gradient, arrays[f"{peer}, gradient"])
                    found[peer] = max(found[peer], of_gradient)
    assert found.keys() == {k for k in arrays if "case/" not in k and ", gradient" not in k}
    return found


def difference(ours: jax.Array, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))


@pytest.mark.parametrize("peer", PEERS)
def test_kernels_agree_with_a_peers_own_functions(differences, peer):
    of_peer = {name: x for name, x in differences.items() if name.startswith(f"{peer}: ")}
    assert len(of_peer) >= 20
    for name, relative in of_peer.items():
        tolerance = 1e-5 if any(word in name for word in FLOAT32) else TOLERANCES[peer]
        assert relative <= tolerance, name
