"""Define every option with its default, unit, range and meaning, and the commands that read it.

Names are verl's where the concept is the same: batch and mini-batch sizes count prompts,
frequencies count steps. `docs/options.md` is generated from this file by
`python -m jax_ppo.config --markdown`.
"""

import dataclasses
import functools
import shlex
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jax_ppo.config.option import (
    COMMANDS,
    Option,
    OptionRule,
    first_step_only_if,
    iterate_options,
    option,
    redeclare,
    section,
    unread_unless,
)
from jax_ppo.config.parsing import (
    LORA_TARGETS,
    parse_date,
    parse_loggers,
    parse_lora_targets,
    parse_strings,
)
from jax_ppo.registries import (
    ADVANTAGE_ESTIMATORS,
    AGGREGATIONS,
    IMPORTANCE_WEIGHTS,
    KL_CONTROLLERS,
    KL_ESTIMATORS,
    LEARNING_RATE_SCHEDULES,
    POLICY_LOSSES,
    ROLLOUT_ENGINES,
    AdvantageEstimator,
    RolloutEngineEntry,
)

STORED_DTYPES = ("float32", "bfloat16")
T = TypeVar("T")  # all options, or a section

# The commands that read an option: all where nothing is said. `plan` takes the options of `train`.
POLICY = ("train",)
PPO = ("train", "critic")
SAMPLING = (*PPO, "evaluate")
ADVANTAGES = (*PPO, "score")
MODELS = (*PPO, "evaluate", "score")
SUPERVISED = ("sft", "reward_model")
LEARNING = (*PPO, *SUPERVISED)
REPORTS = (*PPO, "evaluate", *SUPERVISED)


def _names(option: str, names: tuple[str, ...], negated: bool) -> str:
    return f"`{option}` is {'not ' * negated}{' or '.join(names)}"


def estimator_is(is_meant: Callable[[AdvantageEstimator], bool], negated: bool = False) -> str:
    """Return as text that the estimator satisfies `is_meant`, or that it does not."""
    return _names("algorithm.adv_estimator", ADVANTAGE_ESTIMATORS.names(is_meant), negated)


def engine_is(is_meant: Callable[[RolloutEngineEntry], bool], negated: bool = False) -> str:
    """Return as text that the engine satisfies `is_meant`, or that it does not."""
    return _names("rollout.engine", ROLLOUT_ENGINES.names(is_meant), negated)


def estimator_reads(name: str) -> OptionRule:
    """Return the rule that the advantage estimator depends on an option in `algorithm`."""
    return OptionRule(
        lambda c: ADVANTAGE_ESTIMATORS.lookup(c.algorithm.adv_estimator).reads(name),
        estimator_is(lambda entry: entry.reads(name)),
    )


def option_is(name: str, value: object, message: str = "") -> OptionRule:
    """Return the rule that an option has this value."""
    words = ("on" if value else "off") if isinstance(value, bool) else value
    return OptionRule(lambda c: option_value(c, name) == value, f"`{name}` is {words}", message)


def is_set(name: str, message: str = "") -> OptionRule:
    """Return the rule that an option is neither empty nor unset."""
    return OptionRule(lambda c: option_value(c, name), f"`{name}` is set", message)


def is_unset(name: str, message: str = "") -> OptionRule:
    """Return the rule that an option is empty or unset."""
    return OptionRule(lambda c: not option_value(c, name), f"`{name}` is unset", message)


def must_be_set(is_met: Callable[[Any], object], *commands: str) -> OptionRule:
    """Return the rule that an option is set for some commands, or for all that read it."""
    return OptionRule(is_met, "", "must be set ({meaning})", at_default=True, commands=commands)


def engine_is_built_in(others: str) -> OptionRule:
    """Return the rule that the engine is the built-in one; `others` says what others do."""
    message = f"config.rollout.engine={{c.rollout.engine!r}} {others}"
    return option_is("rollout.engine", "built-in", message)


def has_server(engine: str) -> OptionRule:
    """Return the rule that an engine that is a server has an address, or is started."""
    return OptionRule(
        lambda c: (
            c.rollout.engine != engine
            or c.rollout.url
            or (engine == "vllm" and c.rollout.vllm.python)
        ),
        "",
        f"needs {ROLLOUT_ENGINES[engine].requirement.replace('`', '')}",
    )


def fills_alone(axis: str) -> OptionRule:
    """Return the rule that only one axis of the mesh takes the devices that others leave."""
    return OptionRule(
        lambda c: (
            getattr(c.mesh, axis) != -1 or [c.mesh.model, c.mesh.fsdp, c.mesh.data].count(-1) == 1
        ),
        "",
        "only one axis can be -1, of config.mesh.model={c.mesh.model}, fsdp={c.mesh.fsdp} and "
        "data={c.mesh.data}; set another, for example to 1",
    )


def compares(count: Callable[[Any], int]) -> tuple[OptionRule, OptionRule]:
    """Return the rules that what compares responses has several of them to each prompt."""
    # The advantage of a single response within its group is always 0.
    return (
        OptionRule(
            lambda c: (
                count(c) > 1
                or not ADVANTAGE_ESTIMATORS.lookup(c.algorithm.adv_estimator).needs_groups
            ),
            "",
            "config.algorithm.adv_estimator={c.algorithm.adv_estimator!r} compares responses to "
            "one prompt; set it to 2 or more",
            at_default=True,
        ),
        OptionRule(
            lambda c: count(c) > 1 or not c.algorithm.filter_groups.enable,
            "",
            "config.algorithm.filter_groups.enable=True compares the rewards of a prompt's "
            "responses; set it to 2 or more",
            at_default=True,
        ),
    )


# fmt: off
# Without the formatter, which would give each argument a line: an option is read as a paragraph of
# its default, its meaning and its facts.

# Rules that several options share.
HAS_CRITIC = OptionRule(lambda c: c.has_critic, estimator_is(lambda entry: entry.needs_critic),
    "there is no critic with config.algorithm.adv_estimator={c.algorithm.adv_estimator!r}")
VALUES_TOKENS = OptionRule(
    lambda c: not ADVANTAGE_ESTIMATORS.lookup(c.algorithm.adv_estimator).values_turns,
    estimator_is(lambda entry: entry.values_turns, negated=True),
    "config.algorithm.adv_estimator={c.algorithm.adv_estimator!r} has a critic that learns "
    "values only where turns start; leave it unset, or choose bi_level_gae")
CRITIC_HAS_TRUNK = option_is("critic.shared_trunk", False,
    "a critic that shares the actor's trunk has no trunk of its own; leave it unset, or set "
    "config.critic.shared_trunk=False")
HAS_OWN_CRITIC = OptionRule(lambda c: not c.shares_trunk, CRITIC_HAS_TRUNK.summary)
WEIGHS = OptionRule(lambda c: c.algorithm.rollout_is != "none", "`algorithm.rollout_is` is set")
HAS_ROLLOUT_MESH = OptionRule(
    lambda c: c.rollout.mesh.model is not None or c.rollout.mesh.devices > 0,
    "`rollout.mesh.model` or `rollout.mesh.devices` is set",
    "decoding uses config.mesh; set config.rollout.mesh.model")
TRAINS_ADAPTERS = OptionRule(lambda c: False, "",
    "jax_ppo.{command} trains all parameters, only jax_ppo.train trains adapters; leave it unset",
    commands=SUPERVISED)
SEQUENCES_ARE_WHOLE = OptionRule(lambda c: c.mesh.context == 1, "`mesh.context` is 1",
    "is computed from whole sequences, which config.mesh.context={c.mesh.context} splits; set one "
    "of them to its default")
DRAWN_WITHIN_STEP = OptionRule(lambda c: c.rollout.max_staleness < 2,
    "`rollout.max_staleness` is below 2",
    "expected {default!r} with config.rollout.max_staleness={c.rollout.max_staleness}, whose "
    "responses continue from step to step; or set config.rollout.max_staleness to 0 or 1")
DRAWN_ONCE = OptionRule(lambda c: not c.rollout.exact, "`rollout.exact` is off",
    "expected {default!r} with config.rollout.exact=True, which draws each token again; or set "
    "config.rollout.exact=False")
SEVERAL_TOKENS = OptionRule(
    lambda c: c.data.max_response_length > 1 or not (
        c.rollout.exact or c.rollout.max_staleness > 1),
    "`data.max_response_length` is at least 2",
    "expected config.data.max_response_length of at least 2, got {c.data.max_response_length}: a "
    "response of one token does not continue")
