"""Worker of decode.py: tunix's sampler. Arguments: the settings of decode.py as JSON."""

import itertools
import json
import sys

import harness
import tunix_model
import workload
from tunix.generate import sampler as sampler_lib


def main(settings: dict) -> None:
    model, config = tunix_model.load_model(settings["model"], tunix_model.one_device_mesh())
    longest = settings["prompt"] + settings["response"]
    sampler = sampler_lib.Sampler(
        model,
        tunix_model.Tokenizer(settings["model"]),
        sampler_lib.CacheConfig(
            cache_size=longest,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        ),
    )
    seeds, rows = itertools.count(), settings["rows"]

    def turn() -> dict:
        seed, tokens = next(seeds), 0
        texts = [
            workload.text(p)
            for p in workload.prompts(settings["prompts"], settings["prompt"], seed=seed)
        ]
        for first in range(0, len(texts), rows):
            output = sampler(
                texts[first : first + rows],
                max_generation_steps=settings["response"],
                max_prompt_length=settings["prompt"],
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                seed=len(texts) * seed + first,
                eos_tokens=[workload.EOS],
            )
            tokens += tunix_model.count_tokens(output.tokens, settings["response"])
        return {"tokens": tokens}

    harness.serve(turn, packages=("google-tunix", "jax", "jaxlib", "flax"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
