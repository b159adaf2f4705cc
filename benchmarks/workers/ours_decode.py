"""Worker of decode.py: jax_ppo's sampler. Arguments: the settings of decode.py as JSON."""

import itertools
import json
import sys

import harness
import jax
import jax.numpy as jnp
import numpy as np
import workload

from jax_ppo.config import schema
from jax_ppo.models import heads
from jax_ppo.models.hf.load import load_checkpoint, read_architecture
from jax_ppo.models.layer_stack import unroll_params
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import meshes
from jax_ppo.sampler.decode_loop import SamplingOptions, sampler_program
from jax_ppo.types import Prompts


def load_decoder(folder: str):
    """Load the decoder and the actor's parameters in the sampler's layout."""
    architecture = read_architecture(folder)
    shapes = jax.eval_shape(
        lambda key: heads.init_params(Transformer(architecture, jnp.float32), key, "lm"),
        jax.random.key(0),
    )
    device_placement = jax.tree.map(
        lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shapes
    )
    return Transformer(architecture, jnp.float32, unrolled=True), jax.jit(unroll_params)(
        load_checkpoint(folder, architecture, device_placement)
    )


def main(settings: dict) -> None:
    model, params = load_decoder(settings["model"])
    options = SamplingOptions(
        settings["response"], temperature=1.0, eos_ids=(workload.EOS,), slots=settings["rows"]
    )
    sample, seeds = sampler_program(model, options), itertools.count()

    def turn() -> dict:
        seed = next(seeds)
        tokens = workload.prompts(settings["prompts"], settings["prompt"], seed=seed)
        prompts = Prompts(tokens, np.full(len(tokens), tokens.shape[1], np.int32))
        rollout = jax.device_get(sample(params, prompts, jax.random.key(seed)))
        return {"tokens": int(rollout.lengths.sum())}

    with jax.set_mesh(meshes.make_mesh(schema.MeshShape())):
        harness.serve(turn, packages=("jax", "jaxlib", "flax", "numpy"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