USES_REFERENCE = option_is("algorithm.use_reference", True,
    "needs the reference; set config.algorithm.use_reference=True")
HAS_BUILT_IN_ENGINE = engine_is_built_in("stores its weights itself")
ENGINE_IS_SERVER = OptionRule(
    lambda c: ROLLOUT_ENGINES.lookup(c.rollout.engine).is_server,
    engine_is(lambda entry: entry.is_server),
    "config.rollout.engine={c.rollout.engine!r} is no server; set it to vllm or openai")
STARTS_VLLM = OptionRule(lambda c: c.rollout.engine == "vllm" and not c.rollout.url,
    "`rollout.engine` is vllm without a `rollout.url`",
    "no vLLM is started with config.rollout.engine={c.rollout.engine!r} and "
    "config.rollout.url={c.rollout.url!r}")
HAS_REWARD_URL = is_set("reward.url", "needs a server; set config.reward.url")
HAS_REWARD_MODEL = is_set("reward.model_path",
    "there is no reward model; set config.reward.model_path")
REWARDS_BY_RULE = is_unset("reward.model_path",
    "samples are selected by the rewards of rules, before a reward model reads them; unset "
    "config.reward.model_path")
HAS_TEACHER = is_set("teacher.path", "there is no teacher; set config.teacher.path")
HAS_ADAPTERS = OptionRule(lambda c: c.has_adapters, "`model.lora.rank` or `model.lora.path` is set")
HAS_RESPONSES = is_set("score.file")
EXPORTS = option_is("trainer.export", True)
FILTERS_GROUPS = option_is("algorithm.filter_groups.enable", True)
NEWEST_WEIGHTS = option_is("rollout.max_staleness", 0,
    "samples are selected by the newest weights; set config.rollout.max_staleness=0")
HAS_ENVIRONMENT = is_set("rollout.multi_turn.environment")
ENVIRONMENT_IS_SERVER = OptionRule(
    lambda c: c.rollout.multi_turn.environment.startswith(("http://", "https://")),
    "`rollout.multi_turn.environment` is the address of a server",
    "config.rollout.multi_turn.environment={c.rollout.multi_turn.environment!r} is no server; "
    "set it to http://HOST:PORT")


@dataclasses.dataclass(frozen=True)
class Data:
    """Training and evaluation data."""

    train_files: str = option("",
        "training data: files (.jsonl, .jsonl.gz, .json, .csv, .parquet; data/*.parquet), "
        "`hf:OWNER/NAME/FILE`, `tfds:NAME/SPLIT`, or generated: `arithmetic:COUNT`, `sums:COUNT`, "
        "`calculations:COUNT`, `stories:COUNT`. Separate several with commas; FILE[START:END] "
        "takes some rows; a.jsonl*0.7,b.csv*0.3 mixes sources in these shares",
        is_list=True, read_by=LEARNING,
        rules=(must_be_set(lambda c: c.data.train_files or c.learns_from_files,
            "train", "critic", *SUPERVISED),))
    val_files: str = option("", "held-out data in the same notation; empty turns evaluation off",
        is_list=True, read_by=REPORTS)
    train_batch_size: int = option(64, "prompts per step", unit="prompts", at_least=1,
        read_by=LEARNING)
    val_batch_size: int = option(256, "prompts per batch of an evaluation",
        unit="prompts", at_least=1)
    val_max_samples: int | None = option(None,
        "held-out prompts to use, from the start of the files; unset: all",
        unit="prompts", at_least=1, read_by=REPORTS)
    train_max_samples: int | None = option(None,
        "training examples to use, from the start of the files; unset: all",
        unit="examples", at_least=1, read_by=LEARNING)
    max_prompt_length: int = option(512,
        "maximum length of a prompt; longer ones are dropped, truncated or refused",
        unit="tokens", at_least=1)
    max_response_length: int = option(512, "maximum length of a response",
        unit="tokens", at_least=1)
    filter_overlong_prompts: bool = option(True,
        "drop prompts longer than max_prompt_length, and report how many")
    truncation: str = option("error",
        "what happens to a longer prompt if filter_overlong_prompts is off",
        choices=("error", "left", "right", "middle"))
    prompt_key: str = option("",
        "column of the prompt, or its name in extra_info; empty: recognized by name, `prompt` "
        "first")
    ground_truth_key: str = option("",
        "column of the reference answer; empty: recognized by name (ground_truth, "
        "expected_answer, final_answer, answer), or in reward_model")
    system_prompt: str = option("", "system message of every chat, instead of the chat's own")
    prompt_template: str = option("",
        "text around each prompt, or a chat's last message, which replaces {prompt} in it; @FILE "
        "reads it from a file")
    instruction: str = option("", "text appended to a prompt that is only a question or problem")
    chat_template: bool = option(True, "apply the tokenizer's chat template if it has one")
    chat_template_kwargs: str = option("",
        'variables of the chat template, as a JSON object: {"enable_thinking": false}')
    date: str = option("",
        "the date that chat templates write, as YYYY-MM-DD; empty: of the run's first start, "
        "also where its models are evaluated; else today", parse=parse_date, fixed_on_resume=True)
    shuffle: bool = option(True, "shuffle the rows anew in each epoch, from `seed`",
        read_by=LEARNING)


@dataclasses.dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters."""

    rank: int = option(0,
        "rank of the adapters that actor and critic train on one frozen base, which is also the "
        "reference; 0: train all parameters",
        at_least=0, rules=(TRAINS_ADAPTERS,))
    alpha: float = option(16.0, "the adapters' product is scaled by alpha / rank",
        above=0, rules=(HAS_ADAPTERS,))
    targets: str = option("all-linear",
        f"projections with adapters, separated by commas: {', '.join(LORA_TARGETS)}; or all-linear",
        is_list=True, parse=parse_lora_targets, rules=(HAS_ADAPTERS,))
    path: str = option("",
        "folder or hub name of adapters in PEFT's format to start from, with their rank, alpha "
        "and targets",
        rules=(
            TRAINS_ADAPTERS,
            OptionRule(lambda c: c.model.lora == LoraOptions(path=c.model.lora.path),
                "the other options of `model.lora` are unset",
                "determines rank, alpha and targets; leave config.model.lora.rank, alpha and "
                "targets at their defaults")))


@dataclasses.dataclass(frozen=True)
class Model:
    """The pretrained model and its computation."""

    path: str = option("",
        "Hugging Face folder or hub name, OWNER/NAME or OWNER/NAME@REVISION; empty: the package's "
        "small model, which solves problems of `arithmetic`",
        rules=(
            must_be_set(lambda c: c.model.path, "score", *SUPERVISED),
            must_be_set(lambda c: c.model.path or not c.learns_from_files),
            OptionRule(lambda c: c.model.path or c.data.train_files.startswith("arithmetic:"), "",
                "must be set to a Hugging Face folder or hub name; the small model solves only the "
                "problems of `arithmetic`", at_default=True)))
    tokenizer_path: str = option("", "folder or hub name of the tokenizer; empty: model.path")
    dtype: str = option("auto",
        "type of the computation; auto: bfloat16 on TPUs and on GPUs from compute capability 8.0, "
        "else float32. Parameters are stored in optim.param_dtype",
        choices=("auto", "bfloat16", "float32"))
    gradient_checkpointing: bool = option(True,
        "compute each layer's activations again in the backward pass, to save memory",
        read_by=LEARNING)
    gradient_checkpointing_policy: str = option("full",
        "what a layer keeps for the backward pass besides its input: full, nothing; attention, "
        "its output; dots, all matrix products (most memory, least time)",
        choices=("full", "attention", "dots"), fixed_on_resume=False, read_by=LEARNING,
        rules=(option_is("model.gradient_checkpointing", True),))
    attention: str = option("auto",
        "attention for whole sequences: xla, everywhere; cudnn, NVIDIA GPUs in bfloat16; splash, "
        "TPUs if packing.row_length is unset or a multiple of 128; auto: the platform's where it "
        "can run",
        choices=("auto", "xla", "cudnn", "splash"))
    lora: LoraOptions = section(LoraOptions, read_by=MODELS)


@dataclasses.dataclass(frozen=True)
class Optim:
    """The optimizer and its learning-rate schedule."""

    lr: float = option(1e-6, "peak learning rate", above=0)
    lr_warmup_steps: int = option(0,
        "steps of linear warm-up, not counting steps that leave this model unchanged",
        unit="steps", at_least=0)
    lr_schedule: str = option("constant", "schedule after the warm-up, until the last step",
        choices=tuple(LEARNING_RATE_SCHEDULES))
    min_lr_ratio: float = option(0.0, "share of lr that remains at the end of linear and cosine",
        at_least=0, at_most=1)
    beta1: float = option(0.9, "AdamW's beta1", at_least=0, below=1)
    beta2: float = option(0.999, "AdamW's beta2", at_least=0, below=1)
    eps: float = option(1e-8, "AdamW's epsilon", above=0)
    weight_decay: float = option(0.01,
        "decoupled weight decay, of matrices only, not of norms and biases",
        at_least=0)
    param_dtype: str = option("float32",
        "type of stored parameters; steps are computed in float32, and bfloat16 is rounded "
        "stochastically so that small steps count on average",
        choices=STORED_DTYPES, fixed_on_resume=True)
    moments_dtype: str = option("float32",
        "type of the optimizer's stored moments; bfloat16 is rounded stochastically",
        choices=STORED_DTYPES, fixed_on_resume=True)
    gradient_dtype: str = option("float32",
        "type of the sum of gradients over micro-batches; bfloat16 is rounded stochastically",
        choices=STORED_DTYPES)


@dataclasses.dataclass(frozen=True)
class CriticOptim(Optim):
    """AdamW with a higher default learning rate, for models with a new head."""

    # A head that starts at zero has farther to go than a pretrained policy.
    lr: float = option(1e-5, "peak learning rate", above=0)


@dataclasses.dataclass(frozen=True)
class RouterReplay:
    """Replay of the experts that the sampler selected, in the actor's forward pass and update."""

    mode: str = option("disabled",
        "R3: the actor's passes send each token through the experts used in sampling (routing "
        "replay); disabled: each pass selects experts anew",
        choices=("disabled", "R3"),
        rules=(
            engine_is_built_in("does not record it; use the built-in engine"),
            DRAWN_WITHIN_STEP,
            DRAWN_ONCE))


