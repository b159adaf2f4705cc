"""Worker of decode.py: the compiled hand-written torch decoder.

Arguments: the settings of decode.py as JSON.
"""

import itertools
import json
import sys

import harness
import torch
import workload
from torch_compiled_decoder import CompiledDecoder
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def main(settings: dict) -> None:
    torch.set_num_threads(harness.THREADS)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    decoder = CompiledDecoder(
        model,
        settings["rows"],
        settings["prompt"],
        settings["response"],
        workload.EOS if settings["chance"] else None,
    )
    seeds = itertools.count()

    def turn() -> dict:
        prompts = torch.tensor(
            workload.prompts(settings["prompts"], settings["prompt"], seed=next(seeds))
        ).long()
        return {
            "tokens": sum(
                int(decoder.generate(batch)[2].sum()) for batch in prompts.split(settings["rows"])
            )
        }

    harness.serve(turn, packages=("torch", "transformers"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
