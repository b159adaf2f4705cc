"""Rules of options: conditions on others, with the message or note where one is not met."""

from collections.abc import Callable
from typing import Any

from jax_ppo.config.option import SUPERVISED, OptionRule, option_value
from jax_ppo.registries import (
    ADVANTAGE_ESTIMATORS,
    KL_CONTROLLERS,
    POLICY_LOSSES,
    ROLLOUT_ENGINES,
)


def estimator_reads(name: str) -> OptionRule:
    """Return the rule that the advantage estimator depends on an option in `algorithm`."""
    return OptionRule(
        lambda c: ADVANTAGE_ESTIMATORS.lookup(c.algorithm.adv_estimator).reads(name),
        ADVANTAGE_ESTIMATORS.condition(lambda entry: entry.reads(name)),
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
    """Return the rule that the engine is built-in; `others` completes the error of another one."""
    message = f"config.rollout.engine={{c.rollout.engine!r}} {others}"
    return option_is("rollout.engine", "built-in", message)


def has_server(engine: str) -> OptionRule:
    """Return the rule that a server engine has an address, or an interpreter to start it."""
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
    """Return the rule that at most one axis of the mesh is -1, the devices that others leave."""
    return OptionRule(
        lambda c: (
            getattr(c.mesh, axis) != -1 or [c.mesh.model, c.mesh.fsdp, c.mesh.data].count(-1) == 1
        ),
        "",
        "only one of config.mesh.model={c.mesh.model}, fsdp={c.mesh.fsdp} and "
        "data={c.mesh.data} can be -1; set the others, for example to 1",
    )


def compares_responses(count: Callable[[Any], int]) -> tuple[OptionRule, OptionRule]:
    """Return the rules that estimators and filters by group get several responses per prompt."""
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
# Rules that several options share.
HAS_CRITIC = OptionRule(lambda c: c.has_critic,
    ADVANTAGE_ESTIMATORS.condition(lambda entry: entry.needs_critic),
    "there is no critic with config.algorithm.adv_estimator={c.algorithm.adv_estimator!r}")
VALUES_TOKENS = OptionRule(
    lambda c: not ADVANTAGE_ESTIMATORS.lookup(c.algorithm.adv_estimator).values_turns,
    ADVANTAGE_ESTIMATORS.condition(lambda entry: entry.values_turns, negated=True),
    "config.algorithm.adv_estimator={c.algorithm.adv_estimator!r} has a critic that learns "
    "values only where turns start; leave it unset, or choose bi_level_gae")
CRITIC_HAS_TRUNK = option_is("critic.shared_trunk", False,
    "a critic that shares the actor's trunk has no separate trunk; leave it unset, or set "
    "config.critic.shared_trunk=False")
CRITIC_IS_SEPARATE = OptionRule(lambda c: c.has_critic and not c.shares_trunk,
    f"{HAS_CRITIC.summary} and {CRITIC_HAS_TRUNK.summary}")
LOSS_CLIPS = OptionRule(lambda c: POLICY_LOSSES.lookup(c.actor.policy_loss).clips,
    POLICY_LOSSES.condition(lambda entry: not entry.clips, negated=True))
HAS_KL_LOSS = option_is("actor.use_kl_loss", True)
KL_ADAPTS = OptionRule(lambda c: KL_CONTROLLERS[c.algorithm.kl_ctrl.type].adapts,
    KL_CONTROLLERS.condition(lambda entry: entry.adapts))
DRAWS_HELD_OUT = OptionRule(lambda c: c.rollout.val_kwargs.temperature,
    "`rollout.val_kwargs.temperature` is above 0")
LEARNS_FROM_SCORES = option_is("teacher.use_task_rewards", True)
HAS_SCORES = OptionRule(lambda c: not c.rewards_by_environment_alone,
    "`rollout.multi_turn.reward` is sum")
HAS_IMPORTANCE_WEIGHTS = OptionRule(lambda c: c.algorithm.rollout_is != "none",
    "`algorithm.rollout_is` is set")
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
    "response of one token cannot continue")
USES_REFERENCE = option_is("algorithm.use_reference", True,
    "needs the reference; set config.algorithm.use_reference=True")
HAS_BUILT_IN_ENGINE = engine_is_built_in("stores its weights itself")
ENGINE_IS_SERVER = OptionRule(
    lambda c: ROLLOUT_ENGINES.lookup(c.rollout.engine).is_server,
    ROLLOUT_ENGINES.condition(lambda entry: entry.is_server),
    "config.rollout.engine={c.rollout.engine!r} is not a server; set it to vllm or openai")
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
TRAINS_WEIGHTS = OptionRule(lambda c: not c.has_adapters, "`model.lora` is unset",
    "config.model.lora trains adapters on weights that are all frozen; set it to {default!r}")
HAS_RESPONSES = is_set("score.file")
EXPORTS = option_is("trainer.export", True)
FILTERS_GROUPS = option_is("algorithm.filter_groups.enable", True)
NEWEST_WEIGHTS = option_is("rollout.max_staleness", 0,
    "samples are selected by the newest weights; set config.rollout.max_staleness=0")
HAS_ENVIRONMENT = is_set("rollout.multi_turn.environment")
ENVIRONMENT_IS_SERVER = OptionRule(
    lambda c: c.rollout.multi_turn.environment.startswith(("http://", "https://")),
    "`rollout.multi_turn.environment` is the address of a server",
    "config.rollout.multi_turn.environment={c.rollout.multi_turn.environment!r} is not a server; "
    "set it to http://HOST:PORT")
