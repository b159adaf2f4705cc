"""Tables of the estimators, losses, aggregations, schedules and engines that options select.

To add one, write its function and its entry below; all else uses the entries. This module is loaded
before jax, so functions are imported at their first use. For a user's `module:function`,
`Registry.lookup` returns an entry without requirements.
"""

import dataclasses
import functools
import hashlib
import inspect
import itertools
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

# Rows, as JSON, and functions that a Python program has passed, by the values of options that stand
# for them: "memory:KIND@DIGEST".
IN_MEMORY: dict[str, Any] = {}


def keep_in_memory(kind: str, content: Any, text: str) -> str:
    """Keep rows or a function, and return the option's value; equal texts have equal values."""
    value = f"memory:{kind}@{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    IN_MEMORY[value] = content
    return value


def inputs_named(function: Callable[..., Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs that a function's parameters name."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in inputs.items() if name in parameters}


def _need(text: str) -> Any:
    """Return a bool field, by default False; if it is True, the entry's `needs` have the text."""
    return dataclasses.field(default=False, metadata={"need": text})


@dataclasses.dataclass(frozen=True)
class Entry:
    """A value that an option can have."""

    name: str  # the option's value
    path: str  # "module:function" or "module:Class"
    summary: str  # its meaning, in a few words
    _: dataclasses.KW_ONLY
    when: str = ""  # completes "use it when"
    source: str = ""  # paper and equation, or the program that it comes from
    other_names: tuple[str, ...] = ()  # its names in other programs
    requirement: str = ""  # the first of `needs`
    # Arguments of the function by name, and the options beside the registry's that set them.
    arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """Import and return the function."""
        function: Callable[..., Any] = pkgutil.resolve_name(self.path)
        return function

    @property
    def needs(self) -> Iterator[str]:
        """Yield its requirements, as text for the documentation."""
        if self.requirement:
            yield self.requirement
        for field in dataclasses.fields(self):
            if "need" in field.metadata and getattr(self, field.name):
                yield field.metadata["need"]

    def reads(self, option: str) -> bool:
        """Return whether an option sets one of the function's arguments."""
        return option in self.arguments.values()

    def read_arguments(self, section: object) -> dict[str, Any]:
        """Return the function's arguments from a section of the options."""
        return {argument: getattr(section, option) for argument, option in self.arguments.items()}


E = TypeVar("E", bound=Entry)


class Registry(dict[str, E], Generic[E]):
    """Entries of one type, by name; `options` select one, and `title` is their heading in docs."""

    def __init__(self, kind: type[E], title: str, options: tuple[str, ...], *entries: E) -> None:
        super().__init__((entry.name, entry) for entry in entries)
        assert len(self) == len(entries), "two entries have the same name"
        self.kind = kind
        self.title = title
        self.options = options

    def lookup(self, name: str) -> E:
        """Return the entry for an option's value, built-in or user-defined."""
        if ":" in name:
            return self.kind(name=name, path=name, summary="a function of the user")
        return self[name]

    def names(self, is_meant: Callable[[E], bool]) -> tuple[str, ...]:
        """Return the names of the entries that satisfy `is_meant`."""
        return tuple(name for name, entry in self.items() if is_meant(entry))

    def condition(self, is_meant: Callable[[E], bool], negated: bool = False) -> str:
        """Return as text that an entry which satisfies `is_meant` is selected, or that none is."""
        return f"`{self.options[0]}` is {'not ' * negated}{' or '.join(self.names(is_meant))}"

    def other_names(self) -> dict[str, str]:
        """Return a map from names in other programs to the entries' names."""
        return {other: name for name, entry in self.items() for other in entry.other_names}

    def markdown(self) -> str:
        """Return a table of the entries, without the columns that are empty."""
        table = [("value", "meaning", "use it when", "needs", "elsewhere called", "source")]
        for name, entry in self.items():
            others = ", ".join(f"`{other}`" for other in entry.other_names)
            needs = ", ".join(entry.needs)
            table.append((f"**{name}**", entry.summary, entry.when, needs, others, entry.source))
        filled = [any(cells) for cells in zip(*table[1:], strict=True)]
        rows = [list(itertools.compress(cells, filled)) for cells in table]
        rows.insert(1, ["---"] * sum(filled))
        return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageEstimator(Entry):
    """An estimator; its parameters name its inputs, as ppo/advantages.py lists them.

    With a critic it returns (advantages_T, returns_T) of one response, and its arguments lam and
    turn_lam may be traced. Otherwise it returns an advantage per response or per token, and options
    in `algorithm` that are not among its arguments have no effect.
    """

    needs_critic: bool = _need("a critic")
    reads_turns: bool = _need("dialogues: a response without an environment is one turn")
    values_turns: bool = False  # the critic learns, and it uses, only values where turns start
    needs_groups: bool = _need("several responses per prompt")
    whitens: bool = False  # over the rollout, unless `algorithm.whiten_advantages` is set


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLossEntry(Entry):
    """A loss, see kernels/policy_losses.py; its parameters name its inputs."""

    clips: bool = True  # it reads the clip range
    clips_twice: bool = True  # it reads the constant of the dual clip
    # Its authors' `clip_ratio_low` and `clip_ratio_high`, unless they clip single tokens.
    authors_clip: tuple[str, str] | None = None
    # It is biased once the policy has changed.
    needs_one_update: bool = _need("one optimizer step per rollout")

    @property
    def needs(self) -> Iterator[str]:
        """Yield its requirements, as text for the documentation."""
        if self.authors_clip:
            low, high = self.authors_clip
            yield f"`actor.clip_ratio_low={low}`, `actor.clip_ratio_high={high}`"
        yield from super().needs


@dataclasses.dataclass(frozen=True, kw_only=True)
class KLEstimator(Entry):
    """A function of d = log actor(token) - log reference(token); see kernels/kl.py."""

    requirement: str = "a reference"
    # Instead of d the function takes hidden states, and it sums over the vocabulary.
    needs_vocabulary: bool = _need(
        "the whole vocabulary: in the loss, a pass of the reference per micro-batch"
    )
    # It differs from another in its gradient alone; in the reward only its value would count.
    only_in_loss: bool = _need("a gradient: only in the loss")
    unbiased_in_reward: bool = False  # in the reward, its expected gradient is the KL's
    restrains_in_loss: bool = True  # in the loss, its expected gradient is not 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aggregation(Entry):
    """How the losses of a mini-batch's tokens are averaged; see `kernels.losses.loss_weights`."""

    needs_scale: bool = _need("`actor.loss_scale_factor`")  # its divisor


@dataclasses.dataclass(frozen=True, kw_only=True)
class KLController(Entry):
    """A function (options, coefficient, measured KL, samples of the step) -> next coefficient."""

    adapts: bool = False  # to the measured KL; a resumed run continues with the last value


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutEngineEntry(Entry):
    """A class that generates responses, as sampler/engine.py describes.

    A user's is called with `mesh`, `actor` and `params`; an external one, which samples outside of
    JAX, also with `options` (the section `rollout`), `folder` (the actor's) and `max_length`.
    """

    is_external: bool = False  # it gets weights as files, and rounds differently from the trainer
    is_server: bool = False  # it is another program, which is called over HTTP


# fmt: off
# As in config/schema.py: an entry reads as a paragraph.
ADVANTAGE_ESTIMATORS = Registry(
    AdvantageEstimator, "Advantage estimators", ("algorithm.adv_estimator",),
    AdvantageEstimator("gae", "jax_ppo.kernels.advantages:gae",
        "generalized advantage estimation, with a critic",
        when="responses are long, or rewards come within them: credit goes to single tokens",
        source="Schulman et al. 2016, arXiv 1506.02438, eq. 16",
        needs_critic=True, whitens=True, arguments={"gamma": "gamma", "lam": "lam"}),
    AdvantageEstimator("turn_gae", "jax_ppo.kernels.advantages:turn_gae",
        "generalized advantage estimation over the turns of dialogues",
        when="turns are long and differ in length, and credit should go to whole turns",
        source="Li et al. 2025, arXiv 2512.17008",
        other_names=("turn_level_gae", "turn_wise_gae"), needs_critic=True, reads_turns=True,
        values_turns=True, whitens=True, arguments={"gamma": "turn_gamma", "lam": "turn_lam"}),
    AdvantageEstimator("bi_level_gae", "jax_ppo.kernels.advantages:bi_level_gae",
        "generalized advantage estimation over turns, and over tokens within each",
        when="as turn_gae, and credit should also go to single tokens of a turn",
        source="Wang et al. 2025, arXiv 2510.16907",
        needs_critic=True, reads_turns=True, whitens=True,
        arguments={name: name for name in ("gamma", "lam", "turn_gamma", "turn_lam")}),
    AdvantageEstimator("grpo", "jax_ppo.kernels.advantages:grpo",
        "score minus the mean of the prompt's responses, divided by their standard deviation",
        when="results should compare with published GRPO runs",
        source="Shao et al. 2024, arXiv 2402.03300",
        other_names=("group_norm",), needs_groups=True,
        arguments={"by_std": "norm_adv_by_std_in_grpo"}),
    AdvantageEstimator("dr_grpo", "jax_ppo.kernels.advantages:group_mean_baseline",
        "score minus the mean of the prompt's responses, not divided",
        when="prompts differ in difficulty; with `seq-mean-token-sum-norm` as in its paper",
        source="Liu et al. 2025, arXiv 2503.20783",
        needs_groups=True),
    AdvantageEstimator("rloo", "jax_ppo.kernels.advantages:rloo",
        "score minus the mean of the prompt's other responses",
        when="there is no memory for a critic and the gradient should be unbiased",
        source="Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740",
        needs_groups=True),
    AdvantageEstimator("reinforce_plus_plus", "jax_ppo.kernels.advantages:reward_to_go",
        "discounted reward to go",
        when="there is one response per prompt and no memory for a critic",
        source="Hu et al. 2025, arXiv 2501.03262",
        other_names=("reinforce",), whitens=True, arguments={"gamma": "gamma"}),
    AdvantageEstimator("reinforce_plus_plus_baseline",
        "jax_ppo.kernels.advantages:group_mean_baseline",
        "score minus the mean of the prompt's responses",
        when="the scale of rewards should not matter",
        source="Hu et al. 2025, arXiv 2501.03262",
        other_names=("reinforce_baseline",), needs_groups=True, whitens=True))

POLICY_LOSSES = Registry(PolicyLossEntry, "Policy losses", ("actor.policy_loss",),
    PolicyLossEntry("vanilla", "jax_ppo.kernels.losses:clipped_surrogate",
        "PPO's clip",
        when="you have no reason for another; it is safe for several optimizer steps per rollout",
        source="Schulman et al. 2017, arXiv 1707.06347, eq. 7",
        other_names=("ppo",)),
    PolicyLossEntry("importance", "jax_ppo.kernels.policy_losses:importance",
        "unclipped ratio",
        when="you want to see what the clip changes",
        source="Kakade & Langford 2002; Schulman et al. 2015, arXiv 1502.05477",
        clips=False, clips_twice=False),
    PolicyLossEntry("gspo", "jax_ppo.kernels.policy_losses:gspo",
        "sequence-level ratio",
        when="the ratios of single tokens are noise, as with mixtures of experts",
        source="Zheng et al. 2025, arXiv 2507.18071",
        authors_clip=("3e-4", "4e-4")),
    PolicyLossEntry("gmpo", "jax_ppo.kernels.policy_losses:gmpo",
        "geometric mean of clipped ratios",
        when="a few tokens with large ratios dominate a response",
        source="Zhao et al. 2025, arXiv 2507.20673",
        other_names=("geo_mean",), clips_twice=False),
    PolicyLossEntry("cispo", "jax_ppo.kernels.policy_losses:cispo",
        "truncated ratio as a weight",
        when="clipping would exclude tokens worth learning, such as rare words that turn a proof",
        source="MiniMax-M1 2025, arXiv 2506.13585",
        clips_twice=False),
    PolicyLossEntry("reinforce", "jax_ppo.kernels.policy_losses:reinforce",
        "no ratio",
        when="each rollout gets one optimizer step",
        source="Williams 1992; Chu et al. 2025, arXiv 2504.02546",
        other_names=("gpg",), clips=False, clips_twice=False, needs_one_update=True))

SCHULMAN = "http://joschu.net/blog/kl-approx.html"
KL_ESTIMATORS = Registry(  # verl's names are accepted beside the names of Schulman's note
    KLEstimator, "KL estimators", ("algorithm.kl_penalty", "actor.kl_loss_type"),
    KLEstimator("k1", "jax_ppo.kernels.kl:k1",
        "d = log actor - log reference, of the sampled token",
        source=SCHULMAN,
        other_names=("kl",), unbiased_in_reward=True, restrains_in_loss=False),
    KLEstimator("abs", "jax_ppo.kernels.kl:absolute",
        "absolute value of d",
        source="verl"),
    KLEstimator("k2", "jax_ppo.kernels.kl:k2",
        "d^2 / 2",
        source=SCHULMAN,
        other_names=("mse",)),
    KLEstimator("k3", "jax_ppo.kernels.kl:k3",
        "exp(-d) - 1 + d",
        source=SCHULMAN,
        other_names=("low_var_kl",)),
    KLEstimator("k3+", "jax_ppo.kernels.kl:k3_plus",
        "value of k3, gradient of k2",
        source="verl",
        other_names=("low_var_kl+",), only_in_loss=True),
    KLEstimator("clamped", "jax_ppo.kernels.kl:clamped",
        "max(d, 0)",
        source="Dubois et al. 2023, arXiv 2305.14387"),
    KLEstimator("full", "jax_ppo.kernels.vocabulary_kl:full_kl",
        "the exact KL",
        needs_vocabulary=True))

AGGREGATIONS = Registry(
    Aggregation, "Aggregations of losses", ("actor.loss_agg_mode", "critic.loss_agg_mode"),
    Aggregation("token-mean", "jax_ppo.kernels.losses:token_mean",
        "tokens weigh the same",
        source="DAPO, arXiv 2503.14476",
        other_names=("bnpo", "dapo")),
    Aggregation("seq-mean-token-sum", "jax_ppo.kernels.losses:seq_mean_token_sum",
        "sum over a response, mean over responses"),
    Aggregation("seq-mean-token-mean", "jax_ppo.kernels.losses:seq_mean_token_mean",
        "responses weigh the same",
        source="GRPO, arXiv 2402.03300",
        other_names=("grpo",)),
    Aggregation("seq-mean-token-sum-norm", "jax_ppo.kernels.losses:seq_mean_token_sum_norm",
        "sum over a response divided by a constant, mean over responses",
        source="Dr. GRPO, arXiv 2503.20783",
        other_names=("dr_grpo",), needs_scale=True))

IMPORTANCE_WEIGHTS = Registry(Entry, "Importance weights", ("algorithm.rollout_is",),
    Entry("none", "jax_ppo.kernels.importance:unweighted",
        "all weights are 1",
        when="sampler and trainer agree: `rollout/logprob_difference` below 0.01"),
    Entry("token", "jax_ppo.kernels.importance:token_log_ratio",
        "ratio of each token",
        when="sampler and trainer round differently; masked from 0.5 to 5 it is IcePop",
        source="Espeholt et al. 2018, arXiv 1802.01561; IcePop: Ling team 2025, arXiv 2510.18855"),
    Entry("sequence", "jax_ppo.kernels.importance:sequence_log_ratio",
        "product over the response; unbiased as long as no bound applies",
        when="responses are short, or the sampler's weights are older",
        source="Hilton et al. 2022, arXiv 2110.00641; masked: https://richardli.xyz/rl-collapse"),
    Entry("geometric", "jax_ppo.kernels.importance:sequence_mean_log_ratio",
        "geometric mean over the response",
        when="whole responses should be rejected, masked with bounds close to 1",
        source="Liu et al. 2025, https://richardli.xyz/rl-collapse"),
    Entry("turn", "jax_ppo.kernels.importance:turn_log_ratio",
        "product over the token's turn",
        when="an environment interrupts responses",
        source="Hilton et al. 2022, arXiv 2110.00641, for the actions of one turn"))

KL_CONTROLLERS = Registry(KLController, "KL controllers", ("algorithm.kl_ctrl.type",),
    KLController("fixed", "jax_ppo.training.control:keep_coefficient",
        "the coefficient stays at `kl_coef`"),
    KLController("adaptive", "jax_ppo.training.control:adapt_coefficient",
        "grows while the KL is above `target_kl`, and falls while it is below",
        source="Ziegler et al. 2019, arXiv 1909.08593, section 2.2",
        adapts=True))

LEARNING_RATE_SCHEDULES = Registry(
    Entry, "Learning rate schedules",
    ("actor.optim.lr_schedule", "critic.optim.lr_schedule", "supervised.optim.lr_schedule"),
    Entry("constant", "jax_ppo.training.optimizer:constant_rate",
        "`lr` after the warm-up"),
    Entry("linear", "jax_ppo.training.optimizer:linear_rate",
        "falls linearly to `lr` x `min_lr_ratio` at the end of the run"),
    Entry("cosine", "jax_ppo.training.optimizer:cosine_rate",
        "falls along half a cosine to `lr` x `min_lr_ratio` at the end of the run",
        source="Loshchilov & Hutter 2017, arXiv 1608.03983"))

ROLLOUT_ENGINES = Registry(RolloutEngineEntry, "Rollout engines", ("rollout.engine",),
    RolloutEngineEntry("built-in", "jax_ppo.sampler.built_in:BuiltInEngine",
        "decodes on the devices that train",
        when="no other engine was measured to be faster; only this one has environments, records "
        "of draws and a memory plan"),
    RolloutEngineEntry("transformers", "jax_ppo.sampler.engines.hugging_face:HuggingFaceEngine",
        "`generate` of Hugging Face transformers, on the CPU of this process",
        when="you compare with another implementation of the model; draws the same tokens as the "
        "built-in engine, up to rounding",
        requirement="torch", other_names=("hf",), is_external=True),
    RolloutEngineEntry("vllm", "jax_ppo.sampler.engines.server:ServerEngine",
        "a vLLM that the run starts, or one at `rollout.url`",
        when="responses are long, or have very different lengths, and GPUs are left for it",
        requirement="`rollout.vllm.python` or `rollout.url`", is_external=True, is_server=True),
    RolloutEngineEntry("openai", "jax_ppo.sampler.engines.server:ServerEngine",
        "a running server that takes and returns token ids: SGLang, vLLM, or completions",
        when="such a server is already running, here or on another machine",
        requirement="`rollout.url`", other_names=("sglang",), is_external=True, is_server=True))

# fmt: on
REGISTRIES: tuple[Registry[Any], ...] = (
    ADVANTAGE_ESTIMATORS,
    POLICY_LOSSES,
    KL_ESTIMATORS,
    AGGREGATIONS,
    IMPORTANCE_WEIGHTS,
    KL_CONTROLLERS,
    LEARNING_RATE_SCHEDULES,
    ROLLOUT_ENGINES,
)
