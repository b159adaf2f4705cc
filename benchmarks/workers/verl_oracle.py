"""Worker of oracles.py: verl's own functions. Arguments: the settings of oracles.py as JSON."""

import numpy as np
import torch
from serve_oracle import serve
from tensordict import TensorDict
from torch_oracle import Answers, tensors
from verl.protocol import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos as core
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.utils import torch_functional as functional
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.workers.config import ActorConfig, PolicyLossConfig

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def advantages(answers, case, options):
    mask, scores = case["mask"], case["scores"]
    whitened, returns = core.compute_gae_advantage_return(
        case["rewards"], case["old_values"], mask, options["gamma"], options["lam"]
    )
    answers.add("GAE: returns", returns * mask)
    answers.add("GAE: advantages before whitening", (returns - case["old_values"]) * mask)
    answers.add("GAE: advantages", whitened * mask)
    answers.add("masked mean", functional.masked_mean(case["losses"], mask))
    answers.add("whitening", functional.masked_whiten(case["losses"], mask) * mask)
    answers.add(
        "whitening without shift",
        functional.masked_whiten(case["losses"], mask, shift_mean=False) * mask,
    )

    config = AlgoConfig(gamma=options["gamma"])
    whitened, returns = core.compute_reinforce_plus_plus_outcome_advantage(
        case["rewards"] * mask, mask, config
    )
    answers.add("REINFORCE++: returns", returns)
    answers.add("REINFORCE++: advantages", whitened)
    last = torch.nn.functional.one_hot(mask.sum(1) - 1, mask.shape[1]) * scores[:, None]
    groups = np.repeat(np.arange(len(scores) // options["n"]), options["n"])
    components = {
        "config": AlgoConfig(gdpo_reward_keys=["0", "1"], gdpo_reward_weights=[1.0, 2.0]),
        "non_tensor_batch": {str(k): case["components"][:, k].numpy() for k in range(2)},
        "batch": {"prompts": mask[:, :0], "attention_mask": mask},
    }
    for name, function, more in (
        (
            "REINFORCE++-baseline: advantages",
            core.compute_reinforce_plus_plus_baseline_outcome_advantage,
            {},
        ),
        ("GRPO", core.compute_grpo_outcome_advantage, {}),
        ("GRPO, vectorised", core.compute_grpo_vectorized_outcome_advantage, {}),
        (
            "GRPO without the division",
            core.compute_grpo_outcome_advantage,
            {"norm_adv_by_std_in_grpo": False},
        ),
        ("RLOO", core.compute_rloo_outcome_advantage, {}),
        ("RLOO, vectorised", core.compute_rloo_vectorized_outcome_advantage, {}),
        ("OPO", core.compute_opo_outcome_advantage, {}),
        ("GDPO", core.compute_gdpo_outcome_advantage, components),
    ):
        answers.add(name, function(last, mask, groups, **more)[0])
    answers.add(
        "ReMax",
        core.compute_remax_outcome_advantage(case["rewards"], case["response_advantages"], mask)[0],
    )


def policy_losses(answers, case, options):
    low, high, mask = options["clip_low"], options["clip_high"], case["mask"]

    def add_policy_loss(
        name,
        kind,
        mode,
        advantages="advantages",
        old="old_logprobs",
        mask=mask,
        importance=None,
        low=low,
        high=high,
        dual=options["dual_clip"],
        **settings,
    ):
        info = {"loss_scale_factor": mask.shape[1]} if mode == MODES[3] else {}
        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=dual,
            global_batch_info=info,
            **settings,
        )
        A = (
            case[advantages]
            if advantages == "advantages"
            else case[advantages][:, None].expand(mask.shape)
        )
        return answers.add_with_gradient(
            name,
            lambda logprobs: core.get_policy_loss_fn(kind)(
                case[old], logprobs, A, mask, mode, config, importance
            ),
            case["logprobs"],
        )

    for mode in MODES:
        add_policy_loss(f"vanilla, {mode}", "vanilla", mode)
    (shares,) = add_policy_loss("vanilla, ratios far off", "vanilla", MODES[0], old="wide_logprobs")
    answers.add("vanilla, ratios far off: share clipped", shares["actor/pg_clipfrac"])
    answers.add(
        "vanilla, ratios far off: share of the dual clip", shares["actor/pg_clipfrac_lower"]
    )
    add_policy_loss(
        "vanilla, log-ratios beyond 20", "vanilla", MODES[0], old="far_logprobs", dual=1e30
    )
    add_policy_loss(
        "vanilla, importance weights", "vanilla", MODES[0], importance=case["importance"]
    )
    add_policy_loss("gspo, seq-mean-token-mean", "gspo", MODES[2], low=0.1, high=0.15)
    add_policy_loss("gspo, token-mean, advantages of tokens", "gspo", MODES[0])
    add_policy_loss("gspo, dual clip asked", "gspo", MODES[2], old="wide_logprobs")
    add_policy_loss("gspo, log-ratios beyond 20", "gspo", MODES[2], old="far_logprobs")
    add_policy_loss("geo_mean", "geo_mean", MODES[2], "response_advantages")
    add_policy_loss(
        "geo_mean, absent responses",
        "geo_mean",
        MODES[2],
        "response_advantages",
        mask=case["absent_mask"],
    )
    add_policy_loss("cispo", "cispo", MODES[0])
    add_policy_loss("cispo, log-ratios beyond 20", "cispo", MODES[0], old="far_logprobs")
    add_policy_loss("gpg", "gpg", MODES[0])
    for suffix, old in (("", "old_logprobs"), (", log-ratios beyond 20", "far_logprobs")):
        taus = {name: options[name] for name in ("tau_pos", "tau_neg")}
        add_policy_loss(f"sapo{suffix}", "sapo", MODES[2], old=old, **taus)
    for kind in ("dppo_tv", "dppo_kl"):
        bounds = {"old": "valid_logprobs", "low": 0.05, "high": 0.1}
        add_policy_loss(f"{kind}: gradient", kind, MODES[0], **bounds, dual=1e30)
        answers[f"{kind}: gradient"] = answers.pop(f"{kind}: gradient, gradient")
        add_policy_loss(f"{kind}, ratios above clip_ratio_c", kind, MODES[0], **bounds)
    covariances = PolicyLossConfig(
        clip_cov_ratio=1.0,
        clip_cov_lb=options["cov_low"],
        clip_cov_ub=options["cov_high"],
        kl_cov_ratio=options["cov_ratio"],
        ppo_kl_coef=options["cov_kl_coef"],
    )
    for kind in ("clip_cov", "kl_cov"):
        for suffix, old in (("", "old_logprobs"), (", equal log-ratios", "shifted_logprobs")):
            add_policy_loss(f"{kind}{suffix}", kind, MODES[0], old=old, policy_loss=covariances)
    log_ratio = case["logprobs"] - case["wide_logprobs"]
    add_policy_loss(
        "vanilla, tokens rejected",
        "vanilla",
        MODES[0],
        mask=compute_rollout_rejection_mask(log_ratio, mask, "token_k1", "0.5_2.0")[0],
        importance=log_ratio.exp(),
    )
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    answers.add_with_gradient(
        "reinforce, importance weights",
        lambda logprobs: core.compute_policy_loss_reinforce(
            case["old_logprobs"],
            logprobs,
            case["advantages"],
            mask,
            MODES[1],
            config,
            case["importance"],
        ),
        case["logprobs"],
    )


def averages(answers, case, options):
    for mode in MODES:
        answers.add_with_gradient(
            f"aggregation: {mode}",
            lambda x, mode=mode: core.agg_loss(
                x, case["absent_mask"], mode, loss_scale_factor=options["scale"]
            ),
            case["losses"],
        )
    halves, tokens = (slice(0, None, 2), slice(1, None, 2)), case["mask"].sum()
    answers.add_with_gradient(
        "token-mean in two micro-batches, global count",
        lambda x: sum(
            core.agg_loss(x[half], case["mask"][half], MODES[0], batch_num_tokens=tokens)
            for half in halves
        ),
        case["losses"],
    )
    answers.add_with_gradient(
        "token-mean in two micro-batches, count of each",
        lambda x: sum(core.agg_loss(x[half], case["mask"][half], MODES[0]) for half in halves) / 2,
        case["losses"],
    )
    (share,) = answers.add_with_gradient(
        "value loss",
        lambda values: core.compute_value_loss(
            values, case["returns"], case["old_values"], case["mask"], options["value_clip"]
        ),
        case["values"],
    )
    answers.add("value loss: share clipped", share)


def divergences(answers, case, options):
    mask = case["mask"]
    for ours, theirs in (
        ("k1", "kl"),
        ("abs", "abs"),
        ("k2", "mse"),
        ("k3", "low_var_kl"),
        ("k3+", "low_var_kl+"),
    ):
        for suffix, reference in (("", "ref_logprobs"), (", log-ratios beyond 20", "far_logprobs")):
            answers.add_with_gradient(
                f"KL {ours}{suffix}",
                lambda x, theirs=theirs, reference=reference: (
                    mask * core.kl_penalty(x, case[reference], theirs)
                ),
                case["logprobs"],
                case["cotangents"],
            )
    controller, path = (
        core.AdaptiveKLController(options["kl_coef"], options["kl_target"], options["kl_horizon"]),
        [],
    )
    for current in case["kls"].tolist():
        controller.update(current, len(mask))
        path.append(controller.value)
    answers.add("adaptive KL coefficient", path)
    for level in ("token", "sequence"):
        for suffix, old in (("", "wide_logprobs"), (", log-ratios beyond 20", "far_logprobs")):
            answers.add(
                f"importance weights, {level}{suffix}",
                compute_rollout_correction_weights(
                    case["logprobs"] - case[old], mask, level, options["threshold"]
                )[0],
            )
    bounds = f"{options['lower']}_{options['threshold']}"
    for level in ("token", "sequence"):
        answers.add(
            f"importance weights, {level}, masked (IcePop)",
            compute_rollout_correction_weights(
                case["logprobs"] - case["old_logprobs"], mask, level, bounds
            )[0],
        )
    answers.add(
        "importance weights, effective sample size",
        compute_rollout_correction_weights(
            case["logprobs"] - case["wide_logprobs"], mask, "token", options["threshold"]
        )[1]["rollout_is_eff_sample_size"],
    )
    for kind, old in (
        ("token_k1", "wide_logprobs"),
        ("seq_sum_k1", "old_logprobs"),
        ("seq_mean_k1", "valid_logprobs"),
    ):
        answers.add(
            f"rejection, {kind}",
            compute_rollout_rejection_mask(case["logprobs"] - case[old], mask, kind, bounds)[0],
        )
    batch = {
        "rollout_log_probs": case["wide_logprobs"],
        "old_log_probs": case["logprobs"],
        "response_mask": mask,
        "responses": case["targets"],
    }
    metrics = calculate_debug_metrics(DataProto(batch=TensorDict(batch, batch_size=len(mask))))
    answers.add("sampler and trainer: mean |p - q|", metrics["training/rollout_probs_diff_mean"])
    answers.add("sampler and trainer: max |p - q|", metrics["training/rollout_probs_diff_max"])
    answers.add(
        "sampler and trainer: correlation", metrics["training/rollout_actor_probs_pearson_corr"]
    )


def logits(answers, case, options):
    def compute_logits(hidden):
        return hidden @ case["unembedding"].T / options["temperature"]

    answers.add_with_gradient(
        "log-prob",
        lambda x: (
            case["mask"] * functional.logprobs_from_logits(compute_logits(x), case["targets"])
        ),
        case["hidden"],
        case["cotangents"],
    )
    answers.add_with_gradient(
        "entropy",
        lambda x: case["mask"] * functional.entropy_from_logits(compute_logits(x)),
        case["hidden"],
        case["cotangents"],
    )


def answer(case, options):
    answers, case = Answers(), tensors(case)
    for add_answers in (advantages, policy_losses, averages, divergences, logits):
        add_answers(answers, case, options)
    return answers


if __name__ == "__main__":
    serve(answer, ("verl", "torch", "tensordict"))
