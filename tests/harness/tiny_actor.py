"""A random tiny actor, far from uniform, with prompts and compiled samplers to share."""

import dataclasses
import functools

import jax
import numpy as np

from jax_ppo.models import heads
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.layer_stack import unroll_params
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import sharding
from jax_ppo.sampler.built_in import BuiltInEngine
from jax_ppo.sampler.decode_loop import SamplingOptions, sampler_program
from jax_ppo.types import Prompts

ARCHITECTURE = Architecture(
    family="qwen2",
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qkv_bias=True,
)
HYBRID = dataclasses.replace(
    ARCHITECTURE,
    family="qwen3_5_text",
    block="delta",
    linear_layers=(True, False),
    delta_key_heads=2,
    delta_value_heads=4,
    delta_key_dim=4,
    delta_value_dim=6,
    delta_window=3,
    output_gate=True,
    qk_norm=True,
    norm_plus_one=True,
    qkv_bias=False,
)
T = 12


class Actor:
    """The model with stacked and with unrolled layers."""

    def __init__(self, architecture=ARCHITECTURE):
        self.scored = Transformer(architecture)
        self.decoded = Transformer(architecture, unrolled=True)
        self.stacked, self.params = self.init(jax.random.key(0))
        # Tests share programs.
        self.sampler = functools.cache(lambda options: sampler_program(self.decoded, options))

    @functools.partial(jax.jit, static_argnums=0)
    def init(self, key):
        stacked = jax.tree.map(
            lambda x: 5 * x if x.ndim > 1 else x, heads.init_params(self.scored, key, "lm")
        )
        partial_stacks = self.scored.architecture.partial_stacks
        return stacked, unroll_params(stacked, partial_stacks=partial_stacks)

    def sample(self, prompts, seed=0, first=0, max_response_length=T, temperature=1.0, **options):
        """Return a Rollout of numpy arrays."""
        sampler = self.sampler(SamplingOptions(max_response_length, temperature, **options))
        rollout = sampler(self.params, prompts, jax.random.key(seed), first)
        return jax.tree.map(np.asarray, rollout)

    @functools.partial(jax.jit, static_argnums=0)
    def logits(self, tokens):
        """Return the logits of a forward pass of the stacked form over whole rows, [B, S, V]."""
        positions = jax.numpy.broadcast_to(jax.numpy.arange(tokens.shape[1]), tokens.shape)
        hidden, *_ = self.scored.apply(
            {"params": self.stacked}, tokens, positions, jax.numpy.zeros_like(tokens)
        )
        return heads.compute_logits(self.scored.architecture, self.stacked, hidden)

    def full_logits(self, prompts, responses):
        """Return the logits before each response token, [B, T, V], from one forward pass."""
        lengths, T = np.asarray(prompts.lengths), responses.shape[1]
        tokens = np.zeros((len(lengths), prompts.tokens.shape[1] + T), np.int32)
        for row, prompt, length, response in zip(
            tokens, np.asarray(prompts.tokens), lengths, responses, strict=True
        ):
            row[:length], row[length : length + T] = prompt[:length], response
        before = lengths[:, None] + np.arange(T) - 1
        return np.take_along_axis(np.asarray(self.logits(tokens)), before[..., None], 1)

    def logprobs(self, rollout, temperature=1.0):
        """Return the log-probs of a rollout's tokens, [B, T], from one forward pass."""
        logits = self.full_logits(rollout.prompts, rollout.responses)
        log_p = np.asarray(jax.nn.log_softmax(logits / temperature))
        return np.take_along_axis(log_p, np.asarray(rollout.responses)[..., None], 2)[..., 0]


def make_prompts(lengths=(5, 16, 1, 9), P=16, pad=0, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, ARCHITECTURE.vocab_size, (len(lengths), 32))[:, :P].astype(np.int32)
    lengths = np.array(lengths, np.int32)
    return Prompts(np.where(np.arange(P) < lengths[:, None], tokens, pad).astype(np.int32), lengths)


def place_for_decoding(mesh, actor, prompts):
    """Return parameters, prompts and key 0, split over a mesh as decoding has them."""
    rules = sharding.decode_rules(mesh, actor.decoded.architecture.num_kv_heads)
    return (
        jax.device_put(actor.params, sharding.tree_shardings(mesh, actor.params, rules)),
        jax.device_put(prompts, sharding.batch_rows(mesh, len(prompts.lengths))),
        jax.device_put(jax.random.key(0), sharding.replicated(mesh)),
    )


def sample_on_mesh(mesh, model, params, prompts, options):
    """Return what the built-in engine draws from parameters in the layout of training."""
    with jax.set_mesh(mesh):
        layouts = sharding.tree_shardings(mesh, params, sharding.TRAIN_RULES)
        engine = BuiltInEngine(mesh, model, params)
        engine.update_weights(jax.device_put(params, layouts))
        own = jax.device_put(prompts, sharding.rows(mesh))
        key = jax.device_put(jax.random.key(0), sharding.replicated(mesh))
        return jax.tree.map(np.asarray, engine.generate(own, key, options))
