"""Validate options against each other: incompatible sizes, and options that require others.

Names, types and ranges of single options are validated in loading.py. What is simple to say stands
in tables of rules, in the order in which they are applied; the functions raise `UserError` at the
first problem, too.
"""

import dataclasses
import datetime
import functools
import shlex
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from jax_ppo.config import parsing
from jax_ppo.config.schema import (
    ENVIRONMENT_IS_SERVER,
    HAS_PYTHON_TOOL,
    LOGGERS,
    Actor,
    Algorithm,
    Config,
    Critic,
    Data,
    LoraOptions,
    RolloutOptions,
    all_options,
    option_value,
    options_by_name,
)
from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.registries import ADVANTAGE_ESTIMATORS, ROLLOUT_ENGINES, AdvantageEstimator

# Responses of an example, each with a copy of the prompt.
RESPONSES_PER_EXAMPLE = {"sft": 1, "reward_model": 2}


class _Rule(NamedTuple):
    """A combination of options that is refused."""

    # The dotted names of the options that it is about; the message begins with the first that
    # breaks it.
    options: str | tuple[str, ...]
    is_broken: Callable[[Config, Any], object]  # whether a `Config` breaks it with the value of one
    message: str  # the text after `config.OPTION=VALUE: `, with fields of the config `c`


def _estimator(algorithm: Algorithm) -> AdvantageEstimator:
    return ADVANTAGE_ESTIMATORS.lookup(algorithm.adv_estimator)


# fmt: off
# Without the formatter, as in schema.py.
RANKING_RULES = (
    _Rule("evaluate.rank_by", lambda c, value: c.rollout.val_kwargs.n < 2,
        "ranks the responses to a prompt, and config.rollout.val_kwargs.n="
        "{c.rollout.val_kwargs.n}; set it to 2 or more"),
    _Rule("evaluate.rank_by", lambda c, value: c.rollout.val_kwargs.temperature == 0,
        "config.rollout.val_kwargs.temperature=0 gives equal responses; set it above 0"),
    _Rule("evaluate.rank_by", lambda c, value: value == "critic" and not c.has_critic,
        "there is no critic with config.algorithm.adv_estimator={c.algorithm.adv_estimator!r}; "
        "expected 'gae'"),
    # The value of a whole response is that of its last token.
    _Rule("evaluate.rank_by",
        lambda c, value: value == "critic" and _estimator(c.algorithm).values_turns,
        "with config.algorithm.adv_estimator={c.algorithm.adv_estimator!r} the critic learns "
        "values only where turns start; expected 'gae' or 'bi_level_gae'"),
    _Rule("evaluate.rank_by",
        lambda c, value: value == "reward_model" and not c.reward.model_path,
        "there is no reward model; set config.reward.model_path"),
)
# Of responses that files give.
FILE_RULES = (
    _Rule("reward.normalize", lambda c, value: value == "reference",
        "samples responses, and config.score.file gives them; expected 'none' or 'running'"),
    _Rule("score.reward_key", lambda c, value: value and c.reward.model_path,
        "the rewards are in the rows; unset config.reward.model_path, or this for the reward "
        "model's"),
)
ROW_RULES = (
    _Rule("packing.row_length",
        lambda c, value: (value or c.sequence_length) < c.sequence_length,
        "a row must hold config.data.max_prompt_length + config.data.max_response_length = "
        "{c.sequence_length} tokens; set it to that or more"),
)
SAMPLING_RULES = (
    _Rule(("rollout.top_k", "rollout.val_kwargs.top_k"), lambda c, value: value == 0,
        "expected -1 (all tokens) or at least 1"),
    _Rule("rollout.min_new_tokens", lambda c, value: value > c.data.max_response_length,
        "must be at most config.data.max_response_length={c.data.max_response_length}"),
    _Rule("rollout.keep", lambda c, value: value is not None and value > c.rollout.n,
        "expected at most config.rollout.n={c.rollout.n}"),
)
ENGINE_RULES = (  # of external ones
    _Rule("rollout.mesh.model", lambda c, value: value is not None,
        "config.rollout.engine={c.rollout.engine!r} does not decode on the mesh; unset it"),
    _Rule("rollout.reuse_logprobs", lambda c, value: value == "always",
        "config.rollout.engine={c.rollout.engine!r} rounds differently, so its log-probs are "
        "compared with the trainer's; set it to 'auto'"),
)
SERVER_RULES = (  # of external engines that are servers
    _Rule("rollout.temperature",
        lambda c, value: value != 1 and c.rollout.filters_tokens,
        "servers report log-probs before temperature and filters or after both; set it to 1, unset "
        "top_k, top_p, min_p and min_new_tokens, or use the built-in engine"),
)
_WITHIN_TURN = (
    "expected less than config.rollout.multi_turn.timeout={c.rollout.multi_turn.timeout}, which "
    "bounds all calls of a turn together")
