"""The problems that the metrics of a run's last steps show, with remedies.

A diagnostic is one function: it yields a message if the steps that it looks at have its problem. A
metric that one of these steps lacks, or that is NaN, is ignored.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jax_ppo.config.schema import Config
from jax_ppo.registries import ADVANTAGE_ESTIMATORS

MAX_REWARD = 1e4
RATIO_RANGE = (0.8, 1.2)
_LEAST_COMPILE_SECONDS = 0.5  # below it nobody notices


class _NoFigure(Exception):
    """A step lacks a metric."""


@dataclasses.dataclass(frozen=True)
class LastSteps:
    """The metrics of the last steps of a run, the newest last, and its options."""

    options: Config
    metrics: Sequence[dict[str, float]]
    first_kl: float = 0.0  # the KL to the reference in the run's first step, before any update

    def __getitem__(self, name: str) -> np.ndarray:
        """Return a metric's values [steps]."""
        values = np.array([row.get(name, np.nan) for row in self.metrics])
        if np.isnan(values).any():
            raise _NoFigure
        return values

    @property
    def count(self) -> int:
        """Return the number of steps."""
        return len(self.metrics)

    @property
    def span(self) -> str:
        """Return "last step", "last 2 steps"."""
        return "last step" if self.count == 1 else f"last {self.count} steps"

    @property
    def is_solved(self) -> bool:
        """Return whether nearly all answers are right, where correctness is defined."""
        known = [row["reward/accuracy"] for row in self.metrics if "reward/accuracy" in row]
        return bool(known) and sum(known) / len(known) >= 0.9


Diagnose = Callable[[LastSteps], Iterator[str]]


@dataclasses.dataclass(frozen=True)
class Diagnostic:
    """One thing that can go wrong."""

    name: str  # identifies it
    steps: int  # how many steps `diagnose` looks at; not called before there are that many
    diagnose: Diagnose  # yields the message, or nothing if all is well
    shows_misses: bool = False  # whether some wrong responses are shown with the message
    in_short_runs: bool = False  # whether the steps of a shorter run are enough


DIAGNOSTICS: list[Diagnostic] = []


def _diagnostic(**facts: Any) -> Callable[[Diagnose], Diagnose]:
    """Add a function to the diagnostics, under its name without `_diagnose_`."""

    def add(diagnose: Diagnose) -> Diagnose:
        name = diagnose.__name__.removeprefix("_diagnose_")
        DIAGNOSTICS.append(Diagnostic(name=name, diagnose=diagnose, **facts))
        return diagnose

    return add


def nothing_is_left(metrics: dict[str, float]) -> bool:
    """Return whether a step had no response to learn from: its update has no figures."""
    return metrics.get("response_length/masked_share") == 1


@_diagnostic(steps=1)
def _diagnose_nothing_left(run: LastSteps) -> Iterator[str]:
    last = run.metrics[-1]
    responses = run.options.samples_per_step
    if nothing_is_left(last):
        yield (
            f"no response is left to learn from: all {responses} were cut off at "
            f"{_describe_limits(run)}, and config.algorithm.mask_truncated=True leaves "
            "those out. Nothing was updated; allow longer responses"
        )
    elif run.options.algorithm.filter_groups.enable and last.get("reward/uniform_groups") == 1:
        yield (
            f"no prompt is left to learn from: in {last.get('rollout/draws', 1):.0f} batches, "
            "config.algorithm.filter_groups found no prompt with responses of different rewards, "
            f"so the {responses} of this step cannot be compared; easier or harder prompts, or a "
            "larger config.rollout.n, may help"
        )


@_diagnostic(steps=1)
def _diagnose_entropy(run: LastSteps) -> Iterator[str]:
    entropy, limit = run["actor/entropy"][-1], run.options.trainer.warn_entropy_below
    if entropy < limit:
        yield (
            f"the policy's entropy is {entropy:.2g} nats per token "
            f"(config.trainer.warn_entropy_below={limit:g}): it has collapsed or is "
            "about to; config.actor.entropy_coeff may help"
        )


@_diagnostic(steps=1)
def _diagnose_kl(run: LastSteps) -> Iterator[str]:
    divergence, limit = run["kl/reference"][-1], run.options.trainer.warn_kl_above
    if 0 < limit < divergence - run.first_kl:
        yield (
            f"the KL to the reference is {divergence:.2g} nats per token "
            f"(config.trainer.warn_kl_above={limit:g}): the policy runs away; a KL penalty "
            "or a smaller config.actor.optim.lr may help"
        )


