"""Expected result of each row of oracles.py: equal to ours, or different for a listed reason."""

import jax
import jax.numpy as jnp
from workers.ours_oracle import (
    FLOAT32,
    Result,
    Row,
    adaptive_kl_row,
    aggregate,
    broadcast_to_tokens,
    clip_fractions,
    differentiate,
    distribution_rows,
    gae,
    gdpo,
    importance_weights,
    importance_weights_row,
    kl_divergence,
    last_token_mask,
    mean_of_two_micro_batches,
    overlong_row,
    policy_loss,
    preference_loss,
    unclamped_k3,
    unclamped_surrogate,
    value_loss,
    whitening_row,
)

from jax_ppo.kernels import (
    advantages,
    importance,
    losses,
    masked,
    policy_losses,
    vocabulary_kl,
)
from jax_ppo.kernels.losses import Clip
from jax_ppo.registries import AGGREGATIONS, POLICY_LOSSES

TOKENS, SUM, MEAN, NORM = AGGREGATIONS
NO_CLAMP = (
    "the log-ratio is not clamped before the exponential; ours at 20, where float32 would soon "
    "overflow"
)
MICRO = (
    "a mean of the micro-batches' means, which weighs tokens of a sparse micro-batch more; "
    "ours is of the mini-batch"
)
ABSENT = "the mean counts responses without a token; ours does not, as they are left out on purpose"


def verl(case, options):
    yield from verl_advantages(case, options)
    yield from verl_policy_losses(case, options)
    yield from verl_divergence_ppo(case, options)
    yield from verl_covariance_losses(case, options)
    yield from verl_averages_and_divergences(case, options)
    yield from verl_off_policy(case, options)
    yield from distribution_rows(case, options).items()


def verl_advantages(case, options):
    mask, n = case["mask"], options["n"]
    raw, returns = gae(case, case["rewards"], mask, options)
    to_go = jax.vmap(advantages.reward_to_go, in_axes=(0, 0, None))(
        case["rewards"], mask, options["gamma"]
    )
    grpo, plain_grpo = (
        Row(Result(broadcast_to_tokens(advantages.grpo(case["scores"], n, by_std), mask)))
        for by_std in (True, False)
    )
    rloo = Row(Result(broadcast_to_tokens(advantages.rloo(case["scores"], n), mask)))
    yield "GAE: returns", Row(Result(returns))
    yield "GAE: advantages before whitening", Row(Result(raw))
    yield "GAE: advantages", whitening_row(raw, mask)
    yield "masked mean", Row(Result(masked.masked_mean(case["losses"], mask)))
    yield "whitening", whitening_row(case["losses"], mask)
    yield "whitening without shift", whitening_row(case["losses"], mask, shift_mean=False)
    yield "REINFORCE++: returns", Row(Result(to_go))
    yield "REINFORCE++: advantages", whitening_row(to_go, mask)
    yield (
        "REINFORCE++-baseline: advantages",
        whitening_row(
            broadcast_to_tokens(advantages.group_mean_baseline(case["scores"], n), mask), mask
        ),
    )
    yield "GRPO", grpo
    yield "GRPO, vectorised", grpo._replace(tolerance=FLOAT32)
    yield "GRPO without the division", plain_grpo
    yield "RLOO", rloo
    yield "RLOO, vectorised", rloo
    yield (
        "OPO",
        Row(Result(broadcast_to_tokens(advantages.opo(case["scores"], n, mask.sum(1)), mask))),
    )
    yield "GDPO", whitening_row(gdpo(case, n), mask)._replace(tolerance=FLOAT32)
    remax = jax.vmap(advantages.remax)(case["rewards"], mask, case["response_advantages"])
    yield "ReMax", Row(Result(remax))


