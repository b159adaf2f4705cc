"""Worker of ppo_step.py: TRL's PPOTrainer. Arguments: the settings of ppo_step.py as JSON.

Runs without gradient checkpointing. TRL supports only a reward model. `train_rows` is the rows of a
training micro-batch; `forward_rows` is the rows that are generated and scored at a time.
"""

import json
import os
import sys
import tempfile

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import harness
import torch
import workload
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from transformers.trainer_callback import PrinterCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer
from turnstile import Turnstile

PROMPTS = 1024
MATRICES = r".*\.(self_attn|mlp)\.\w+_proj"


class Door(TrainerCallback):
    """Callback that pauses the trainer between steps and counts response tokens."""

    def __init__(self, turnstile: Turnstile):
        self.turnstile, self.tokens = turnstile, 0

    def on_train_begin(self, *args, **kwargs):
        self.turnstile.step_done()

    def on_step_end(self, *args, **kwargs):
        figures = {"tokens": self.tokens}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.turnstile.step_done(figures)

    def counting(self, generate):
        def generate_and_count(model, queries, *args):
            responses, logits = generate(model, queries, *args)
            self.tokens = int((responses[:, queries.shape[1] :] != workload.PAD).sum())
            return responses, logits

        return generate_and_count


def time_phases(turnstile: Turnstile, trainer: PPOTrainer, forward) -> None:
    update, reference = turnstile.phase("update", forward), turnstile.phase("reference", forward)
    value, reward = (
        turnstile.phase("values", ppo_trainer.get_reward),
        turnstile.phase("reward", ppo_trainer.get_reward),
    )
    ppo_trainer.forward = lambda *args: (update if torch.is_grad_enabled() else reference)(*args)
    ppo_trainer.get_reward = lambda model, *args: (
        reward if model is trainer.reward_model else value
    )(model, *args)
    trainer.accelerator.backward = turnstile.phase("update", trainer.accelerator.backward)
    trainer.optimizer.step = turnstile.phase("update", trainer.optimizer.step)


def add_adapters(model: torch.nn.Module, rank: int) -> None:
    """Freeze the model and add adapters to all matrices of its layers, in place."""
    import peft

    peft.inject_adapter_in_model(
        peft.LoraConfig(r=rank, lora_alpha=16, target_modules=MATRICES), model
    )


def make_trainer(settings: dict, folder: str, door: Door) -> PPOTrainer:
    tokenizer = AutoTokenizer.from_pretrained(settings["model"] + "/tokenizer")
    prompts = Dataset.from_list(
        [{"input_ids": prompt.tolist()} for prompt in workload.prompts(PROMPTS, settings["prompt"])]
    )
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
        for _ in range(2)
    )
    value, reward = (
        AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
        for path in (settings["model"], settings["reward_model"])
    )
    if settings["lora"]:
        add_adapters(policy, settings["lora"])
        add_adapters(value, settings["lora"])
        value.score.requires_grad_(True)
    train_rows = settings["micro_batches"]["train_rows"]
    options = PPOConfig(
        output_dir=folder,
        use_cpu=settings["platform"] == "cpu",
        bf16=settings["dtype"] == "bfloat16",
        gradient_checkpointing=False,
        per_device_train_batch_size=train_rows,
        gradient_accumulation_steps=settings["samples"] // train_rows,
        num_mini_batches=1,
        num_ppo_epochs=1,
        local_rollout_forward_batch_size=settings["micro_batches"]["forward_rows"],
        total_episodes=settings["samples"] * 10**6,
        response_length=settings["response"],
        stop_token="eos",
        temperature=1.0,
        learning_rate=settings["lr"],
        kl_coef=settings["kl_coef"],
        gamma=1.0,
        lam=settings["lam"],
        cliprange=0.2,
        cliprange_value=0.2,
        num_sample_generations=0,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = PPOTrainer(
        options,
        tokenizer,
        policy,
        reference,
        reward,
        prompts,
        value,
        eval_dataset=prompts.select(range(8)),
        callbacks=[door],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def main(settings: dict) -> None:
    torch.set_num_threads(harness.THREADS)
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, where bf16 does not apply
    turnstile = Turnstile(
        ("trl", "torch", "transformers", "accelerate"),
        lambda work: torch.cuda.synchronize() if settings["platform"] == "cuda" else None,
    )
    door, forward = Door(turnstile), ppo_trainer.forward
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(settings, folder, door)
        ppo_trainer.batch_generation = turnstile.phase(
            "rollout", door.counting(ppo_trainer.batch_generation)
        )
        ppo_trainer.gc.collect = turnstile.phase("gc.collect", ppo_trainer.gc.collect)
        time_phases(turnstile, trainer, forward)
        trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
