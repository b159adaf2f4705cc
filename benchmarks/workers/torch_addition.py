"""Worker of time_to_reward.py: hand-written PPO in torch for addition.

Arguments: options as JSON, by jax_ppo's names. The code is what a skilled torch programmer would
write for this task and this CPU: no framework, no padding, the sampler's log-probs as the old ones,
fused AdamW. Each turn is a run with the next seed.
"""

import itertools
import json
import sys
import time

import addition
import harness
import torch
import torch.nn.functional as F
from torch_decoder import Decoder, greedy, sample
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging

torch.set_num_threads(harness.THREADS)
logging.disable_progress_bar()
logging.set_verbosity_error()


def load_splits() -> dict[str, tuple]:
    """Return (prompts [N, PROMPT], answers [N, RESPONSE]) of each split."""
    splits = addition.splits()
    ids = {symbol: token for token, symbol in enumerate(splits["vocab"])}

    def encoded(name):
        return (
            torch.tensor([[ids[c] for c in addition.prompt(pair)] for pair in splits[name]]),
            torch.tensor(
                [[ids[c] for c in addition.answer(pair)] + [addition.EOS] for pair in splits[name]]
            ),
        )

    return {name: encoded(name) for name in ("train", "held")}


def response_mask(responses):
    """Return 1 up to and including the first EOS, 0 after it."""
    ends = (responses == addition.EOS).long()
    return (ends.cumsum(1) - ends == 0).float()


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def whiten(x, mask):
    x = x - masked_mean(x, mask)
    return x * torch.rsqrt(masked_mean(x**2, mask) + 1e-8)


def generalized_advantages(rewards, values, gamma, lam):
    advantages, following, next_value = torch.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(rewards.shape[1])):
        following = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * following
        advantages[:, t], next_value = following, values[:, t]
    return advantages


class Training:
    """One run. `options` are jax_ppo's; only the options named below are read."""

    def __init__(self, options: dict, data: dict, seed: int):
        torch.manual_seed(seed)
        self.options, self.data, self.steps_done = options, data, 0
        folder = str(addition.FOLDER)
        self.actor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.critic = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float32
        )
        self.critic.score.weight.data.zero_()
        size = addition.PROMPT, addition.RESPONSE
        self.decoder = Decoder(self.actor, options["data.train_batch_size"], *size)
        self.held_out_decoder = Decoder(self.actor, len(data["held"][0]), *size)
        self.optimizers = {
            role: torch.optim.AdamW(
                model.parameters(),
                lr=options[f"{role}.optim.lr"],
                betas=(0.9, options[f"{role}.optim.beta2"]),
                weight_decay=options[f"{role}.optim.weight_decay"],
                fused=True,
            )
            for role, model in (("actor", self.actor), ("critic", self.critic))
        }

    def step(self) -> None:
        options = self.options
        prompts, answers = self.data["train"]
        drawn = torch.randint(0, len(prompts), (options["data.train_batch_size"],))
        responses, old = self.decoder.generate(
            prompts[drawn], lambda logits: sample(logits, options["rollout.temperature"])
        )
        sequences, mask = torch.cat([prompts[drawn], responses], 1), response_mask(responses)
        with torch.no_grad():
            values = self._values(sequences) * mask
        rewards = torch.zeros_like(old)
        rewards[torch.arange(len(rewards)), mask.sum(1).long() - 1] = (
            (responses == answers[drawn]).all(1).float()
        )
        advantages = (
            generalized_advantages(
                rewards, values, options["algorithm.gamma"], options["algorithm.lam"]
            )
            * mask
        )
        returns = advantages + values
        if options["algorithm.whiten_advantages"]:
            advantages = whiten(advantages, mask)
        # Reaches the full rate in the same step as jax_ppo, but rises from the first step.
        rising = (self.steps_done + 1) / (
            options["trainer.critic_warmup"] + options["actor.optim.lr_warmup_steps"]
        )
        self.optimizers["actor"].param_groups[0]["lr"] = options["actor.optim.lr"] * min(
            1.0, rising
        )
        for _ in range(options["actor.ppo_epochs"]):
            for i in torch.randperm(len(sequences)).split(options["actor.ppo_mini_batch_size"]):
                self._mini_batch(
                    sequences[i],
                    responses[i],
                    mask[i],
                    old[i],
                    advantages[i],
                    values[i],
                    returns[i],
                )
        self.steps_done += 1

    def accuracy(self) -> float:
        prompts, answers = self.data["held"]
        return (
            (self.held_out_decoder.generate(prompts, greedy)[0] == answers)
            .all(1)
            .float()
            .mean()
            .item()
        )

    def _mini_batch(self, sequences, responses, mask, old, advantages, values, returns):
        options = self.options
        moved = self._values(sequences)
        clipped = moved.clamp(
            values - options["critic.cliprange_value"], values + options["critic.cliprange_value"]
        )
        worse = torch.maximum((moved - returns) ** 2, (clipped - returns) ** 2)
        self._descend("critic", self.critic, 0.5 * masked_mean(worse, mask))
        if self.steps_done >= options["trainer.critic_warmup"]:
            ratio = ((self._logprobs(sequences, responses) - old) * mask).exp()
            clipped = ratio.clamp(1 - options["actor.clip_ratio"], 1 + options["actor.clip_ratio"])
            worse = torch.maximum(-advantages * ratio, -advantages * clipped)
            self._descend("actor", self.actor, masked_mean(worse, mask))

    def _descend(self, role, model, loss):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), self.options[f"{role}.grad_clip"])
        self.optimizers[role].step()
        self.optimizers[role].zero_grad()

    def _hidden(self, model, sequences):
        """Return the hidden states of the positions that predict the response."""
        return model.model(input_ids=sequences, use_cache=False).last_hidden_state[
            :, addition.PROMPT - 1 : -1
        ]

    def _values(self, sequences):
        return self.critic.score(self._hidden(self.critic, sequences))[..., 0]

    def _logprobs(self, sequences, responses):
        logits = (
            F.linear(self._hidden(self.actor, sequences), self.actor.lm_head.weight)
            / self.options["rollout.temperature"]
        )
        return logits.gather(-1, responses[..., None])[..., 0] - logits.logsumexp(-1)


def reach_target(options: dict, data: dict, seed: int) -> dict:
    """Run once.

    `warm_up_seconds` covers a first step on a state that is discarded; nothing compiles.
    """
    start = time.perf_counter()
    Training(options, data, seed).step()
    warm_up = time.perf_counter() - start
    training = Training(options, data, seed)
    return addition.until_target(training.step, lambda: None, training.accuracy) | {
        "warm_up_seconds": warm_up
    }


def main(options: dict) -> None:
    seeds, data = itertools.count(), load_splits()
    harness.serve(
        lambda: reach_target(options, data, next(seeds)), packages=("torch", "transformers")
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