def verl_policy_losses(case, options):
    ppo, plain = (
        Clip(options["clip_low"], options["clip_high"], dual)
        for dual in (options["dual_clip"], None)
    )
    shares = clip_fractions(case, ppo, "wide_logprobs")
    for mode in AGGREGATIONS:
        yield f"vanilla, {mode}", Row(policy_loss(case, "vanilla", mode, ppo))
    yield (
        "vanilla, ratios far off",
        Row(policy_loss(case, "vanilla", TOKENS, ppo, old="wide_logprobs")),
    )
    yield "vanilla, ratios far off: share clipped", Row(shares[0])
    yield "vanilla, ratios far off: share of the dual clip", Row(shares[1])
    yield (
        "vanilla, log-ratios beyond 20",
        Row(policy_loss(case, "vanilla", TOKENS, plain, old="far_logprobs")),
    )
    yield (
        "vanilla, importance weights",
        Row(policy_loss(case, "vanilla", TOKENS, ppo, weights=case["importance"])),
    )
    yield "gspo, seq-mean-token-mean", Row(policy_loss(case, "gspo", MEAN, Clip(0.1, 0.15)))
    yield "gspo, token-mean, advantages of tokens", Row(policy_loss(case, "gspo", TOKENS, plain))
    yield (
        "gspo, dual clip asked",
        Row(
            policy_loss(case, "gspo", MEAN, ppo, old="wide_logprobs"),
            "gspo has no dual clip there; ours has it where actor.clip_ratio_c is set, "
            "as its ratio is as little bounded",
            policy_loss(case, "gspo", MEAN, plain, old="wide_logprobs"),
        ),
    )
    yield (
        "gspo, log-ratios beyond 20",
        Row(
            policy_loss(case, "gspo", MEAN, plain, old="far_logprobs"),
            "clamps the response's mean log-ratio at 10 from above; ours each token's at 20 "
            "before the mean, as in every loss",
            differentiate(lambda x: unclamped_gspo(case, x, plain), case["logprobs"]),
        ),
    )
    gmpo = policy_loss(case, "gmpo", MEAN, plain, "response_advantages", mask="absent_mask")
    present = (case["absent_mask"].sum(1) > 0).mean()
    yield "geo_mean", Row(policy_loss(case, "gmpo", MEAN, plain, "response_advantages"))
    yield (
        "geo_mean, absent responses",
        Row(gmpo, ABSENT, Result(gmpo.values * present, gmpo.gradient * present)),
    )
    yield "cispo", Row(policy_loss(case, "cispo", TOKENS, plain))
    yield (
        "cispo, log-ratios beyond 20",
        Row(policy_loss(case, "cispo", TOKENS, plain, old="far_logprobs")),
    )
    yield "gpg", Row(policy_loss(case, "reinforce", TOKENS, plain))
    yield (
        "reinforce, importance weights",
        Row(policy_loss(case, "reinforce", SUM, plain, weights=case["importance"])),
    )
    for suffix, old in (("", "old_logprobs"), (", log-ratios beyond 20", "far_logprobs")):
        yield f"sapo{suffix}", Row(sapo(case, options, old))


def sapo(case, options, old="old_logprobs"):
    taus = {name: options[name] for name in ("tau_pos", "tau_neg")}
    return policy_loss(case, "sapo", MEAN, Clip(0.2, 0.2), old=old, **taus)


def verl_divergence_ppo(case, options):
    mask, clip = case["mask"], Clip(0.05, 0.1)
    for kind in ("dppo_tv", "dppo_kl"):
        ours = policy_loss(case, kind, TOKENS, clip, old="valid_logprobs")

        def loss(logprobs, kind=kind):
            batch = losses.padded_batch(logprobs, case["valid_logprobs"], case["advantages"], mask)
            policy = POLICY_LOSSES[kind].function(batch, clip)
            weights = jax.lax.stop_gradient(jnp.minimum(policy.ratio, options["dual_clip"]))
            return aggregate(
                -weights * (1 - policy.clipped) * case["advantages"] * logprobs, mask, TOKENS
            )

        yield f"{kind}: gradient", Row(Result(ours.gradient))
        yield (
            f"{kind}, ratios above clip_ratio_c",
            Row(
                ours,
                "the loss is that of log pi, weighted by the ratio, which is truncated at "
                "clip_ratio_c; ours the paper's, without truncation",
                differentiate(loss, case["logprobs"]),
            ),
        )


