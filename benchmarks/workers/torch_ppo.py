"""Worker of ppo_step.py: a PPO step hand-written in torch and compiled.

Arguments: the settings of ppo_step.py as JSON. The code is what a skilled torch programmer would
write for this CPU: a custom decoder, the sampler's log-probs as the old ones, no logits of prompt
tokens, fused AdamW. Responses are sorted by length, and each micro-batch is padded to its own
longest response; without `by_length`, all are padded to the longest of the batch. Programs are
compiled for any width, or with `static_widths` for each multiple of 64.
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

STATIC_WIDTH = 64


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
        self.train_rows = settings["micro_batches"]["train_rows"]
        self.forward_rows = settings["micro_batches"]["forward_rows"]
        # Responses of equal length need no other width than their own.
        static_widths = settings["equal_lengths"] or settings["static_widths"]
        self.width_unit = min(STATIC_WIDTH, settings["response"]) if static_widths else 1

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
            self.actor,
            settings["samples"],
            self.prompt,
            settings["response"],
            None if settings["equal_lengths"] else workload.EOS,
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
            micro_batches = self._micro_batches(lengths, self.forward_rows)
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
        train_micro_batches = self._micro_batches(lengths, self.train_rows)
        self._descend(sequences, train_micro_batches, mask, old, advantages, values, returns)
        clock.lap("update")
        tokens = int(lengths.sum())
        padded_tokens = sum(len(rows) * width for rows, width in train_micro_batches)
        return {
            "tokens": tokens,
            "phases": clock.laps,
            "padded_tokens_per_token": padded_tokens / tokens,
            "row_steps_per_token": self.decoder.computed_row_steps / tokens,
        }

    def _compile_all(self):
        """Run every program once, so that nothing compiles during a turn."""
        response = self.settings["response"]
        if self.width_unit == 1:
            widths = [response - 1, response]  # one program serves all widths
        else:
            widths = range(self.width_unit, response + 1, self.width_unit)
        if self.settings["equal_lengths"]:
            widths = [response]
        for width in widths:
            with torch.no_grad():
                sequences = self._any_width(
                    torch.ones(self.forward_rows, self.prompt + width, dtype=torch.long)
                )
                self.logprobs(self.reference, sequences)
                self.values(self.critic, sequences)
                if self.reward_model is not None:
                    ends = torch.ones(self.forward_rows, dtype=torch.long)
                    self.last_score(self.reward_model, sequences, ends)
            sequences = self._any_width(
                torch.ones(self.train_rows, self.prompt + width, dtype=torch.long)
            )
            # The same tensor three times would compile a different program.
            per_token = [self._any_width(torch.ones(self.train_rows, width)) for _ in range(3)]
            self.actor_loss(self.actor, sequences, *per_token).backward()
            self.critic_loss(self.critic, sequences, *per_token).backward()
        self.actor.zero_grad()
        self.critic.zero_grad()

    def _any_width(self, x):
        """Return x, contiguous, marked so that one program is compiled for all widths."""
        x = x.contiguous()
        if self.width_unit == 1:
            torch._dynamo.mark_dynamic(x, 1)
        return x

    def _round_up(self, length: int) -> int:
        # torch compiles a width of 1 separately.
        rounded = max(2, -(-length // self.width_unit) * self.width_unit)
        return min(rounded, self.settings["response"])

    def _padded(self, prompts, responses, old, lengths):
        """Pad responses to a compiled width.

        Returns:
          Sequences, old log-probs (0 past the end) and response mask.
        """
        width = self._round_up(responses.shape[1])
        padding = 0, width - responses.shape[1]
        mask = (torch.arange(width) < lengths[:, None]).float()
        responses = torch.where(mask.bool(), F.pad(responses, padding), workload.PAD)
        return torch.cat([prompts, responses], 1), F.pad(old, padding) * mask, mask

    def _micro_batches(self, lengths, size: int):
        """Return (rows, width) of each micro-batch of `size` rows."""
        if self.settings["by_length"]:
            return [
                (rows, self._round_up(int(lengths[rows].max())))
                for rows in lengths.argsort().split(size)
            ]
        width = self._round_up(int(lengths.max()))
        return [(rows, width) for rows in torch.arange(len(lengths)).split(size)]

    def _gathered(self, work, model, sequences, micro_batches, mask):
        """Return the results of `work` per response token, 0 past the end."""
        result = torch.zeros_like(mask)
        for rows, width in micro_batches:
            tokens = self._any_width(sequences[rows, : self.prompt + width])
            result[rows, :width] = work(model, tokens)
        return result * mask

    def _rewards(self, sequences, lengths, mask, micro_batches):
        if self.reward_model is None:
            return ((sequences[:, self.prompt :] % 2 == 0) * mask).sum(1) / lengths
        rewards = torch.zeros(len(lengths))
        for rows, width in micro_batches:
            tokens = self._any_width(sequences[rows, : self.prompt + width])
            rewards[rows] = self.last_score(self.reward_model, tokens, lengths[rows])
        return rewards

    def _descend(self, sequences, micro_batches, mask, old, advantages, values, returns):
        count = mask.sum()
        for rows, width in micro_batches:
            tokens = self._any_width(sequences[rows, : self.prompt + width])
            weights = self._any_width(mask[rows, :width] / count)
            old_logprobs, token_advantages, old_values, value_targets = (
                self._any_width(x[rows, :width]) for x in (old, advantages, values, returns)
            )
            actor_loss = self.actor_loss(
                self.actor, tokens, old_logprobs, token_advantages, weights
            )
            actor_loss.backward()
            critic_loss = self.critic_loss(self.critic, tokens, old_values, value_targets, weights)
            critic_loss.backward()
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