@dataclasses.dataclass(frozen=True)
class Actor:
    """The policy's loss and update."""

    optim: Optim = section(Optim)
    router_replay: RouterReplay = section(RouterReplay)
    grad_clip: float = option(1.0, "maximum global gradient norm", above=0)
    optimizer_offload: bool = option(False,
        "keep the optimizer state in the host's memory between updates")
    param_offload: bool = option(False,
        "keep the actor's parameters in the host's memory when no phase reads them; sampling "
        "needs only the copy that decodes",
        read_by=MODELS)
    ppo_mini_batch_size: int = option(64,
        "prompts per optimizer step, each with rollout.n samples (or rollout.keep), shuffled one "
        "by one",
        unit="prompts", at_least=1, read_by=PPO)
    ppo_micro_batch_size_per_device: int | None = option(None,
        "packed rows that a device processes at once; unset: a sixteenth of all rows, more of "
        "short or few ones, at most 8,192 tokens",
        unit="rows", at_least=1, read_by=MODELS)
    ppo_epochs: int = option(1, "passes over a rollout, each in another order", at_least=1,
        read_by=PPO)
    clip_ratio: float = option(0.2, "the ratio is clipped to [1 - clip_ratio, 1 + clip_ratio]",
        above=0, below=1)
    clip_ratio_low: float | None = option(None, "clip range below 1; unset: clip_ratio",
        above=0, below=1)
    clip_ratio_high: float | None = option(None, "clip range above 1; unset: clip_ratio", above=0)
    clip_ratio_c: float | None = option(3.0,
        "dual clip: bound of the ratio where the advantage is negative; 0 turns it off",
        at_least=0,
        rules=(OptionRule(lambda c: not c.actor.clip_ratio_c or c.actor.clip_ratio_c > 1,
            "it is above 1, or 0",
            "the dual clip's constant must be above 1; 0 turns it off"),))
    policy_loss: str = option("vanilla",
        "loss of a token; or your own, `module:function` or `file.py:function` "
        "(kernels/policy_losses.py)",
        choices=tuple(POLICY_LOSSES), is_plugin=True)
    entropy_coeff: float = option(0.0, "weight of the entropy bonus", at_least=0)
    router_aux_loss_coef: float = option(0.0,
        "weight of the load-balancing loss of a mixture of experts",
        at_least=0, rules=(SEQUENCES_ARE_WHOLE,))
    use_kl_loss: bool = option(False, "add the KL to the reference to the actor's loss",
        rules=(USES_REFERENCE,))
    kl_loss_coef: float = option(0.001, "weight of the KL in the loss", at_least=0)
    kl_loss_type: str = option("k3",
        "estimator of the KL in the loss, where k1 does not restrain the policy; or a function of "
        "log-ratios (kernels/kl.py)",
        choices=tuple(KL_ESTIMATORS), is_plugin=True, aliases=KL_ESTIMATORS.other_names())
    target_kl: float | None = option(None,
        "no further mini-batch of a step once the approximate KL to the policy at its start "
        "exceeds 1.5 times this; unset: no limit",
        unit="nats per token", above=0,
        rules=(OptionRule(lambda c: not c.updates_once,
            "a step takes several mini-batches or epochs"),))
    loss_agg_mode: str = option("token-mean",
        "how the losses of a mini-batch's tokens are averaged",
        choices=tuple(AGGREGATIONS), read_by=PPO)
    loss_scale_factor: int | None = option(None,
        "divisor of seq-mean-token-sum-norm; unset: data.max_response_length",
        unit="tokens", at_least=1, read_by=PPO,
        rules=(OptionRule(lambda c: AGGREGATIONS[c.actor.loss_agg_mode].needs_scale,
            "`actor.loss_agg_mode` is seq-mean-token-sum-norm"),))


@dataclasses.dataclass(frozen=True)
class Reference:
    """The policy that the KL is measured to."""

    path: str = option("",
        "folder or hub name of the reference, with the actor's architecture, or with model.lora "
        "of adapters in PEFT's format; empty: the policy that the run starts from, without "
        "adapters",
        fixed_on_resume=True, rules=(USES_REFERENCE,))


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A policy whose distribution the actor learns on its own responses."""

    path: str = option("",
        "folder or hub name of the teacher, any policy with the actor's vocabulary, or with "
        "model.lora of adapters in PEFT's format; empty: none",
        fixed_on_resume=True)
    reward_coef: float = option(1.0,
        "subtract this times log actor - log teacher of each sampled token from its reward; 0: no "
        "rewards from the teacher",
        at_least=0,
        rules=(
            HAS_TEACHER,
            OptionRule(lambda c: c.teacher.reward_coef or c.teacher.loss_coef,
                "it or `teacher.loss_coef` is more than 0",
                "expected more than 0, or a config.teacher.loss_coef above 0; otherwise nothing "
                "reads config.teacher.path")))
    loss_coef: float = option(0.0,
        "add this times KL(actor || teacher) over the vocabulary to the actor's loss: a pass of "
        "the teacher per micro-batch",
        at_least=0, read_by=POLICY, rules=(HAS_TEACHER,))
    use_task_rewards: bool = option(True,
        "also learn from the rewards of rules and reward model; off: they are only reported",
        rules=(HAS_TEACHER,))
    param_offload: bool = option(False,
        "keep the teacher in the host's memory when it does not compute",
        rules=(HAS_TEACHER,))


@dataclasses.dataclass(frozen=True)
class Critic:
    """The value function's model, loss and update."""

    path: str = option("",
        "folder or hub name that the critic starts from, with model.lora of adapters in PEFT's "
        "format; empty: model.path",
        fixed_on_resume=True, read_by=ADVANTAGES, rules=(HAS_CRITIC, CRITIC_HAS_TRUNK))
    keep_head: bool | None = option(None,
        "start with the scalar head in critic.path, such as a reward model's; off: with zeros; "
        "unset: on where critic.path holds a critic that a run exported",
        fixed_on_resume=False, read_by=ADVANTAGES,
        rules=(
            HAS_CRITIC,
            CRITIC_HAS_TRUNK,
            is_set("critic.path", "needs a config.critic.path that has a head"),
            first_step_only_if(HAS_CRITIC)))
    shared_trunk: bool = option(False,
        "make the critic a scalar head on the actor's trunk: one pass serves both losses; the "
        "head uses actor.optim and stops with actor.target_kl",
        fixed_on_resume=True, rules=(HAS_CRITIC,))
    optim: CriticOptim = section(CriticOptim,
        rules=(HAS_OWN_CRITIC,))
    grad_clip: float = redeclare(Actor, "grad_clip",
        rules=(HAS_OWN_CRITIC,))
    optimizer_offload: bool = option(False, "as the actor's",
        rules=(HAS_OWN_CRITIC,))
    param_offload: bool = option(False,
        "keep the critic's parameters in the host's memory when it does not compute",
        read_by=ADVANTAGES, rules=(HAS_OWN_CRITIC,))
    ppo_mini_batch_size: int | None = option(None, "as the actor's; unset: the actor's",
        unit="prompts", at_least=1, rules=(CRITIC_HAS_TRUNK, unread_unless(HAS_CRITIC)))
    ppo_micro_batch_size_per_device: int | None = option(None, "as the actor's; unset: the actor's",
        unit="rows", at_least=1, rules=(CRITIC_HAS_TRUNK,))
    ppo_epochs: int | None = option(None, "as the actor's; unset: the actor's",
        at_least=1, rules=(CRITIC_HAS_TRUNK, unread_unless(HAS_CRITIC)))
    loss_agg_mode: str | None = option(None, "as the actor's; unset: the actor's",
        choices=tuple(AGGREGATIONS), rules=(CRITIC_HAS_TRUNK,))
    cliprange_value: float | None = option(0.5,
        "how far a new value may move from the old one in the loss; 0: no limit",
        at_least=0)
    value_loss_coef: float = option(1.0,
        "weight of the value loss; also scales the reported loss and gradient norm",
        above=0)
    router_aux_loss_coef: float = option(0.0, "as the actor's",
        at_least=0, rules=(HAS_OWN_CRITIC, SEQUENCES_ARE_WHOLE))
    normalize_values: bool = option(False,
        "train the critic on returns normalized by their running mean and deviation; "
        "cliprange_value then counts in standard deviations",
        fixed_on_resume=True, read_by=ADVANTAGES, rules=(HAS_CRITIC,))