@_diagnostic(steps=1)
def _diagnose_first_kl(run: LastSteps) -> Iterator[str]:
    limit = run.options.trainer.warn_kl_above
    if 0 < limit < run.first_kl == run["kl/reference"][-1]:
        yield (
            f"before any update, the KL to the reference was {run.first_kl:.2g} nats per token "
            f"(config.trainer.warn_kl_above={limit:g} is now added to it); is "
            "config.reference.path the model that training starts from?"
        )


@_diagnostic(steps=1)
def _diagnose_ratio(run: LastSteps) -> Iterator[str]:
    ratio = run["actor/ratio_mean"][-1]
    low, high = RATIO_RANGE
    if not low <= ratio <= high:
        yield (
            f"the ratio of new to old probabilities is {ratio:.2g} on average, outside "
            f"[{low:g}, {high:g}]: a step's updates go further than its samples support. A smaller "
            "config.actor.optim.lr, fewer config.actor.ppo_epochs or a smaller "
            "config.actor.clip_ratio may help"
        )


@_diagnostic(steps=1)
def _diagnose_reward_size(run: LastSteps) -> Iterator[str]:
    largest = max(abs(run["reward/min"][-1]), abs(run["reward/max"][-1]))
    if largest > MAX_REWARD:
        yield (
            f"a reward has the size {largest:.2g}: its square dominates the critic's loss, and "
            "overflows float32 beyond 1e19. Scale the rewards to about 1, or set "
            "config.reward.clip or config.reward.normalize"
        )


@_diagnostic(steps=10, shows_misses=True, in_short_runs=True)
def _diagnose_constant_reward(run: LastSteps) -> Iterator[str]:
    values = {*run["reward/min"], *run["reward/max"]}
    if len(values) != 1:
        return
    finding = (
        f"every response of the {run.span} had the reward {values.pop():g}: there is nothing to "
        "learn from. "
    )
    samples = run.options.data.train_batch_size * run.options.rollout.n
    if all(row.get("reward/rule_failures", 0) >= samples for row in run.metrics):
        yield finding + "The reward failed on each of them: the first failure was logged"
        return
    yield (
        f"{finding}Compare the responses in report.html with what the rule looks for; an "
        "instruction (config.data.instruction), a few demonstrations first (python -m jax_ppo.sft) "
        "or longer responses (config.data.max_response_length) may help"
    )


@_diagnostic(steps=10, in_short_runs=True)
def _diagnose_equal_groups(run: LastSteps) -> Iterator[str]:
    share = run["reward/uniform_groups"].mean()
    # `constant_reward` reports rewards that are equal across all groups.
    differ = len({*run["reward/min"], *run["reward/max"]}) > 1
    estimator = run.options.algorithm.adv_estimator
    compares = ADVANTAGE_ESTIMATORS.lookup(estimator).needs_groups
    if share > 0.9 and compares and differ and not run.is_solved:
        yield (
            f"for {share:.0%} of the prompts of the {run.span}, all responses had the same "
            f"reward, so config.algorithm.adv_estimator={estimator} learned nothing "
            "from them: prompts are too hard or too easy. "
            "config.algorithm.filter_groups.enable=True draws other prompts, and a larger "
            "config.rollout.n finds differences"
        )


@_diagnostic(steps=10)
def _diagnose_duplicates(run: LastSteps) -> Iterator[str]:
    common = run["rollout/most_common"].mean()
    repeated = sum(row.get("rollout/duplicates", 0.0) for row in run.metrics) / run.count
    if max(common, repeated) > 0.75 and not run.is_solved:
        finding = f"{repeated:.0%} of the responses repeat another one to the same prompt"
        if common > 0.75:
            finding = f"{common:.0%} of all responses are identical"
        yield (
            f"{finding}, over the {run.span}: the policy hardly explores. A higher "
            "config.rollout.temperature, config.actor.entropy_coeff or a larger KL penalty may help"
        )


