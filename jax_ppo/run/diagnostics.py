"""The problems that the metrics of a run's last steps show, with remedies.

A diagnostic is one function: it returns a message if the steps that it looks at have its problem.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax_ppo.config.schema import Config
from jax_ppo.registries import ADVANTAGE_ESTIMATORS

Metrics = dict[str, float]
MAX_REWARD = 1e4
RATIO_RANGE = (0.8, 1.2)
_LEAST_COMPILE_SECONDS = 0.5  # below it nobody notices


@dataclasses.dataclass(frozen=True)
class LastSteps:
    """The metrics of the last steps of a run, the newest last, and its options."""

    options: Config
    metrics: Sequence[Metrics]

    @property
    def last(self) -> Metrics:
        """Return the metrics of the newest step."""
        return self.metrics[-1]

    @property
    def count(self) -> int:
        """Return the number of steps."""
        return len(self.metrics)

    @property
    def is_solved(self) -> bool:
        """Return whether nearly all answers are right, where correctness is defined."""
        known = [row["reward/accuracy"] for row in self.metrics if "reward/accuracy" in row]
        return bool(known) and sum(known) / len(known) >= 0.9

    def mean(self, name: str) -> float:
        """Return the mean of a metric over the steps."""
        return _mean(self.metrics, name)


Check = Callable[[LastSteps], str | None]


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """One thing that can go wrong.

    Attributes:
      name: identifies it.
      steps: how many steps the check looks at; it is not called before there are that many.
      check: returns the message, or `None` if all is well. It is not called for metrics that lack
        one of `reads`.
      reads: the metrics that the check reads.
      shows_misses: whether some wrong responses are shown with the message.
      in_short_runs: whether the steps of a shorter run are enough.
    """

    name: str
    steps: int
    check: Check
    reads: tuple[str, ...] = ()
    shows_misses: bool = False
    in_short_runs: bool = False


DIAGNOSTICS: list[Diagnostic] = []


def _diagnostic(**facts: Any) -> Callable[[Check], Check]:
    """Add a function to the diagnostics, under its name without `_check_`."""

    def add(check: Check) -> Check:
        name = check.__name__.removeprefix("_check_")
        DIAGNOSTICS.append(Diagnostic(name=name, check=check, **facts))
        return check

    return add


def nothing_is_left(metrics: Metrics) -> bool:
    """Return whether a step had no response to learn from: its update has no figures."""
    return metrics.get("response_length/masked_share") == 1


def _mean(rows: Sequence[Metrics], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


@_diagnostic(steps=1)
def _check_nothing_left(run: LastSteps) -> str | None:
    last = run.last
    responses = run.options.data.train_batch_size * run.options.responses_per_prompt
    if nothing_is_left(last):
        return (
            f"no response is left to learn from: all {responses} were cut off at "
            f"config.data.max_response_length={run.options.data.max_response_length}, and "
            "config.algorithm.mask_truncated=True leaves those out. Nothing was updated; allow "
            "longer responses"
        )
    if run.options.algorithm.filter_groups.enable and last.get("reward/uniform_groups") == 1:
        return (
            f"no prompt is left to learn from: config.algorithm.filter_groups found none in "
            f"{last.get('rollout/draws', 1):.0f} batches whose responses differ in reward, so that "
            f"the {responses} of this step have nothing to compare; easier or harder prompts, or a "
            "larger config.rollout.n, may help"
        )
    return None


@_diagnostic(steps=1, reads=("actor/entropy",))
def _check_entropy(run: LastSteps) -> str | None:
    entropy = run.last["actor/entropy"]
    limit = run.options.trainer.warn_entropy_below
    if entropy >= limit:
        return None
    return (
        f"the policy's entropy is {entropy:.2g} nats per token "
        f"(config.trainer.warn_entropy_below={limit:g}): it has collapsed or is "
        "about to; config.actor.entropy_coeff may help"
    )


@_diagnostic(steps=1, reads=("kl/reference",))
def _check_kl(run: LastSteps) -> str | None:
    divergence = run.last["kl/reference"]
    limit = run.options.trainer.warn_kl_above
    if not 0 < limit < divergence:
        return None
    return (
        f"the KL to the reference is {divergence:.2g} nats per token "
        f"(config.trainer.warn_kl_above={limit:g}): the policy runs away; a KL penalty "
        "or a smaller config.actor.optim.lr may help"
    )


@_diagnostic(steps=1, reads=("actor/ratio_mean",))
def _check_ratio(run: LastSteps) -> str | None:
    ratio = run.last["actor/ratio_mean"]
    low, high = RATIO_RANGE
    if low <= ratio <= high:
        return None
    return (
        f"the ratio of new to old probabilities is {ratio:.2g} on average, outside "
        f"[{low:g}, {high:g}]: a step's updates go further than its samples support. A smaller "
        "config.actor.optim.lr, fewer config.actor.ppo_epochs or a smaller config.actor.clip_ratio "
        "may help"
    )


@_diagnostic(steps=1, reads=("reward/min", "reward/max"))
def _check_reward_size(run: LastSteps) -> str | None:
    largest = max(abs(run.last["reward/min"]), abs(run.last["reward/max"]))
    if largest <= MAX_REWARD:
        return None
    return (
        f"a reward has the size {largest:.2g}: squared, it drowns all others in the critic's loss, "
        "and beyond 1e19 it is infinite in float32. Scale the rewards to about 1, or set "
        "config.reward.clip or config.reward.normalize"
    )


@_diagnostic(steps=10, reads=("reward/min", "reward/max"), shows_misses=True, in_short_runs=True)
def _check_constant_reward(run: LastSteps) -> str | None:
    values = {row[name] for row in run.metrics for name in ("reward/min", "reward/max")}
    if len(values) > 1:
        return None
    return (
        f"every response of the last {run.count} steps had the reward {values.pop():g}: there "
        "is nothing to learn from. Compare the responses in report.html with what the rule looks "
        "for; an instruction (config.data.instruction), a few demonstrations first "
        "(python -m jax_ppo.sft) or longer responses (config.data.max_response_length) may help"
    )


@_diagnostic(
    steps=10, reads=("reward/uniform_groups", "reward/min", "reward/max"), in_short_runs=True
)
def _check_equal_groups(run: LastSteps) -> str | None:
    share = run.mean("reward/uniform_groups")
    rewards = {row[name] for row in run.metrics for name in ("reward/min", "reward/max")}
    # `constant_reward` reports rewards that are equal across all groups.
    compares = ADVANTAGE_ESTIMATORS.lookup(run.options.algorithm.adv_estimator).needs_groups
    if share <= 0.9 or not compares or len(rewards) == 1 or run.is_solved:
        return None
    return (
        f"{share:.0%} of the prompts of the last {run.count} steps had responses of equal "
        f"rewards, from which config.algorithm.adv_estimator={run.options.algorithm.adv_estimator} "
        "learns nothing: prompts are too hard or too easy. "
        "config.algorithm.filter_groups.enable=True draws others, config.data.curriculum="
        "solve_rate prefers prompts between, and a larger config.rollout.n finds differences"
    )


@_diagnostic(steps=10, reads=("rollout/most_common",))
def _check_duplicates(run: LastSteps) -> str | None:
    common = run.mean("rollout/most_common")
    repeated = sum(row.get("rollout/duplicates", 0.0) for row in run.metrics) / run.count
    if max(common, repeated) <= 0.75 or run.is_solved:
        return None
    if common > 0.75:
        finding = f"{common:.0%} of all responses are the same one"
    else:
        finding = f"{repeated:.0%} of the responses repeat another one to the same prompt"
    return (
        f"{finding}, over the last {run.count} steps: the policy hardly explores. A higher "
        "config.rollout.temperature, config.actor.entropy_coeff or a larger KL penalty may help"
    )


@_diagnostic(steps=10, reads=("response_length/truncated_share",))
def _check_truncation(run: LastSteps) -> str | None:
    share = run.mean("response_length/truncated_share")
    if share <= 0.5:
        return None
    limit = f"config.data.max_response_length={run.options.data.max_response_length} tokens"
    if turns := run.options.rollout.multi_turn.max_assistant_turns:
        limit += f" or config.rollout.multi_turn.max_assistant_turns={turns}"
    if (contexts := run.options.rollout.multi_turn.max_contexts) > 1:
        limit += f" or config.rollout.multi_turn.max_contexts={contexts}"
    return (
        f"{share:.0%} of the responses of the last {run.count} steps were cut off at {limit} "
        "before they ended: their answers are missing; allow longer ones, or penalize length "
        "(config.reward.overlong_buffer_len)"
    )


@_diagnostic(steps=3, reads=("actor/first_log_ratio",))
def _check_first_ratio(run: LastSteps) -> str | None:
    difference = min(row["actor/first_log_ratio"] for row in run.metrics)
    # Log-probs from another program, or another type, differ by rounding.
    limit = 0.05 if run.options.model.dtype == "float32" else 0.5
    if difference <= limit:
        return None
    return (
        f"at the first mini-batch, before any update, a token's log-prob differed by "
        f"{difference:.2g} nats from the one that the ratio divides by, in each of the last "
        f"{run.count} steps: the ratios start off 1. config.rollout.reuse_logprobs=never or "
        "config.model.dtype=float32 may help"
    )


@_diagnostic(steps=3, reads=("rollout/logprob_difference",))
def _check_mismatch(run: LastSteps) -> str | None:
    difference = run.mean("rollout/logprob_difference")
    if difference <= 0.05:
        return None
    return (
        f"sampler and trainer disagree by {difference:.2g} nats per token on average over the last "
        f"{run.count} steps: the update learns from another policy's samples. "
        "config.algorithm.rollout_is=token corrects for it; without config.rollout.quantization, "
        "with config.model.dtype=float32, and for a mixture of experts with "
        "config.actor.router_replay.mode=R3 it gets smaller"
    )


@_diagnostic(steps=20, reads=("critic/explained_variance",))
def _check_explained_variance(run: LastSteps) -> str | None:
    variance = max(row["critic/explained_variance"] for row in run.metrics)
    if variance >= 0:
        return None
    return (
        f"the critic has explained less than nothing of the returns for {run.count} steps (at "
        f"most {variance:.2f}): its advantages add noise. A larger config.critic.optim.lr, "
        "config.trainer.critic_warmup or config.critic.normalize_values may help"
    )


@_diagnostic(steps=20, reads=("critic/values_std", "critic/returns_std"))
def _check_flat_critic(run: LastSteps) -> str | None:
    values = max(row["critic/values_std"] for row in run.metrics)
    returns = min(row["critic/returns_std"] for row in run.metrics)
    if returns <= 0 or values >= 0.01 * returns:
        return None
    return (
        f"the critic has predicted the same value everywhere for {run.count} steps (standard "
        f"deviation {values:.2g}, that of the returns {returns:.2g}): a larger "
        "config.critic.optim.lr may help"
    )


@_diagnostic(
    steps=20,
    reads=(
        "critic/values_within_responses",
        "critic/values_std",
        "critic/returns_std",
        "response_length/mean",
    ),
)
def _check_prompt_only_critic(run: LastSteps) -> str | None:
    within = max(row["critic/values_within_responses"] for row in run.metrics)
    is_flat = _check_flat_critic(run) is not None
    if is_flat or within >= 0.01 or run.mean("response_length/mean") < 2:
        return None
    return (
        f"for {run.count} steps at most {within:.1%} of the variance of the critic's values lay "
        "within responses: it knows the prompt, but not whether a response goes well, so that all "
        "tokens of a response share one advantage. A larger config.critic.optim.lr, "
        "config.critic.ppo_epochs or config.trainer.critic_warmup may help"
    )


@_diagnostic(steps=50, reads=("actor/grad_norm",))
def _check_clipped_gradients(run: LastSteps) -> str | None:
    limit = run.options.actor.grad_clip
    norm = min(row["actor/grad_norm"] for row in run.metrics)
    # Adam is invariant to a constant scale of the gradient; only extreme clipping matters.
    if limit <= 0 or norm <= 10 * limit:
        return None
    return (
        f"the actor's gradient has been clipped to less than a tenth for {run.count} steps "
        f"(norm {norm:.2g} or more, config.actor.grad_clip={limit:g}): the direction of single "
        "batches decides; larger batches, config.algorithm.whiten_advantages or "
        "config.reward.normalize may help"
    )


@_diagnostic(steps=20, reads=("response_length/mean", "reward/mean", "reward/std"))
def _check_runaway_length(run: LastSteps) -> str | None:
    half = run.count // 2
    first_length = _mean(run.metrics[:half], "response_length/mean")
    last_length = _mean(run.metrics[half:], "response_length/mean")
    is_long = last_length > 0.5 * run.options.data.max_response_length
    if last_length <= 1.5 * first_length or not is_long:
        return None
    first_reward = _mean(run.metrics[:half], "reward/mean")
    last_reward = _mean(run.metrics[half:], "reward/mean")
    rises = last_reward > first_reward + 0.1 * run.mean("reward/std")
    if not rises:
        return None
    return (
        f"within {run.count} steps the responses grew from {first_length:.0f} to "
        f"{last_length:.0f} tokens while the reward rose from {first_reward:.3g} to "
        f"{last_reward:.3g}: "
        "the reward may pay for length. Read some in report.html; "
        "config.reward.overlong_buffer_len or a KL penalty may help"
    )


@_diagnostic(steps=10, reads=("rollout/slot_use",))
def _check_idle_slots(run: LastSteps) -> str | None:
    use = run.mean("rollout/slot_use")
    if use >= 0.25:
        return None
    return (
        f"only {use:.0%} of the decoding slots drew a token over the last {run.count} steps: a "
        "few long responses occupy a device. A smaller config.rollout.max_num_seqs refills slots "
        "earlier, and config.rollout.max_staleness=1 fills the time"
    )


@_diagnostic(steps=10, reads=("seconds/reward", "seconds/step"))
def _check_host_time(run: LastSteps) -> str | None:
    reward = run.mean("seconds/reward")
    step = run.mean("seconds/step")
    if reward <= 0.5 * step:
        return None
    return (
        f"the reward function takes {reward:.2f} of the {step:.2f} seconds of a step while the "
        "devices wait: more config.reward.workers, or config.rollout.max_staleness=1, may help"
    )


@_diagnostic(steps=10, reads=("seconds/host", "seconds/update", "seconds/step"))
def _check_host_bound(run: LastSteps) -> str | None:
    host = run.mean("seconds/host")
    step = run.mean("seconds/step")
    waits = run.mean("seconds/update")
    # Where the host waits for an update, the devices had work all the time.
    if host <= 0.5 * step or waits > 0.1 * step:
        return None
    return (
        f"the devices wait for the host: {host:.2f} of the {step:.2f} seconds of a step are not "
        "sampling, forward passes, rewards or updates. Rarer samples "
        "(config.trainer.log_rollouts_freq) and plots (config.trainer.plot_freq), larger batches "
        "(config.data.train_batch_size) or a "
        "machine with idle cores may help"
    )


@_diagnostic(steps=10, reads=("update/padding",))
def _check_padding(run: LastSteps) -> str | None:
    share = run.mean("update/padding")
    if share <= 0.5:
        return None
    if not run.options.packing.enabled:
        remedy = "config.packing.enabled=True packs several samples into a row"
    else:
        remedy = (
            "fewer rows at once (config.actor.ppo_micro_batch_size_per_device), a row length that "
            "samples fill (config.packing.row_length) or larger mini-batches "
            "(config.actor.ppo_mini_batch_size) may help"
        )
    return (
        f"{share:.0%} of what the actor's update computed over the last {run.count} steps was "
        f"padding: {remedy}"
    )


@_diagnostic(steps=4, reads=("perf/compiled_programs", "seconds/compile", "seconds/step"))
def _check_warm_compilation(run: LastSteps) -> str | None:
    last = run.last
    seconds = last["seconds/compile"]
    step = last["seconds/step"]
    if seconds <= max(_LEAST_COMPILE_SECONDS, 0.1 * step):
        return None
    return (
        f"{last['perf/compiled_programs']:.0f} programs were compiled for {seconds:.1f} of the "
        f"{step:.1f} seconds of a step, long after the first: shapes must not change from step to "
        "step. A function of yours that uses JAX (config.reward.function, a plug-in) may compile "
        "anew for every length; otherwise please report it with config.json"
    )


class Diagnosis:
    """Watches the metrics of a run."""

    def __init__(self, config: Config, total_steps: int) -> None:
        """Start watching a run of `total_steps` steps with these options."""
        self._config = config
        self._total_steps = total_steps
        self._history = collections.deque[Metrics](maxlen=max(d.steps for d in DIAGNOSTICS))

    def observe(self, metrics: Metrics, misses: Sequence[str] = ()) -> dict[str, str]:
        """Record the next step; return the messages of the problems that it has, by name.

        `misses` describe some of the step's wrong responses.
        """
        self._history.append(metrics)
        messages = {}
        for diagnostic in DIAGNOSTICS:
            steps = diagnostic.steps
            if diagnostic.in_short_runs:
                steps = max(min(steps, self._total_steps), 1)
            history = list(self._history)[-steps:]
            # NaN is no figure: nothing is concluded from it.
            is_complete = not any(
                math.isnan(row.get(name, math.nan)) for row in history for name in diagnostic.reads
            )
            message = None
            if len(history) == steps and is_complete:
                message = diagnostic.check(LastSteps(self._config, history))
            if message is not None:
                lines = [message]
                if diagnostic.shows_misses:
                    lines += misses
                messages[diagnostic.name] = "\n  ".join(lines)
        return messages
