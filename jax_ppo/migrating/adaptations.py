"""Adapt translated options: to what is counted differently here, and to what a run accepts."""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_ppo.config import loading
from jax_ppo.config.parsing import split_items
from jax_ppo.config.schema import options_by_name
from jax_ppo.config.suggestions import Program
from jax_ppo.errors import UserError, shorten
from jax_ppo.migrating.peer_commands import VARIABLE
from jax_ppo.registries import ADVANTAGE_ESTIMATORS

# The options that determine TRL's sizes of a step and number of steps.
TRL_SIZES = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_mini_batches",
    "total_episodes",
)
_COUNT = re.compile(r"[1-9][0-9]{,11}")  # a number of prompts, samples, processes or steps
# The actor's options that `sft` and `reward_model` have, too.
_ACTORS = re.compile(
    r"actor\.(optim\.\w+|grad_clip|router_aux_loss_coef|ppo_micro_batch_size_per_device)"
)
# TRL's reward functions, and the terms that score the same.
_TRL_REWARDS = {
    "accuracy_reward": "math",
    "reasoning_accuracy_reward": "math",
    "think_format_reward": "format[think]",
}
# What a problem says about a valid value.
_VALID = re.compile(r"(?:nearest divisor is|set it to|expected at (?:least|most)) (-?\d[\d.]*)")
_DEFAULT = re.compile(r"\$\{\w+:-([^${}]*)\}")  # a variable of the shell that has a default
_STEPS, _EPOCHS = "trainer.total_training_steps", "trainer.total_epochs"


def use_supervised_names(options: dict[str, str], program: Program) -> list[str]:
    """Replace the actor's options by the ones of `sft` and `reward_model`; return notes."""
    notes = []
    known = options_by_name()
    for name, value in list(options.items()):
        if program.command in known[name].read_by:
            continue
        del options[name]
        ours = _ACTORS.sub(r"supervised.\1", name).replace(".ppo_", ".")
        # One option for both optimizers stands for the only one.
        is_again = (
            name.startswith("critic.optim.") and name.replace("critic", "supervised") in options
        )
        if program.command in known.get(ours, known[name]).read_by:
            options[ours] = value
        elif not is_again and ours.replace("critic.", "supervised.") not in options:
            notes.append(f"config.{name}={shorten(value)}: {program.command} does not read it")
    return notes