def verl_covariance_losses(case, options):
    """Yield the rows of clip_cov, which here selects all tokens in the range, and of kl_cov."""
    A, mask = case["advantages"], case["mask"].astype(bool)
    clip = Clip(options["clip_low"], options["clip_high"])
    clipped = losses.clipped_surrogate(
        losses.padded_batch(case["logprobs"], case["old_logprobs"], A, mask), clip
    ).clipped

    def clip_cov(old, at, eligible=True):
        selected = policy_losses.clip_cov_tokens(
            case[at], A, mask, jax.random.key(0), 1.0, options["cov_low"], options["cov_high"]
        )
        return policy_loss(case, "clip_cov", TOKENS, clip, old=old, selected=selected & eligible)

    def kl_cov(old, at):
        selected = policy_losses.kl_cov_tokens(
            case[at], A, mask, jax.random.key(0), options["cov_ratio"]
        )
        return policy_loss(
            case,
            "kl_cov",
            TOKENS,
            clip,
            old=old,
            selected=selected,
            beta=options["cov_kl_coef"],
        )

    current = (
        "the covariance is the current policy's{}; ours the old policy's, throughout an update"
    )
    yield "clip_cov, equal log-ratios", Row(clip_cov("shifted_logprobs", "shifted_logprobs"))
    yield (
        "clip_cov",
        Row(
            clip_cov("old_logprobs", "old_logprobs"),
            current.format(", over the tokens that PPO does not clip"),
            clip_cov("old_logprobs", "logprobs", clipped == 0),
        ),
    )
    yield "kl_cov, equal log-ratios", Row(kl_cov("shifted_logprobs", "shifted_logprobs"))
    yield (
        "kl_cov",
        Row(
            kl_cov("old_logprobs", "old_logprobs"),
            current.format(""),
            kl_cov("old_logprobs", "logprobs"),
        ),
    )


def verl_averages_and_divergences(case, options):
    mask = case["mask"]
    yield from aggregations(case, options, {mode: mode for mode in AGGREGATIONS})
    whole = differentiate(lambda x: aggregate(x, mask, TOKENS), case["losses"])
    yield "token-mean in two micro-batches, global count", Row(whole)
    yield (
        "token-mean in two micro-batches, count of each",
        Row(whole, MICRO, mean_of_two_micro_batches(case)),
    )
    yield "value loss", Row(value_loss(case, options["value_clip"]))
    yield (
        "value loss: share clipped",
        Row(
            Result(
                masked.masked_mean(
                    losses.value_loss(
                        case["values"],
                        case["old_values"],
                        case["returns"],
                        mask,
                        options["value_clip"],
                    ).clipped,
                    mask,
                )
            )
        ),
    )
    for kind in ("k1", "abs", "k2", "k3", "k3+"):
        yield f"KL {kind}", Row(kl_divergence(case, kind, "ref_logprobs"))
        yield f"KL {kind}, log-ratios beyond 20", Row(kl_divergence(case, kind, "far_logprobs"))
    yield "adaptive KL coefficient", adaptive_kl_row(case, options)
    for level in ("token", "sequence"):
        yield (
            f"importance weights, {level}",
            importance_weights_row(case, level, "wide_logprobs", options),
        )
        yield (
            f"importance weights, {level}, log-ratios beyond 20",
            importance_weights_row(case, level, "far_logprobs", options),
        )
    mismatch = importance.mismatch(case["logprobs"], case["wide_logprobs"], mask)
    yield "sampler and trainer: mean |p - q|", Row(Result(mismatch["prob_difference_mean"]))
    yield "sampler and trainer: max |p - q|", Row(Result(mismatch["prob_difference_max"]))
    yield "sampler and trainer: correlation", Row(Result(mismatch["prob_correlation"]))