@_diagnostic(steps=10)
def _diagnose_truncation(run: LastSteps) -> Iterator[str]:
    share = run["response_length/truncated_share"].mean()
    if share > 0.5:
        yield (
            f"{share:.0%} of the responses of the {run.span} were cut off at "
            f"{_describe_limits(run)} before they ended: their answers are missing; allow "
            "longer ones, or penalize length (config.reward.overlong_buffer_len)"
        )


def _describe_limits(run: LastSteps) -> str:
    limit = f"config.data.max_response_length={run.options.data.max_response_length} tokens"
    if turns := run.options.rollout.multi_turn.max_assistant_turns:
        limit += f" or config.rollout.multi_turn.max_assistant_turns={turns}"
    return limit


@_diagnostic(steps=3)
def _diagnose_first_ratio(run: LastSteps) -> Iterator[str]:
    difference = run["actor/first_log_ratio"].min()
    # Log-probs from another program, or another type, differ by rounding.
    if difference > (0.05 if run.options.model.dtype == "float32" else 0.5):
        yield (
            f"at the first mini-batch, before any update, a token's log-prob differed by "
            f"{difference:.2g} nats from the one that the ratio divides by, in each of the last "
            f"{run.count} steps: the ratios do not start at 1. config.rollout.reuse_logprobs=never "
            "or config.model.dtype=float32 may help"
        )


@_diagnostic(steps=1)
def _diagnose_inexact(run: LastSteps) -> Iterator[str]:
    count = run["actor/inexact_logprobs"][-1]
    if count > 0:
        yield (
            f"config.rollout.exact=True did not hold: {count:.0f} log-probs of the first "
            "mini-batch differ in their bits from those of the rollout"
        )


@_diagnostic(steps=3)
def _diagnose_mismatch(run: LastSteps) -> Iterator[str]:
    difference = run["rollout/logprob_difference"].mean()
    if difference > 0.05:
        staleness = run.options.rollout.max_staleness
        newer = f"with less than config.rollout.max_staleness={staleness}, with slower learning, "
        yield (
            f"sampler and trainer disagree by {difference:.2g} nats per token on average over the "
            f"{run.span}: the update learns from another policy's samples. "
            f"config.algorithm.rollout_is=token corrects for it; {newer * (staleness > 0)}"
            "without config.rollout.quantization, with config.model.dtype=float32, and for a "
            "mixture of experts with config.actor.router_replay.mode=R3 they disagree less"
        )


@_diagnostic(steps=20)
def _diagnose_explained_variance(run: LastSteps) -> Iterator[str]:
    variance = run["critic/explained_variance"].max()
    if variance < 0:
        yield (
            f"the critic's explained variance has been negative for {run.count} steps (at "
            f"most {variance:.2f}): its advantages add noise. A larger config.critic.optim.lr, "
            "config.trainer.critic_warmup or config.critic.normalize_values may help"
        )


@_diagnostic(steps=20)
def _diagnose_flat_critic(run: LastSteps) -> Iterator[str]:
    values, returns = run["critic/values_std"].max(), run["critic/returns_std"].min()
    if values < 0.01 * returns:
        yield (
            f"the critic has predicted the same value everywhere for {run.count} steps (standard "
            f"deviation {values:.2g}, that of the returns {returns:.2g}): a larger "
            "config.critic.optim.lr may help"
        )


@_diagnostic(steps=20)
def _diagnose_prompt_only_critic(run: LastSteps) -> Iterator[str]:
    within = run["critic/values_within_responses"].max()
    is_flat = any(_diagnose_flat_critic(run))
    if within < 0.01 and not is_flat and run["response_length/mean"].mean() >= 2:
        yield (
            f"for {run.count} steps at most {within:.1%} of the variance of the critic's values "
            "lay within responses: it knows the prompt, but not whether a response goes well, so "
            "that all tokens of a response share one advantage. A larger config.critic.optim.lr, "
            "config.critic.ppo_epochs or config.trainer.critic_warmup may help"
        )


@_diagnostic(steps=20)
def _diagnose_runaway_length(run: LastSteps) -> Iterator[str]:
    lengths, rewards = (
        [half.mean() for half in np.split(run[name], 2)]
        for name in ("response_length/mean", "reward/mean")
    )
    is_long = lengths[1] > 0.5 * run.options.data.max_response_length
    rises = rewards[1] > rewards[0] + 0.1 * run["reward/std"].mean()
    if is_long and rises and lengths[1] > 1.5 * lengths[0]:
        yield (
            f"within {run.count} steps the responses grew from {lengths[0]:.0f} to "
            f"{lengths[1]:.0f} tokens while the reward rose from {rewards[0]:.3g} to "
            f"{rewards[1]:.3g}: the reward may pay for length. Read some in report.html; "
            "config.reward.overlong_buffer_len or a KL penalty may help"
        )


