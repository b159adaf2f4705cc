"""Worker of ppo_step.py: jax_ppo. Arguments: the settings of ppo_step.py as JSON.

Runs ppo_training.train_ppo itself and pauses it where it requests the next batch. There it waits
for the update, which would otherwise overlap with the next step.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import workload
from turnstile import Turnstile

from jax_ppo.config import loading, schema
from jax_ppo.data import prompt_batches
from jax_ppo.ppo import forward_passes, rewarding, step
from jax_ppo.run import parts, ppo_training
from jax_ppo.sampler import built_in

PROMPTS = 1024


def even_share(data_source, solution_str, ground_truth, extra_info):
    """Return the rule's reward, the share of even token ids."""
    words = solution_str.split()
    return sum(int(word[1:]) % 2 == 0 for word in words) / max(len(words), 1)


def make_config(folder: Path, settings: dict) -> schema.Config:
    rows = (
        {
            "data_source": "random",
            "prompt": workload.text(prompt),
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for prompt in workload.prompts(PROMPTS, settings["prompt"])
    )
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = loading.default_config()
    config.update_from_flattened_dict(
        {
            "data.train_files": str(folder / "train.jsonl"),
            "data.train_batch_size": settings["samples"],
            "data.max_prompt_length": settings["prompt"],
            "data.max_response_length": settings["response"],
            "model.path": settings["model"],
            "model.tokenizer_path": settings["model"] + "/tokenizer",
            "model.dtype": settings["dtype"],
            "model.lora.rank": settings["lora"],
            "model.gradient_checkpointing": False,
            "actor.ppo_mini_batch_size": settings["samples"],
            "actor.optim.lr": settings["lr"],
            "critic.optim.lr": settings["lr"],
            "critic.cliprange_value": 0.2,
            "algorithm.lam": settings["lam"],
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.kl_coef": settings["kl_coef"],
            "reward.model_path": settings["reward_model"],
            "reward.function": "" if settings["reward_model"] else f"{__file__}:even_share",
            "reward.workers": 0,  # in this process, as on the other sides
            "trainer.total_training_steps": 10**6,
            "trainer.save_freq": 0,
            "trainer.logger": "",
        }
    )
    return loading.from_config_dict(config)


def stop_between_steps(turnstile: Turnstile, prompt_tokens: int) -> None:
    """Insert the turnstile where the run takes its next batch, and time the phases."""
    current_step = {}  # metrics and response tokens of the current step

    class Batches(prompt_batches.PromptBatches):
        def __next__(self):
            if "metrics" in current_step:
                jax.block_until_ready(current_step["metrics"])
            turnstile.step_done(figures() if "metrics" in current_step else None)
            return super().__next__()

    def figures():
        memory = jax.local_devices()[0].memory_stats()  # None on a CPU
        peak = {"peak_gib": memory["peak_bytes_in_use"] / 2**30} if memory else {}
        return {"tokens": current_step["tokens"]} | peak

    def lengths(batch, rollout):
        response_lengths = sample_lengths(batch, rollout)
        current_step["tokens"] = int(response_lengths.sum()) - prompt_tokens
        return response_lengths

    def update(*args, **kwargs):
        state, current_step["metrics"] = original_update(*args, **kwargs)
        return state, current_step["metrics"]

    # Precompilation would interfere with the turnstile.
    ppo_training.PPOTraining.step_on_shapes = lambda *_: lambda: None
    parts.PromptBatches = Batches
    sample_lengths, step.sample_lengths = step.sample_lengths, lengths
    original_update, step.update_state = turnstile.phase("update", step.update_state), update
    for owner, name, phase in (
        (built_in.BuiltInEngine, "generate", "rollout"),
        (step, "run_forward_passes", "scoring"),
        (rewarding.RuleScorer, "score", "reward"),
        (forward_passes, "reward_model_scores", "reward"),
        (step, "estimate_experience", "advantages"),
    ):
        setattr(owner, name, turnstile.phase(phase, getattr(owner, name)))


def main(settings: dict) -> None:
    turnstile = Turnstile(
        ("jax", "jaxlib", "flax", "optax", "numpy", "tokenizers"),
        jax.block_until_ready,
    )
    stop_between_steps(turnstile, settings["samples"] * settings["prompt"])
    with tempfile.TemporaryDirectory() as folder:
        ppo_training.train_ppo(make_config(Path(folder), settings), Path(folder) / "run")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
