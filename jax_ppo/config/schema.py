"""All options, each with its default, unit, range, meaning and the commands that read it.

The sections of models, losses and advantages are in training_options.py, those of sampling in
rollout_options.py. Names are verl's where the concept is the same: batch and mini-batch sizes count
prompts, frequencies count steps. `python -m jax_ppo.config --markdown` generates `docs/options.md`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from jax_ppo.config import option_rules as rule
from jax_ppo.config.option import (
    ADVANTAGES,
    COMMANDS,
    LEARNING,
    MODELS,
    POLICY,
    PPO,
    REPORTS,
    SAMPLING,
    SUPERVISED,
    Option,
    OptionRule,
    iterate_options,
    option,
    redeclare,
    section,
    unread_unless,
)
from jax_ppo.config.parsing import Term, parse_date, parse_loggers, parse_terms, refuse_main
from jax_ppo.config.rollout_options import RolloutOptions
from jax_ppo.config.training_options import (
    Actor,
    Algorithm,
    Critic,
    CriticOptim,
    Model,
    Reference,
    Teacher,
)
from jax_ppo.registries import ADVANTAGE_ESTIMATORS

T = TypeVar("T")  # all options, or a section

# fmt: off
# Without the formatter, which would give each argument a line: an option is read as a paragraph of
# its default, its meaning and its facts.


@dataclasses.dataclass(frozen=True)
class Data:
    """Training and evaluation data."""

    train_files: str = option("",
        "training data: files (.jsonl, .jsonl.gz, .json, .csv, .parquet; `data/*.parquet`), "
        "`hf:OWNER/NAME/FILE`, `tfds:NAME/SPLIT`, or generated: `arithmetic:COUNT`, `sums:COUNT`, "
        "`calculations:COUNT`, `char_count:COUNT`, `stories:COUNT`. Separate several with commas; "
        "`FILE[START:END]` takes some rows; `a.jsonl*0.7,b.csv*0.3` mixes sources in these shares",
        is_list=True, read_by=REPORTS,
        rules=(rule.must_be_set(lambda c: c.data.train_files or c.learns_from_files,
            "train", "critic", *SUPERVISED),))
    val_files: str = option("", "held-out data in the same notation; empty turns evaluation off",
        is_list=True, read_by=REPORTS)
    val_fraction: float = option(0.0,
        "share of the training prompts to hold out in place of val_files: drawn at random, the "
        "same ones with every `seed`, rows of one prompt together",
        at_least=0, below=1, read_by=REPORTS, fixed_on_resume=True,
        rules=(
            rule.is_unset("data.val_files",
                "config.data.val_files={c.data.val_files!r} is held out; set one of them to its "
                "default"),
            rule.is_set("data.train_files", "needs config.data.train_files to take rows from")))
    train_batch_size: int = option(64,
        "prompts per step; what an epoch leaves over, fewer than these, is passed over",
        unit="prompts", at_least=1, read_by=LEARNING)
    val_batch_size: int = option(256, "prompts per batch of an evaluation",
        unit="prompts", at_least=1)
    val_max_samples: int | None = option(None,
        "held-out prompts to use, drawn at random, the same ones with every `seed`; unset: all",
        unit="prompts", at_least=1, read_by=REPORTS)
    train_max_samples: int | None = option(None,
        "training examples to use, drawn at random by `seed`, in the files' order; unset: all",
        unit="examples", at_least=1, read_by=LEARNING,
        rules=(OptionRule(lambda c: c.data.train_max_samples >= c.data.train_batch_size,
            "", "fewer than a step's config.data.train_batch_size={c.data.train_batch_size}"),))
    max_prompt_length: int = option(512,
        "maximum length of a prompt; longer ones are dropped, truncated or refused",
        unit="tokens", at_least=1)
    max_response_length: int = option(512, "maximum length of a response",
        unit="tokens", at_least=1)
    filter_overlong_prompts: bool = option(True,
        "drop prompts longer than max_prompt_length, and report how many")
    truncation: str = option("error",
        "refuse longer prompts or cut them there, if filter_overlong_prompts is off",
        choices=("error", "left", "right", "middle"))
    prompt_key: str = option("",
        "column of the prompt, or its name in extra_info; empty: recognized by name, `prompt` "
        "first")
    ground_truth_key: str = option("",
        "column of the reference answer; empty: recognized by name (ground_truth, "
        "expected_answer, final_answer, answer), or in reward_model")
    system_prompt: str = option("", "system message of every chat; replaces the chat's own",
        fixed_on_resume=True)
    prompt_template: str = option("",
        "text around each prompt or a chat's last message, which {prompt} stands for; @FILE reads "
        "the text from a file",
        fixed_on_resume=True)
    instruction: str = option("", "text appended to a prompt that is only a question or problem",
        fixed_on_resume=True)
    chat_template: bool = option(True, "apply the tokenizer's chat template if it has one")
    chat_template_kwargs: str = option("",
        'variables of the chat template, as a JSON object: {"enable_thinking": false}')
    date: str = option("",
        "date that chat templates write, as YYYY-MM-DD; empty: the day the run first started, "
        "also when its models are evaluated; without a run, today",
        parse=parse_date, fixed_on_resume=True)
    shuffle: bool = option(True, "shuffle the rows anew in each epoch, from `seed`",
        read_by=LEARNING)

    @property
    def held_out_option(self) -> str:
        """Return the option that names the held-out data, for messages."""
        return "config.data.val_fraction" if self.val_fraction else "config.data.val_files"


@dataclasses.dataclass(frozen=True)
class Reward:
    """Reward functions, reward models, and the shaping of scores."""

    function: str = option("",
        "`module:function` or `file.py:function`, called as f(data_source, solution_str, "
        "ground_truth, extra_info), or for a batch as verl's or TRL's; empty: the rule of each "
        "row's data_source", parse=refuse_main)
    terms: str = option("",
        "sum of rewards as NAME:WEIGHT pairs: built-in rules (gsm8k, gsm8k[flexible], math, "
        "math_dapo, boxed, multiple_choice, exact, search_qa, regex, json_schema, arithmetic, "
        "sums, stories, format[think,answer], length[5:200]), `auto` (the rule of each row's "
        "data_source), `model` (the reward model), `judge` (reward.url), or file.py:function",
        parse=parse_terms)
    url: str = option("",
        "address of a server that scores responses: it gets prompt, response, ground_truth and "
        "data_source as JSON, or a chat completion if url_model is set, and JAX_PPO_REWARD_KEY as "
        "a bearer token")
    url_model: str = option("",
        "name of the judging model, whose reply has the score as JSON or as its last number",
        rules=(rule.HAS_REWARD_URL,))
    url_prompt: str = option(
        "Rate the response to the prompt from 0 to 10. End with the number.\n\n"
        "Prompt:\n{prompt}\n\nResponse:\n{response}",
        "prompt for the judging model; may also contain {ground_truth}",
        rules=(rule.HAS_REWARD_URL,))
    url_timeout: float = option(15.0, "longest time for a call",
        unit="seconds", above=0, rules=(rule.HAS_REWARD_URL,))
    url_retries: int = option(3,
        "retries of a call that failed or was refused by the server (429, 5xx)",
        at_least=0, rules=(rule.HAS_REWARD_URL,))
    fallback_score: float = option(0.0,
        "score of a sample whose rule raised an error or ran out of time")
    workers: int | None = option(None,
        "worker processes of the reward function, so that a call that hangs or crashes costs only "
        "its sample; 0: call it in the run's process; unset: 1 for your functions, math, regex "
        "and json_schema, else 0",
        unit="processes", at_least=0)
    timeout: float = option(60.0,
        "longest time for one response in a worker; a function for batches gets up to max_timeouts "
        "times that",
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
        rules=(rule.HAS_REWARD_MODEL,))
    model_input: str = option("auto",
        "input of the reward model: chat (in its chat template), pair (prompt and response), text "
        "(both joined); auto: pair for an encoder, else the sampled tokens if vocabulary and "
        "template are the actor's, else chat or text",
        choices=("auto", "chat", "pair", "text"), fixed_on_resume=True,
        rules=(rule.HAS_REWARD_MODEL,))
    max_length: int | None = option(None,
        "maximum input length of the reward model; longer prompts lose their start; unset: the "
        "one in its config.json",
        unit="tokens", at_least=16, rules=(rule.HAS_REWARD_MODEL,))
    micro_batch_size_per_device: int | None = option(None,
        "packed rows of the reward model that a device processes at once; auto: as for the actor",
        unit="rows", at_least=1, is_automatic=True, rules=(rule.HAS_REWARD_MODEL,))
    score_position: str = option("auto",
        "token at which a decoder's score is read: auto, the last that is not its pad token, as "
        "in transformers; last_token, the last",
        choices=("auto", "last_token"), fixed_on_resume=True, rules=(rule.HAS_REWARD_MODEL,))
    process_rewards: bool = option(False,
        "reward.function may return `step_rewards`, a list of (end of the step in characters, "
        "reward), neither normalized nor clipped",
        rules=(OptionRule(lambda c: c.reward.function or c.reward.terms,
            "`reward.function` or `reward.terms` is set",
            "needs a config.reward.function that returns step_rewards"),))
    normalize: str = option("none",
        "shift and scale scores to mean 0 and variance 1: running, of all so far",
        choices=("none", "running"), fixed_on_resume=True,
        rules=(rule.HAS_SCORES, rule.LEARNS_FROM_SCORES))
    clip: float | None = option(None,
        "clip scores, after normalization, to +- this; unset: no clipping",
        above=0, rules=(rule.HAS_SCORES, rule.LEARNS_FROM_SCORES))
    missing_eos_penalty: float = option(0.0,
        "subtracted from the score of a response that was cut off",
        at_least=0, rules=(rule.LEARNS_FROM_SCORES,))
    overlong_buffer_len: int = option(0,
        "last tokens of max_response_length over which a penalty grows from 0 to "
        "overlong_penalty_factor (DAPO); 0: no penalty",
        unit="tokens", at_least=0,
        rules=(
            # verl#2107
            OptionRule(lambda c: c.reward.overlong_buffer_len <= c.data.max_response_length,
                "it is at most `data.max_response_length`",
                "expected at most config.data.max_response_length={c.data.max_response_length}"),
            rule.LEARNS_FROM_SCORES))
    overlong_penalty_factor: float = option(1.0, "subtracted from the score at max_response_length",
        at_least=0, rules=(rule.is_set("reward.overlong_buffer_len"),))
    length_penalty: float = option(0.0, "subtracted from the score for each token of the response",
        at_least=0, rules=(rule.LEARNS_FROM_SCORES,))


    @functools.cached_property
    def parsed_terms(self) -> tuple[Term, ...]:
        """Return the summands that `terms` names."""
        return parse_terms(self.terms)


@dataclasses.dataclass(frozen=True)
class Score:
    """Given prompts and responses: jax_ppo.score scores them, jax_ppo.critic learns from them."""

    file: str = option("",
        "JSONL, Parquet, JSON or CSV file of prompts and responses, such as those in a run's "
        "rollouts/; a pattern with `*`; or that folder, for its responses of training. Empty: "
        "jax_ppo.critic samples",
        rules=(rule.must_be_set(lambda c: c.score.file, "score"),))
    response_key: str = option("",
        "column of the response, or its name in extra_info; empty: recognized by name (chosen, a "
        "chat's last message, completion, response, output, solution, answer)",
        rules=(rule.HAS_RESPONSES,))
    reward_key: str = option("",
        "column of the rewards, such as score in rollouts/; empty: the rules and the reward model "
        "of config.reward",
        rules=(
            rule.HAS_RESPONSES,
            OptionRule(lambda c: not (c.learns_from_files and c.reward.model_path), "",
                "the rows contain rewards; unset config.reward.model_path, or unset this to use "
                "the reward model")))


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
        unit="devices", at_least=-1, not_zero=True, rules=(rule.fills_alone("fsdp"),))
    model: int = option(1, "devices that split each matrix (tensor parallelism); -1 as for data",
        unit="devices", at_least=-1, not_zero=True, rules=(rule.fills_alone("model"),))
    stage: int = option(1,
        "stages of the layers (pipeline parallelism); in decoding they act like data",
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
    heartbeat_seconds: int = option(30, "time after which a silent process is considered dead",
        unit="seconds", at_least=10)
    stall_seconds: int = option(1800,
        "time without progress, pauses (Ctrl-Z) included, after which a run prints its threads' "
        "stacks and ends; 0: no limit",
        unit="seconds", at_least=0)


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Duration, evaluation, checkpoints and logs of a run."""

    total_epochs: int = option(1, "passes over the training data",
        unit="epochs", at_least=1, rules=(rule.is_unset("trainer.total_training_steps"),))
    total_training_steps: int | None = option(None,
        "number of steps; unset: determined by total_epochs",
        unit="steps", at_least=1)
    critic_warmup: int = option(0, "number of first steps that train only the critic",
        unit="steps", at_least=0, read_by=POLICY, rules=(rule.HAS_CRITIC, rule.CRITIC_HAS_TRUNK))
    critic_only: bool = option(False,
        "train the critic alone, on the responses of an unchanged actor; jax_ppo.critic turns it "
        "on",
        read_by=PPO, fixed_on_resume=True, rules=(rule.HAS_CRITIC, rule.CRITIC_HAS_TRUNK))
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
    export: bool = option(True,
        "write the trained model as a Hugging Face folder at the end (WORKDIR/actor, adapter or "
        "reward_model)")
    export_best: bool = option(False,
        "also write the models of the best checkpoint, to WORKDIR/best, which model.path can name",
        rules=(
            OptionRule(
                lambda c: (c.data.val_files or c.data.val_fraction)
                and min(c.trainer.save_freq, c.trainer.test_freq) >= 0,
                "`data.val_files` or `data.val_fraction` is set, and `trainer.save_freq` and "
                "`trainer.test_freq` are not -1",
                "the best of the steps that are evaluated and saved needs config.data.val_files "
                "or val_fraction, and config.trainer.save_freq and test_freq of 0 or more"),
            rule.EXPORTS))
    export_critic: bool = option(True,
        "also write the critic to WORKDIR/critic, for critic.path and as a token classifier of "
        "transformers; adapters in PEFT's format",
        read_by=PPO, rules=(rule.EXPORTS, unread_unless(rule.HAS_CRITIC)))
    export_dtype: str = option("float32",
        "type of the weights in the exported folder; adapters are always float32",
        choices=("bfloat16", "float32"), rules=(rule.EXPORTS,))
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
        "write responses to WORKDIR/rollouts and report.html at the first step and then every so "
        "many steps; 0: never",
        unit="steps", at_least=0, read_by=PPO)
    log_rollouts: int = option(32,
        "responses written at such a step, of different prompts where possible",
        unit="responses", at_least=0, read_by=PPO)
    compilation_cache: str = option("",
        "folder of compiled programs for later runs; `off`: none; empty: "
        "JAX_COMPILATION_CACHE_DIR, or jax_ppo/compiled in the user's cache folder",
        read_by=COMMANDS)
    logger: str = option("tensorboard",
        "destinations of metrics besides the CSV: tensorboard, wandb, mlflow (server: "
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
        """Return whether a rollout has one optimizer step, of the forward passes' policy."""
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


def replace_options(section: T, values: Mapping[str, Any]) -> T:
    """Return a copy of all options or a section with new values by dotted names; not validated."""
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
