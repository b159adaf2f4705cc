"""Worker of time_to_reward.py: hand-written PPO in torch for addition.

Arguments: options as JSON, by jax_ppo's names, and `compiled`. The code is what a skilled torch
programmer would write for this task and this CPU: no framework, no padding, the sampler's log-probs
as the old ones, fused AdamW, and with `compiled` torch.compile for sampling, experience and losses.
Each turn is a run with the next seed.
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

    def __init__(self, options: dict, data: dict):
        self.options, self.data, self.steps_done = options, data, 0
        self.shared_trunk = options.get("critic.shared_trunk", False)
        folder = str(addition.FOLDER)
        self.actor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.critic = self._make_critic(folder)
        size = addition.PROMPT, addition.RESPONSE
        self.decoder = Decoder(self.actor, options["data.train_batch_size"], *size)
        self.held_out_decoder = Decoder(self.actor, len(data["held"][0]), *size)
        self.optimizers = self._make_optimizers()
        self.initial_weights = [
            {name: weight.clone() for name, weight in model.state_dict().items()}
            for model in (self.actor, self.critic)
        ]
        self.compute = {
            "rollout": self._rollout,
            "experience": self._experience,
            "actor_loss": self._actor_loss,
            "critic_loss": self._critic_loss,
            "joint_loss": self._joint_loss,
        }
        if options["compiled"]:
            self.compute = {
                name: torch.compile(function, dynamic=False)
                for name, function in self.compute.items()
            }

    def restart(self, seed: int) -> None:
        """Return to the initial weights and keep the compiled programs, which refer to them."""
        torch.manual_seed(seed)
        for model, weights in zip((self.actor, self.critic), self.initial_weights, strict=True):
            model.load_state_dict(weights)
        self.optimizers = self._make_optimizers()
        self.steps_done = 0

    def _make_critic(self, folder: str):
        """Return the critic's head on the actor, or a separate critic; both start at 0."""
        if self.shared_trunk:
            head = torch.nn.Linear(self.actor.config.hidden_size, 1, bias=False)
            torch.nn.init.zeros_(head.weight)
            return head
        critic = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=1, dtype=torch.float32
        )
        critic.score.weight.data.zero_()
        return critic

    def _make_optimizers(self) -> dict[str, torch.optim.AdamW]:
        options = self.options
        if self.shared_trunk:
            parameters = {"actor": [*self.actor.parameters(), *self.critic.parameters()]}
        else:
            parameters = {"actor": self.actor.parameters(), "critic": self.critic.parameters()}
        return {
            role: torch.optim.AdamW(
                role_parameters,
                lr=options[f"{role}.optim.lr"],
                betas=(0.9, options[f"{role}.optim.beta2"]),
                weight_decay=options[f"{role}.optim.weight_decay"],
                fused=True,
            )
            for role, role_parameters in parameters.items()
        }

    def step(self) -> None:
        options = self.options
        prompts, answers = self.data["train"]
        drawn = torch.randint(0, len(prompts), (options["data.train_batch_size"],))
        with torch.no_grad():
            responses, old = self.compute["rollout"](prompts[drawn])
            batch = self.compute["experience"](prompts[drawn], answers[drawn], responses, old)
        # Reaches the full rate in the same step as jax_ppo, but rises from the first step.
        warm_up = options.get("trainer.critic_warmup", 0) + options["actor.optim.lr_warmup_steps"]
        self.optimizers["actor"].param_groups[0]["lr"] = options["actor.optim.lr"] * min(
            1.0, (self.steps_done + 1) / warm_up
        )
        for _ in range(options["actor.ppo_epochs"]):
            for rows in torch.randperm(len(drawn)).split(options["actor.ppo_mini_batch_size"]):
                self._mini_batch(*(x[rows] for x in batch))
        self.steps_done += 1

    def _rollout(self, prompts):
        temperature = self.options["rollout.temperature"]
        return self.decoder.generate(prompts, lambda logits: sample(logits, temperature))

    def _experience(self, prompts, answers, responses, old):
        """Return what a mini-batch needs: sequences, responses, mask and per-token targets."""
        options = self.options
        sequences, mask = torch.cat([prompts, responses], 1), response_mask(responses)
        values = self._values(sequences) * mask
        rewards = torch.zeros_like(old)
        rewards[torch.arange(len(rewards)), mask.sum(1).long() - 1] = (
            (responses == answers).all(1).float()
        )
        gamma, lam = options["algorithm.gamma"], options["algorithm.lam"]
        advantages = generalized_advantages(rewards, values, gamma, lam) * mask
        returns = advantages + values
        if options["algorithm.whiten_advantages"]:
            advantages = whiten(advantages, mask)
        return sequences, responses, mask, old, advantages, values, returns

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
        actor_args = (sequences, responses, mask, old, advantages)
        critic_args = (sequences, mask, values, returns)
        if self.shared_trunk:
            self._descend("actor", self.compute["joint_loss"](*actor_args, values, returns))
            return
        self._descend("critic", self.compute["critic_loss"](*critic_args))
        if self.steps_done >= self.options["trainer.critic_warmup"]:
            self._descend("actor", self.compute["actor_loss"](*actor_args))

    def _descend(self, role, loss):
        loss.backward()
        optimizer = self.optimizers[role]
        parameters = optimizer.param_groups[0]["params"]
        torch.nn.utils.clip_grad_norm_(parameters, self.options[f"{role}.grad_clip"])
        optimizer.step()
        optimizer.zero_grad()

    def _actor_loss(self, sequences, responses, mask, old, advantages):
        hidden = self._hidden(self.actor, sequences)
        return self._policy_loss(hidden, responses, mask, old, advantages)

    def _critic_loss(self, sequences, mask, values, returns):
        return self._value_loss(self._values(sequences), mask, values, returns)

    def _joint_loss(self, sequences, responses, mask, old, advantages, values, returns):
        """Return both losses of a shared trunk after one pass."""
        hidden = self._hidden(self.actor, sequences)
        policy_loss = self._policy_loss(hidden, responses, mask, old, advantages)
        value_loss = self._value_loss(self.critic(hidden)[..., 0], mask, values, returns)
        return policy_loss + self.options["critic.value_loss_coef"] * value_loss

    def _policy_loss(self, hidden, responses, mask, old, advantages):
        clip = self.options["actor.clip_ratio"]
        ratio = ((self._logprobs(hidden, responses) - old) * mask).exp()
        clipped = ratio.clamp(1 - clip, 1 + clip)
        return masked_mean(torch.maximum(-advantages * ratio, -advantages * clipped), mask)

    def _value_loss(self, current, mask, values, returns):
        clip = self.options["critic.cliprange_value"]
        clipped = torch.maximum(torch.minimum(current, values + clip), values - clip)
        worse = torch.maximum((current - returns) ** 2, (clipped - returns) ** 2)
        return 0.5 * masked_mean(worse, mask)

    def _hidden(self, model, sequences):
        """Return the hidden states of the positions that predict the response."""
        return model.model(input_ids=sequences, use_cache=False).last_hidden_state[
            :, addition.PROMPT - 1 : -1
        ]

    def _values(self, sequences):
        if self.shared_trunk:
            return self.critic(self._hidden(self.actor, sequences))[..., 0]
        return self.critic.score(self._hidden(self.critic, sequences))[..., 0]

    def _logprobs(self, hidden, responses):
        logits = F.linear(hidden, self.actor.lm_head.weight)
        logits = logits / self.options["rollout.temperature"]
        return logits.gather(-1, responses[..., None])[..., 0] - logits.logsumexp(-1)


def reach_target(options: dict, data: dict, seed: int) -> dict:
    """Run once.

    `warm_up_seconds` covers loading and the first two steps, which compile and whose result is
    discarded. No compiled program is taken from an earlier run or a cache.
    """
    torch._dynamo.reset()
    start = time.perf_counter()
    training = Training(options, data)
    training.step()
    training.steps_done = options.get("trainer.critic_warmup", 0)  # so that the actor learns too
    training.step()
    warm_up = time.perf_counter() - start
    training.restart(seed)
    clock = addition.Clock(addition.TARGET, addition.MAX_STEPS)
    return addition.until_target(clock, training.step, lambda: None, training.accuracy) | {
        "warm_up_seconds": warm_up
    }


def main(options: dict) -> None:
    torch.set_num_threads(harness.THREADS)
    # Every run compiles anew, as ours does.
    torch._inductor.config.force_disable_caches = True
    seeds, data = itertools.count(), load_splits()
    harness.serve(
        lambda: reach_target(options, data, next(seeds)), packages=("torch", "transformers")
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
