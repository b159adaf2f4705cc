"""The engine `transformers`: Hugging Face's `generate` with our draws."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.errors import UserError
from jax_ppo.kernels.vocabulary_chunks import drop_ids
from jax_ppo.sampler import sampling, text_search
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.engines.external import ExternalEngine, Response


class HuggingFaceEngine(ExternalEngine):
    """Runs the exported weights in torch on the CPU, with the built-in engine's draws of tokens."""

    def start(self) -> None:
        """Require torch."""
        try:
            import torch  # noqa: F401  # heavy, and only this engine needs it
        except ImportError:
            raise UserError(f"{self.setting}: needs torch; `pip install torch`") from None
        from transformers.utils import logging

        logging.disable_progress_bar()  # of each update

    def load_weights(self) -> None:
        """Read the weights, as any user of the export would."""
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(self.weights, dtype=self.dtype)
        # The checkpoint's defaults, such as a repetition penalty, are not the policy's.
        model.generation_config = transformers.GenerationConfig()
        self._model = model

    def sample(
        self, prompts: Sequence[list[int]], keys: jax.Array, options: SamplingOptions
    ) -> list[Response]:
        """Return one response to each prompt, `options.slots` at a time."""
        size = options.slots or len(prompts)
        return [
            response
            for first in range(0, len(prompts), size)
            for response in self._sample_batch(
                prompts[first : first + size], keys[first : first + size], options
            )
        ]

    def _sample_batch(
        self, prompts: Sequence[list[int]], keys: jax.Array, options: SamplingOptions
    ) -> list[Response]:
        import torch
        import transformers

        longest = max(map(len, prompts))
        tokens = torch.zeros((len(prompts), longest), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        ended = np.zeros(len(prompts), bool)
        stop_states = jnp.full(len(prompts), text_search.START, jnp.int32)
        steps: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

        def draw(ids: Any, logits: Any) -> Any:
            nonlocal ended, stop_states
            ours = drop_ids(jnp.asarray(logits.float().numpy()), self.actor.architecture.num_ids)
            next_B, logprobs, ends, stop_states = _draw(
                ours, keys, len(steps), stop_states, options
            )
            steps.append((np.asarray(next_B), np.asarray(logprobs), ~ended))
            ended = ended | np.asarray(ends)
            only = torch.full_like(logits, -torch.inf)
            return only.scatter(1, torch.from_numpy(np.asarray(next_B, np.int64))[:, None], 0.0)

        with torch.inference_mode():
            self._model.generate(
                input_ids=tokens,
                attention_mask=mask,
                generation_config=transformers.GenerationConfig(
                    do_sample=False, max_new_tokens=options.max_response_length, pad_token_id=0
                ),
                logits_processor=transformers.LogitsProcessorList([draw]),
                stopping_criteria=transformers.StoppingCriteriaList(
                    [lambda ids, scores: torch.from_numpy(ended)]
                ),
            )
        drawn, logprobs, active = (np.stack(x, axis=1) for x in zip(*steps, strict=True))
        return [
            Response(drawn[row, mask].tolist(), logprobs[row, mask].tolist(), not is_over)
            for row, (mask, is_over) in enumerate(zip(active, ended, strict=True))
        ]


@functools.partial(jax.jit, static_argnames="options")
def _draw(
    logits_BxV: jax.Array,
    keys_B: jax.Array,
    position: jax.Array,
    stop_B: jax.Array,
    options: SamplingOptions,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return tokens, log-probs, whether rows end, and the search's states; see decode_loop.py."""
    drawn_B = jnp.full(stop_B.shape, position, jnp.int32)
    draws = sampling.sample_tokens(
        logits_BxV,
        sampling.token_uniforms(keys_B, position),
        sampling.forbidden_ends(options, logits_BxV.shape[1], drawn_B),
        filters=options.filters,
    )
    stop_B = sampling.advance_stop_search(options, stop_B, draws.tokens, drawn_B + 1)
    ends_B = sampling.finishes_responses(options, draws.tokens, stop_B)
    return draws.tokens, draws.logprobs, ends_B, stop_B
