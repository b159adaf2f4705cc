"""Worker of gsm8k_evaluation.py: transformers' generate. Arguments: its settings as JSON.

Writes a JSON line for each question, in their order. `seconds` is the time since generation began.
"""

import json
import sys
import time
from pathlib import Path

import harness
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(settings: dict) -> None:
    torch.set_num_threads(harness.THREADS)
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    lines = Path(settings["questions_file"]).read_text().splitlines()[: settings["questions"]]
    prompts = [
        tokenizer.apply_chat_template(
            [
                {
                    "role": "user",
                    "content": f"{json.loads(line)['question']} {settings['instruction']}",
                }
            ],
            add_generation_prompt=True,
            return_dict=False,
        )[: settings["prompt"]]
        for line in lines
    ]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    rows: list[dict] = [{}] * len(prompts)
    start = time.perf_counter()
    for first in range(0, len(order), settings["rows"]):
        batch = order[first : first + settings["rows"]]
        inputs = tokenizer.pad({"input_ids": [prompts[i] for i in batch]}, return_tensors="pt")
        with torch.inference_mode():
            sequences = model.generate(
                **inputs, max_new_tokens=settings["response"], do_sample=False
            )
        for i, sequence in zip(batch, sequences[:, inputs["input_ids"].shape[1] :], strict=True):
            ids = sequence.tolist()
            if tokenizer.eos_token_id in ids:  # the first one ends the response; padding follows
                ids = ids[: ids.index(tokenizer.eos_token_id) + 1]
            rows[i] = {
                "prompt_ids": prompts[i],
                "response_ids": ids,
                "response": tokenizer.decode(ids, skip_special_tokens=True),
                "seconds": time.perf_counter() - start,
            }
    Path(settings["output"]).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
