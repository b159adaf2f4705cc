"""Worker of time_to_sums.py: TRL's GRPOTrainer on sums of two-digit numbers.

Arguments, as JSON: `model`, a folder; `options` of GRPOConfig; the `limits` of the clock. Its only
turn is a run, timed from the reading of the model on. A step is a batch of responses and all
optimizer steps on it. Sums and rule are the package's own, which need no JAX.
"""

import json
import os
import sys
import tempfile

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import harness
import torch
from clock import Clock
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from jax_ppo.demonstration.arithmetic import generate_sum_examples
from jax_ppo.rewards.number_rules import score_gsm8k

RESPONSE = 16  # tokens, as in configs/smollm2_sums.py
HELD_OUT, EVALUATION_BATCH = 128, 64


def score(texts, truths):
    return [score_gsm8k(*pair, "flexible").score for pair in zip(texts, truths, strict=True)]


def reward(completions, ground_truth, **_):
    """Return the rewards of TRL's completions, each a list of messages."""
    return score([message["content"] for (message,) in completions], ground_truth)


def measure_accuracy(model, tokenizer) -> float:
    """Return the share of held-out sums that greedy responses solve."""
    examples, scores = generate_sum_examples(HELD_OUT, "heldout"), []
    texts = [
        tokenizer.apply_chat_template(x.prompt, tokenize=False, add_generation_prompt=True)
        for x in examples
    ]
    model.eval()
    for start in range(0, HELD_OUT, EVALUATION_BATCH):
        batch = slice(start, start + EVALUATION_BATCH)
        inputs = tokenizer(texts[batch], padding=True, return_tensors="pt")
        tokens = model.generate(**inputs, do_sample=False, max_new_tokens=RESPONSE)
        responses = tokens[:, inputs["input_ids"].shape[1] :]
        responses = tokenizer.batch_decode(responses, skip_special_tokens=True)
        scores += score(responses, [example.ground_truth for example in examples[batch]])
    model.train()
    return sum(scores) / HELD_OUT


class Watch(TrainerCallback):
    """Evaluates after every step and ends the run."""

    def __init__(self, clock: Clock, updates: int, tokenizer):
        self.clock, self.updates, self.tokenizer = clock, updates, tokenizer

    def on_step_end(self, args, state, control, model, **_):
        if state.global_step % self.updates == 0:
            control.should_training_stop = self.clock.measure(
                state.global_step // self.updates, lambda: measure_accuracy(model, self.tokenizer)
            )


def run(settings: dict) -> dict:
    clock = Clock(**settings["limits"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    examples = generate_sum_examples(4096)
    prompts = Dataset.from_list(
        [{"prompt": list(x.prompt), "ground_truth": x.ground_truth} for x in examples]
    )
    with tempfile.TemporaryDirectory() as folder:
        options = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
            max_completion_length=RESPONSE,
            temperature=1.0,
            lr_scheduler_type="constant",
            max_steps=10**6,  # the clock ends the run
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            **settings["options"],
        )
        updates = options.steps_per_generation // options.gradient_accumulation_steps
        watch = Watch(clock, updates, tokenizer)
        GRPOTrainer(
            settings["model"], reward, options, prompts, None, tokenizer, callbacks=[watch]
        ).train()
    return clock.figures()


if __name__ == "__main__":
    torch.set_num_threads(harness.THREADS)
    arguments = json.loads(sys.argv[1])
    harness.serve(
        lambda: run(arguments), packages=("trl", "torch", "transformers", "accelerate", "datasets")
    )
