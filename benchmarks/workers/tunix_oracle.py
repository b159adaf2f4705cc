"""Worker of oracles.py: tunix's own functions. Arguments: the settings of oracles.py as JSON.

Its losses call a model for log-probs, logits and values; a table replaces the model here.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from serve_oracle import serve
from tunix.rl import algo_core, common
from tunix.rl.grpo import dapo_learner

MODES = (
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-scale",
    "seq-mean-token-sum",
)


class Answers(dict):
    """Arrays to compare, by row name."""

    def add_with_gradient(self, name, function, at, cotangents=None):
        values, pull = jax.vjp(function, at)
        self[name] = values
        cotangents = (
            jnp.ones_like(values) if cotangents is None else cotangents.astype(values.dtype)
        )
        (self[f"{name}, gradient"],) = pull(cotangents)


def advantages(answers, case, options):
    mask, n = case["mask"], options["n"]
    whitened, returns = algo_core.compute_gae_advantages(
        case["rewards"], case["old_values"], mask, options["gamma"], options["lam"]
    )
    answers["GAE: returns"], answers["GAE: advantages"] = returns * mask, whitened * mask
    answers["whitening"] = algo_core.masked_whiten(case["losses"], mask) * mask
    answers["Dr. GRPO: advantages"] = algo_core.compute_drgrpo_advantages(case["scores"], n)
    answers["RLOO: advantages"] = algo_core.compute_rloo_advantages(case["scores"], n)


def policy_losses(answers, case, options):
    mask = case["mask"]

    def add_policy_loss(
        name,
        function,
        advantages="advantages",
        old="old_logprobs",
        dual=options["dual_clip"],
        importance=None,
        **config,
    ):
        example = types.SimpleNamespace(
            prompt_ids=None,
            completion_ids=case["targets"],
            completion_mask=mask,
            advantages=case[advantages],
            old_per_token_logps=case[old],
            ref_per_token_logps=None,
            sampler_is_weights=importance,
        )
        config = types.SimpleNamespace(
            epsilon=options["clip_low"],
            epsilon_low=options["clip_low"],
            temperature=1.0,
            epsilon_high=options["clip_high"],
            epsilon_c=dual,
            entropy_coef=None,
            beta=None,
            **config,
        )

        def loss(logprobs):
            common.compute_per_token_logps = lambda *args, **kwargs: (
                logprobs,
                jnp.zeros((*mask.shape, 2)),
            )
            return function(nnx.Module(), example, config, 0, 0)[0]

        answers.add_with_gradient(name, loss, case["logprobs"])

    add_policy_loss("PPO: policy loss", algo_core.ppo_policy_loss_fn, old="wide_logprobs")
    add_policy_loss(
        "PPO: policy loss, log-ratios beyond 20",
        algo_core.ppo_policy_loss_fn,
        old="far_logprobs",
        dual=None,
    )
    for mode in MODES:
        add_policy_loss(
            f"GRPO: policy loss, {mode}",
            algo_core.grpo_loss_fn,
            "response_advantages",
            loss_algo="grpo",
            loss_agg_mode=mode,
        )
    add_policy_loss(
        "GRPO: policy loss, importance weights",
        algo_core.grpo_loss_fn,
        importance=case["importance"],
        loss_algo="grpo",
        loss_agg_mode=MODES[0],
    )
    add_policy_loss(
        "GRPO: policy loss, log-ratios beyond 20",
        algo_core.grpo_loss_fn,
        old="far_logprobs",
        dual=None,
        loss_algo="grpo",
        loss_agg_mode=MODES[0],
    )
    add_policy_loss(
        "GRPO: gspo-token",
        algo_core.grpo_loss_fn,
        "response_advantages",
        "wide_logprobs",
        loss_algo="gspo-token",
        loss_agg_mode=MODES[1],
    )


def value_loss(answers, case, options):
    example = types.SimpleNamespace(
        prompt_ids=None,
        completion_ids=case["targets"],
        completion_mask=case["mask"],
        old_values=case["old_values"],
        returns=case["returns"],
    )

    def loss(values):
        common.compute_score = lambda *args, **kwargs: jnp.pad(values, ((0, 0), (0, 1)))
        return algo_core.ppo_value_loss_fn(nnx.Module(), example, options["value_clip"], 0, 0)[0]

    answers.add_with_gradient("PPO: value loss", loss, case["values"])


def aggregations_divergences_and_logits(answers, case, options):
    for mode in (*MODES, "sequence-mean-token-sum-norm"):
        norm = {"norm": options["scale"]} if mode == MODES[2] else {}
        if mode == "sequence-mean-token-sum-norm":
            # tunix divides a sum, not a mean.
            norm = {"norm": options["scale"] * (case["absent_mask"].sum(1) > 0).sum()}
        answers.add_with_gradient(
            f"aggregation: {mode}",
            lambda x, mode=mode, norm=norm: common.aggregate_loss(
                x, case["absent_mask"], mode, **norm
            ),
            case["losses"],
        )
    for name, method, reference in (
        ("k1", "kl", "ref_logprobs"),
        ("k2", "mse_kl", "ref_logprobs"),
        ("k3", "low_var_kl", "ref_logprobs"),
        ("k3, log-ratios beyond 20", "low_var_kl", "far_logprobs"),
    ):
        answers.add_with_gradient(
            f"KL {name}",
            lambda x, method=method, reference=reference: (
                case["mask"] * common.compute_kl_divergence(x, case[reference], method)
            ),
            case["logprobs"],
            case["cotangents"],
        )

    def compute_logits(hidden):
        return hidden @ case["unembedding"].T / options["temperature"]

    answers.add_with_gradient(
        "log-prob",
        lambda x: case["mask"] * common.selective_log_softmax(compute_logits(x), case["targets"]),
        case["hidden"],
        case["cotangents"],
    )
    answers.add_with_gradient(
        "entropy",
        lambda x: case["mask"] * algo_core.compute_entropy_from_logits(compute_logits(x)),
        case["hidden"],
        case["cotangents"],
    )


@functools.cache
def compile_answers(options):
    """Compile one function for all cases."""

    def answer_case(case):
        answers = Answers()
        for add_answers in (
            advantages,
            policy_losses,
            value_loss,
            aggregations_divergences_and_logits,
        ):
            add_answers(answers, case, dict(options))
        return dict(answers)

    return jax.jit(answer_case)


def answer(case, options):
    answers = compile_answers(tuple(options.items()))(case)
    answers["GRPO: advantages"] = algo_core.compute_advantages(
        case["scores"], options["n"]
    )  # numpy's
    answers["DAPO: reward shaping"] = dapo_learner.reward_shaping(
        prompts=[],
        completions=["a " * length for length in case["mask"].sum(1)],
        mode=None,
        overlong_buffer={
            "overlong_buffer_length": 5,
            "overlong_buffer_penalty": 1.0,
            "max_response_length": 12,
        },
    )
    return {name: np.asarray(array) for name, array in answers.items()}


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    serve(answer, ("google-tunix", "jax", "flax"))
