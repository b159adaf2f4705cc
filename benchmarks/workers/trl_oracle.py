"""Worker of oracles.py: TRL's own functions. Arguments: the settings of oracles.py as JSON.

Most of its computations are inside its trainers' methods. These methods run unchanged on a stand-in
for the trainer whose models read their outputs from a table.
"""

import contextlib
import os
import types
import unittest.mock

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import torch
from serve_oracle import serve
from torch_oracle import Answers, tensors
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.experimental.gspo_token.grpo_trainer import GRPOTrainer as GSPOTokenTrainer
from trl.experimental.ppo import ppo_trainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

WHITEN = ppo_trainer.masked_whiten
PAD = 0


def functions(answers, case, options):
    answers.add("whitening", WHITEN(case["losses"], case["mask"]) * case["mask"])
    answers.add(
        "whitening without shift",
        WHITEN(case["losses"], case["mask"], shift_mean=False) * case["mask"],
    )

    def compute_logits(hidden):
        return hidden @ case["unembedding"].T / options["temperature"]

    answers.add_with_gradient(
        "log-prob",
        lambda x: case["mask"] * selective_log_softmax(compute_logits(x), case["targets"]),
        case["hidden"],
        case["cotangents"],
    )
    answers.add_with_gradient(
        "entropy",
        lambda x: case["mask"] * entropy_from_logits(compute_logits(x)),
        case["hidden"],
        case["cotangents"],
    )
    answers.add_with_gradient(
        "GKDTrainer: KL of the whole vocabulary",
        lambda x: (
            case["mask"]
            * GKDTrainer.generalized_jsd_loss(
                compute_logits(x), compute_logits(case["ref_hidden"]), beta=1, reduction="none"
            ).sum(-1)
        ),
        case["hidden"],
        case["cotangents"],
    )
    trainer = make_stand_in(args=types.SimpleNamespace(center_rewards_coefficient=0.01))

    def preference_loss(chosen):
        logits = torch.cat([chosen, case["response_advantages"]])[:, None]
        model = unittest.mock.Mock(return_value=types.SimpleNamespace(logits=logits))
        return RewardTrainer.compute_loss(trainer, model, {"attention_mask": case["mask"]})

    answers.add_with_gradient("RewardTrainer: loss, centred", preference_loss, case["scores"])
    punish = get_soft_overlong_punishment(12, 5)
    answers.add(
        "soft overlong punishment", punish([[1] * length for length in case["mask"].sum(1)])
    )