@dataclasses.dataclass(frozen=True)
class KLControl:
    """The coefficient of the KL to the reference."""

    type: str = option("fixed",
        "how the coefficient changes: fixed, not at all; adaptive, towards target_kl",
        choices=tuple(KL_CONTROLLERS),
        rules=(option_is("algorithm.use_kl_in_reward", True,
            "changes the coefficient of the KL in the reward; set "
            "config.algorithm.use_kl_in_reward=True"),))
    kl_coef: float = option(0.001,
        "coefficient of the KL in the reward; of adaptive, the first one",
        at_least=0,
        rules=(OptionRule(lambda c: KL_CONTROLLERS[c.algorithm.kl_ctrl.type].adapts,
            "`algorithm.kl_ctrl.type` is adaptive", first_step_only=True),))
    target_kl: float = option(0.1, "KL that adaptive aims at, per target_unit",
        unit="nats", above=0)
    target_unit: str = option("token",
        "what target_kl counts: token, the mean KL per token (verl); sequence, its sum over a "
        "response (OpenAI's 6)",
        choices=("token", "sequence"))
    horizon: int = option(10_000, "samples over which adaptive changes the coefficient",
        unit="samples", at_least=1,
        rules=(
            # The coefficient stays positive while 0.2 x samples < horizon (kernels/kl.py).
            OptionRule(lambda c: c.algorithm.kl_ctrl.type != "adaptive" or (
                c.algorithm.kl_ctrl.horizon >= c.samples_per_step),
                "it is at least a step's samples, for `adaptive`",
                "must be at least the {c.samples_per_step} samples of a step, or one step could "
                "take the coefficient far past its target", at_default=True),))


@dataclasses.dataclass(frozen=True)
class FilterGroups:
    """Dynamic sampling (DAPO): prompts whose responses earn equal rewards are replaced."""

    enable: bool = option(False,
        "replace prompts whose responses all earned the same reward by further prompts",
        rules=(REWARDS_BY_RULE, NEWEST_WEIGHTS, DRAWN_ONCE))
    metric: str = option("score",
        "what must differ: score, the reward of the rules; accuracy, whether responses are "
        "correct",
        choices=("score", "accuracy"),
        aliases={"acc": "accuracy", "seq_reward": "score", "seq_final_reward": "score"},
        rules=(FILTERS_GROUPS,))
    max_num_gen_batches: int = option(10,
        "batches of train_batch_size prompts that a step samples at most; prompts with equal "
        "rewards fill what is left",
        unit="batches", at_least=1, rules=(FILTERS_GROUPS,))


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """Advantages, returns and the KL to the reference."""

    adv_estimator: str = option("gae",
        "how advantages are estimated; or your own, `module:function` or `file.py:function` "
        "(ppo/advantages.py)",
        choices=tuple(ADVANTAGE_ESTIMATORS), is_plugin=True, fixed_on_resume=True)
    gamma: float = option(1.0, "discount per token",
        at_least=0, at_most=1, rules=(estimator_reads("gamma"),))
    lam: float = option(1.0, "GAE's lambda, per token",
        at_least=0, at_most=1, rules=(estimator_reads("lam"),))
    turn_gamma: float = option(1.0, "discount per turn of a dialogue",
        at_least=0, at_most=1, rules=(estimator_reads("turn_gamma"),))
    turn_lam: float = option(1.0, "GAE's lambda, per turn of a dialogue",
        at_least=0, at_most=1, rules=(estimator_reads("turn_lam"),))
    critic_lam: float | None = option(None,
        "lambda of the critic's returns, per token and per turn; unset: lam and turn_lam",
        at_least=0, at_most=1, rules=(unread_unless(HAS_CRITIC),))
    lam_length_alpha: float | None = option(None,
        "lambda of advantages is 1 - 1 / (this x response length), 0.05 in VAPO; unset: lam",
        above=0, rules=(estimator_reads("lam"),))
    bootstrap_truncated: bool = option(False,
        "a response that was cut off ends with the critic's value, not with 0",
        rules=(HAS_CRITIC, VALUES_TOKENS, option_is("algorithm.mask_truncated", False)))
    mask_truncated: bool = option(False,
        "leave responses that were cut off out of the losses, but not out of baselines, whitened "
        "rewards and running moments")
    norm_adv_by_std_in_grpo: bool = option(True,
        "grpo divides by the standard deviation of a prompt's rewards; off: Dr. GRPO",
        rules=(estimator_reads("norm_adv_by_std_in_grpo"),))
    whiten_rewards: bool = option(False,
        "scale token rewards to variance 1 over the rollout, keeping their mean")
    whiten_advantages: bool | None = option(None,
        "scale advantages to variance 1 over the whole rollout; unset: with "
        f"{', '.join(ADVANTAGE_ESTIMATORS.names(lambda entry: entry.whitens))}")
    use_kl_in_reward: bool = option(False,
        "subtract the KL to the reference, times kl_ctrl's coefficient, from each token's reward",
        rules=(USES_REFERENCE,))
    use_reference: bool = option(True,
        "measure the KL to a frozen reference: reference.path, or the first policy, without "
        "adapters")
    reference_offload: bool = option(False,
        "keep the reference in the host's memory when it does not compute",
        rules=(OptionRule(lambda c: c.algorithm.use_reference and not c.has_adapters,
            "`algorithm.use_reference` is on, without adapters",
            "there is no separate reference: config.algorithm.use_reference is off, or it is "
            "the base of adapters (config.model.lora)"),))
    kl_penalty: str = option("k1",
        "estimator of the KL in the reward, where only k1 follows the KL's gradient; or a "
        "function as for actor.kl_loss_type",
        choices=KL_ESTIMATORS.names(lambda entry: entry.in_reward), is_plugin=True,
        aliases=KL_ESTIMATORS.other_names())
    kl_ctrl: KLControl = section(KLControl)
    filter_groups: FilterGroups = section(FilterGroups, read_by=PPO)
    rollout_is: str = option("none",
        "importance weights of the policy loss, for samples of older weights "
        "(rollout.max_staleness) or the sampler's rounding",
        choices=tuple(IMPORTANCE_WEIGHTS), read_by=POLICY, rules=(DRAWN_ONCE,))
    rollout_is_threshold: float = option(2.0, "upper bound of importance weights",
        at_least=1, read_by=POLICY, rules=(WEIGHS,))
    rollout_is_lower: float = option(0.0, "lower bound of importance weights",
        at_least=0, below=1, read_by=POLICY, rules=(WEIGHS,))
    rollout_is_masks: bool = option(False,
        "weights outside the bounds become 0, as in IcePop; off: they are truncated to the bounds",
        read_by=POLICY, rules=(WEIGHS,))


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Options of drawing tokens."""

    temperature: float = option(0.0, "divides the logits; 0 is greedy", at_least=0)
    top_k: int = option(-1, "draw from the k most likely tokens; -1: from all",
        at_least=-1, not_zero=True)
    top_p: float = option(1.0,
        "draw from the most likely tokens that together have this probability",
        above=0, at_most=1)
    min_p: float = option(0.0,
        "draw from the tokens at least this fraction as likely as the most likely one",
        at_least=0, at_most=1)
    n: int = option(1, "responses per prompt", unit="responses", at_least=1)

    @property
    def truncates(self) -> bool:
        """Return whether unlikely tokens are left out of a draw."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclasses.dataclass(frozen=True)