def verl_off_policy(case, options):
    """Yield the rows of masks, with bounds of which neither is the inverse of the other."""
    mask, lower, upper = case["mask"], options["lower"], options["threshold"]
    for level in ("token", "sequence"):
        yield (
            f"importance weights, {level}, masked (IcePop)",
            importance_weights_row(case, level, "old_logprobs", options, lower=lower, masks=True),
        )
    truncated = importance_weights(case, "token", "wide_logprobs", upper)
    yield (
        "importance weights, effective sample size",
        Row(Result(importance.effective_sample_size(truncated, mask))),
    )
    for kind, level, old in (
        ("token_k1", "token", "wide_logprobs"),
        ("seq_sum_k1", "sequence", "old_logprobs"),
        ("seq_mean_k1", "geometric", "valid_logprobs"),
    ):
        ours, theirs = (
            Result(mask * (importance_weights(case, level, old, high, lower=low, masks=True) > 0))
            for low, high in ((lower, upper), (1 / upper, 1 / lower))
        )
        yield (
            f"rejection, {kind}",
            Row(
                ours,
                "the bounds, documented as those of pi / mu, are applied to mu / pi (verl#6377); "
                "ours to pi / mu",
                theirs,
            ),
        )
    weights = importance_weights(case, "token", "wide_logprobs", 2.0, lower=0.5, masks=True)
    clip = Clip(options["clip_low"], options["clip_high"], options["dual_clip"])
    kept = case | {"kept": mask * (weights > 0)}
    yield (
        "vanilla, tokens rejected",
        Row(
            policy_loss(case, "vanilla", TOKENS, clip, weights=weights),
            "the mean does not count rejected tokens; ours does, as IcePop: their loss is 0",
            policy_loss(kept, "vanilla", TOKENS, clip, weights=weights, mask="kept"),
        ),
    )


def trl(case, options):
    yield "whitening", whitening_row(case["losses"], case["mask"])
    yield "whitening without shift", whitening_row(case["losses"], case["mask"], shift_mean=False)
    yield from distribution_rows(case, options).items()
    yield (
        "GKDTrainer: KL of the whole vocabulary",
        Row(
            differentiate(
                lambda hidden: vocabulary_kl.full_kl(
                    hidden,
                    case["unembedding"],
                    case["ref_hidden"],
                    case["unembedding"],
                    case["mask"],
                    options["temperature"],
                    chunk_size=5,
                ),
                case["hidden"],
                case["cotangents"],
            ),
            tolerance=FLOAT32,
        ),
    )
    yield "RewardTrainer: loss, centred", Row(preference_loss(case, 0.01))
    yield "soft overlong punishment", overlong_row(case)
    yield from trl_ppo(case, options)
    yield from trl_grpo_losses(case, options)
    yield from trl_rollouts(case, options)


def trl_ppo(case, options):
    """Yield the rows of TRL's PPO, which places score and last value one past the end."""
    mask, even = case["mask"], Clip(options["clip_low"], options["clip_low"])
    past = jnp.minimum(mask.sum(1), mask.shape[1] - 1)[:, None] == jnp.arange(mask.shape[1])
    longer = jnp.maximum(mask, past)
    penalty = options["kl_coef"] * masked.zero_outside(
        case["old_logprobs"] - case["ref_logprobs"], mask
    )
    scores = case["scores"][:, None]
    ours = gae(case, last_token_mask(mask) * scores - penalty, mask, options)
    theirs = gae(case, past * scores - penalty, longer, options)
    reason = (
        "the score is given one place after the last token, and the value there counts; "
        "ours ends with the last token, whose reward the score is"
    )
    for i, name in enumerate(("advantages before whitening", "returns")):
        yield (
            f"PPOTrainer: {name}",
            Row(Result(ours[i]), reason, Result(masked.zero_outside(theirs[i], mask))),
        )
    every = jnp.ones_like(mask)
    full = gae(
        case,
        last_token_mask(every) * scores
        - options["kl_coef"] * (case["old_logprobs"] - case["ref_logprobs"]),
        every,
        options,
    )
    yield (
        "PPOTrainer: advantages before whitening, responses that fill the row",
        Row(Result(full[0])),
    )
    for kind in ("k1", "k3"):
        at = case | {"logprobs": case["old_logprobs"]}
        yield (
            f"PPOTrainer: KL {kind} in the reward",
            Row(Result(kl_divergence(at, kind, "ref_logprobs").values)),
        )
    yield (
        "PPOTrainer: KL k3 in the reward, log-ratios beyond 20",
        Row(
            Result(kl_divergence(case, "k3", "far_logprobs").values),
            "k3 is not clamped; ours as verl's, d at 20 and the result at 10",
            Result(unclamped_k3(case, "far_logprobs").values),
        ),
    )
    vanilla = policy_loss(case, "vanilla", TOKENS, even)
    yield "PPOTrainer: policy loss", Row(vanilla)
    yield "PPOTrainer: policy loss, two micro-batches", Row(vanilla, MICRO, halves(case, even))
    yield (
        "PPOTrainer: policy loss, log-ratios beyond 20",
        Row(
            policy_loss(case, "vanilla", TOKENS, even, old="far_logprobs"),
            NO_CLAMP,
            far_surrogate(case, even),
        ),
    )
    at = case | {"returns": theirs[1], "longer": longer}
    yield (
        "PPOTrainer: value loss",
        Row(
            value_loss(at, options["value_clip"]),
            "the value one place after the last token is trained too; ours has none there",
            value_loss(at, options["value_clip"], "longer"),
        ),
    )