class PPO:
    """One step of PPOTrainer.train on tables. A token's id is its row number, starting at 1.

    Attributes:
      raw: Advantages before whitening.
      returns: Targets of the value function.
      losses: Loss of each micro-batch.
      logprobs, values: Tables that the losses are differentiated with respect to.
    """

    def __init__(
        self,
        case,
        options,
        old="old_logprobs",
        kl_coef=0.0,
        estimator="k1",
        vf_coef=0.0,
        micro_batches=1,
        gamma=None,
        **changes,
    ):
        case = case | changes
        self.case, self.losses, self.log_softmax_calls = case, [], 0
        self.logprobs, self.values = (
            case[name].clone().requires_grad_() for name in ("logprobs", "values")
        )
        self.old = case[old]
        B, self.T = case["mask"].shape
        rows = torch.arange(1, B + 1)[:, None]
        self.prompts_and_responses = torch.cat([rows, torch.where(case["mask"] > 0, rows, PAD)], 1)
        args = types.SimpleNamespace(
            num_ppo_epochs=1,
            num_mini_batches=1,
            gradient_accumulation_steps=micro_batches,
            num_total_batches=1,
            batch_size=B,
            local_batch_size=B,
            local_mini_batch_size=B,
            per_device_train_batch_size=B // micro_batches,
            total_episodes=B,
            local_rollout_forward_batch_size=B,
            response_length=self.T,
            temperature=1.0,
            logging_steps=None,
            eval_steps=None,
            save_steps=None,
            missing_eos_penalty=None,
            kl_estimator=estimator,
            kl_coef=kl_coef,
            whiten_rewards=False,
            gamma=options["gamma"] if gamma is None else gamma,
            lam=options["lam"],
            vf_coef=vf_coef,
            cliprange=options["clip_low"],
            cliprange_value=options["value_clip"],
            num_sample_generations=0,
            ds3_gather_for_generation=False,
        )
        trainer = unittest.mock.MagicMock(
            args=args,
            dataloader=[{"input_ids": rows}],
            stop_token_id=None,
            train_dataset_len=B,
            reward_model="reward",
            is_deepspeed_enabled=False,
        )
        trainer.accelerator.device, trainer.accelerator.backward = "cpu", self.backward
        trainer.processing_class.pad_token_id, trainer.processing_class.eos_token_id = PAD, -1
        trainer.callback_handler.on_step_end.return_value.should_save = False
        trainer.callback_handler.on_train_end.return_value.should_save = False
        with unittest.mock.patch.multiple(
            ppo_trainer,
            batch_generation=self.generate,
            forward=self.forward,
            get_reward=self.reward,
            selective_log_softmax=self.log_softmax,
            masked_whiten=self.whiten,
            unwrap_model_for_generation=lambda *args, **kwargs: contextlib.nullcontext(
                unittest.mock.MagicMock()
            ),
        ):
            ppo_trainer.PPOTrainer.train(trainer)

    def generate(self, *args):
        return self.prompts_and_responses, torch.zeros(*self.case["mask"].shape, 2)

    def forward(self, model, tokens, pad):
        """Return unused logits; in the update, which is differentiated, also the values."""
        output = types.SimpleNamespace(logits=torch.zeros(*tokens.shape, 2))
        return (
            (output, as_scores(self.values[tokens[:, 0] - 1]))
            if torch.is_grad_enabled()
            else output
        )

    def reward(self, model, *args):
        return as_scores(self.case["old_values"]), self.case["scores"], None

    def log_softmax(self, logits, responses):
        """Return log-probs: sampler first, then reference, then policy per micro-batch."""
        self.log_softmax_calls += 1
        if self.log_softmax_calls <= 2:
            return (self.old if self.log_softmax_calls == 1 else self.case["ref_logprobs"]).clone()
        return self.logprobs[responses[:, 0] - 1]

    def whiten(self, values, mask):
        """Record the input and return the advantages shared by all sides."""
        self.raw = values
        return self.case["advantages"].clone()

    def backward(self, loss):
        self.losses.append(loss.detach())
        loss.backward()


def as_scores(values):
    """Reshape [B, T] to the [B, T + 1, 1] output of a value head with a one-token prompt."""
    return torch.nn.functional.pad(values, (0, 1))[..., None]


def ppo(answers, case, options):
    mask = case["mask"]

    def zero_padding(x):
        return torch.where(mask > 0, x, 0.0)

    step = PPO(case, options, kl_coef=options["kl_coef"])
    answers.add("PPOTrainer: advantages before whitening", zero_padding(step.raw))
    answers.add("PPOTrainer: returns", zero_padding(step.raw + case["old_values"]))
    step = PPO(case, options, kl_coef=options["kl_coef"], mask=torch.ones_like(mask))
    answers.add("PPOTrainer: advantages before whitening, responses that fill the row", step.raw)
    zeros = {name: torch.zeros_like(case[name]) for name in ("scores", "old_values")}
    kl_only = zeros | {"gamma": 0.0, "kl_coef": -1.0}  # then an advantage equals the token's KL
    for kind in ("k1", "k3"):
        answers.add(
            f"PPOTrainer: KL {kind} in the reward",
            zero_padding(PPO(case, options, estimator=kind, **kl_only).raw),
        )
    kl_only_far = kl_only | {"ref_logprobs": case["far_logprobs"], "old": "logprobs"}
    answers.add(
        "PPOTrainer: KL k3 in the reward, log-ratios beyond 20",
        zero_padding(PPO(case, options, estimator="k3", **kl_only_far).raw),
    )
    for name, changes in (("", {}), (", log-ratios beyond 20", {"old": "far_logprobs"})):
        step = PPO(case, options, **changes)
        answers.add(f"PPOTrainer: policy loss{name}", step.losses[0])
        answers.add(f"PPOTrainer: policy loss{name}, gradient", zero_padding(step.logprobs.grad))
    # Micro-batches are slices of a permutation: here the even rows, then the odd ones.
    evens_first = torch.cat([torch.arange(0, len(mask), 2), torch.arange(1, len(mask), 2)]).numpy()
    with unittest.mock.patch.object(ppo_trainer.np.random, "permutation", lambda n: evens_first):
        step = PPO(case, options, micro_batches=2)
    answers.add("PPOTrainer: policy loss, two micro-batches", sum(step.losses) / 2)
    answers.add(
        "PPOTrainer: policy loss, two micro-batches, gradient", zero_padding(step.logprobs.grad) / 2
    )
    step = PPO(
        case,
        options,
        kl_coef=options["kl_coef"],
        vf_coef=1.0,
        advantages=torch.zeros_like(case["advantages"]),
    )
    answers.add("PPOTrainer: value loss", step.losses[0])
    answers.add("PPOTrainer: value loss, gradient", step.values.grad)