ENVIRONMENT_RULES = (
    _Rule("rollout.multi_turn.environment", lambda c, value: value and ":" not in value,
        "expected module:Class, path/to/file.py:Class or http://HOST:PORT"),
    _Rule("rollout.multi_turn.python_timeout",
        lambda c, value: HAS_PYTHON_TOOL.is_met(c) and value >= c.rollout.multi_turn.timeout,
        _WITHIN_TURN),
    _Rule("rollout.multi_turn.url_timeout",
        lambda c, value: ENVIRONMENT_IS_SERVER.is_met(c) and value >= c.rollout.multi_turn.timeout,
        _WITHIN_TURN),
)
# What an estimator, or the selection of prompts, compares.
COMPARISON_RULES = (
    # The advantage of a single response within its group is always 0.
    _Rule(("rollout.keep", "rollout.n"),
        lambda c, value: value == c.responses_per_prompt == 1 and (
            _estimator(c.algorithm).needs_groups),
        "config.algorithm.adv_estimator={c.algorithm.adv_estimator!r} compares responses to one "
        "prompt; set it to 2 or more"),
    _Rule(("rollout.keep", "rollout.n"),
        lambda c, value: value == c.responses_per_prompt == 1 and c.algorithm.filter_groups.enable,
        "config.algorithm.filter_groups.enable=True compares the rewards of a prompt's responses; "
        "set it to 2 or more"),
)
LOSS_RULES = (
    _Rule("reward.overlong_buffer_len",  # verl#2107
        lambda c, value: value > c.data.max_response_length,
        "expected at most config.data.max_response_length={c.data.max_response_length}"),
    _Rule("teacher.reward_coef",
        lambda c, value: c.teacher.path and not (c.teacher.reward_coef or c.teacher.loss_coef),
        "expected more than 0, or a config.teacher.loss_coef above 0; otherwise nothing reads "
        "config.teacher.path"),
    # The coefficient stays positive while 0.2 x samples < horizon (kernels/kl.py).
    _Rule("algorithm.kl_ctrl.horizon",
        lambda c, value: c.algorithm.kl_ctrl.type == "adaptive" and value < c.samples_per_step,
        "must be at least the {c.samples_per_step} samples of a step, or one step could take the "
        "coefficient far past its target"),
    _Rule("actor.clip_ratio_c", lambda c, value: value and value <= 1,
        "the dual clip's constant must be above 1; 0 turns it off"),
    _Rule("rollout.reuse_logprobs",
        lambda c, value: value == "always" and c.algorithm.rollout_is != "none",
        "leaves config.algorithm.rollout_is={c.algorithm.rollout_is!r} no other log-probs to "
        "compare the sampler's with; set it to 'auto'"),
)
MODEL_RULES = (
    _Rule("model.lora.path",
        lambda c, value: value and c.model.lora != dataclasses.replace(LoraOptions(), path=value),
        "determines rank, alpha and targets; leave config.model.lora.rank, alpha and targets at "
        "their defaults"),
    # The created model is taught only arithmetic.
    _Rule("model.path",
        lambda c, value: not value and not c.data.train_files.startswith("arithmetic:"),
        "must be set to a Hugging Face folder or hub name; a model is created only for the "
        "`arithmetic` data"),
    _Rule("model.create.num_heads", lambda c, value: c.model.create.hidden_size % value,
        "must divide config.model.create.hidden_size={c.model.create.hidden_size}"),
    _Rule("model.create.num_kv_heads", lambda c, value: c.model.create.num_heads % value,
        "must divide config.model.create.num_heads={c.model.create.num_heads}"),
)
# Of `sft` and `reward_model`.
SUPERVISED_RULES = (
    _Rule(("model.lora.rank", "model.lora.path"), lambda c, value: value,
        "jax_ppo.{command} trains all parameters, only jax_ppo.train trains adapters; leave it "
        "unset"),
)
SFT_RULES = (
    _Rule("supervised.center_coef", lambda c, value: value,
        "only jax_ppo.reward_model reads it"),
    *SUPERVISED_RULES,
)
MESH_RULES = (
    _Rule(("mesh.data", "mesh.fsdp", "mesh.model", "rollout.mesh.data"),
        lambda c, value: value == 0,
        "expected -1 or at least 1"),
    _Rule(("mesh.model", "mesh.fsdp"),
        lambda c, value: value == -1 and [c.mesh.model, c.mesh.fsdp, c.mesh.data].count(-1) > 1,
        "only one axis can be -1, of config.mesh.model={c.mesh.model}, fsdp={c.mesh.fsdp} and "
        "data={c.mesh.data}; set another, for example to 1"),
    # Each part of a row has two blocks of columns.
    _Rule("packing.row_length",
        lambda c, value: value and c.mesh.context > 1 and value % (2 * c.mesh.context),
        "expected a multiple of twice config.mesh.context={c.mesh.context}, or leave it unset"),
    # A mean over sequences.
    _Rule(tuple(f"{name}.router_aux_loss_coef" for name in ("actor", "critic", "supervised")),
        lambda c, value: value and c.mesh.context > 1,
        "is computed from whole sequences, which config.mesh.context={c.mesh.context} splits; set "
        "one of them to its default"),
    _Rule("distributed.process_id",
        lambda c, value: c.distributed.coordinator_address and not (
            0 <= value < c.distributed.num_processes),
        "expected at least 0, and less than config.distributed.num_processes="
        "{c.distributed.num_processes}, with config.distributed.coordinator_address set"),
)
# Options that must keep their defaults where responses continue from step to step, and what more
# there is with rollout.exact.
CONTINUED_RESPONSES = (
    "rollout.engine", "actor.router_replay.mode", "rollout.multi_turn.environment")