def trl_grpo_losses(case, options):
    mask = case["mask"]
    clip, dual = (
        Clip(options["clip_low"], options["clip_high"], c) for c in (None, options["dual_clip"])
    )
    for kind, mode in (
        ("grpo", MEAN),
        ("bnpo", TOKENS),
        ("dapo", TOKENS),
        ("dr_grpo", NORM),
        ("luspo", SUM),
    ):
        yield f"GRPOTrainer: {kind}", Row(policy_loss(case, "vanilla", mode, clip))
    far = policy_loss(case, "vanilla", TOKENS, clip, old="far_logprobs")
    absent, present = (
        policy_loss(case, "vanilla", MEAN, clip, mask="absent_mask"),
        (case["absent_mask"].sum(1) > 0).mean(),
    )
    yield (
        "GRPOTrainer: dapo, delta",
        Row(policy_loss(case, "vanilla", TOKENS, dual, old="wide_logprobs")),
    )
    yield "GRPOTrainer: dapo, log-ratios beyond 20", Row(far, NO_CLAMP, far_surrogate(case, clip))
    yield (
        "GRPOTrainer: grpo, absent responses",
        Row(absent, ABSENT, Result(absent.values * present, absent.gradient * present)),
    )
    yield (
        "GRPOTrainer: dapo, importance weights",
        Row(policy_loss(case, "vanilla", TOKENS, clip, weights=case["importance"])),
    )
    yield (
        "GRPOTrainer: sequence weights (GSPO)",
        Row(policy_loss(case, "gspo", MEAN, Clip(0.1, 0.15), "response_advantages")),
    )
    yield (
        "GRPOTrainer: sequence_token weights (GSPO-token)",
        Row(policy_loss(case, "gspo", TOKENS, clip)),
    )
    yield (
        "GRPOTrainer: cispo",
        Row(policy_loss(case, "cispo", TOKENS, Clip(1.0, options["clip_high"]))),
    )
    yield (
        "GRPOTrainer: KL in the loss",
        Row(differentiate(lambda x: kl_loss(case, x, "ref_logprobs"), case["logprobs"])),
    )
    yield (
        "GRPOTrainer: KL in the loss, log-ratios beyond 20",
        Row(
            differentiate(lambda x: kl_loss(case, x, "far_logprobs"), case["logprobs"]),
            "k3 is not clamped; ours as verl's, d at 20 and the result at 10",
            differentiate(
                lambda x: aggregate(
                    unclamped_k3(case | {"logprobs": x}, "far_logprobs").values, mask, TOKENS
                ),
                case["logprobs"],
            ),
        ),
    )
    yield "GRPOTrainer: sapo", Row(sapo(case, options))
    yield "GMPOTrainer", Row(policy_loss(case, "gmpo", MEAN, clip, "response_advantages"))


