"""Worker of ppo_step.py: a PPO step hand-written in torch and compiled.

Arguments: the settings of ppo_step.py as JSON. The code is what a skilled torch programmer would
write for this CPU: a custom decoder, the sampler's log-probs as the old ones, no logits of prompt
tokens, fused AdamW. Responses of unequal lengths are processed in micro-batches of similar length
or, without `by_length`, in one batch padded to the longest.
"""

import itertools
import json
import sys
import time

import harness
import torch
import torch.nn.functional as F
import workload
from torch_compiled_decoder import CompiledDecoder
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging

MICRO_BATCH = 8  # rows, if lengths differ
# Responses of a micro-batch are padded to a multiple of this; each multiple is compiled.
WIDTH = 64


def generalized_advantages(rewards, values, lam):
    """Compute GAE with gamma 1 from rewards and values that are 0 past the end."""
    advantages, following, next_value = torch.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(rewards.shape[1])):
        following = rewards[:, t] + next_value - values[:, t] + lam * following
        advantages[:, t], next_value = following, values[:, t]
    return advantages


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum()


class Step:
    """The models and their training steps."""

    def __init__(self, settings: dict):
        self.settings, self.prompt = settings, settings["prompt"]
        self.by_length = settings["by_length"] and not settings["equal_lengths"]

        def load(kind, folder, **options):
            return kind.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="sdpa", **options
            )

        self.actor, self.reference = (
            load(AutoModelForCausalLM, settings["model"]) for _ in range(2)
        )
        self.critic = load(AutoModelForSequenceClassification, settings["model"], num_labels=1)
        self.critic.score.weight.data.zero_()
        self.reward_model = None
        if settings["reward_model"]:
            self.reward_model = load(AutoModelForSequenceClassification, settings["reward_model"])
        self.decoder = CompiledDecoder(
            self.actor, settings["samples"], self.prompt, settings["response"], workload.EOS
        )
        self.optimizers = [
            torch.optim.AdamW(model.parameters(), lr=settings["lr"], fused=True)
            for model in (self.actor, self.critic)
        ]
        torch._dynamo.config.recompile_limit = 64
        compiled = (
            torch.compile(f, dynamic=False)
            for f in (
                self._logprobs,
                self._values,
                self._last_score,
                self._actor_loss,
                self._critic_loss,
            )
        )
        self.logprobs, self.values, self.last_score, self.actor_loss, self.critic_loss = compiled
        self.seeds = itertools.count()
        if self.by_length:
            self._compile_all()

    def turn(self) -> dict:
        """Run one step on new prompts."""
        clock, settings = Clock(), self.settings
        prompts = torch.tensor(
            workload.prompts(settings["samples"], self.prompt, seed=next(self.seeds))
        ).long()
        with torch.no_grad():
            responses, old, lengths = self.decoder.generate(prompts)
            clock.lap("rollout")
            sequences, old, mask = self._padded(prompts, responses, old, lengths)
            micro_batches = self._micro_batches(lengths)
            reference = self._gathered(
                self.logprobs, self.reference, sequences, micro_batches, mask
            )
            clock.lap("reference")
            values = self._gathered(self.values, self.critic, sequences, micro_batches, mask)
            clock.lap("values")
            rewards = self._rewards(sequences, lengths, mask, micro_batches)
            clock.lap("reward")
            token_rewards = -settings["kl_coef"] * (old - reference) * mask
            token_rewards[torch.arange(len(rewards)), lengths - 1] += rewards
            advantages = generalized_advantages(token_rewards, values, settings["lam"]) * mask
            returns = advantages + values
            mean = masked_mean(advantages, mask)
            advantages = (advantages - mean) * torch.rsqrt(
                masked_mean((advantages - mean) ** 2, mask) + 1e-8
            )
            clock.lap("advantages")
        self._descend(sequences, micro_batches, mask, old, advantages, values, returns)
        clock.lap("update")
        return {"tokens": int(lengths.sum()), "phases": clock.laps}

    def _compile_all(self):
        """Run everything once per micro-batch width, so that nothing compiles during a turn."""
        for width in range(WIDTH, self.settings["response"] + 1, WIDTH):
            sequences = torch.ones(MICRO_BATCH, self.prompt + width, dtype=torch.long)
            # The same tensor three times would compile a different program.
            each = [torch.ones(MICRO_BATCH, width) for _ in range(3)]
            with torch.no_grad():
                self.logprobs(self.reference, sequences)
                self.values(self.critic, sequences)
                if self.reward_model is not None:
                    self.last_score(
                        self.reward_model, sequences, torch.ones(MICRO_BATCH, dtype=torch.long)
                    )
            self.actor_loss(self.actor, sequences, *each).backward()
            self.critic_loss(self.critic, sequences, *each).backward()
        self.actor.zero_grad()
        self.critic.zero_grad()

    def _padded(self, prompts, responses, old, lengths):
        """Pad responses to a multiple of WIDTH.

        Returns:
          Sequences, old log-probs (0 past the end) and response mask.
        """
        width = min(-(-responses.shape[1] // WIDTH) * WIDTH, self.settings["response"])
        room = 0, width - responses.shape[1]
        mask = (torch.arange(width) < lengths[:, None]).float()
        responses = torch.where(mask.bool(), F.pad(responses, room), workload.PAD)
        return torch.cat([prompts, responses], 1), F.pad(old, room) * mask, mask

    def _micro_batches(self, lengths):
        """Return (rows, width) of each micro-batch; a single one if not grouped by length."""
        size = MICRO_BATCH if self.by_length else len(lengths)
        return [
            (rows, min(-(-int(lengths[rows].max()) // WIDTH) * WIDTH, self.settings["response"]))
            for rows in lengths.argsort().split(size)
        ]

    def _gathered(self, work, model, sequences, micro_batches, mask):
        """Return the results of `work` per response token, 0 past the end."""
        result = torch.zeros_like(mask)
        for rows, width in micro_batches:
            result[rows, :width] = work(model, sequences[rows, : self.prompt + width])
        return result * mask

    def _rewards(self, sequences, lengths, mask, micro_batches):
        if self.reward_model is None:
            return ((sequences[:, self.prompt :] % 2 == 0) * mask).sum(1) / lengths
        rewards = torch.zeros(len(lengths))
        for rows, width in micro_batches:
            rewards[rows] = self.last_score(
                self.reward_model, sequences[rows, : self.prompt + width], lengths[rows]
            )
        return rewards

    def _descend(self, sequences, micro_batches, mask, old, advantages, values, returns):
        count = mask.sum()
        for rows, width in micro_batches:
            tokens, cut = sequences[rows, : self.prompt + width], (rows, slice(width))
            self.actor_loss(
                self.actor, tokens, old[cut], advantages[cut], mask[cut] / count
            ).backward()
            self.critic_loss(
                self.critic, tokens, values[cut], returns[cut], mask[cut] / count
            ).backward()
        for model, optimizer in zip((self.actor, self.critic), self.optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def _hidden(self, model, sequences):
        return model.model(input_ids=sequences, use_cache=False).last_hidden_state

    def _logprobs(self, model, sequences):
        logits = F.linear(
            self._hidden(model, sequences)[:, self.prompt - 1 : -1], model.lm_head.weight
        )
        return logits.gather(-1, sequences[:, self.prompt :, None])[..., 0] - logits.logsumexp(-1)

    def _values(self, model, sequences):
        return model.score(self._hidden(model, sequences)[:, self.prompt - 1 : -1])[..., 0]

    def _last_score(self, model, sequences, lengths):
        return model.score(
            self._hidden(model, sequences)[torch.arange(len(lengths)), self.prompt + lengths - 1]
        )[:, 0]

    def _actor_loss(self, model, sequences, old, advantages, weights):
        ratio = ((self._logprobs(model, sequences) - old) * (weights > 0)).exp()
        return (
            weights * torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        ).sum()

    def _critic_loss(self, model, sequences, old, returns, weights):
        values = self._values(model, sequences)
        clipped = torch.maximum(torch.minimum(values, old + 0.2), old - 0.2)
        return (
            0.5 * (weights * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)).sum()
        )


class Clock:
    """Seconds of each phase in order of completion; torch on a CPU runs synchronously."""

    def __init__(self):
        self.laps, self._last = {}, time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


def main(settings: dict) -> None:
    torch.set_num_threads(harness.THREADS)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    harness.serve(Step(settings).turn, packages=("torch", "transformers"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
