"""Sample responses to the prompts of a step, and select those that the update learns from.

Two selections by rewards, which combine: `algorithm.filter_groups` replaces prompts whose responses
all earned the same (dynamic sampling; DAPO, Yu et al. 2025, arXiv 2503.14476, section 3.2), and
`rollout.keep` keeps some of the responses to each prompt (PODS, Xu et al. 2025, arXiv 2504.13818).

A step draws batches of prompts until it has enough of them. What it selects always has the same
shapes, so that no number of draws compiles anything.
"""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jax_ppo.data.prompt_batches import make_batch
from jax_ppo.errors import UserError
from jax_ppo.kernels.masked_statistics import ROUNDING
from jax_ppo.ppo.rewarding import RuleRewards, mean_of_known
from jax_ppo.ppo.samples.on_policy import sample_batch
from jax_ppo.ppo.samples.source import SampledBatch, SampleSource
from jax_ppo.ppo.step_parts import StepObserver, StepParts
from jax_ppo.runtime import placement, sharding
from jax_ppo.runtime.compiled_programs import program
from jax_ppo.training.state import TrainState
from jax_ppo.types import Prompts, Rollout, with_nan


class Selected(NamedTuple):
    """Samples in groups of k responses to one prompt, G groups."""

    # Fields of `Rollout` and `RuleRewards` by name, on the mesh: arrays or trees [G * k, ...].
    arrays: dict[str, Any]
    # int [G * k, 2], the draw of each sample within its step and its row in that draw.
    addresses: np.ndarray
    prompts: np.ndarray  # int [G], rows of the data set


class SelectedSource(SampleSource):
    """Samples from the newest weights until a step has enough, and selects them by rewards."""

    def take(self, state: TrainState, step: int, observer: StepObserver) -> SampledBatch:
        """Sample, score and select. See `SampleSource.take`."""
        parts, batches = self._parts, self._batches
        filters = parts.config.algorithm.filter_groups
        selected: Selected | None = None
        draws: list[RuleRewards] = []
        # Over all draws: groups with equal rewards, tokens, and those that slots could have drawn.
        counts: collections.Counter[str] = collections.Counter()
        filled = 0
        for draw in range(filters.max_num_gen_batches if filters.enable else 1):
            sampled = sample_batch(parts, state, batches, step, observer, draw)
            with observer.phase("rollout"):
                jax.block_until_ready(sampled.rollout.lengths)
            with observer.phase("reward"):
                rewards = parts.rules.score(sampled.batch, sampled.rollout)
            drawn, differs = _select_responses(parts, sampled, rewards, draw)
            draws.append(rewards)
            counts["uniform groups"] += int((~differs).sum())
            counts["tokens"] += int(placement.to_host(sampled.rollout.action_mask).sum())
            if sampled.rollout.slot_steps is not None:
                counts["slot steps"] += int(placement.to_host(sampled.rollout.slot_steps).sum())
            if not filters.enable:
                selected = drawn
                break
            # Places that earlier draws have filled stay; the others are chosen again.
            groups, filled = choose_groups(differs, filled)
            pools = (selected or drawn, drawn)
            rows = rows_of_groups(groups, parts.config.responses_per_prompt)
            selected = Selected(
                arrays=take_on_mesh(parts.mesh, tuple(x.arrays for x in pools), rows),
                addresses=np.concatenate([x.addresses for x in pools])[rows],
                prompts=np.concatenate([x.prompts for x in pools])[groups],
            )
            if filled == len(groups):
                break
        assert selected is not None, "there is at least one draw"
        metrics = {
            "rollout/draws": len(draws),
            "rollout/uniform_groups": counts["uniform groups"] / (len(draws) * len(differs)),
        }
        if counts["slot steps"]:
            metrics["rollout/slot_use"] = counts["tokens"] / counts["slot steps"]
        sampled = _as_batch(parts, selected, draws, batches.position)
        return sampled._replace(metrics=metrics, weights_step=step)


def choose_groups(differs: np.ndarray, filled: int) -> tuple[np.ndarray, int]:
    """Choose a step's groups: the first `filled` of its present ones stay, drawn ones are added.

    `differs`, bool [G], says whether the rewards of a drawn group differ. Places that no such group
    fills hold drawn groups with equal rewards. Return int [G], indices into the G groups of the
    step followed by the G drawn ones, and how many of the first ones a further draw keeps.
    """
    size = len(differs)
    useful = np.flatnonzero(differs)[: size - filled]
    fillers = np.flatnonzero(~differs)[: size - filled - len(useful)]
    groups = np.concatenate([np.arange(filled), size + useful, size + fillers])
    return groups, filled + len(useful)


def choose_responses(scores_Gxn: np.ndarray, keep: int, by: str) -> np.ndarray:
    """Choose `keep` responses of each group, int [G, keep] in ascending order, by their scores.

    `by` "best" keeps the highest scores; "spread" the set of the largest variance, which consists
    of the lowest and the highest scores (PODS, theorem 1).
    """
    n = scores_Gxn.shape[1]
    # Of equal scores the first sample counts as the lowest, so that nothing is left to chance.
    order_Gxn = np.argsort(scores_Gxn, axis=1, kind="stable")
    if by == "best":
        return np.sort(order_Gxn[:, n - keep :], axis=1)
    # Every split of the places between the lowest and the highest scores: [keep + 1, keep].
    splits = np.array([[*range(low), *range(n - keep + low, n)] for low in range(keep + 1)])
    ordered_Gxn = np.take_along_axis(scores_Gxn, order_Gxn, axis=1)
    best_G = ordered_Gxn[:, splits].var(axis=2).argmax(axis=1)
    return np.sort(np.take_along_axis(order_Gxn, splits[best_G], axis=1), axis=1)