@_diagnostic(steps=10)
def _diagnose_idle_slots(run: LastSteps) -> Iterator[str]:
    use = run["rollout/slot_use"].mean()
    if use < 0.25:
        fills = ", and config.rollout.max_staleness=1 fills the time"
        yield (
            f"only {use:.0%} of the decoding slots drew a token over the {run.span}: a "
            "few long responses occupy a device. A smaller config.rollout.max_num_seqs refills "
            f"slots earlier{'' if run.options.rollout.max_staleness else fills}"
        )


@_diagnostic(steps=10)
def _diagnose_host_time(run: LastSteps) -> Iterator[str]:
    reward, step = run["seconds/reward"].mean(), run["seconds/step"].mean()
    if reward > 0.5 * step:
        yield (
            f"the reward function takes {reward:.2f} of the {step:.2f} seconds of a step while the "
            "devices wait: more config.reward.workers, or config.rollout.max_staleness=1, may help"
        )


@_diagnostic(steps=10)
def _diagnose_host_bound(run: LastSteps) -> Iterator[str]:
    host, step = run["seconds/host"].mean(), run["seconds/step"].mean()
    # Where the host waits for an update, the devices had work all the time.
    if host > 0.5 * step and run["seconds/update"].mean() <= 0.1 * step:
        yield (
            f"the devices wait for the host: {host:.2f} of the {step:.2f} seconds of a step are "
            "not sampling, forward passes, rewards or updates. Rarer samples "
            "(config.trainer.log_rollouts_freq), larger batches (config.data.train_batch_size) or "
            "a machine with idle cores may help"
        )


@_diagnostic(steps=10)
def _diagnose_padding(run: LastSteps) -> Iterator[str]:
    share = run["update/padding"].mean()
    remedy = "config.packing.enabled=True packs several samples into a row"
    if run.options.packing.enabled:
        remedy = "a config.packing.row_length that samples fill may help"
    if share > 0.5:
        yield f"{share:.0%} of the actor's update over the {run.span} was padding: {remedy}"


@_diagnostic(steps=4)
def _diagnose_warm_compilation(run: LastSteps) -> Iterator[str]:
    names = ("perf/compiled_programs", "seconds/compile", "seconds/step")
    programs, seconds, step = (run[name][-1] for name in names)
    if seconds > max(_LEAST_COMPILE_SECONDS, 0.1 * step):
        yield (
            f"long after the first step, compiling {programs:.0f} programs took {seconds:.1f} of "
            f"the {step:.1f} seconds of a step: shapes must not change from step to step. If your "
            "own function (config.reward.function, a plug-in) uses JAX, it may compile for every "
            "new length; otherwise please report it with config.json"
        )


@dataclasses.dataclass
class Diagnosis:
    """Watches the metrics of a run."""

    options: Config
    total_steps: int
    first_kl: float | None = None  # of a run that is resumed

    def __post_init__(self) -> None:
        longest = max(diagnostic.steps for diagnostic in DIAGNOSTICS)
        self._history = collections.deque[dict[str, float]](maxlen=longest)

    def observe(self, metrics: dict[str, float], misses: Sequence[str] = ()) -> dict[str, str]:
        """Record a step, whose wrong responses `misses` describe; return its problems by name."""
        self._history.append(metrics)
        if self.first_kl is None:
            self.first_kl = metrics.get("kl/reference", 0.0)
        messages = {}
        for diagnostic in DIAGNOSTICS:
            steps = diagnostic.steps
            if diagnostic.in_short_runs:
                steps = max(min(steps, self.total_steps), 1)
            history = list(self._history)[-steps:]
            if len(history) < steps:
                continue
            with contextlib.suppress(_NoFigure):
                for message in diagnostic.diagnose(LastSteps(self.options, history, self.first_kl)):
                    lines = [message, *(misses if diagnostic.shows_misses else ())]
                    messages[diagnostic.name] = "\n  ".join(lines)
        return messages