def trl_rollouts(case, options):
    n = options["n"]
    deviations = advantages.grpo(case["scores"], n, by_std=False)
    spread = jnp.repeat(case["scores"].reshape(-1, n).std(1, ddof=1), n)
    yield (
        "GRPOTrainer: advantages",
        Row(
            Result(advantages.grpo(case["scores"], n, by_std=True)),
            "the group's deviation has 1e-4 added; ours 1e-6, as verl's",
            Result(deviations / (spread + 1e-4)),
        ),
    )
    yield "GRPOTrainer: advantages, scale_rewards none", Row(Result(deviations))
    for level in ("token", "sequence"):
        yield (
            f"GRPOTrainer: importance weights, {level}",
            importance_weights_row(case, level, "wide_logprobs", options),
        )
        for kind, masks in (("truncated at both ends", False), ("masked", True)):
            yield (
                f"GRPOTrainer: importance weights, {level}, {kind}",
                importance_weights_row(
                    case, level, "wide_logprobs", options, lower=options["lower"], masks=masks
                ),
            )
    parts = [
        advantages.grpo(scores, n, by_std=False)
        / (jnp.repeat(scores.reshape(-1, n).std(1, ddof=1), n) + 1e-4)
        for scores in case["components"].T
    ]
    total = parts[0] + 2 * parts[1]
    yield (
        "GRPOTrainer: advantages, normalize_then_sum (GDPO)",
        Row(
            Result(masked.whiten(gdpo(case, n), case["mask"])[:, 0]),
            "mean and deviation are those of responses, the deviation divides by n - 1, and all "
            "have 1e-4 added; ours those of tokens, as verl's and the authors' code",
            Result((total - total.mean()) / (total.std(ddof=1) + 1e-4)),
        ),
    )
    yield "RLOOTrainer: advantages", Row(Result(advantages.rloo(case["scores"], n)))


def tunix(case, options):
    mask, n = case["mask"], options["n"]
    ppo, plain = (
        Clip(options["clip_low"], options["clip_high"], dual)
        for dual in (options["dual_clip"], None)
    )
    raw, returns = gae(case, case["rewards"], mask, options)
    yield "GAE: returns", Row(Result(returns))
    yield "GAE: advantages", whitening_row(raw, mask)
    yield "whitening", whitening_row(case["losses"], mask)
    yield from distribution_rows(case, options).items()
    yield "PPO: policy loss", Row(policy_loss(case, "vanilla", TOKENS, ppo, old="wide_logprobs"))
    yield (
        "PPO: policy loss, log-ratios beyond 20",
        Row(
            policy_loss(case, "vanilla", TOKENS, plain, old="far_logprobs"),
            NO_CLAMP,
            far_surrogate(case, plain),
        ),
    )
    yield "PPO: value loss", Row(value_loss(case, options["value_clip"]))
    modes = {
        "token-mean": TOKENS,
        "sequence-mean-token-mean": MEAN,
        "sequence-mean-token-scale": NORM,
        "seq-mean-token-sum": SUM,
    }
    for name, mode in modes.items():
        yield (
            f"GRPO: policy loss, {name}",
            Row(policy_loss(case, "vanilla", mode, ppo, "response_advantages"), tolerance=FLOAT32),
        )
    yield (
        "GRPO: policy loss, importance weights",
        Row(
            policy_loss(case, "vanilla", TOKENS, ppo, weights=case["importance"]),
            tolerance=FLOAT32,
        ),
    )
    yield (
        "GRPO: policy loss, log-ratios beyond 20",
        Row(policy_loss(case, "vanilla", TOKENS, plain, old="far_logprobs"), tolerance=FLOAT32),
    )
    yield (
        "GRPO: gspo-token",
        Row(
            policy_loss(case, "gspo", MEAN, ppo, "response_advantages", old="wide_logprobs"),
            tolerance=FLOAT32,
        ),
    )
    for name, row in aggregations(case, options, modes | {"sequence-mean-token-sum-norm": NORM}):
        yield name, row._replace(tolerance=FLOAT32)
    for kind in ("k1", "k2", "k3"):
        yield f"KL {kind}", Row(kl_divergence(case, kind, "ref_logprobs"), tolerance=FLOAT32)
    yield (
        "KL k3, log-ratios beyond 20",
        Row(
            kl_divergence(case, "k3", "far_logprobs"),
            "k3 is not clamped; ours as verl's, d at 20 and the result at 10",
            unclamped_k3(case, "far_logprobs"),
            FLOAT32,
        ),
    )
    yield "GRPO: advantages", Row(Result(advantages.grpo(case["scores"], n, by_std=True)))
    yield "Dr. GRPO: advantages", Row(Result(advantages.grpo(case["scores"], n, by_std=False)))
    yield "RLOO: advantages", Row(Result(advantages.rloo(case["scores"], n)))
    over = mask.sum(1) * 2.0 - 7
    yield (
        "DAPO: reward shaping",
        overlong_row(case)._replace(
            reason="a length is the number of characters, and the penalty grows beyond the limit; "
            "ours counts tokens, up to the paper's bound",
            theirs=Result(-jnp.maximum(over / 5, 0)),
        ),
    )


