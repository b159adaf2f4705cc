"""Worker of decode.py: transformers' generate. Arguments: the settings of decode.py as JSON.

`transformers` uses generate's defaults, `transformers-static` a static cache and a compiled forward
pass; `transformers-continuous` is generate_batch, which refills rows whose response has ended.
"""

import itertools
import json
import sys

import harness
import torch
import workload
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    ContinuousBatchingConfig,
    GenerationConfig,
)
from transformers.utils import logging


def sampling(settings: dict, **options) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=settings["response"],
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=workload.PAD,
        eos_token_id=workload.EOS,
        **options,
    )


def batches(model, settings: dict, options: GenerationConfig):
    """Build a function that runs generate on batches of `rows` prompts and counts the tokens."""

    def run(prompts):
        tokens = 0
        for batch in torch.tensor(prompts).long().split(settings["rows"]):
            sequences = model.generate(
                batch, attention_mask=torch.ones_like(batch), generation_config=options
            )
            tokens += int((sequences[:, settings["prompt"] :] != workload.PAD).sum())
        return tokens

    return run


def continuous(model, settings: dict, options: GenerationConfig):
    """Build a function that runs generate_batch on all prompts."""
    pages = settings["rows"] * -(-(settings["prompt"] + settings["response"]) // 256)
    batching = ContinuousBatchingConfig(
        max_requests_per_batch=settings["rows"],
        num_blocks=pages,
        use_cuda_graph=False,
        max_batch_tokens=settings["rows"] * settings["prompt"],
        allow_block_sharing=False,
    )

    def run(prompts):
        results = model.generate_batch(
            prompts.tolist(), options, batching, persistent_manager=True, warmup=False
        )
        return sum(len(result.generated_tokens) for result in results.values())

    return run


def main(settings: dict) -> None:
    torch.set_num_threads(harness.THREADS)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    side = settings["side"]
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    if side == "transformers-continuous":
        run = continuous(model, settings, sampling(settings))
    elif side == "transformers-static":
        everywhere = CompileConfig(fullgraph=False)
        everywhere._compile_all_devices = True  # otherwise it compiles only on accelerators
        run = batches(
            model,
            settings,
            sampling(settings, cache_implementation="static", compile_config=everywhere),
        )
    else:
        run = batches(model, settings, sampling(settings))
    seeds = itertools.count()

    def turn():
        prompts = workload.prompts(settings["prompts"], settings["prompt"], seed=next(seeds))
        with torch.inference_mode():
            return {"tokens": run(prompts)}

    harness.serve(turn, packages=("torch", "transformers"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