EXACT_RESPONSES = (
    "rollout.max_staleness", "rollout.keep", "rollout.reuse_logprobs",
    "rollout.logprob_micro_batch_size_per_device", "algorithm.rollout_is",
    "algorithm.filter_groups.enable")
# fmt: on


def _apply(rules: Iterable[_Rule], config: Config, command: str = "train") -> None:
    """Raise `UserError` for the first of the rules that the options break."""
    for options, is_broken, message in rules:
        for name in (options,) if isinstance(options, str) else options:
            value: Any = option_value(config, name)
            if is_broken(config, value):
                problem = message.format(c=config, command=command)
                raise UserError(f"config.{name}={value!r}: {problem}")


def validate_config(config: Config, command: str) -> None:
    """Validate the options of a command; raise `UserError` on the first problem."""
    if command in RESPONSES_PER_EXAMPLE:
        _require_set("data.train_files", config.data.train_files)
        # Only PPO creates a small model to start from, for its arithmetic data.
        _require_set("model.path", config.model.path)
        responses = RESPONSES_PER_EXAMPLE[command]
        _validate_longest_example(config.packing.row_length, config.sequence_length, responses)
        _apply(SFT_RULES if command == "sft" else SUPERVISED_RULES, config, command)
    else:
        _validate_ppo_config(config, command)
        command = "train"
    if date := config.data.date:
        _parse(f"config.data.date={date!r}", date, datetime.date.fromisoformat)
    _apply(MESH_RULES, config)
    _validate_loggers(config.trainer.logger)
    # Requirements come after the rules, whose messages are more specific.
    validate_requirements(config, command)