class RolloutMesh:
    """The mesh for decoding, over the devices of `mesh`, or over others.

    It has no fsdp axis: decoding reads every weight for each token.
    """

    model: int | None = option(None,
        "devices that split each matrix while decoding; unset: decoding uses `mesh`, or 1 with "
        "`rollout.mesh.devices`",
        unit="devices", at_least=1,
        rules=(OptionRule(lambda c: not ROLLOUT_ENGINES.lookup(c.rollout.engine).is_external,
            engine_is(lambda entry: entry.is_external, negated=True),
            "config.rollout.engine={c.rollout.engine!r} does not decode on the mesh; unset "
            "it"),))
    devices: int = option(0,
        "devices that only decode, the last of each process, while those of `mesh` learn "
        "(docs/sample-sources.md#devices-that-only-decode); 0: those of `mesh` decode",
        unit="devices", at_least=0, read_by=PPO,
        rules=(
            engine_is_built_in("decodes elsewhere; use the built-in engine"),
            OptionRule(lambda c: c.rollout.max_staleness > 0,
                "`rollout.max_staleness` is at least 1",
                "these devices would decode nothing while the others learn; set "
                "config.rollout.max_staleness to 1 or more")))
    data: int = option(-1,
        "groups of devices with a copy of the weights each; -1: as many as fit",
        unit="groups", at_least=-1, not_zero=True, rules=(HAS_ROLLOUT_MESH,))


@dataclasses.dataclass(frozen=True)
class MultiTurn:
    """Dialogues: responses of several turns, which an environment answers."""

    environment: str = option("",
        "what answers each turn of the policy: a class, `module:Class` or `file.py:Class` "
        "(environments/protocol.py, or with Gymnasium's methods); `gymnasium:ID`; tools, "
        "`tools:calculator,python,file.py:function`; or a server, http://HOST:PORT, which gets "
        "the environment variable JAX_PPO_ENVIRONMENT_KEY, if set, as a bearer token; empty: a "
        "response is one turn",
        rules=(
            engine_is_built_in("has no environment; use the built-in engine"),
            option_is("reward.process_rewards", False,
                "the environment rewards turns; set config.reward.process_rewards=False"),
            OptionRule(lambda c: ":" in c.rollout.multi_turn.environment, "",
                "expected module:Class, path/to/file.py:Class or http://HOST:PORT"),
            DRAWN_WITHIN_STEP,
            DRAWN_ONCE))
    max_assistant_turns: int | None = option(None,
        "turns of the policy after which a response is cut off; unset: no limit",
        unit="turns", at_least=1, rules=(HAS_ENVIRONMENT,))
    max_turn_length: int | None = option(None,
        "tokens after which a turn ends; unset: data.max_response_length",
        unit="tokens", at_least=1, rules=(HAS_ENVIRONMENT,))
    max_observation_length: int = option(64,
        "tokens to which an observation is cut",
        unit="tokens", at_least=1, rules=(HAS_ENVIRONMENT,))
    timeout: float = option(60.0,
        "longest time for a `step` of the environment (the first includes `reset`), after which "
        "the dialogue ends with a reward of 0 for the turn",
        unit="seconds", above=0, rules=(HAS_ENVIRONMENT,))
    observation_role: str = option("",
        "role under which the chat template renders observations, such as user; empty: they are "
        "inserted unchanged (results of tools: as the role tool)",
        rules=(HAS_ENVIRONMENT,))
    url_timeout: float = option(20.0,
        "longest time for a call of the environment's server",
        unit="seconds", above=0,
        rules=(
            ENVIRONMENT_IS_SERVER,
            OptionRule(lambda c: not ENVIRONMENT_IS_SERVER.is_met(c) or (
                c.rollout.multi_turn.url_timeout < c.rollout.multi_turn.timeout),
                "it is below `rollout.multi_turn.timeout`",
                "expected less than "
                "config.rollout.multi_turn.timeout={c.rollout.multi_turn.timeout}, which bounds "
                "all calls of a turn together", at_default=True)))
    url_retries: int = option(2,
        "repetitions of a call that the environment's server refused (429, 503) or did not "
        "accept; of a `reset`, and a `step` that the server lets repeat, also after other faults",
        at_least=0, rules=(ENVIRONMENT_IS_SERVER,))
    action_field: str = option("",
        "field of the object that the environment's server takes as action, such as `message`; "
        "empty: the action is a text",
        rules=(ENVIRONMENT_IS_SERVER,))
    observation_field: str = option("",
        "field of the object that the environment's server returns as observation; empty: it is a "
        "text",
        rules=(ENVIRONMENT_IS_SERVER,))
    info_metrics: str = option("",
        "numbers in the `info` of a server's or Gymnasium's environment that become metrics "
        "environment/NAME",
        is_list=True, rules=(HAS_ENVIRONMENT,))
    reward: str = option("sum",
        "sum: the environment's rewards and the reward of the response; environment: only the "
        "environment's",
        choices=("sum", "environment"),
        rules=(
            OptionRule(lambda c: not any((
                c.reward.function, c.reward.terms, c.reward.url, c.reward.model_path)),
                "no other reward is set",
                "ignores the rewards that config.reward sets; unset function, terms, url and "
                "model_path there, or set config.rollout.multi_turn.reward='sum'"),
            HAS_ENVIRONMENT))


@dataclasses.dataclass(frozen=True)
class VLLM:
    """The vLLM that a run starts and ends, on this machine."""

    python: str = option("", "interpreter of an environment that has vLLM",
        rules=(STARTS_VLLM,))
    arguments: str = option("",
        "further arguments, such as --gpu-memory-utilization=0.4 --tensor-parallel-size=2",
        parse=shlex.split, rules=(STARTS_VLLM,))