def openrlhf(case, options):
    mask, n = case["mask"], options["n"]
    clip, ppo = (
        Clip(options["clip_low"], options["clip_high"], c) for c in (None, options["dual_clip"])
    )
    cut = "the value is cut off at 10 for every estimator; ours for k3 alone, as verl's"
    yield (
        "PPO: policy loss, token level",
        Row(policy_loss(case, "vanilla", TOKENS, ppo, old="wide_logprobs")),
    )
    yield "PPO: policy loss, sample level", Row(policy_loss(case, "vanilla", MEAN, clip))
    yield (
        "PPO: policy loss, log-ratios beyond 20",
        Row(policy_loss(case, "vanilla", TOKENS, clip, old="far_logprobs")),
    )
    corrected = importance.importance_weights(
        case["old_logprobs"], case["wide_logprobs"], mask, "token", options["threshold"]
    )
    yield (
        "PPO: policy loss, importance weights clipped",
        Row(policy_loss(case, "vanilla", TOKENS, clip, weights=corrected)),
    )
    at_old = case | {"logprobs": case["old_logprobs"]}
    bounds = {"upper": options["threshold"], "lower": options["lower"], "masks": True}
    token, geometric = (
        importance_weights(at_old, level, "valid_logprobs", **bounds)
        for level in ("token", "geometric")
    )
    own = importance_weights(at_old, "token", "valid_logprobs", jnp.inf) * (geometric > 0)
    yield (
        "PPO: policy loss, importance weights masked",
        Row(policy_loss(case, "vanilla", TOKENS, clip, weights=token)),
    )
    yield (
        "PPO: policy loss, responses masked by geometric mean",
        Row(
            policy_loss(case, "vanilla", TOKENS, clip, weights=geometric),
            "tokens that are kept weigh their own ratios, which nothing bounds; ours the geometric "
            "mean that decides",
            policy_loss(case, "vanilla", TOKENS, clip, weights=own),
        ),
    )
    yield "gspo", Row(policy_loss(case, "gspo", MEAN, Clip(0.1, 0.15), "response_advantages"))
    yield "preferences", Row(preference_loss(case))
    yield "overlong penalty", overlong_row(case, factor=2.0)
    yield "value loss", Row(value_loss(case, options["value_clip"]))
    yield "value loss, not clipped, sample level", Row(value_loss(case, None, mode=MEAN))
    yield from aggregations(case, options, {"token level": TOKENS, "sample level": MEAN})
    for kind in ("k1", "k2", "k3", "k3+"):
        yield f"KL {kind}", Row(kl_divergence(case, kind, "ref_logprobs"), tolerance=FLOAT32)
    for kind in ("k1", "k2"):
        yield (
            f"KL {kind}, log-ratios beyond 20",
            Row(
                kl_divergence(case, kind, "far_logprobs"),
                cut,
                kl_divergence(case, kind, "far_logprobs", clip=10),
                FLOAT32,
            ),
        )
    for kind in ("k3", "k3+"):
        yield (
            f"KL {kind}, log-ratios beyond 20",
            Row(kl_divergence(case, kind, "far_logprobs"), tolerance=FLOAT32),
        )
    yield "adaptive KL coefficient", adaptive_kl_row(case, options)
    yield from distribution_rows(case, options).items()
    rewards = last_token_mask(mask) * case["scores"][:, None]
    raw, returns = gae(case, rewards, mask, options)
    yield "GAE: returns", Row(Result(returns))
    yield "GAE: advantages", Row(Result(masked.whiten(raw, mask)), tolerance=FLOAT32)
    to_go = jax.vmap(advantages.reward_to_go, in_axes=(0, 0, None))(rewards, mask, options["gamma"])
    yield "reinforce: advantages", Row(Result(masked.whiten(to_go, mask)), tolerance=FLOAT32)
    baseline = broadcast_to_tokens(advantages.group_mean_baseline(case["scores"], n), mask)
    yield (
        "reinforce_baseline: advantages",
        Row(Result(masked.whiten(baseline, mask)), tolerance=FLOAT32),
    )
    yield (
        "rloo: advantages",
        Row(Result(broadcast_to_tokens(advantages.rloo(case["scores"], n), mask))),
    )
    deviations = advantages.grpo(case["scores"], n, by_std=False)
    yield "dr_grpo: advantages", Row(Result(broadcast_to_tokens(deviations, mask)))
    spread = jnp.repeat(case["scores"].reshape(-1, n).std(1, ddof=1), n)
    yield (
        "group_norm: advantages",
        Row(
            Result(broadcast_to_tokens(advantages.grpo(case["scores"], n, by_std=True), mask)),
            "the group's deviation has 1e-9 added; ours 1e-6, as verl's",
            Result(broadcast_to_tokens(deviations / (spread + 1e-9), mask)),
        ),
    )