def count_trl_batches(
    flags: Mapping[str, str], options: dict[str, str], program: Program
) -> list[str]:
    """Set the sizes that several options of TRL determine, for one process; return notes."""
    if TRL_SIZES[0] not in flags:
        return []
    sizes = [flags.get(name, "1") for name in (*TRL_SIZES, "num_generations")]
    if not all(_COUNT.fullmatch(size) for size in sizes):
        return [f"{', '.join(TRL_SIZES)}: set config.data.train_batch_size, in prompts"]
    per_device, accumulated, mini_batches, episodes, samples = map(int, sizes)
    batch = max(per_device * accumulated // samples, 1)
    is_set = "data.train_batch_size" in options
    sized = {"data.train_batch_size": batch}
    if program.command == "train":
        sized["actor.ppo_mini_batch_size"] = max(batch // mini_batches, 1)
    if program.command == "train" and "total_episodes" in flags:
        sized[_STEPS] = -(-episodes // batch)
    for name, size in sized.items():
        options.setdefault(name, str(size))
    by_samples = " / num_generations" if samples > 1 else ""
    if is_set:
        return []
    return [
        f"config.data.train_batch_size={batch}: {TRL_SIZES[0]} x {TRL_SIZES[1]}{by_samples} of one "
        "process; multiply sizes of batches by the number of processes, and divide steps by it"
    ]


def adapt_openrlhf(options: dict[str, str]) -> list[str]:
    """Count mini-batches in prompts, and move the KL penalty into the loss; return notes."""
    # OpenRLHF has no reward model unless one is named.
    options.setdefault("reward.model_path", "")
    notes = []
    n = options.get("rollout.n", "1")
    size = options.get("actor.ppo_mini_batch_size", "")
    if n != "1" and _COUNT.fullmatch(n) and _COUNT.fullmatch(size):
        options["actor.ppo_mini_batch_size"] = str(max(int(size) // int(n), 1))
        if int(size) % int(n):
            notes.append(
                f"config.actor.ppo_mini_batch_size={options['actor.ppo_mini_batch_size']}: "
                f"{size} samples are not a whole number of prompts with {n} each"
            )
    if options.get("actor.use_kl_loss") == "true":
        # OpenRLHF has one coefficient and one estimator, for the reward or for the loss.
        options["algorithm.use_kl_in_reward"] = "false"  # the base may have it
        for ours, in_loss in (
            ("algorithm.kl_ctrl.kl_coef", "actor.kl_loss_coef"),
            ("algorithm.kl_penalty", "actor.kl_loss_type"),
        ):
            if ours in options:
                options[in_loss] = options.pop(ours)
    return notes


def adapt_run_length(
    options: dict[str, str], given: Mapping[str, str], base: Mapping[str, Any]
) -> list[str]:
    """Choose between steps and epochs, and count warm-ups that are shares of them; return notes.

    verl's and OpenRLHF's ratios, and TRL's numbers of steps below 1, are such shares.
    """
    notes = []
    total = options.get(_STEPS, loading.UNSET)
    # Either decides how long a run is; the base may set the one that the command does not.
    if total != loading.UNSET:
        if _EPOCHS not in given:
            options.pop(_EPOCHS, None)
    elif _EPOCHS in options and base[_STEPS]:
        options[_STEPS] = loading.UNSET
    for name in [name for name in options if name.endswith("optim.lr_warmup_steps")]:
        if re.fullmatch(r"0?\.\d*[1-9]\d*|[1-9]e-\d", ratio := options[name]):
            is_known = _COUNT.fullmatch(total)
            options[name] = str(round(float(ratio) * int(total))) if is_known else "0"
            if not is_known:
                notes.append(f"config.{name}=0: set it to {ratio} of the steps of the run")
    return notes


def begin_critic(framework: str, options: dict[str, str], base: Mapping[str, Any]) -> list[str]:
    """Set the critic's initial weights, or remove its options if there is none; return notes.

    TRL and OpenRLHF begin with the reward model. Adapters share the actor's frozen weights.
    """
    value = {**{name: str(x or "") for name, x in base.items()}, **options}
    options.pop("critic.keep_head", None)
    without_critic = ADVANTAGE_ESTIMATORS.names(lambda entry: not entry.needs_critic)
    if value["algorithm.adv_estimator"] in without_critic:
        for name in [name for name in options if name.startswith("critic.")]:
            del options[name]
        if base["critic.path"]:
            options["critic.path"] = ""
        return []
    rewards = value["reward.model_path"]
    path = value["critic.path"]
    if framework != "verl" and "reward.model_path" in options:
        path = options.setdefault("critic.path", rewards or value["model.path"])
    has_adapters = value["model.lora.rank"] not in ("", "0") or value["model.lora.path"]
    if has_adapters and path and not (Path(path) / "adapter_config.json").is_file():
        options["critic.path"] = ""
        if path != value["model.path"]:
            return [
                f"config.critic.path='': adapters share config.model.path, and the critic begins "
                f"with a new head, not as {shorten(path)}; config.model.lora.rank=0 trains all "
                "parameters from there"
            ]
    elif framework != "verl" and path and path == rewards:
        options["critic.keep_head"] = "true"  # only a reward model has a head to keep
    return []


def translate_rewards(flags: Mapping[str, str]) -> dict[str, str]:
    """Return our options for TRL's `reward_funcs` and `reward_weights`; none if one is unknown."""
    items = [item for item in split_items(flags.get("reward_funcs", "")) if item]
    weights = split_items(flags["reward_weights"]) if "reward_weights" in flags else []
    terms = []
    options: dict[str, str] = {}
    for item in items:
        module, dot, name = item.rpartition(".")
        if item in _TRL_REWARDS or ":" in item:
            terms.append(_TRL_REWARDS.get(item, item))
        elif "/" in item:
            options["reward.model_path"] = item
            terms.append("model")
        elif dot:
            terms.append(f"{module}:{name}")
    if not items or len(terms) != len(items) or len(weights or items) != len(items):
        return {}
    if "math" in terms and "dataset_name" in flags:
        options["data.ground_truth_key"] = "solution"  # the column that TRL's function reads
    if len(terms) == 1 and ":" in terms[0] and not weights:
        options["reward.function"] = terms[0]
    elif terms != ["model"]:
        pairs = itertools.zip_longest(terms, weights, fillvalue="1")
        options["reward.terms"] = ",".join(f"{term}:{weight}" for term, weight in pairs)
    return options


def make_valid(
    options: dict[str, str],
    program: Program,
    base: Mapping[str, Any],
    defaults: Mapping[str, str],
) -> list[str]:
    """Change what the run refuses to the nearest valid value; return a line for each change."""
    notes: list[str] = []
    changed: set[str] = set()
    while problem := _find_problem(options, program):
        name = problem.removeprefix("config.").partition("=")[0]
        if name not in base or name in changed:
            return [*notes, f"the run refuses this command: {problem}"]
        changed.add(name)
        values = (base[name], options_by_name()[name].default)
        texts = [loading.UNSET if value is None else str(value) for value in values]
        for text in (*_VALID.findall(problem), defaults.get(name, texts[0]), *texts):
            options[name] = text
            if not _find_problem(options, program).startswith(f"config.{name}="):
                break
        notes.append(f"{problem.rstrip('.')}; changed to {options[name]!r}")
        if options[name] == texts[0]:
            del options[name]  # the base has it
    return notes


def _find_problem(options: Mapping[str, str], program: Program) -> str:
    """Return the first reason why the run refuses options on top of the base, or ""."""
    values = {}
    for name, text in options.items():
        if not all(character.isprintable() or character == "\n" for character in text):
            return f"config.{name}={shorten(text)!r}: expected printable characters"
        # A variable of the shell may be part of a text, and has the value of its default, if any.
        text = _DEFAULT.sub(r"\1", text)
        try:
            values[name] = loading.parse_option(name, text)
        except UserError as error:
            if not VARIABLE.search(text):
                return str(error)
    try:
        loading.load_config(program.base, values, command=program.command)
    except UserError as error:
        return str(error)
    return ""