@dataclasses.dataclass(frozen=True)
class RolloutOptions(Sampling):
    """Sampling for training."""

    # Training cannot be greedy: a policy gradient needs samples.
    temperature: float = option(1.0,
        "divides the logits, in sampling and in all passes of training",
        above=0, read_by=ADVANTAGES,
        rules=(OptionRule(lambda c: not (
            ROLLOUT_ENGINES.lookup(c.rollout.engine).is_server and c.rollout.filters_tokens),
            engine_is(lambda entry: entry.is_server, negated=True),
            "servers report log-probs before temperature and filters or after both; set it to "
            "1, unset top_k, top_p, min_p and min_new_tokens, or use the built-in engine"),))
    top_k: int = redeclare(Sampling, "top_k", read_by=PPO)
    top_p: float = redeclare(Sampling, "top_p", read_by=PPO)
    min_p: float = redeclare(Sampling, "min_p", read_by=PPO)
    n: int = redeclare(Sampling, "n",
        read_by=PPO,
        rules=(*compares(lambda c: c.rollout.n),))
    engine: str = option("built-in",
        "what generates responses; or your RolloutEngine, `module:Class` or `file.py:Class` "
        "(sampler/engine.py)",
        choices=tuple(ROLLOUT_ENGINES), is_plugin=True, aliases=ROLLOUT_ENGINES.other_names(),
        rules=(
            *map(has_server, ROLLOUT_ENGINES.names(lambda entry: entry.is_server)),
            DRAWN_WITHIN_STEP,
            DRAWN_ONCE))
    weights_dir: str = option("",
        "folder in which an external engine finds the weights of each step, shared with a server "
        "on another machine; empty: shared memory, or the temporary folder if they do not fit "
        "twice",
        rules=(OptionRule(lambda c: ROLLOUT_ENGINES.lookup(c.rollout.engine).is_external,
            engine_is(lambda entry: entry.is_external)),))
    url: str = option("",
        "address of a running server that samples, http://HOST:PORT; it gets the environment "
        "variable JAX_PPO_ROLLOUT_KEY, if set, as a bearer token",
        rules=(ENGINE_IS_SERVER,))
    url_timeout: float = option(600.0, "longest wait for one response of a server",
        unit="seconds", above=0, rules=(unread_unless(ENGINE_IS_SERVER),))
    vllm: VLLM = section(VLLM)
    max_num_seqs: int = option(256,
        "samples that a device decodes at once, each followed by another when it ends; 0: as many "
        "as fit into memory",
        unit="samples", at_least=0)
    stop: str = option("",
        'strings that end a response or a turn: one string, or a JSON list such as ["Question:", '
        '"\\n\\n"]; the token that completes one is part of the response',
        is_json=True, parse=parse_strings)
    min_new_tokens: int = option(0, "tokens before which a response does not end",
        unit="tokens", at_least=0,
        rules=(OptionRule(lambda c: c.rollout.min_new_tokens <= c.data.max_response_length,
            "it is at most `data.max_response_length`",
            "must be at most config.data.max_response_length={c.data.max_response_length}"),))
    attention: str = option("auto",
        "attention in decoding: xla runs everywhere; cudnn needs model.attention=cudnn and has no "
        "sliding window; auto: cudnn where it can run",
        choices=("auto", "xla", "cudnn"), rules=(unread_unless(HAS_BUILT_IN_ENGINE),))
    quantization: str = option("none",
        "how weights are stored for decoding: none, as model.dtype; int8, half of bfloat16's "
        "memory, but a slightly different policy (algorithm.rollout_is corrects that)",
        choices=("none", "int8"), rules=(HAS_BUILT_IN_ENGINE,))
    logprob_micro_batch_size_per_device: int | None = option(None,
        "packed rows that a device processes at once without gradients; unset: as for the actor",
        unit="rows", at_least=1, read_by=MODELS, rules=(DRAWN_ONCE,))
    reuse_logprobs: str = option("auto",
        "take the sampler's log-probs as the old policy's: always (ratios then start at 1 up to "
        "rounding, percents in bfloat16); never, compute them again; auto, where rounding cannot "
        "bias the update",
        choices=("auto", "always", "never"), read_by=PPO,
        rules=(
            OptionRule(lambda c: c.rollout.reuse_logprobs != "always" or (
                not ROLLOUT_ENGINES.lookup(c.rollout.engine).is_external),
                "the engine is built-in, for `always`",
                "config.rollout.engine={c.rollout.engine!r} rounds differently, so its log-probs "
                "are compared with the trainer's; set it to 'auto'"),
            OptionRule(
                lambda c: c.rollout.reuse_logprobs != "always" or c.algorithm.rollout_is == "none",
                "`algorithm.rollout_is` is none, for `always`",
                "leaves config.algorithm.rollout_is={c.algorithm.rollout_is!r} no other log-probs "
                "to compare the sampler's with; set it to 'auto'"),
            DRAWN_ONCE))
    exact: bool = option(False,
        "draw each token again from a forward pass over the rows of the update, so that both have "
        "the same log-probs to the bit (docs/sample-sources.md)",
        read_by=PPO,
        rules=(
            OptionRule(lambda c: not HAS_ROLLOUT_MESH.is_met(c) and all(
                getattr(c.mesh, axis) == 1
                for axis in ("fsdp", "model", "stage", "context", "expert")),
                "`mesh.data` is the only axis, also of decoding",
                "sums over other axes depend on their sizes; leave config.mesh.fsdp, model, stage,"
                " context and expert at 1, config.rollout.mesh.devices at 0, and "
                "config.rollout.mesh.model unset"),
            SEVERAL_TOKENS))
    max_staleness: int = option(0,
        "updates by which sampling weights may be older than trained ones: 0, sample within each "
        "step; 1, sample the next batch while this one is scored; more, partial rollouts, whose "
        "unfinished responses continue under newer weights for at most this many steps",
        unit="steps", at_least=0, read_by=PPO,
        rules=(
            DRAWN_ONCE,
            OptionRule(lambda c: c.algorithm.rollout_is != "none",
                "`algorithm.rollout_is` is token or sequence",
                "the sampling weights are older than the weights that are trained; set "
                "config.algorithm.rollout_is to 'token' or 'sequence'"),
            SEVERAL_TOKENS))
    partial_length: int | None = option(None,
        "tokens of each response that partial rollouts draw at a time; unset: an eighth of "
        "data.max_response_length",
        unit="tokens", at_least=1, read_by=PPO,
        rules=(
            OptionRule(lambda c: c.rollout.max_staleness > 1, "`rollout.max_staleness` is above 1"),
            OptionRule(lambda c: c.rollout.max_staleness < 2 or (
                c.rollout.partial_length < c.data.max_response_length),
                "it is below `data.max_response_length`",
                "expected fewer tokens than "
                "config.data.max_response_length={c.data.max_response_length}")))
    keep: int | None = option(None,
        "responses per prompt to learn from, of the n that are sampled; unset: all",
        unit="responses", at_least=1, read_by=PPO,
        rules=(
            REWARDS_BY_RULE,
            NEWEST_WEIGHTS,
            OptionRule(lambda c: c.rollout.keep <= c.rollout.n, "it is at most `rollout.n`",
                "expected at most config.rollout.n={c.rollout.n}"),
            DRAWN_ONCE,
            *compares(lambda c: c.rollout.keep or c.rollout.n)))
    keep_by: str = option("spread",
        "which responses are kept: spread, those whose scores differ most (PODS); best, those "
        "with the highest",
        choices=("spread", "best"), read_by=PPO, rules=(is_set("rollout.keep"),))
    multi_turn: MultiTurn = section(MultiTurn)
    mesh: RolloutMesh = section(RolloutMesh)
    val_kwargs: Sampling = section(Sampling)

    @property
    def filters_tokens(self) -> bool:
        """Return whether some tokens may be left out of a draw."""
        return self.truncates or self.min_new_tokens > 0


@dataclasses.dataclass(frozen=True)
class Reward:
    """Reward functions, reward models, and the shaping of scores."""

    function: str = option("",
        "`module:function` or `file.py:function`, called as f(data_source, solution_str, "
        "ground_truth, extra_info), or for a batch as verl's or TRL's; empty: the rule of each "
        "row's data_source")
    terms: str = option("",
        "sum of rewards as NAME:WEIGHT pairs: built-in rules (gsm8k, gsm8k[flexible], math, "
        "math_dapo, multiple_choice, exact, search_qa, regex, json_schema, arithmetic, sums, "
        "stories, format[think,answer], length[5:200]), `auto` (the rule of each row's "
        "data_source), `model` (the reward model), `judge` (reward.url), or file.py:function")
    url: str = option("",
        "address of a server that scores responses: it gets prompt, response, ground_truth and "
        "data_source as JSON, or a chat completion if url_model is set, and JAX_PPO_REWARD_KEY as "
        "a bearer token")
    url_model: str = option("",
        "name of the model that judges; its reply has the score as JSON or as its last number",
        rules=(HAS_REWARD_URL,))
    url_prompt: str = option(
        "Rate the response to the prompt from 0 to 10. End with the number.\n\n"
        "Prompt:\n{prompt}\n\nResponse:\n{response}",
        "prompt of the model that judges; {ground_truth} may occur in it, too",
        rules=(HAS_REWARD_URL,))
    url_timeout: float = option(15.0, "longest time for a call",
        unit="seconds", above=0, rules=(HAS_REWARD_URL,))
    url_retries: int = option(3,
        "retries of a call that failed or was refused by the server (429, 5xx)",
        at_least=0, rules=(HAS_REWARD_URL,))
    fallback_score: float = option(0.0,
        "score of a sample whose rule raised an error or ran out of time")
    workers: int | None = option(None,
        "worker processes of the reward function, where a call that hangs or dies costs only its "
        "sample; 0: the run's own process; unset: 1 for your functions, math, regex and "
        "json_schema, else 0",
        unit="processes", at_least=0)
    timeout: float = option(60.0,
        "longest time for one response in a worker; a function for batches has up to max_timeouts "
        "times as long",
        unit="seconds", above=0,
        rules=(OptionRule(lambda c: c.reward.workers != 0,
            "the reward function runs in worker processes (`reward.workers` is not 0)"),))
    max_timeouts: int = option(8,
        "consecutive responses that may run out of time before the rest of the batch fails",
        unit="responses", at_least=1)
    model_path: str = option("",
        "folder or hub name of a reward model (sequence classification with one label), whose "
        "score is added to reward.function's",
        fixed_on_resume=True)
    param_offload: bool = option(False,
        "keep the reward model in the host's memory when it does not compute",
        rules=(HAS_REWARD_MODEL,))
    model_input: str = option("auto",
        "what the reward model reads: chat (its chat template), pair (prompt and response), text "
        "(both joined); auto: pair for an encoder, else the sampled tokens if vocabulary and "
        "template are the actor's, else chat or text",
        choices=("auto", "chat", "pair", "text"), fixed_on_resume=True, rules=(HAS_REWARD_MODEL,))
    max_length: int | None = option(None,
        "maximum input length of the reward model, which cuts the start of longer prompts; unset: "
        "the one in its config.json",
        unit="tokens", at_least=16, rules=(HAS_REWARD_MODEL,))
    micro_batch_size_per_device: int | None = option(None,
        "packed rows of the reward model that a device processes at once; unset: as for the actor",
        unit="rows", at_least=1, rules=(HAS_REWARD_MODEL,))
    score_position: str = option("auto",
        "the token at which a decoder's score is read: auto, the last one but its pad tokens, as "
        "in transformers; last_token, the last one",
        choices=("auto", "last_token"), fixed_on_resume=True, rules=(HAS_REWARD_MODEL,))
    process_rewards: bool = option(False,
        "reward.function may return `step_rewards`, a list of (end of the step in characters, "
        "reward), neither normalized nor clipped",
        rules=(OptionRule(lambda c: c.reward.function or c.reward.terms,
            "`reward.function` or `reward.terms` is set",
            "needs a config.reward.function that returns step_rewards"),))
    normalize: str = option("none",
        "divide scores by their standard deviation: running, over all so far",
        choices=("none", "running"), fixed_on_resume=True)
    normalize_shift: bool = option(True, "also subtract the mean from normalized scores",
        rules=(option_is("reward.normalize", "running"),))
    clip: float | None = option(None,
        "clip scores, after normalization, to +- this; unset: no clipping",
        above=0)
    missing_eos_penalty: float = option(0.0,
        "subtracted from the score of a response that was cut off",
        at_least=0)
    overlong_buffer_len: int = option(0,
        "last tokens of max_response_length over which a penalty grows from 0 to "
        "overlong_penalty_factor (DAPO); 0: no penalty",
        unit="tokens", at_least=0,
        rules=(
            # verl#2107
            OptionRule(lambda c: c.reward.overlong_buffer_len <= c.data.max_response_length,
                "it is at most `data.max_response_length`",
                "expected at most config.data.max_response_length={c.data.max_response_length}"),))
    overlong_penalty_factor: float = option(1.0, "subtracted from the score at max_response_length",
        at_least=0)
    length_penalty: float = option(0.0, "subtracted from the score for each token of the response",
        at_least=0)


