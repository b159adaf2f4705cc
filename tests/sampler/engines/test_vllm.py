"""A real vLLM, in the environment of the interpreter that JAX_PPO_VLLM_PYTHON names.

On a CPU it takes a minute to start: VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1.
"""

import dataclasses
import os

import jax
import numpy as np
import pytest

import tiny_actor
from jax_ppo.config.schema import VLLM, MeshShape, RolloutOptions
from jax_ppo.models.hf import save
from jax_ppo.runtime import meshes
from jax_ppo.sampler.engine import SamplingOptions, running
from jax_ppo.sampler.engines.server import ServerEngine

PYTHON = os.environ.get("JAX_PPO_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="JAX_PPO_VLLM_PYTHON is not set")
MESH = meshes.make_mesh(MeshShape(), jax.devices()[:1])
# vLLM's attention has no smaller heads.
ARCHITECTURE = dataclasses.replace(
    tiny_actor.ARCHITECTURE, hidden_size=64, head_dim=32, num_heads=2, max_position_embeddings=128
)
# Chunks of prompts with seeds fail on a CPU (0.32).
ARGUMENTS = "--skip-tokenizer-init --enforce-eager --no-enable-chunked-prefill"


@pytest.mark.parametrize("tied", [False, True])
def test_it_samples_from_the_newest_weights_and_survives_its_end(tmp_path, tied):
    """The log-probs are ours, before and after an update, and after vLLM was killed."""
    architecture = dataclasses.replace(ARCHITECTURE, tied=tied)
    actor = tiny_actor.Actor(architecture)
    prompts = tiny_actor.make_prompts()
    save.export_checkpoint(actor.stacked, architecture, tmp_path / "model")
    options = RolloutOptions(
        engine="vllm", temperature=0.7, vllm=VLLM(python=PYTHON, arguments=ARGUMENTS)
    )
    engine = ServerEngine(MESH, actor.scored, actor.stacked, options, tmp_path / "model", 32)
    sampling = SamplingOptions(max_response_length=8, temperature=0.7, n=4, eos_ids=(2, 3, 4))
    negative = jax.tree.map(lambda x: -x, actor.stacked)

    def generate():
        rollout = engine.generate(prompts, jax.random.key(7), sampling)
        return jax.tree.map(np.asarray, rollout)

    def difference(rollout, params):
        trainer = tiny_actor.Actor(architecture)
        trainer.stacked = params
        logits = trainer.full_logits(rollout.prompts, rollout.responses)
        ours = np.asarray(jax.nn.log_softmax(logits / 0.7))
        ours = np.take_along_axis(ours, rollout.responses[..., None], axis=2)[..., 0]
        return np.abs(ours - rollout.logprobs)[rollout.action_mask].max()

    with jax.set_mesh(MESH), running(engine):
        rollouts = []
        for params in (actor.stacked, negative, actor.stacked):
            engine.update_weights(params)
            rollouts.append(generate())
            assert difference(rollouts[-1], params) < 1e-3
        engine._process.stop()
        rollouts.append(generate())
    first, other, third, after_end = rollouts
    assert (first.responses != other.responses).any()
    assert 1 < len(set(first.lengths.tolist()))
    for rollout in (third, after_end):
        assert (rollout.responses == first.responses).all()