def _validate_ppo_config(config: Config, command: str) -> None:
    data, rollout = config.data, config.rollout
    if command == "evaluate" and config.evaluate.rank_by != "none":
        _apply(RANKING_RULES, config)
    elif command == "score":
        _require_set("score.file", config.score.file)
        _require_set("model.path", config.model.path)
    elif command in ("train", "critic") and not config.learns_from_files:
        _require_set("data.train_files", data.train_files)
    value_of = functools.partial(option_value, config)
    if config.learns_from_files:
        _require_set("model.path", config.model.path)
        _apply(FILE_RULES, config)
    _validate_batches(data, config.actor, config.critic)
    _apply(ROW_RULES, config)
    _parse("config.rollout.stop", rollout.stop, parsing.parse_strings)
    _apply(SAMPLING_RULES, config)
    if ROLLOUT_ENGINES.lookup(rollout.engine).is_external:
        _apply(ENGINE_RULES, config)
        _validate_external_engine(rollout)
        if ROLLOUT_ENGINES.lookup(rollout.engine).is_server:
            _apply(SERVER_RULES, config)
    _apply(ENVIRONMENT_RULES, config)
    if ENVIRONMENT_IS_SERVER.is_met(config):
        option, url = "config.rollout.multi_turn.environment", rollout.multi_turn.environment
        _require_address(option, url, "JAX_PPO_ENVIRONMENT_KEY")
    _apply(COMPARISON_RULES, config)
    if rollout.max_staleness > 1 or rollout.exact:
        _require_responses_that_continue(value_of)
    if config.reward.url:
        _require_address("config.reward.url", config.reward.url, "JAX_PPO_REWARD_KEY", True)
    _apply(LOSS_RULES, config)
    targets = config.model.lora.targets
    _parse(f"config.model.lora.targets={targets!r}", targets, parsing.parse_lora_targets)
    _apply(MODEL_RULES, config)


def _validate_longest_example(row_length: int | None, sample: int, responses: int) -> None:
    """Validate that a row holds the prompt and the response of an example, or two such pairs."""
    longest = sample * responses
    if row_length and row_length < longest:
        raise UserError(
            f"config.packing.row_length={row_length}: a row must hold the {longest} tokens of the "
            f"longest example, {responses} x (config.data.max_prompt_length + "
            "config.data.max_response_length); set it to that or more"
        )


def _parse(setting: str, text: str, parse: Callable[[str], object]) -> None:
    """Raise `UserError` for a text that cannot be parsed, which begins with the setting."""
    try:
        parse(text)
    except ValueError as error:
        raise UserError(f"{setting}: {error}") from None


def validate_requirements(config: Config, command: str) -> None:
    """Raise `UserError` for a changed option whose requirements are not met."""
    for option in all_options():
        value = option_value(config, option.name)
        # Options at their defaults, or not read by this command, require nothing.
        if value == option.default or command not in option.read_by:
            continue
        for requirement in option.facts.requires:
            if not requirement.is_met(config):
                reason = requirement.message.format(config=config)
                raise UserError(f"config.{option.name}={value!r}: {reason}")


def _require_set(name: str, value: str) -> None:
    """Raise `UserError` if a text option is empty."""
    if not value:
        # The meaning of an empty value to other commands does not help here.
        meaning = options_by_name()[name].facts.doc.partition("; empty")[0]
        raise UserError(f"config.{name}='': must be set ({meaning})")


def _require_values(
    value_of: Callable[[str], object], expected: Mapping[str, object], reason: str
) -> None:
    """Raise `UserError` for the first option, by name, that has another value than expected."""
    for name, value in expected.items():
        if (given := value_of(name)) != value:
            raise UserError(f"config.{name}={given!r}: expected {value!r} with {reason}")