def make_stand_in(**attributes):
    """Return a stand-in for a trainer whose model is in training mode and metrics are unused."""
    trainer = unittest.mock.MagicMock(**attributes)
    trainer.accelerator.gather = trainer.accelerator.gather_for_metrics = lambda x: x
    trainer.accelerator.reduce = lambda x, reduction: x
    (
        trainer.accelerator.num_processes,
        trainer.accelerator.process_index,
        trainer.accelerator.device,
    ) = 1, 0, "cpu"
    return trainer


def grpo_losses(answers, case, options):
    case = case | {"no_advantages": torch.zeros_like(case["advantages"])}

    def add_policy_loss(
        name,
        kind,
        advantages="advantages",
        old="old_logprobs",
        ref="ref_logprobs",
        mask="mask",
        beta=0.0,
        level="token",
        delta=None,
        importance=False,
        low=options["clip_low"],
        high=options["clip_high"],
        method=GRPOTrainer._compute_loss,
    ):
        mask = case[mask]
        args = types.SimpleNamespace(
            delta=delta,
            use_bias_correction_kl=False,
            steps_per_generation=1,
            sapo_temperature_pos=options["tau_pos"],
            sapo_temperature_neg=options["tau_neg"],
        )
        inputs = {
            "prompt_ids": mask,
            "prompt_mask": mask,
            "completion_ids": mask,
            "completion_mask": mask,
            "advantages": case[advantages],
            "old_per_token_logps": case[old],
            "ref_per_token_logps": case[ref],
            "num_items_in_batch": mask.sum(),
            "importance_sampling_ratio": case["importance"],
        }

        def loss(logprobs):
            trainer = make_stand_in(
                args=args,
                loss_type=kind,
                importance_sampling_level=level,
                epsilon_low=low,
                epsilon_high=high,
                beta=beta,
                top_entropy_quantile=1.0,
                off_policy_mask_threshold=None,
                use_vllm=importance,
                vllm_importance_sampling_correction=importance,
                aux_loss_enabled=False,
                current_gradient_accumulation_steps=1,
                _entropy_bonus_enabled=False,
                max_completion_length=mask.shape[1],
            )
            trainer._get_per_token_logps_and_entropies.return_value = (
                logprobs,
                torch.zeros(mask.shape),
                None,
            )
            return method(trainer, None, inputs)

        answers.add_with_gradient(name, loss, case["logprobs"])

    for kind in ("grpo", "bnpo", "dapo", "dr_grpo", "luspo"):
        add_policy_loss(f"GRPOTrainer: {kind}", kind)
    add_policy_loss(
        "GRPOTrainer: dapo, delta", "dapo", old="wide_logprobs", delta=options["dual_clip"]
    )
    add_policy_loss("GRPOTrainer: dapo, log-ratios beyond 20", "dapo", old="far_logprobs")
    add_policy_loss("GRPOTrainer: grpo, absent responses", "grpo", mask="absent_mask")
    add_policy_loss("GRPOTrainer: dapo, importance weights", "dapo", importance=True)
    add_policy_loss(
        "GRPOTrainer: sequence weights (GSPO)",
        "grpo",
        "response_advantages",
        level="sequence",
        low=0.1,
        high=0.15,
    )
    add_policy_loss(
        "GRPOTrainer: sequence_token weights (GSPO-token)",
        "dapo",
        level="sequence_token",
        method=GSPOTokenTrainer._compute_loss,
    )
    add_policy_loss("GRPOTrainer: cispo", "cispo", high=1 + options["clip_high"])
    add_policy_loss("GRPOTrainer: KL in the loss", "dapo", "no_advantages", beta=1.0)
    add_policy_loss(
        "GRPOTrainer: KL in the loss, log-ratios beyond 20",
        "dapo",
        "no_advantages",
        beta=1.0,
        ref="far_logprobs",
    )
    add_policy_loss("GRPOTrainer: sapo", "sapo")
    add_policy_loss("GMPOTrainer", "grpo", "response_advantages", method=GMPOTrainer._compute_loss)


