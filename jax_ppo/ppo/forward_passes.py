"""Forward passes over a rollout: log-probs of policy and reference, values, a reward model."""

import dataclasses
from collections.abc import Iterator
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt32

from jax_ppo.config.schema import Config
from jax_ppo.kernels.platform import target_platform
from jax_ppo.kernels.vocabulary_chunks import MaskedChunks, default_chunk_size
from jax_ppo.models.deberta_encoder import Deberta
from jax_ppo.models.heads import compute_scalars
from jax_ppo.models.transformer import Transformer
from jax_ppo.registries import KL_CONTROLLERS, KL_ESTIMATORS, ROLLOUT_ENGINES
from jax_ppo.runtime import placement
from jax_ppo.runtime.compiled_programs import ROUNDED_ALIKE, CompiledProgram, program
from jax_ppo.runtime.parallelism.vocabulary import split_by_device
from jax_ppo.sampler.engine import SamplingOptions
from jax_ppo.sampler.sampling import draw_next_tokens
from jax_ppo.training import forward, packing
from jax_ppo.training.forward import DecoderOutput
from jax_ppo.training.learner import gather_micro_batch
from jax_ppo.training.networks import Networks
from jax_ppo.training.packing import Rows
from jax_ppo.training.state import TrainState, reference_policy
from jax_ppo.types import PackedRows, Params, Rollout, Sequences, pytree

Part = Literal["policy", "critic", "teacher"]


