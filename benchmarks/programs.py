"""Programs of a PPO step and their arguments at any size, without data, tokenizer or checkpoint.

Abstract shapes allow ahead-of-time compilation for this machine or another.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_ppo.config import schema
from jax_ppo.models import cache
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.attention_kernels import (
    AttentionFacts,
    round_row_length,
    select_attention_program,
)
from jax_ppo.models.layer_stack import unroll_params
from jax_ppo.models.quantization import round_parameters
from jax_ppo.models.transformer import Transformer
from jax_ppo.ppo import forward_passes, update
from jax_ppo.ppo.experience import estimate_experience
from jax_ppo.ppo.objectives import UpdateOptions
from jax_ppo.ppo.reward_shaping import EarnedRewards, ExperienceOptions
from jax_ppo.runtime import meshes, sharding
from jax_ppo.sampler.decode_loop import SamplingOptions, sampler_program
from jax_ppo.training import packing
from jax_ppo.training.networks import Networks
from jax_ppo.training.state import StateBuilder, TrainState
from jax_ppo.types import Experience, MiniBatches, Packing, Prompts, Sequences


def qwen2(
    layers: int = 4,
    hidden: int = 256,
    vocabulary: int = 4096,
    tied: bool = False,
    query_heads: int | None = None,
    kv_heads: int | None = None,
    mlp: int | None = None,
) -> Architecture:
    """Return a Qwen2 architecture with heads of 64; by default the benchmarks' small model."""
    return Architecture(
        family="qwen2",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=mlp or hidden * 11 // 4,
        num_layers=layers,
        num_heads=query_heads or hidden // 64,
        num_kv_heads=kv_heads or max(1, hidden // 128),
        head_dim=64,
        qkv_bias=True,
        max_position_embeddings=32768,
        tied=tied,
    )


@dataclasses.dataclass(frozen=True)
class Step:
    """One PPO step with actor, critic and reference, one epoch and one mini-batch.

    Attributes:
      architecture: Architecture of all three models.
      samples: Number of responses.
      responses: Number of them to each prompt.
      prompt: Maximum tokens per prompt.
      response: Maximum tokens per response.
      rows: Rows of `prompt + response` tokens per micro-batch; `None` for jax_ppo's default.
      dtype: As in config.model.
      remat: As in config.model.gradient_checkpointing.
      slots: Samples decoded at once.
      endings: Number of token ids that end a response. With random weights all tokens are about
        equally likely, so a response ends with constant probability; 0 gives full-length responses.
      decoding: Program that reads the cache; `None` for jax_ppo's default.
      mesh: Devices; by default the first one.
    """

    architecture: Architecture
    _: dataclasses.KW_ONLY
    samples: int = 32
    responses: int = 1
    prompt: int = 64
    response: int = 64
    rows: int | None = None
    dtype: str = "float32"
    remat: bool = False
    slots: int = 256
    endings: int = 0
    decoding: str | None = None
    mesh: jax.sharding.Mesh = dataclasses.field(
        default_factory=lambda: meshes.make_mesh(schema.MeshShape(), jax.devices()[:1])
    )

    @functools.cached_property
    def config(self) -> schema.Config:
        samples, rows = self.samples, self.rows
        return schema.Config(
            data=schema.Data(
                train_files="-",
                train_batch_size=samples // self.responses,
                max_prompt_length=self.prompt,
                max_response_length=self.response,
            ),
            model=schema.Model(dtype=self.dtype, gradient_checkpointing=self.remat),
            actor=schema.Actor(
                ppo_mini_batch_size=samples // self.responses, ppo_micro_batch_size_per_device=rows
            ),
            rollout=schema.RolloutOptions(
                n=self.responses, logprob_micro_batch_size_per_device=rows
            ),
        )

    @property
    def platform(self) -> str:
        platform = self.mesh.devices.flat[0].platform
        return {"gpu": "cuda"}.get(platform, platform)

    @property
    def row_length(self) -> int:
        return round_row_length("auto", self.platform, self.config.sequence_length)

    @functools.cached_property
    def nets(self) -> Networks:
        facts = AttentionFacts(
            self.platform, self.dtype, self.architecture.head_dim, self.row_length
        )
        program = select_attention_program("auto", facts)
        model = Transformer(
            self.architecture, jnp.dtype(self.dtype), remat=self.remat, attention=program
        )
        return Networks(actor=model, critic=model)

    @functools.cached_property
    def decoder(self) -> Transformer:
        chosen = cache.select_cache_program(
            "auto",
            self.platform,
            self.nets.actor.attention,
            self.architecture,
            self.config.sequence_length,
        )
        return Transformer(
            self.architecture,
            jnp.dtype(self.dtype),
            unrolled=True,
            decoding=self.decoding or chosen,
        )

    @functools.cached_property
    def sampler(self):
        endings = tuple(range(2, 2 + self.endings))
        options = SamplingOptions(
            self.response, 1.0, eos_ids=endings, slots=self.slots, n=self.responses
        )
        return sampler_program(self.decoder, options)

    def state(self) -> TrainState:
        return StateBuilder(self.config, self.nets, self.mesh).shapes()

    def decode_params(self):
        shapes = jax.eval_shape(self._to_decoding_form, self.state().actor)
        return self._with(shapes, sharding.tree_shardings(self.mesh, shapes, sharding.DECODE_RULES))

    def _to_decoding_form(self, params):
        return round_parameters(unroll_params(params), jnp.dtype(self.dtype))

    def prompts(self) -> Prompts:
        return Prompts(
            self.by_rows((self.samples // self.responses, self.prompt), jnp.int32),
            self.by_rows((self.samples // self.responses,), jnp.int32),
        )

    def key(self):
        return self._with(jax.eval_shape(lambda: jax.random.key(0)), sharding.replicated(self.mesh))

    def sequences(self) -> Sequences:
        columns = self.prompt + self.response
        lengths = self.by_rows((self.samples,), jnp.int32)
        return Sequences(
            tokens=self.by_rows((self.samples, columns), jnp.int32),
            prompt_lengths=lengths,
            lengths=lengths,
            truncated=self.by_rows((self.samples,), bool),
            action_mask=self.by_rows((self.samples, self.response), bool),
        )

    def experience(self) -> Experience:
        def build(state, sequences, sampled, packed_rows, rewards):
            outputs = forward_passes.run_forward_passes(
                forward_passes.ForwardOptions.from_config(self.config),
                self.nets,
                state,
                sequences,
                (packed_rows, 1),
            )
            return estimate_experience(
                ExperienceOptions.from_config(self.config),
                state.control,
                sequences,
                sampled,
                outputs,
                EarnedRewards(rewards),
            )[0]

        packed_rows = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.packing().packing
        )
        shapes = jax.eval_shape(
            build,
            self.state(),
            self.sequences(),
            self.by_rows((self.samples, self.response), jnp.float32),
            packed_rows,
            self.by_rows((self.samples,), jnp.float32),
        )
        return jax.tree.map(
            lambda x: self.by_rows(x.shape, x.dtype) if x.ndim else self.everywhere(x), shapes
        )

    def pack(self, lengths) -> tuple[Packing, np.ndarray]:
        """Pack one mini-batch of samples of these lengths.

        Returns:
          The packing [1, A, R, L] and the number of non-empty micro-batches among the A, [1].
        """
        at_once = packing.rows_per_micro_batch(
            self.rows,
            self.row_length,
            self.samples,
            meshes.row_shards(self.mesh),
            meshes.gathers_weights(self.mesh),
        )
        return packing.pack_samples(
            lengths, np.arange(self.samples)[None], at_once, self.row_length
        )

    def packing(self) -> MiniBatches:
        """Return the abstract mini-batch of an update."""
        packed, counts = self.pack(np.ones(self.samples, int))
        packed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.rows(self.mesh, 2)),
            packed,
        )
        return MiniBatches(
            packed, self.everywhere(counts), self.everywhere(np.ones((1, self.samples), bool))
        )

    def lower(self, program: str, platforms: tuple[str, ...] | None = None):
        """Trace and lower a program for the mesh's devices or for other platforms.

        Args:
          program: `sample`, `score`, `score critic`, `update` or `update critic`. Without a role,
            `score` is the reference's program and `update` the actor's.
          platforms: Target platforms; `None` for the mesh's.
        """
        batches, (kind, *critic) = self.packing(), program.split()
        if kind == "sample":
            parts = [(self.sampler, (self.decode_params(), self.prompts(), self.key()))]
        elif kind == "score":
            rows = sharding.rows(self.mesh, 1)
            first = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=rows), batches.packing
            )
            options = forward_passes.ForwardOptions.from_config(self.config)
            packed = (first, self.everywhere(np.int32(0)))
            parts = [
                (
                    forward_passes.forward_part,
                    (options, self.nets, part, self.state(), self.sequences(), packed),
                )
                for part in options.parts
            ]
        else:
            by_role = update.update_arguments(
                update.UpdateSetup(UpdateOptions.from_config(self.config), self.nets, 100),
                self.state(),
                self.experience(),
                {"actor": batches, "critic": batches},
            )
            functions = (update.update_actor, update.update_critic)
            parts = list(zip(functions, by_role.values(), strict=True))
        function, arguments = parts[len(critic)]
        with jax.set_mesh(self.mesh):
            return function.jitted.trace(*arguments).lower(lowering_platforms=platforms)

    def by_rows(self, shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.rows(self.mesh))

    def everywhere(self, like):
        return jax.ShapeDtypeStruct(
            np.shape(like), like.dtype, sharding=sharding.replicated(self.mesh)
        )

    def _with(self, shapes, places):
        places = places if isinstance(places, dict) else jax.tree.map(lambda _: places, shapes)
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places
        )