@dataclasses.dataclass(frozen=True)
class Score:
    """Given prompts and responses: jax_ppo.score scores them, jax_ppo.critic learns from them."""

    file: str = option("",
        "JSONL, Parquet, JSON or CSV file of prompts and responses, such as those in a run's "
        "rollouts/; a pattern with *; or that folder, for its responses of training. Empty: "
        "jax_ppo.critic samples",
        rules=(must_be_set(lambda c: c.score.file, "score"),))
    response_key: str = option("",
        "column of the response, or its name in extra_info; empty: recognized by name (chosen, a "
        "chat's last message, completion, response, output, solution, answer)",
        rules=(HAS_RESPONSES,))
    reward_key: str = option("",
        "column of the rewards, such as score in rollouts/; empty: the rules and the reward model "
        "of config.reward",
        rules=(
            HAS_RESPONSES,
            OptionRule(lambda c: not (c.learns_from_files and c.reward.model_path), "",
                "the rewards are in the rows; unset config.reward.model_path, or this for the "
                "reward model's")))


@dataclasses.dataclass(frozen=True)
class Supervised:
    """Supervised fine-tuning and reward-model training."""

    optim: CriticOptim = section(CriticOptim)
    grad_clip: float = redeclare(Actor, "grad_clip")
    micro_batch_size_per_device: int | None = redeclare(Actor, "ppo_micro_batch_size_per_device",
        read_by=None)
    response_key: str = redeclare(Score, "response_key",
        read_by=("sft",), fixed_on_resume=True, rules=())
    router_aux_loss_coef: float = redeclare(Actor, "router_aux_loss_coef", fixed_on_resume=True)
    center_coef: float = option(0.0,
        "weight of the squared sum of a pair's scores, which keeps their mean at 0",
        at_least=0, read_by=("reward_model",), fixed_on_resume=True,
        rules=(OptionRule(lambda c: False,
            "", "only jax_ppo.reward_model reads it", commands=("sft",)),))


@dataclasses.dataclass(frozen=True)
class PackingOptions:
    """Packing of several samples into one row."""

    enabled: bool = option(True, "pack several samples into a row; off: one sample per row, padded")
    row_length: int | None = option(None,
        "tokens per row; unset: max_prompt_length + max_response_length, rounded up for splash "
        "attention; in supervised training the longest example",
        unit="tokens", at_least=2,
        rules=(
            OptionRule(lambda c: c.packing.row_length >= c.sequence_length, "",
                "a row must hold config.data.max_prompt_length + config.data.max_response_length ="
                " {c.sequence_length} tokens; set it to that or more"),
            OptionRule(lambda c: c.packing.row_length >= 2 * c.sequence_length, "",
                "a row must hold the two responses of an example, each with its prompt: 2 x "
                "(config.data.max_prompt_length + config.data.max_response_length) = 2 x "
                "{c.sequence_length} tokens; set it to that or more", commands=("reward_model",)),
            # Each part of a row has two blocks of columns.
            OptionRule(
                lambda c: c.mesh.context == 1 or not c.packing.row_length % (2 * c.mesh.context),
                "",
                "expected a multiple of twice config.mesh.context={c.mesh.context}, or leave it "
                "unset")))


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The axes of the device mesh."""

    data: int = option(-1, "replicas of the parameters; -1: all devices that the other axes leave",
        unit="devices", at_least=-1, not_zero=True)
    fsdp: int = option(1,
        "devices that share one copy of parameters and optimizer state; -1 as for data",
        unit="devices", at_least=-1, not_zero=True, rules=(fills_alone("fsdp"),))
    model: int = option(1, "devices that split each matrix (tensor parallelism); -1 as for data",
        unit="devices", at_least=-1, not_zero=True, rules=(fills_alone("model"),))
    stage: int = option(1,
        "stages of the layers (pipeline parallelism) outside decoding, in which they act like "
        "data",
        unit="devices", at_least=1)
    context: int = option(1,
        "devices that split the tokens of a packed row (context parallelism), for long responses; "
        "otherwise they act like fsdp",
        unit="devices", at_least=1)
    expert: int = option(1,
        "devices that split the experts of a mixture of experts; otherwise they act like fsdp",
        unit="devices", at_least=1)


@dataclasses.dataclass(frozen=True)
class Distributed:
    """Addresses by which the processes of a multi-host run connect."""

    coordinator_address: str = option("",
        "HOST:PORT of process 0; empty: from the TPU pod or Slurm, or a single process")
    num_processes: int = option(0, "number of processes, with coordinator_address",
        unit="processes", at_least=0)
    process_id: int = option(-1, "index of this process from 0, with coordinator_address",
        at_least=-1,
        rules=(OptionRule(lambda c: not c.distributed.coordinator_address or (
            0 <= c.distributed.process_id < c.distributed.num_processes),
            "", "expected at least 0, and less than "
            "config.distributed.num_processes={c.distributed.num_processes}, with "
            "config.distributed.coordinator_address set", at_default=True),))
    heartbeat_seconds: int = option(30, "time after which a silent process is taken for dead",
        unit="seconds", at_least=10)
    stall_seconds: int = option(1800,
        "time without progress after which a run prints its threads' stacks and ends; 0: no limit",
        unit="seconds", at_least=0)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Duration, evaluation, checkpoints and logs of a run."""

    total_epochs: int = option(1, "passes over the training data",
        unit="epochs", at_least=1, rules=(is_unset("trainer.total_training_steps"),))
    total_training_steps: int | None = option(None,
        "number of steps; unset: determined by total_epochs",
        unit="steps", at_least=1)
    critic_warmup: int = option(0, "first steps, in which only the critic is trained",
        unit="steps", at_least=0, read_by=POLICY, rules=(HAS_CRITIC, CRITIC_HAS_TRUNK))
    critic_only: bool = option(False,
        "train the critic alone, on the responses of an unchanged actor; jax_ppo.critic turns it "
        "on",
        read_by=PPO, fixed_on_resume=True, rules=(HAS_CRITIC, CRITIC_HAS_TRUNK))
    test_freq: int = option(10, "steps between evaluations; 0: only the last step; -1: never",
        unit="steps", at_least=-1)
    val_before_train: bool = option(True, "evaluate before the first step")
    save_freq: int = option(50,
        "steps between checkpoints; 0: only the last step; -1: never, except before a preemption",
        unit="steps", at_least=-1)
    max_checkpoints: int = option(2, "newest checkpoints to keep, besides the best one", at_least=1)
    best_metric: str = option("accuracy",
        "metric of the best checkpoint, among steps that are both evaluated and saved",
        choices=("accuracy", "reward_mean"), read_by=PPO)
    resume: bool = option(True,
        "resume from the newest checkpoint in the work directory; off: refuse a folder that has "
        "one")
    resume_with_changed_data: bool = option(False,
        "resume with a new epoch although the training rows or their order have changed; off: "
        "refuse. Files that only moved have not changed")
    export: bool = option(True,
        "write the trained model as a Hugging Face folder at the end (WORKDIR/actor, adapter or "
        "reward_model)")
    export_best: bool = option(False,
        "also write the models of the best checkpoint, to WORKDIR/best, which model.path can name",
        rules=(
            OptionRule(
                lambda c: c.data.val_files and min(c.trainer.save_freq, c.trainer.test_freq) >= 0,
                "`data.val_files` is set, and `trainer.save_freq` and `trainer.test_freq` are not "
                "-1",
                "the best of the steps that are evaluated and saved needs config.data.val_files, "
                "and config.trainer.save_freq and test_freq of 0 or more"),
            EXPORTS))
    export_critic: bool = option(True,
        "also write the critic (WORKDIR/critic), for critic.path and as transformers' classifier "
        "of tokens; its adapters in PEFT's format",
        read_by=PPO, rules=(EXPORTS, unread_unless(HAS_CRITIC)))
    export_dtype: str = option("float32",
        "type of the weights in the exported folder; adapters are always float32",
        choices=("bfloat16", "float32"), rules=(EXPORTS,))
    warn_entropy_below: float = option(0.005,
        "warn when the mean entropy falls below this; 0: never",
        unit="nats per token", at_least=0, read_by=PPO)
    warn_kl_above: float = option(1.0,
        "warn when the mean KL to the reference is this much above the first step's; 0: never",
        unit="nats per token", at_least=0, read_by=PPO)
    max_skipped_updates: int = option(10,
        "stop after this many consecutive steps with a non-finite gradient",
        unit="steps", at_least=1)
    log_samples: int = option(2, "responses shown at each evaluation",
        unit="responses", at_least=0, read_by=SAMPLING)
    log_rollouts_freq: int = option(10,
        "steps between those whose responses go to WORKDIR/rollouts and report.html, besides the "
        "first; 0: never",
        unit="steps", at_least=0, read_by=PPO)
    log_rollouts: int = option(32,
        "responses written in such a step, of different prompts where possible",
        unit="responses", at_least=0, read_by=PPO)
    compilation_cache: str = option("",
        "folder of compiled programs for later runs; `off`: none; empty: "
        "JAX_COMPILATION_CACHE_DIR, or jax_ppo/compiled in the user's cache folder",
        read_by=COMMANDS)
    logger: str = option("tensorboard",
        "where curves go besides the CSV: tensorboard, wandb, mlflow (server: "
        "MLFLOW_TRACKING_URI), separated by commas; console is always on",
        is_list=True, parse=parse_loggers, read_by=REPORTS)
    project_name: str = option("jax_ppo", "project in wandb, experiment in mlflow", read_by=REPORTS)


