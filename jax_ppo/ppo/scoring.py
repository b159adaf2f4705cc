"""The passes over a rollout: log-probs of the policy and of the reference, values, a reward model's scores."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_ppo.config.schema import Config
from jax_ppo.models import heads
from jax_ppo.models.deberta.encoder import Deberta
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import dispatch
from jax_ppo.runtime.sharding import constrain_rows
from jax_ppo.training import forward
from jax_ppo.training import packing as packing_lib
from jax_ppo.training.networks import Networks, full_parameters
from jax_ppo.training.state import TrainState
from jax_ppo.types import Packing, Rollout, Sequences, pytree


@pytree
class Scores:
    """What the frozen passes over a rollout give; [B, T] float32, 0 past the length.

    Attributes:
      old_logprobs: of the policy that the update starts from; None where the sampler's own serve (reuses_logprobs).
      ref_logprobs: of the reference; None without one.
      kl: KL to the reference over the whole vocabulary; None where it is estimated from log-probs.
      values: the critic's output; None without a critic.
      last_values: [B], its output after the last token; None where nothing is bootstrapped.
    """

    old_logprobs: jax.Array | None = None
    ref_logprobs: jax.Array | None = None
    kl: jax.Array | None = None
    values: jax.Array | None = None
    last_values: jax.Array | None = None


@functools.partial(jax.jit, static_argnames=("length",))
def join(rollout: Rollout, length: int) -> Sequences:
    """Prompt and response without the gap between them. `length`: S, columns of the result."""
    column = jnp.arange(length)
    prompts, lengths = rollout.prompts.lengths[:, None], rollout.lengths[:, None]

    def pick(tokens, index):
        return jnp.take_along_axis(tokens, jnp.clip(index, 0, tokens.shape[1] - 1), axis=1)

    from_prompt = pick(rollout.prompts.tokens, jnp.broadcast_to(column, (prompts.shape[0], length)))
    from_response = pick(rollout.responses, column - prompts)
    tokens = jnp.where(
        column < prompts, from_prompt, jnp.where(column < prompts + lengths, from_response, 0)
    )
    return Sequences(
        tokens=tokens,
        prompt_lengths=rollout.prompts.lengths,
        lengths=rollout.lengths,
        truncated=rollout.truncated,
        action_mask=rollout.action_mask,
    )


def reuses_logprobs(config: Config) -> bool:
    """Whether the sampler's log-probs serve as the old policy's, so that its pass over the rollout is spared.

    In float32 the two differ by 1e-6 on CPU; elsewhere products of float32 are rounded to fewer bits, and differently from
    program to program. Where a rollout is learned from in one optimizer step the update takes the old log-probs to be those it
    differentiates (their ratio is 1), and the sampler's are no more than a figure to report, unless the reward has a KL
    or a controller goes by one.
    """
    if config.algorithm.rollout_is != "none":
        return False  # it is what importance weights compare the sampler's with
    exact = config.model.dtype == "float32" and jax.default_backend() == "cpu"
    adapts = config.algorithm.kl_ctrl.type == "adaptive"
    unused = config.updates_once and not config.algorithm.use_kl_in_reward and not adapts
    return config.rollout.reuse_logprobs == "always" or (
        config.rollout.reuse_logprobs == "auto" and (exact or unused)
    )


def score(
    config: Config,
    nets: Networks,
    state: TrainState,
    sequences: Sequences,
    plan: Packing,
    micro_batches,
) -> Scores:
    """Runs the roles whose numbers are wanted over packed rows, a micro-batch at a time.

    Args:
      plan: Packing [A, R, L].
      micro_batches: int32 scalar, how many of the A hold something.
    """
    return join_scores(
        dispatch.run_together(programs(config, nets, state, sequences, plan, micro_batches))
    )


def programs(
    config: Config, nets: Networks, state: TrainState, *of_rollout
) -> list[dispatch.Program]:
    """What `score` runs: a program of the policy's numbers, and one of the critic's, as far as they are wanted."""
    wanted = {
        "policy": config.shares_trunk
        or config.algorithm.use_reference
        or not reuses_logprobs(config),
        "critic": config.has_critic and not config.shares_trunk,
    }
    return [
        (score_part, (config, nets, part, state, *of_rollout))
        for part, is_wanted in wanted.items()
        if is_wanted
    ]


def join_scores(parts: list[Scores]) -> Scores:
    """What each of them has."""
    return Scores(
        **{name: value for part in parts for name, value in vars(part).items() if value is not None}
    )


@functools.partial(jax.jit, static_argnames=("config", "nets", "part"))
def score_part(
    config: Config,
    nets: Networks,
    part: str,
    state: TrainState,
    sequences: Sequences,
    plan: Packing,
    micro_batches,
) -> Scores:
    """The numbers of actor and reference (`part` policy), or the values (critic); None for the rest. With a shared trunk the
    values come with the policy's."""
    options, temperature, of_policy = config.algorithm, config.rollout.temperature, part == "policy"
    with_values = config.has_critic and config.shares_trunk == of_policy
    zeros = jnp.zeros((len(sequences.lengths), config.data.max_response_length), jnp.float32)
    with_reference = of_policy and options.use_reference
    whole_kl = with_reference and options.kl_penalty == "full"
    first = Scores(
        old_logprobs=zeros if of_policy and not reuses_logprobs(config) else None,
        ref_logprobs=zeros if with_reference else None,
        kl=zeros if whole_kl else None,
        values=zeros if with_values else None,
        last_values=zeros[:, 0] if with_values and options.bootstrap_truncated else None,
    )

    actor = full_parameters(nets.actor, state.actor, state.reference)
    critic = full_parameters(nets.critic, state.critic, state.reference)

    def micro_batch(i, scores):
        rows = packing_lib.gather(sequences, jax.tree.map(lambda x: constrain_rows(x[i]), plan))

        def put(values_RxL, into):
            return packing_lib.to_samples(values_RxL, rows, into)

        def logprobs_of(params, hidden):
            return forward.token_logprobs(
                nets.actor, params, hidden, rows, temperature, with_entropy=False
            )[0]

        found = {}
        if scores.old_logprobs is not None or whole_kl or config.shares_trunk:
            actor_hidden = forward.hidden_states(nets.actor, actor, rows)
        if scores.old_logprobs is not None:
            found["old_logprobs"] = put(logprobs_of(actor, actor_hidden), scores.old_logprobs)
        if with_reference:
            ref_hidden = forward.hidden_states(nets.actor, state.reference, rows)
            found["ref_logprobs"] = put(
                logprobs_of(state.reference, ref_hidden), scores.ref_logprobs
            )
        if whole_kl:
            divergence = forward.reference_kl(
                nets.actor, actor, actor_hidden, state.reference, ref_hidden, rows, temperature
            )
            found["kl"] = put(divergence, scores.kl)
        if with_values:
            values = (
                heads.compute_scalars(actor, actor_hidden)
                if config.shares_trunk
                else forward.scalars(nets.critic, critic, rows)
            )
            found["values"] = put(values, scores.values)
            if options.bootstrap_truncated:
                found["last_values"] = forward.at_the_end(
                    values, rows, sequences, scores.last_values
                )
        return dataclasses.replace(scores, **found)

    return jax.lax.fori_loop(0, micro_batches, micro_batch, first)


@functools.partial(jax.jit, static_argnames=("model",))
def reward_model_scores(
    model: Transformer | Deberta, params, sequences: Sequences, plan: Packing, micro_batches
):
    """The reward model's score of each sample, float32 [B]: a decoder's stands at the sample's last token, an encoder's at its
    first. Arguments as for `score`; `sequences` may be in tokens of the reward model's own."""

    def micro_batch(i, scores_B):
        rows = packing_lib.gather(sequences, jax.tree.map(lambda x: constrain_rows(x[i]), plan))
        if isinstance(model, Deberta):
            values = model.apply({"params": params}, rows.tokens, rows.positions, rows.segments)
            return forward.at_places(values, rows, jnp.zeros_like(sequences.lengths), scores_B)
        return forward.at_the_end(forward.scalars(model, params, rows), rows, sequences, scores_B)

    return jax.lax.fori_loop(
        0, micro_batches, micro_batch, jnp.zeros(len(sequences.lengths), jnp.float32)
    )