def is_uniform(figures_Gxk: np.ndarray) -> np.ndarray:
    """Return whether each group's figures, NaN aside, are equal up to rounding, bool [G]."""
    known = ~np.isnan(figures_Gxk)
    highest = np.where(known, figures_Gxk, -np.inf).max(axis=1)
    lowest = np.where(known, figures_Gxk, np.inf).min(axis=1)
    size = np.where(known, np.abs(figures_Gxk), 0).max(axis=1)
    return highest - lowest <= ROUNDING * size


def _select_responses(
    parts: StepParts, sampled: SampledBatch, rewards: RuleRewards, draw: int
) -> tuple[Selected, np.ndarray]:
    """Return the selected responses of a draw, and bool [G], which groups' rewards differ."""
    config = parts.config
    prompts = sampled.batch.indices
    # Arrays that have a row per sample; the prompts are placed again.
    left_out = ("prompts", "slot_steps")
    arrays = {name: x for name, x in vars(sampled.rollout).items() if name not in left_out}
    arrays |= {"scores": rewards.scores, "correct": rewards.correct}
    scores = placement.to_host(rewards.scores)
    if rewards.steps is not None:
        arrays["steps"] = rewards.steps
        scores = scores + placement.to_host(rewards.steps).sum(axis=1)
    figures = scores
    if config.algorithm.filter_groups.metric == "accuracy":
        figures = with_nan(placement.to_host(rewards.correct))
        if np.isnan(figures).all():
            raise UserError(
                "config.algorithm.filter_groups.metric='accuracy': the rule does not define "
                "correctness; set it to 'score'"
            )
    scores_Gxn = scores.reshape(len(prompts), -1)
    responses_Gxk = choose_responses(
        scores_Gxn, config.responses_per_prompt, config.rollout.keep_by
    )
    figures_Gxk = np.take_along_axis(figures.reshape(scores_Gxn.shape), responses_Gxk, axis=1)
    rows = (responses_Gxk + np.arange(len(prompts))[:, None] * scores_Gxn.shape[1]).ravel()
    selected = Selected(
        arrays=take_on_mesh(parts.mesh, (arrays,), rows),
        addresses=np.stack([np.full_like(rows, draw), rows], axis=1),
        prompts=prompts,
    )
    return selected, ~is_uniform(figures_Gxk)


def rows_of_groups(groups: np.ndarray, n: int) -> np.ndarray:
    """Return the rows of the n samples of each group."""
    return (groups[:, None] * n + np.arange(n)).ravel()


def take_on_mesh(mesh: Mesh, pools: tuple[dict[str, Any], ...], rows: np.ndarray) -> dict[str, Any]:
    """Return rows, int [r], of the concatenated arrays of all pools, [N, ...] each."""
    placed = placement.place(rows.astype(np.int32), sharding.replicated(mesh))
    return _take_rows(pools, placed, sharding.batch_rows(mesh, len(rows)))


@program(static_argnames=("layout",))
def _take_rows(
    pools: tuple[dict[str, Any], ...], rows: jax.Array, layout: NamedSharding
) -> dict[str, Any]:
    def take(*arrays: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(jnp.concatenate(arrays)[rows], layout)

    return jax.tree.map(take, *pools)


def _as_batch(
    parts: StepParts, selected: Selected, draws: list[RuleRewards], position: int
) -> SampledBatch:
    arrays = dict(selected.arrays)
    batch = make_batch(parts.training, selected.prompts, len(selected.prompts))
    responses = parts.config.responses_per_prompt
    prompts = Prompts(
        tokens=np.repeat(batch.prompts.tokens, responses, axis=0),
        lengths=np.repeat(batch.prompts.lengths, responses),
    )
    rewards = RuleRewards(
        scores=arrays.pop("scores"),
        correct=arrays.pop("correct"),
        steps=arrays.pop("steps", None),
        failures=sum(draw.failures for draw in draws),
        scored=sum(draw.scored for draw in draws),
        extra=_mean_extra(draws),
        first_failure=next((draw.first_failure for draw in draws if draw.first_failure), ""),
        answers={
            row: draws[draw].answers[sample]
            for row, (draw, sample) in enumerate(selected.addresses.tolist())
            if sample in draws[draw].answers
        },
        misses=draws[-1].misses,
    )
    return SampledBatch(
        batch=batch,
        rollout=Rollout(prompts=parts.place_prompts(prompts), **arrays),
        position=position,
        rule_rewards=rewards,
        addresses=dict(zip(("draw", "sample"), selected.addresses.T, strict=True)),
    )


def _mean_extra(draws: list[RuleRewards]) -> dict[str, float]:
    """Return the means over the draws of the rules' figures; each draw counts once."""
    names = sorted(set().union(*(draw.extra for draw in draws)))
    return {
        name: mean_of_known(np.array([draw.extra.get(name, np.nan) for draw in draws]))
        for name in names
    }