def rollouts(answers, case, options):
    """Record advantages and importance weights as the trainers compute them from samples."""
    mask, B = case["mask"], len(case["mask"])
    lengths = mask.sum(1).tolist()

    def generate_and_score(
        trainer_class, generated, scores=case["scores"][:, None], weights=(1.0,), **attributes
    ):
        args = types.SimpleNamespace(
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            per_device_train_batch_size=B,
            gradient_checkpointing_kwargs=None,
        )
        trainer = make_stand_in(
            args=args,
            environment_factories=None,
            environments=None,
            tools=None,
            pad_to_multiple_of=None,
            num_iterations=1,
            mask_truncated_completions=False,
            num_generations=options["n"],
            reward_weights=torch.tensor(weights),
            beta=0.0,
            reward_funcs=weights,
            reward_func_names=[f"score {k}" for k in range(len(weights))],
            reward_clip_range=None,
            normalize_advantages=False,
            **{"multi_objective_aggregation": "sum_then_normalize"} | attributes,
        )
        trainer._tokenizer.pad_token_id = PAD
        trainer._generate.return_value = generated
        trainer._calculate_rewards.return_value = scores
        trainer._get_per_token_logps_and_entropies.return_value = case["logprobs"], None, None
        return trainer_class._generate_and_score_completions(
            trainer, [{"prompt": "p"} for _ in range(B)]
        )

    tokens = [[1] * length for length in lengths]
    sampled = [
        row[:length].tolist() for row, length in zip(case["wide_logprobs"], lengths, strict=True)
    ]
    ids = [[1]] * B, tokens
    for name, scale in (("", "group"), (", scale_rewards none", "none")):
        batch = generate_and_score(
            GRPOTrainer,
            (*ids, None, ["c"] * B, None, {}, None, None),
            scale_rewards=scale,
            use_vllm=False,
        )
        answers.add(f"GRPOTrainer: advantages{name}", batch["advantages"])
    batch = generate_and_score(
        GRPOTrainer,
        (*ids, None, ["c"] * B, None, {}, None, None),
        scores=case["components"],
        weights=(1.0, 2.0),
        use_vllm=False,
        multi_objective_aggregation="normalize_then_sum",
    )
    answers.add("GRPOTrainer: advantages, normalize_then_sum (GDPO)", batch["advantages"])
    for level in ("token", "sequence"):
        for suffix, mode, lower in (
            ("", "truncate", None),
            (", truncated at both ends", "truncate", options["lower"]),
            (", masked", "mask", options["lower"]),
        ):
            batch = generate_and_score(
                GRPOTrainer,
                (*ids, None, ["c"] * B, sampled, {}, None, None),
                scale_rewards="group",
                use_vllm=True,
                vllm_importance_sampling_correction=True,
                vllm_importance_sampling_mode=f"{level}_{mode}",
                vllm_importance_sampling_clip_min=lower,
                vllm_importance_sampling_clip_max=options["threshold"],
            )
            answers.add(
                f"GRPOTrainer: importance weights, {level}{suffix}",
                batch["importance_sampling_ratio"] * mask,
            )
    answers.add(
        "RLOOTrainer: advantages", generate_and_score(RLOOTrainer, (*ids, ["c"] * B))["advantages"]
    )


def answer(case, options):
    answers, case = Answers(), tensors(case)
    for add_answers in (functions, ppo, grpo_losses, rollouts):
        add_answers(answers, case, options)
    return answers


if __name__ == "__main__":
    serve(answer, ("trl", "torch", "transformers"))