# fmt: on


@dataclasses.dataclass(frozen=True)
class Config:
    """All options of a run."""

    experiment_name: str = option("ppo", "names the work directory output/NAME")
    seed: int = option(
        0, "seed of all randomness", at_least=0, at_most=2**32 - 1, fixed_on_resume=True
    )
    data: Data = section(Data)
    # The shapes in a checkpoint and the weights that training started from depend on these.
    model: Model = section(Model, fixed_on_resume=True)
    actor: Actor = section(Actor, read_by=POLICY)
    critic: Critic = section(Critic, read_by=PPO)
    reference: Reference = section(Reference, read_by=ADVANTAGES)
    teacher: Teacher = section(Teacher, read_by=ADVANTAGES)
    algorithm: Algorithm = section(Algorithm, read_by=ADVANTAGES)
    rollout: RolloutOptions = section(RolloutOptions, read_by=SAMPLING)
    reward: Reward = section(Reward, read_by=MODELS)
    score: Score = section(Score, read_by=("critic", "score"))
    supervised: Supervised = section(Supervised, read_by=SUPERVISED)
    packing: PackingOptions = section(PackingOptions)
    mesh: MeshShape = section(MeshShape)
    distributed: Distributed = section(Distributed)
    trainer: Trainer = section(Trainer, read_by=LEARNING)

    @property
    def has_critic(self) -> bool:
        """Return whether the advantages need a critic; otherwise none is built or stored."""
        return ADVANTAGE_ESTIMATORS.lookup(self.algorithm.adv_estimator).needs_critic

    @property
    def shares_trunk(self) -> bool:
        """Return whether the critic is a head on the actor's trunk."""
        return self.has_critic and self.critic.shared_trunk

    @property
    def has_adapters(self) -> bool:
        """Return whether adapters are trained; their frozen base is kept as the reference."""
        return bool(self.model.lora.rank or self.model.lora.path)

    @property
    def teacher_gives_rewards(self) -> bool:
        """Return whether the tokens' rewards contain the KL to a teacher."""
        return bool(self.teacher.path and self.teacher.reward_coef)

    @property
    def whitens_advantages(self) -> bool:
        """Return algorithm.whiten_advantages or, if unset, the choice of the estimator's paper."""
        if self.algorithm.whiten_advantages is not None:
            return self.algorithm.whiten_advantages
        return ADVANTAGE_ESTIMATORS.lookup(self.algorithm.adv_estimator).whitens

    @property
    def responses_per_prompt(self) -> int:
        """Return the number of responses to each prompt that the update learns from."""
        return self.rollout.keep or self.rollout.n

    @property
    def samples_per_step(self) -> int:
        """Return the number of responses that a step learns from."""
        return self.data.train_batch_size * self.responses_per_prompt

    @property
    def selects_samples(self) -> bool:
        """Return whether rewards decide which of the samples the update learns from."""
        return self.algorithm.filter_groups.enable or self.rollout.keep is not None

    @property
    def has_step_rewards(self) -> bool:
        """Return whether rewards are earned within responses, and not only by whole ones."""
        return self.reward.process_rewards or bool(self.rollout.multi_turn.environment)

    @property
    def learns_from_files(self) -> bool:
        """Return whether a critic is trained alone, on responses from files."""
        return self.trainer.critic_only and bool(self.score.file)

    @property
    def rewards_by_environment_alone(self) -> bool:
        """Return whether an environment's rewards are the only ones."""
        turns = self.rollout.multi_turn
        return bool(turns.environment) and turns.reward == "environment"

    @property
    def updates_once(self) -> bool:
        """Return whether a rollout is used for a single optimizer step.

        If so, the policy that is trained is still the policy that was scored.
        """
        one_epoch = self.actor.ppo_epochs == 1
        return one_epoch and self.actor.ppo_mini_batch_size == self.data.train_batch_size

    @property
    def sequence_length(self) -> int:
        """Return the number of tokens of the longest prompt and response together, S."""
        return self.data.max_prompt_length + self.data.max_response_length


@functools.cache
def options_by_name() -> dict[str, Option]:
    """Return every option by its dotted name, in the schema's order."""
    return {option.name: option for option in iterate_options(Config)}


def all_options() -> tuple[Option, ...]:
    """Return every option, in the schema's order."""
    return tuple(options_by_name().values())


def option_value(config: Config, name: str) -> object:
    """Return the value of the option with this dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def replace_options(section: T, values: Mapping[str, Any]) -> T:
    """Return all options, or a section, with other values by their dotted names, not validated."""
    for name, value in values.items():
        first, _, rest = name.partition(".")
        if rest:
            value = replace_options(getattr(section, first), {rest: value})
        section = dataclasses.replace(section, **{first: value})  # type: ignore[type-var]
    return section


def flatten_options(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections by their dotted names."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            flat |= flatten_options(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
