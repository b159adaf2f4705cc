"""A real vLLM, in the environment of the interpreter that JAX_PPO_VLLM_PYTHON names.

On a CPU it takes a minute to start: VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1.
"""

import dataclasses
import os

import jax
import numpy as np
import pytest

import tiny_actor
from jax_ppo.config.rollout_options import VLLM
from jax_ppo.config.schema import MeshShape, RolloutOptions
from jax_ppo.models.hf import save
from jax_ppo.models.lora import Lora, init_adapters, join_params
from jax_ppo.models.transformer import Transformer
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
GEMMA = {
    "family": "gemma",
    "qkv_bias": False,
    "activation": "gelu_pytorch_tanh",
    "scaled_embedding": True,
    "norm_plus_one": True,
}
# Chunks of prompts with seeds fail on a CPU (0.32).
ARGUMENTS = "--skip-tokenizer-init --enforce-eager --no-enable-chunked-prefill"
SAMPLING = SamplingOptions(max_response_length=8, temperature=0.7, n=4, eos_ids=(2, 3, 4))


def make_engine(actor, params, folder, **options):
    if not options:
        options = {"engine": "vllm", "vllm": VLLM(python=PYTHON, arguments=ARGUMENTS)}
    options = RolloutOptions(temperature=0.7, **options)
    return ServerEngine(MESH, actor, params, options, folder, 32)


def generate(engine):
    rollout = engine.generate(tiny_actor.make_prompts(), jax.random.key(7), SAMPLING)
    return jax.tree.map(np.asarray, rollout)


def difference(rollout, actor, params):
    """Return the largest difference of log-probs to the trainer's."""
    trainer = tiny_actor.Actor(actor.architecture)
    trainer.scored, trainer.stacked = actor, params
    ours = trainer.logprobs(rollout, temperature=0.7)
    return np.abs(ours - rollout.logprobs)[rollout.action_mask].max()


@pytest.mark.parametrize(
    "changes", [{}, {"tied": True}, {"tied": True} | GEMMA], ids=["untied", "tied", "gemma"]
)
def test_it_samples_from_the_newest_weights_and_survives_its_end(tmp_path, changes):
    """The log-probs are ours, before and after an update, and after vLLM was killed, once."""
    architecture = dataclasses.replace(ARCHITECTURE, **changes)
    actor = tiny_actor.Actor(architecture)
    save.export_checkpoint(actor.stacked, architecture, tmp_path / "model")
    engine = make_engine(actor.scored, actor.stacked, tmp_path / "model")
    # Other layers' kernels, and other tokens' embeddings.
    rolled = jax.tree.map(lambda x: jax.numpy.roll(x, 1, axis=0), actor.stacked)
    with jax.set_mesh(MESH), running(engine):
        rollouts = []
        for params in (actor.stacked, rolled, actor.stacked):
            engine.update_weights(params)
            rollouts.append(generate(engine))
            assert difference(rollouts[-1], actor.scored, params) < 1e-3
        if not changes:
            engine._server._process.stop()
            rollouts.append(generate(engine))
    first, other, *later = rollouts
    assert (first.responses != other.responses).any()
    assert changes or 1 < len(set(first.lengths.tolist()))
    for rollout in later:
        assert (rollout.responses == first.responses).all()


def test_it_samples_with_the_newest_adapters(tmp_path):
    """So does a server that runs already, which gets another base first."""
    actor = tiny_actor.Actor(ARCHITECTURE)
    save.export_checkpoint(actor.stacked, ARCHITECTURE, tmp_path / "model")
    lora = Lora(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"))
    adapted = Transformer(ARCHITECTURE, lora=lora)
    new = init_adapters(ARCHITECTURE, lora, jax.random.key(1), "lm")
    other = jax.tree.map(lambda x: x + 0.05, new)
    params = [join_params(actor.stacked, adapters) for adapters in (new, other, new)]
    engine = make_engine(adapted, params[0], tmp_path / "model")
    with jax.set_mesh(MESH), running(engine):

        def update_and_generate(engine, params):
            engine.update_weights(params)
            assert engine.takes_adapters
            rollout = generate(engine)
            assert difference(rollout, adapted, params) < 1e-3
            return rollout

        first, second, third = (update_and_generate(engine, each) for each in params)
        assert (first.responses != second.responses).any()
        assert (first.responses == third.responses).all()
        base = jax.tree.map(lambda x: 0.9 * x, actor.stacked)
        url = f"http://127.0.0.1:{engine._server.port}"
        with running(make_engine(adapted, params[0], engine.folder, engine="openai", url=url)) as b:
            for adapters in (other, new):
                update_and_generate(b, join_params(base, adapters))