def aggregations(case, options, modes):
    for theirs, mode in modes.items():
        yield (
            f"aggregation: {theirs}",
            Row(
                differentiate(
                    lambda x, mode=mode: aggregate(x, case["absent_mask"], mode, options["scale"]),
                    case["losses"],
                )
            ),
        )


def unclamped_gspo(case, logprobs, clip):
    mask = case["mask"]
    log_ratio = masked.zero_outside(logprobs - case["far_logprobs"], mask)
    mean = (log_ratio.sum(1) / mask.sum(1))[:, None]
    log_s = jnp.minimum(
        jax.lax.stop_gradient(mean) + logprobs - jax.lax.stop_gradient(logprobs), 10.0
    )
    return aggregate(unclamped_surrogate(log_s, case["advantages"], clip), mask, MEAN)


def far_surrogate(case, clip):
    def loss(logprobs):
        log_ratio = masked.zero_outside(logprobs - case["far_logprobs"], case["mask"])
        return aggregate(
            unclamped_surrogate(log_ratio, case["advantages"], clip), case["mask"], TOKENS
        )

    return differentiate(loss, case["logprobs"])


def halves(case, clip):
    """Return the policy loss as the mean of the losses of two micro-batches."""
    parts = [
        policy_loss(
            {name: x[half] for name, x in case.items() if x.ndim and len(x) == len(case["mask"])},
            "vanilla",
            TOKENS,
            clip,
        )
        for half in (slice(0, None, 2), slice(1, None, 2))
    ]
    gradient = jnp.stack([part.gradient for part in parts], axis=1).reshape(case["logprobs"].shape)
    return Result((parts[0].values + parts[1].values) / 2, gradient / 2)


def kl_loss(case, logprobs, reference):
    return aggregate(
        kl_divergence(case | {"logprobs": logprobs}, "k3", reference).values, case["mask"], TOKENS
    )


ROWS = {"verl": verl, "trl": trl, "tunix": tunix, "openrlhf": openrlhf}
