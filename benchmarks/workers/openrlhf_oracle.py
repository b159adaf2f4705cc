"""Worker of oracles.py: OpenRLHF's own functions. Arguments: the settings of oracles.py as JSON.

Its packages import everything that training on GPUs needs, but its losses use none of it, so these
imports are replaced by empty modules.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
import unittest.mock
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # otherwise its entropy would be compiled

import torch
from serve_oracle import serve
from torch_oracle import Answers, tensors


def replace_unused_imports() -> None:
    """Replace unused imports, and OpenRLHF's packages by ones without their __init__.py.

    The __init__.py files import the rest.
    """
    root = Path(importlib.util.find_spec("openrlhf").origin).parent
    for name in ("models", "utils", "trainer"):
        package = sys.modules[f"openrlhf.{name}"] = types.ModuleType(f"openrlhf.{name}")
        package.__path__ = [str(root / name)]
    sys.modules["deepspeed"] = types.ModuleType("deepspeed")
    # transformers looks for a spec.
    sys.modules["deepspeed"].__spec__ = importlib.machinery.ModuleSpec("deepspeed", None)
    for name in ("openrlhf.trainer.ray", "openrlhf.trainer.ray.launcher"):
        sys.modules[name] = unittest.mock.MagicMock()


replace_unused_imports()
losses, utils = (importlib.import_module(f"openrlhf.models.{name}") for name in ("loss", "utils"))
experience_maker, kl_controller, length_penalty = (
    importlib.import_module(f"openrlhf.trainer.ppo_utils.{name}")
    for name in ("experience_maker", "kl_controller", "length_penalty")
)


def policy_losses(answers, case, options):
    mask = case["mask"]

    def add_policy_loss(
        name,
        advantages="advantages",
        old="old_logprobs",
        low=options["clip_low"],
        high=options["clip_high"],
        sampled="wide_logprobs",
        **settings,
    ):
        A = (
            case[advantages]
            if advantages == "advantages"
            else case[advantages][:, None].expand(mask.shape)
        )
        answers.add_with_gradient(
            name,
            lambda logprobs: losses.PolicyLoss(low, high, **settings)(
                logprobs, case[old], A, mask, case[sampled]
            ),
            case["logprobs"],
        )

    add_policy_loss(
        "PPO: policy loss, token level", old="wide_logprobs", dual_clip=options["dual_clip"]
    )
    add_policy_loss("PPO: policy loss, sample level", token_level_loss=False)
    add_policy_loss("PPO: policy loss, log-ratios beyond 20", old="far_logprobs")
    add_policy_loss(
        "PPO: policy loss, importance weights clipped",
        is_correction_level="token",
        is_correction_mode="clip",
        is_correction_threshold=(0, options["threshold"]),
    )
    for suffix, level in (
        ("importance weights masked", "token"),
        ("responses masked by geometric mean", "seq"),
    ):
        add_policy_loss(
            f"PPO: policy loss, {suffix}",
            sampled="valid_logprobs",
            is_correction_level=level,
            is_correction_mode="mask",
            is_correction_threshold=(options["lower"], options["threshold"]),
        )
    add_policy_loss("gspo", "response_advantages", low=0.1, high=0.15, policy_loss_type="gspo")
    answers.add_with_gradient(
        "preferences",
        lambda scores: losses.PairWiseLoss()(scores, case["response_advantages"]),
        case["scores"],
    )
    for name, clip, token_level in (
        ("value loss", options["value_clip"], True),
        ("value loss, not clipped, sample level", None, False),
    ):
        answers.add_with_gradient(
            name,
            lambda values, clip=clip, token_level=token_level: losses.ValueLoss(clip, token_level)(
                values, case["old_values"], case["returns"], mask
            ),
            case["values"],
        )
    for name, token_level in (("token level", True), ("sample level", False)):
        answers.add_with_gradient(
            f"aggregation: {name}",
            lambda x, token_level=token_level: losses.aggregate_loss(
                x, case["absent_mask"], token_level
            ),
            case["losses"],
        )


def divergences(answers, case, options):
    for kind in ("k1", "k2", "k3", "k3+"):
        for suffix, reference in (("", "ref_logprobs"), (", log-ratios beyond 20", "far_logprobs")):
            answers.add_with_gradient(
                f"KL {kind}{suffix}",
                lambda x, kind=kind, reference=reference: (
                    case["mask"]
                    * (
                        utils.compute_approx_kl(
                            x,
                            case[reference],
                            kl_estimator=kind.strip("+"),
                            unbiased_gradient="+" in kind,
                        )
                    )
                ),
                case["logprobs"],
                case["cotangents"],
            )
    controller, path = (
        kl_controller.AdaptiveKLController(
            options["kl_coef"], options["kl_target"], options["kl_horizon"]
        ),
        [],
    )
    for current in case["kls"].tolist():
        controller.update(current, len(case["mask"]))
        path.append(controller.value)
    answers.add("adaptive KL coefficient", path)

    def compute_logits(hidden):
        return hidden @ case["unembedding"].T / options["temperature"]

    answers.add_with_gradient(
        "log-prob",
        lambda x: case["mask"] * utils.log_probs_from_logits(compute_logits(x), case["targets"]),
        case["hidden"],
        case["cotangents"],
    )
    answers.add_with_gradient(
        "entropy",
        lambda x: case["mask"] * utils.compute_entropy(compute_logits(x)),
        case["hidden"],
        case["cotangents"],
    )


def advantages(answers, case, options):
    mask, space = case["mask"], types.SimpleNamespace

    def compute_advantages(estimator):
        experience = space(
            rewards=case["scores"].clone(),
            index=list(range(len(mask))),
            kl=torch.zeros(mask.shape),
            info={},
            action_mask=mask,
            values=case["old_values"],
        )
        gamma = options["gamma"] if estimator in ("gae", "reinforce") else 1.0
        settings = space(estimator=estimator, gamma=gamma, lambd=options["lam"], no_std_norm=False)
        args = space(
            rollout=space(n_samples_per_prompt=options["n"]),
            reward=space(clip_range=None),
            algo=space(advantage=settings),
        )
        maker = experience_maker.RemoteExperienceMaker(
            *[None] * 4, space(value=0.0), space(args=args), None
        )
        (experience_with_advantages,) = maker.compute_advantages_and_returns([experience])
        return (
            experience_with_advantages.advantages * mask,
            experience_with_advantages.returns * mask,
        )

    for estimator in ("reinforce", "reinforce_baseline", "rloo", "dr_grpo", "group_norm"):
        answers.add(f"{estimator}: advantages", compute_advantages(estimator)[0])
    whitened, returns = compute_advantages("gae")
    answers.add("GAE: advantages", whitened)
    answers.add("GAE: returns", returns)
    experience = space(rewards=torch.zeros(len(mask)), response_length=mask.sum(1))
    length_penalty.apply_overlong_penalty([experience], 12, 5, 2.0)
    answers.add("overlong penalty", experience.rewards)


def answer(case, options):
    answers, case = Answers(), tensors(case)
    for add_answers in (policy_losses, divergences, advantages):
        add_answers(answers, case, options)
    return answers


if __name__ == "__main__":
    serve(answer, ("openrlhf", "torch"))