@dataclasses.dataclass(frozen=True)
class ForwardOptions:
    """Options of the forward passes; a static argument of compiled functions."""

    temperature: float  # divides the logits, as in sampling
    max_response_length: int  # T
    old_logprobs: bool  # compute the policy's log-probs; False reuses the sampler's
    reference: bool  # compute the reference's log-probs
    full_kl: bool  # compute the KL to the reference over the whole vocabulary
    values: bool  # compute the critic's values
    last_values: bool  # compute the values of final states, for bootstrapping
    teacher: bool  # compute the teacher's log-probs
    shared_trunk: bool  # the critic is a head of the actor's
    entropy: bool = False  # compute the policy's entropy, with its log-probs
    sampling: SamplingOptions | None = None  # draw each token again, as these options say

    @classmethod
    def from_config(cls, config: Config) -> "ForwardOptions":
        """Collect the options from all sections."""
        algorithm = config.algorithm
        return cls(
            temperature=config.rollout.temperature,
            max_response_length=config.data.max_response_length,
            # Fields follow the options, so that an option that is off costs no pass.
            old_logprobs=not reuses_logprobs(config),
            reference=algorithm.use_reference,
            full_kl=(
                algorithm.use_reference
                and KL_ESTIMATORS.lookup(algorithm.kl_penalty).needs_vocabulary
            ),
            values=config.has_critic,
            # Only truncated responses have a final state whose value is not 0.
            last_values=config.has_critic and algorithm.bootstrap_truncated,
            teacher=config.teacher_gives_rewards,
            shared_trunk=config.shares_trunk,
        )

    @property
    def runs_policy(self) -> bool:
        """Return whether the actor's hidden states are needed: not for the reference alone."""
        return self.old_logprobs or self.full_kl or self.shared_trunk

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the parts that compute something, each in one program."""
        parts: list[Part] = []
        # Actor and reference share one program, since a full KL needs both outputs of a row.
        if self.runs_policy or self.reference:
            parts.append("policy")
        if self.values and not self.shared_trunk:
            parts.append("critic")
        if self.teacher:
            parts.append("teacher")
        return tuple(parts)

    def fields(self, part: Part) -> list[str]:
        """Return the fields of `ForwardOutputs` that a part computes."""
        is_policy = part == "policy"
        has_values = self.values and part == ("policy" if self.shared_trunk else "critic")
        computed = {
            "old_logprobs": is_policy and self.old_logprobs,
            "entropy": is_policy and self.entropy,
            "drawn": is_policy and self.sampling is not None,
            "ref_logprobs": is_policy and self.reference,
            "kl": is_policy and self.full_kl,
            "values": has_values,
            "last_values": has_values and self.last_values,
            "teacher_logprobs": part == "teacher",
        }
        return [name for name, is_computed in computed.items() if is_computed]


@pytree
class ForwardOutputs:
    """Results of the forward passes; arrays of [B, T] are 0 where the action mask is False."""

    # Log-probs under the policy that the update starts from; `None` if the sampler's are reused.
    old_logprobs: Float32[Array, "B T"] | None = None
    # Log-probs under the reference; `None` without a reference.
    ref_logprobs: Float32[Array, "B T"] | None = None
    # KL to the reference over the whole vocabulary; `None` if it is estimated from log-probs.
    kl: Float32[Array, "B T"] | None = None
    # The critic's output for the state before each token; `None` without a critic.
    values: Float32[Array, "B T"] | None = None
    # The critic's output for the final state; `None` without bootstrapping.
    last_values: Float32[Array, " B"] | None = None
    # Log-probs under the teacher; `None` if it gives no rewards.
    teacher_logprobs: Float32[Array, "B T"] | None = None
    # The policy's entropy, at the sampling temperature; `None` unless asked for.
    entropy: Float32[Array, "B T"] | None = None
    # The tokens that the logits and addressed random numbers give; `None` unless asked for.
    drawn: Int32[Array, "B T"] | None = None


@program(static_argnames=("length",))
def join_sequences(rollout: Rollout, length: int) -> Sequences:
    """Join prompts and responses without a gap, in S = `length` columns."""
    column = jnp.arange(length)
    prompts = rollout.prompts.lengths[:, None]
    lengths = rollout.lengths[:, None]

    def pick(tokens: jax.Array, index: jax.Array) -> jax.Array:
        # Indices outside the array are clipped; the caller masks their columns.
        return jnp.take_along_axis(tokens, jnp.clip(index, 0, tokens.shape[1] - 1), axis=1)

    from_prompt = pick(rollout.prompts.tokens, jnp.broadcast_to(column, (prompts.shape[0], length)))
    response_column = column - prompts
    from_response = pick(rollout.responses, response_column)
    response_or_padding = jnp.where(column < prompts + lengths, from_response, 0)
    routed_experts = rollout.routed_experts
    if routed_experts is not None:
        missing = length - routed_experts.shape[1]  # columns beyond the rollout's are never read
        routed_experts = jnp.pad(routed_experts, ((0, 0), (0, missing), (0, 0), (0, 0)))
    return Sequences(
        tokens=jnp.where(column < prompts, from_prompt, response_or_padding),
        prompt_lengths=rollout.prompts.lengths,
        lengths=rollout.lengths,
        truncated=rollout.truncated,
        action_mask=rollout.action_mask,
        routed_experts=routed_experts,
        turn_starts=rollout.turn_starts,
    )


def reuses_logprobs(config: Config) -> bool:
    """Return whether the sampler's log-probs replace a forward pass of the old policy.

    In float32 the two differ by 1e-6 on CPU, unless decoding rounds the weights to int8; elsewhere
    float32 products are rounded differently from program to program. An update of one optimizer
    step takes the log-probs that it differentiates as the old ones, and the sampler's are only
    reported, unless the reward contains a KL, to reference or teacher, or a controller follows it.
    """
    if config.rollout.exact:
        return True  # they are a forward pass's
    if config.algorithm.rollout_is != "none":
        return False  # importance weights compare the two
    if ROLLOUT_ENGINES.lookup(config.rollout.engine).is_external:
        return False  # an external engine's are always checked
    is_exact = (
        config.model.dtype == "float32"
        and target_platform() == "cpu"
        and config.rollout.quantization == "none"
    )
    adapts = KL_CONTROLLERS[config.algorithm.kl_ctrl.type].adapts
    in_reward = config.algorithm.use_kl_in_reward or config.teacher_gives_rewards
    if config.learns_from_files and (config.algorithm.use_reference or in_reward):
        return False  # the actor has not sampled them
    needs_ratios = not (config.updates_once or config.trainer.critic_only)
    is_unused = not (needs_ratios or in_reward or adapts)
    # Reused where they differ by rounding at most, or are only reported.
    if config.rollout.reuse_logprobs == "auto":
        # In a reward, their rounding alone would move a policy that equals the reference.
        return is_unused or (is_exact and not in_reward)
    return config.rollout.reuse_logprobs == "always"


def run_forward_passes(
    options: ForwardOptions,
    nets: Networks,
    state: TrainState,
    sequences: Sequences,
    packed: PackedRows,
) -> ForwardOutputs:
    """Run the roles that are needed over packed rows, one micro-batch at a time."""
    fields: dict[str, jax.Array] = {}
    for part in options.parts:
        outputs = forward_part(options, nets, part, state, sequences, packed)
        fields |= {name: x for name, x in vars(outputs).items() if x is not None}
    return ForwardOutputs(**fields)


_STATIC = ("options", "nets", "part")


@program(lambda options, nets, part, *_: f"forward_{part}", static_argnames=_STATIC)
def forward_part(
    options: ForwardOptions,
    nets: Networks,
    part: Part,
    state: TrainState,
    sequences: Sequences,
    packed: PackedRows,
    draw_keys: UInt32[Array, "B K"] | None = None,
) -> ForwardOutputs:
    """Return the outputs of one part; the other fields are `None`.

    `part` is "policy" for actor and reference, and for values if they share the actor's trunk;
    "critic" for values otherwise; or "teacher". `draw_keys` are the data of the samples' random
    keys if tokens are drawn again.
    """
    rows_of_batches, micro_batches = packed
    samples = len(sequences.lengths)
    shapes = {"last_values": (samples,)}
    types = {"drawn": jnp.int32}
    empty = ForwardOutputs(
        **{
            name: jnp.zeros(
                shapes.get(name, (samples, options.max_response_length)),
                types.get(name, jnp.float32),
            )
            for name in options.fields(part)
        }
    )
    state = state.on_device()  # once, before the loop over micro-batches

    def micro_batch(i: jax.Array, outputs: ForwardOutputs) -> ForwardOutputs:
        rows = gather_micro_batch(sequences, rows_of_batches, i)
        written: dict[str, jax.Array] = {}
        for name, values in _compute_rows(options, nets, part, state, rows, draw_keys):
            written[name] = packing.to_samples(values, rows, getattr(outputs, name))
            if name == "values" and outputs.last_values is not None:
                # The last token may not be an action: read by position, not by mask.
                last_B = sequences.prompt_lengths + sequences.lengths - 1
                written["last_values"] = forward.write_values_at(
                    values, rows, last_B, outputs.last_values
                )
        return dataclasses.replace(outputs, **written)

    return jax.lax.fori_loop(0, micro_batches, micro_batch, empty)


forward_part_exactly = CompiledProgram(
    forward_part.__wrapped__, "draw_again", static_argnames=_STATIC, **ROUNDED_ALIKE
)


def _compute_rows(
    options: ForwardOptions,
    nets: Networks,
    part: Part,
    state: TrainState,
    rows: Rows,
    draw_keys: UInt32[Array, "B K"] | None,
) -> Iterator[tuple[str, Float[Array, "R L"]]]:
    """Yield what a part computes for the tokens of some rows, with its field of the outputs."""

    # All models are divided by the same temperature: equal policies have a KL of exactly 0.
    def logprobs(
        net: Transformer, params: Params, hidden: jax.Array, with_entropy: bool = False
    ) -> tuple[jax.Array, jax.Array | None]:
        return forward.target_logprobs(
            net, params, hidden, rows, options.temperature, with_entropy=with_entropy
        )

    if part == "teacher":
        net, params = nets["teacher"], state.role_params("teacher", nets)
        hidden = forward.hidden_states(net, params, rows)
        yield "teacher_logprobs", logprobs(net, params, hidden)[0]
        return
    if part == "critic":
        assert nets.critic is not None, "there is no separate critic"
        critic = state.role_params("critic", nets)
        yield "values", forward.scalar_outputs(nets.critic, critic, rows)
        return
    net, actor = nets.actor, state.role_params("actor", nets)
    # The actor's hidden states serve its log-probs, the full KL and a shared critic.
    if options.runs_policy:
        hidden = forward.hidden_states(net, actor, rows, replays_routing=True)
    if options.old_logprobs:
        old_logprobs, entropy = logprobs(net, actor, hidden, with_entropy=options.entropy)
        yield "old_logprobs", old_logprobs
        if entropy is not None:
            yield "entropy", entropy
    if options.sampling is not None:
        assert draw_keys is not None, "draws need their random numbers"
        yield "drawn", _draw_again(net, options.sampling, actor, hidden, rows, draw_keys)
    if options.reference:
        ref_net, reference = reference_policy(nets, state)
        # The frozen reference routes by itself: no routing is replayed.
        ref_hidden = forward.hidden_states(ref_net, reference, rows)
        yield "ref_logprobs", logprobs(ref_net, reference, ref_hidden)[0]
    if options.full_kl:
        outputs = (DecoderOutput(net, actor, hidden), DecoderOutput(ref_net, reference, ref_hidden))
        yield "kl", forward.kl_over_vocabulary(*outputs, rows, options.temperature)
    if options.shared_trunk:
        yield "values", compute_scalars(actor, hidden)


def _draw_again(
    net: Transformer,
    sampling: SamplingOptions,
    params: Params,
    hidden: Float[Array, "R L D"],
    rows: Rows,
    draw_keys: UInt32[Array, "B K"],
) -> Int32[Array, "R L"]:
    """Return the token drawn at each action token of some rows; see `forward_part`."""
    inputs = (hidden, draw_keys[rows.samples], rows.steps)
    mask = split_by_device(rows.mask)
    size = default_chunk_size(net.architecture.vocab_size)
    chunks = MaskedChunks(mask, min(size, mask.shape[1]))

    def draw_chunk(i: jax.Array, buffer: jax.Array) -> jax.Array:
        parts = [chunks.gather(split_by_device(x), i) for x in inputs]
        hidden, keys, steps = (x.reshape(-1, *x.shape[2:]) for x in parts)
        keys = jax.random.wrap_key_data(keys)
        drawn = draw_next_tokens(net.architecture, sampling, params, hidden, keys, steps)
        return chunks.write(buffer, drawn.tokens.reshape(len(mask), -1), i)

    buffer = jax.lax.fori_loop(0, chunks.count, draw_chunk, chunks.buffer(jnp.int32))
    return chunks.scatter(buffer).reshape(rows.mask.shape)


@program("forward_reward", static_argnames=("model", "position"))
def reward_model_scores(
    model: Transformer | Deberta,
    params: Params,
    sequences: Sequences,
    packed: PackedRows,
    position: str,
) -> Float32[Array, " B"]:
    """Return the reward model's score of each sample.

    It is a decoder's output at one of the sample's last tokens, or an encoder's at the first one.
    `sequences` are the rollout, or its texts in the reward model's tokens; `position` is
    `config.reward.score_position`.
    """
    if isinstance(model, Deberta):
        # An encoder's head reads the first token, wherever the text ends.
        positions_B = jnp.zeros_like(sequences.lengths)
    else:
        pad_id = model.architecture.pad_id if position == "auto" else None
        positions_B = forward.score_positions(sequences, pad_id)
    params = placement.to_device(params)
    rows_of_batches, micro_batches = packed

    def micro_batch(i: jax.Array, scores_B: jax.Array) -> jax.Array:
        rows = gather_micro_batch(sequences, rows_of_batches, i)
        if isinstance(model, Deberta):
            output = model.apply({"params": params}, rows.tokens, rows.segments)
            values = cast(jax.Array, output)
        else:
            values = forward.scalar_outputs(model, params, rows)
        return forward.write_values_at(values, rows, positions_B, scores_B)

    zeros_B = jnp.zeros(len(sequences.lengths), jnp.float32)
    return jax.lax.fori_loop(0, micro_batches, micro_batch, zeros_B)