def default_values(names: Iterable[str]) -> dict[str, Any]:
    """Return the defaults of options by their dotted names."""
    return {name: options_by_name()[name].default for name in names}


def _require_address(option: str, url: str, key_variable: str, has_path: bool = False) -> None:
    """Raise `UserError` for what is no address of a server, or one with a secret in it.

    An address with a path may have a query, which no message repeats.
    """
    form = "HOST/PATH" if has_path else "HOST:PORT"
    secrets = "a user name or a password" if has_path else "a user name, a password or a query"
    problem = f"expected http://{form} or https://{form}"
    try:
        parts = urllib.parse.urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_address &= parts.port is None or parts.port > 0
    except ValueError:
        raise UserError(f"{option}: {problem}") from None
    if parts.username or parts.password or (parts.query and not has_path):
        raise UserError(
            f"{option}: the address contains {secrets}; set the environment variable "
            f"{key_variable} instead"
        )
    if not is_address:
        shown = "" if "@" in url else f"={url!r}"
        raise UserError(f"{option}{shown}: {problem}")


def _require_responses_that_continue(value_of: Callable[[str], object]) -> None:
    """Validate the options, by name, of responses that continue from step to step."""
    setting = f"config.rollout.max_staleness={value_of('rollout.max_staleness')}"
    remedy = "config.rollout.max_staleness to 0 or 1"
    does = "whose responses continue from step to step"
    longest, length = value_of("data.max_response_length"), value_of("rollout.partial_length")
    assert isinstance(longest, int)
    names: tuple[str, ...] = CONTINUED_RESPONSES
    if value_of("rollout.exact"):
        setting, remedy = "config.rollout.exact=True", "config.rollout.exact=False"
        does = "which draws each token again"
        names = (*names, *EXACT_RESPONSES)
    elif isinstance(length, int) and length >= longest:
        raise UserError(
            f"config.rollout.partial_length={length}: expected fewer tokens than "
            f"config.data.max_response_length={longest}"
        )
    if longest == 1:
        raise UserError(
            f"{setting}: expected config.data.max_response_length of at least 2, got 1: a response "
            "of one token does not continue"
        )
    _require_values(value_of, default_values(names), f"{setting}, {does}; or set {remedy}")


def _validate_batches(data: Data, actor: Actor, critic: Critic) -> None:
    """Validate that mini-batches divide the batch."""
    batch = data.train_batch_size
    sizes = {"actor": actor.ppo_mini_batch_size, "critic": critic.ppo_mini_batch_size}
    for name, mini_batch in sizes.items():
        if mini_batch and batch % mini_batch:
            divisors = (d for d in range(1, batch + 1) if batch % d == 0)
            nearest = min(divisors, key=lambda divisor: abs(divisor - mini_batch))
            raise UserError(
                f"config.{name}.ppo_mini_batch_size={mini_batch}: must divide "
                f"config.data.train_batch_size={batch}; the nearest divisor is {nearest}"
            )


def _validate_external_engine(rollout: RolloutOptions) -> None:
    """Validate the options that an external engine needs."""
    entry = ROLLOUT_ENGINES.lookup(rollout.engine)
    engine = f"config.rollout.engine={rollout.engine!r}"
    if not entry.is_server:
        return
    if not rollout.url and not (rollout.engine == "vllm" and rollout.vllm.python):
        raise UserError(f"{engine}: needs {entry.requirement.replace('`', '')}")
    if rollout.url:
        _require_address("config.rollout.url", rollout.url, "JAX_PPO_ROLLOUT_KEY")
    arguments = rollout.vllm.arguments
    _parse(f"config.rollout.vllm.arguments={arguments!r}", arguments, shlex.split)


def _validate_loggers(names: str) -> None:
    for name in parsing.parse_names(names):
        if name not in LOGGERS:
            raise UserError(
                f"config.trainer.logger={names!r}: expected some of {', '.join(LOGGERS)}, "
                f"separated by commas.{did_you_mean(name, LOGGERS)}"
            )
