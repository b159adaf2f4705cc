"""Trials of the user's functions on shapes alone, before any weights are loaded."""

import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jax_ppo.config.schema import Actor, Algorithm
from jax_ppo.errors import UserError, shorten
from jax_ppo.kernels.losses import LossInputs, MiniBatchTokens, padded_batch, row_sum
from jax_ppo.ppo import advantages, policy_loss
from jax_ppo.ppo.objectives import METRICS, OTHER_ACTOR_METRICS
from jax_ppo.ppo.reward_shaping import KLFunction, get_kl_estimator

# Sizes of a trial, no multiples: a sum over the wrong axis has another shape.
_SAMPLES, _TOKENS = 2, 5
_ARRAY = jax.ShapeDtypeStruct((_SAMPLES, _TOKENS), jnp.float32)
_LIBRARIES = (f"{Path(jax.__file__).parent}/", f"{Path(__file__).parents[1]}/")


def try_plugins(algorithm: Algorithm, actor: Actor, n: int, has_figures: bool = True) -> None:
    """Try the user's losses and estimators that options name; raise `UserError` if one fails."""
    policy_loss_metrics(actor)
    name = algorithm.adv_estimator
    if ":" in name:
        asked = advantages.figures_read(name) if has_figures else ()

        def estimate(rewards: jax.Array) -> Any:
            figures = dict.fromkeys(asked, rewards[:, 0])
            return advantages.critic_free_advantages(algorithm, n, rewards, rewards > 0, figures)

        rewards = jax.ShapeDtypeStruct((_SAMPLES * n, _TOKENS), jnp.float32)
        _try("algorithm.adv_estimator", name, estimate, rewards)
    for option, name in (
        ("algorithm.kl_penalty", algorithm.kl_penalty),
        ("actor.kl_loss_type", actor.kl_loss_type),
    ):
        if ":" in name:
            kl_estimator = get_kl_estimator(name, option)

            def total_kl(log_ratios: jax.Array, function: KLFunction = kl_estimator) -> jax.Array:
                return jnp.sum(function(log_ratios))

            _try(option, name, jax.grad(total_kl), _ARRAY)


@functools.cache
def policy_loss_metrics(options: Actor) -> tuple[str, ...]:
    """Return the names of a user-defined policy loss's metrics; raise `UserError` if it fails."""
    names: tuple[str, ...] = ()
    if ":" not in options.policy_loss:
        return names

    def total_loss(logprobs: jax.Array, others: jax.Array) -> jax.Array:
        nonlocal names
        inputs = LossInputs(
            batch=padded_batch(logprobs, others, others, others > 0),
            clip=policy_loss.clip_bounds(options),
            sequence_sum=row_sum,
            mini_batch=MiniBatchTokens(others, others, others > 0),
            to_rows=jnp.asarray,
        )
        policy, metrics = policy_loss.compute_policy_loss(options.policy_loss, inputs)
        names = tuple(metrics)
        return jnp.sum(policy.loss)

    _try("actor.policy_loss", options.policy_loss, jax.grad(total_loss), _ARRAY, _ARRAY)
    built_in = {*METRICS, *(f"actor/{name}" for name in OTHER_ACTOR_METRICS)}
    names = tuple(f"actor/{name}" for name in names)
    taken = [name for name in names if name in built_in]
    if taken:
        raise UserError(
            f"config.actor.policy_loss={options.policy_loss!r}: its metric {taken[0]!r} has the "
            "name of a built-in one; choose another"
        )
    return names


def _try(option: str, name: str, call: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> None:
    """Trace a call; raise `UserError` with the failing line of the user's function."""
    try:
        jax.eval_shape(call, *shapes)
    except UserError:
        raise
    except Exception as error:
        hint = ""
        # The base of the errors about values that are not known in a traced function.
        if isinstance(error, jax.errors.JAXTypeError):
            hint = (
                ". Values are not known while jax.jit traces a function: use jnp.where and jax.lax "
                "instead of if, while and float()"
            )
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith((*_LIBRARIES, "<"))
        ]
        place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        described = ", ".join(f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in shapes)
        reason = shorten(str(error).partition("\n")[0], 200)
        raise UserError(
            f"config.{option}={name!r}: failed on arrays of {described}: "
            f"{type(error).__name__}: {reason}{place}{hint}"
        ) from error
