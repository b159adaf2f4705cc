"""A real pretrained model continues a story as transformers does."""

import os
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from jax.sharding import SingleDeviceSharding

from jax_ppo.models.hf.load import load_checkpoint, read_architecture
from jax_ppo.models.transformer import Transformer, unroll_params
from jax_ppo.sampler.decode_loop import SamplingOptions, sampler_program
from jax_ppo.types import Prompts

FOLDER = Path(os.environ.get("JAX_PPO_DATA", "../shared/data")) / "tinystories-260k"
PROMPT = "Once upon a time, there was a little girl named Lily."
STORY = " She loved to play outside in the park. One day, she saw a big, red ball."


@pytest.mark.slow  # by default test_api.py has the same story, through the engine
@pytest.mark.skipif(
    not FOLDER.exists(), reason=f"{FOLDER} is missing; JAX_PPO_DATA names the folder it is in"
)
def test_greedy_story():
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(FOLDER)
    architecture = read_architecture(FOLDER)
    stacked = Transformer(architecture)
    shapes = jax.eval_shape(stacked.init, jax.random.key(0))
    device = SingleDeviceSharding(jax.devices()[0])
    params = load_checkpoint(FOLDER, architecture, jax.tree.map(lambda _: device, dict(shapes)))

    ids = tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    ids = [architecture.bos_id, *ids]
    tokens = np.zeros((1, 48), np.int32)
    tokens[0, : len(ids)] = ids
    options = SamplingOptions(48, 0.0, eos_ids=architecture.eos_ids)
    sampler = sampler_program(Transformer(architecture, unrolled=True), options)
    rollout = sampler(
        unroll_params(params), Prompts(tokens, np.array([len(ids)], np.int32)), jax.random.key(0)
    )
    text = tokenizer.decode([*ids, *np.asarray(rollout.responses[0])], skip_special_tokens=True)
    assert text.split(PROMPT)[1].startswith(STORY)
