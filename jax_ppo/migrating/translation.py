"""Translate commands of other frameworks into ours, using the tables of their options."""

import dataclasses
import functools
import itertools
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_ppo.config import loading
from jax_ppo.config.option import Option
from jax_ppo.config.parsing import is_bracketed, split_items
from jax_ppo.config.schema import Algorithm, flatten_options, options_by_name
from jax_ppo.config.suggestions import DataOptions, Program, find_nearest, read_framework
from jax_ppo.errors import UserError, shorten
from jax_ppo.migrating.peer_commands import VARIABLE, answer_of, is_known, read_command
from jax_ppo.registries import ADVANTAGE_ESTIMATORS, AGGREGATIONS, POLICY_LOSSES

# "config.A", "config.A=V", and such parts joined by "and" or "with".
_PART = re.compile(r"config\.([\w.]+)(?:=([\w.]+))?")
_ANSWER = re.compile(rf"{_PART.pattern}(?: (?:and|with) {_PART.pattern})*")
# Remarks in answers for readers; the value does not change.
_SAME_VALUE = (
    ", in prompts",
    ", in packed rows",
    ", in prompts of all devices",
    ", of each device",
    ", on by default",
    ", in the loss config.actor.kl_loss_type",
)
_NO_VALUE = ("null", "none", "")
# The options that determine TRL's sizes of a step and number of steps.
_TRL_SIZES = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_mini_batches",
    "total_episodes",
)
_QUOTED = re.compile(r"""(["'])(.*)\1""", re.DOTALL)
# A name on the Hugging Face hub, and the end of a file's name.
_HUB_NAME = re.compile(r"\w[\w-]*/[\w.-]+")
_DATA_FILE = re.compile(r"\.(jsonl?|csv|tsv|parquet|arrow)(\.gz)?(\[.*\])?$", re.IGNORECASE)
# The actor's options that `sft` and `reward_model` have, too.
_ACTORS = re.compile(
    r"actor\.(optim\.\w+|grad_clip|router_aux_loss_coef|ppo_micro_batch_size_per_device)"
)
# What a base configuration adds to a command that does not name it.
_NAMED = ("model.path", "reward.model_path", "data.train_files", "trainer.total_training_steps")
_COUNT = re.compile(r"[1-9][0-9]{,11}")  # a number of prompts, samples or processes
# Values that have another name here.
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_SCHEDULES = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}
_VALUES = {
    "algorithm.adv_estimator": ADVANTAGE_ESTIMATORS.other_names()
    | {name: f"examples/estimators/{name}.py:{name}" for name in ("opo", "gdpo")},
    "model.attention": {
        "flash_attention_2": "auto",
        "flash_attention_3": "auto",
        "sdpa": "auto",
        "eager": "xla",
    },
    "actor.policy_loss": POLICY_LOSSES.other_names()
    | {name: f"examples/losses/{name}.py:{name}" for name in ("sapo", "clip_cov", "kl_cov")}
    | {name: f"examples/losses/dppo.py:{name}" for name in ("dppo_tv", "dppo_kl")},
    "trainer.resume": {"auto": "true", "disable": "false"},
    "actor.optim.lr_schedule": _SCHEDULES,
    "critic.optim.lr_schedule": _SCHEDULES,
    "supervised.optim.lr_schedule": _SCHEDULES,
    # TRL's losses, and what it divides advantages by.
    "actor.loss_agg_mode": AGGREGATIONS.other_names(),
    "algorithm.norm_adv_by_std_in_grpo": {"group": "true", "none": "false"},
    "rollout.top_k": {"0": "-1"},
    "model.dtype": _DTYPES,
    "actor.optim.param_dtype": _DTYPES,
    "actor.optim.gradient_dtype": _DTYPES,
}


@dataclasses.dataclass(frozen=True)
class Translation:
    """A translated command."""

    program: Program  # what the command starts in its framework, and what runs the same here
    options: dict[str, str]  # values by name, without `config.`, of the options in the command
    defaults: dict[str, str]  # the framework's, where they differ from the base configuration
    notes: list[str]  # one line for each option without a counterpart or in need of a review
    remarks: list[str]  # lines about what the command does not set

    def command(self) -> str:
        """Return our command on several lines, quoted for a shell; variables stay variables."""
        lines = [f"python -m jax_ppo.{self.program.command} --config={self.program.base}"]
        for name, value in {**self.options, **self.defaults}.items():
            lines.append(f"    --config.{name}={_quote_for_shell(value)}")
        return " \\\n".join(lines)


def _quote_for_shell(value: str) -> str:
    """Quote a value; variables stay variables, and everything else is text that never runs."""
    # Splitting by a group yields texts and variables in turn.
    parts = VARIABLE.split(value)
    texts = [shlex.quote(text) if text else "" for text in parts[::2]]
    variables = [f'"{variable}"' for variable in parts[1::2]]
    pairs = itertools.zip_longest(texts, variables, fillvalue="")
    return "".join(itertools.chain.from_iterable(pairs)) or "''"


def translate(framework: str, text: str) -> Translation:
    """Translate a command of "verl", "trl" or "openrlhf", continued by backslashes.

    The text may also be the path of a shell script that contains the command. Raise `UserError` if
    the framework is unknown, or the text is not a command.
    """
    command = read_command(framework, text)
    program = command.program
    base = _load_base(program.base, program.command)
    given, _, _ = _translate_flags(framework, program, command.flags, {}, base)
    by_default, _, _ = _translate_flags(framework, program, {}, program.defaults, base)
    values, notes, remarks = _translate_flags(
        framework, program, command.flags, program.defaults, base
    )
    if not command.has_program:
        remarks.append(f"no program: read as options of {program.name}")
    by_default |= {name: x for name, x in program.always.items() if name not in values}
    values = {**by_default, **values}
    if "data.train_files" in values and "data.val_files" not in values:
        values["data.val_files"] = ""
        remarks.append("config.data.val_files: the command names no held-out data")
    if framework != "verl" and program.command == "train":
        _begin_critic_as_reward_model(values)
    notes = command.notes + notes + _remove_invalid(values, program)
    # Either decides how long a run is; the base may set the one that the command does not.
    steps, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    if values.get(steps, loading.UNSET) != loading.UNSET:
        if epochs not in given:
            values.pop(epochs, None)
    elif epochs in values and base[steps]:
        values[steps] = loading.UNSET
    options = {}
    defaults = {}
    estimator = "algorithm.adv_estimator"
    has_critic = _needs_critic(values.get(estimator, base[estimator]))
    for name, value in values.items():
        if name in given or by_default.get(name) != value:
            options[name] = value
        elif not has_critic and name.startswith("critic."):
            continue
        elif loading.parse_option(name, value) != base[name]:
            defaults[name] = value
    if defaults:
        first = f"config.{next(iter(defaults))}"
        which = (
            f"the last {len(defaults)} options, from {first} on: defaults"
            if len(defaults) > 1
            else f"the last option, {first}: a default"
        )
        remarks.append(f"{which} of {framework}, unlike {program.base}")
    kept = {name: base[name] for name in _NAMED if name not in values}
    if texts := [f"config.{name}={value}" for name, value in kept.items() if value]:
        remarks.append(f"{', '.join(texts)}: set by {program.base}, not by the command")
    # Each note is one line of printable characters, whatever it quotes.
    return Translation(
        program=program,
        options=options,
        defaults=defaults,
        notes=[str(UserError(note)) for note in notes],
        remarks=[str(UserError(remark)) for remark in remarks],
    )


@functools.cache
def _load_base(name: str, command: str) -> dict[str, Any]:
    """Return the values of all options in a configuration, by their dotted names."""
    return flatten_options(dataclasses.asdict(loading.load_config(name, command=command)))


def _translate_flags(
    framework: str,
    program: Program,
    given: Mapping[str, str],
    defaults: Mapping[str, str],
    base: Mapping[str, Any],
) -> tuple[dict[str, str], list[str], list[str]]:
    """Return our options, notes about flags that have none, and notes about such defaults."""
    flags = {**defaults, **given}
    known = options_by_name()
    options: dict[str, str] = {}
    origins: dict[str, str] = {}
    notes: list[str] = []
    default_notes: list[str] = []
    framework_options = read_framework(framework).options
    named = _name_data_sets(read_framework(framework).data, flags, options)
    # Mini-batches and episodes are PPO's.
    sizes = _TRL_SIZES if program.command == "train" else _TRL_SIZES[:2]
    for name, value in flags.items():
        if name in named or (name in sizes and _TRL_SIZES[0] in flags):
            continue
        if not is_known(program, framework, name):
            nearest = find_nearest(name, {**framework_options, **program.options, **known})
            guess = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
            notes.append(f"{name}={shorten(value)}: there is no such option{guess}")
            continue
        answer = answer_of(program, framework, name) or f"config.{name}"
        targets = _find_targets(name, value, answer, known, base)
        if isinstance(targets, str):
            if name in given:
                notes.append(f"{name}={shorten(value)}: {targets}")
            else:
                default_notes.append(f"{framework}'s default {name}={value}: {targets}")
            continue
        switch = _find_switch_that_is_off(name, flags, known)
        if framework == "trl" and name.startswith("lora_"):
            switch = "use_peft" if flags.get("use_peft", "False").lower() == "false" else None
        if switch:
            if name in given:
                notes.append(f"{name}={shorten(value)}: {switch} is False")
            continue
        for target, target_value in targets.items():
            if target in origins and options[target] != target_value:
                notes.append(
                    f"{origins[target]}={shorten(options[target])}: {name}={shorten(value)} sets "
                    f"config.{target} as well, and counts"
                )
            if name in given:
                origins[target] = name
            options[target] = target_value
            if VARIABLE.search(target_value):
                notes.append(
                    f"config.{target}: a variable of the shell, to be set where the command runs"
                )
            elif "$" in target_value or "`" in target_value:
                notes.append(f"config.{target}: an expression of the shell, which stays text")
    if options.get("mesh.fsdp") == "-1":
        # All devices split the parameters, and none are left for copies.
        options.setdefault("mesh.data", "1")
    notes += _join_reward_function(options)
    if framework == "trl":
        notes += _count_trl_batches(flags, options, program)
    if program.command != "train":
        notes += _use_supervised_names(options, program, known)
    elif framework == "openrlhf":
        notes += _adapt_openrlhf(options)
    return options, notes, default_notes


def _find_switch_that_is_off(
    name: str, flags: Mapping[str, str], known: dict[str, Option]
) -> str | None:
    """Return `enable` of the innermost group that has one, if it is off and no option of ours."""
    groups = itertools.accumulate(name.split(".")[:-1], "{}.{}".format)
    switches = [f"{group}.enable" for group in groups if f"{group}.enable" in flags]
    is_off = bool(switches) and flags[switches[-1]].lower() == "false"
    return switches[-1] if is_off and switches[-1] not in known else None


def _name_data_sets(
    data: tuple[DataOptions, ...], flags: Mapping[str, str], options: dict[str, str]
) -> set[str]:
    """Set our options of data sets, and return the flags that named them."""
    named: set[str] = set()
    for group in data:
        values = {name: flags[name] for name in group.names if name in flags}
        if not values or (group.only_with and not set(group.only_with) & set(flags)):
            continue
        split = next((flags[name] for name in group.splits if name in flags), group.default_split)
        subset = "".join(f"/{flags[name]}" for name in group.subsets if name in flags)
        weights = [flags[name].split(",") for name in group.weights if name in flags]
        sets = [_address(item, subset, split) for item in "".join(values.values()).split(",")]
        if None in sets or (weights and len(weights[0]) != len(sets)):
            continue
        if weights:
            sets = [f"{name}*{weight}" for name, weight in zip(sets, weights[0], strict=True)]
        options[group.target] = ",".join(map(str, sets))
        named |= {*group.names, *group.splits, *group.subsets, *group.weights}
    return named


def _address(name: str, subset: str, split: str) -> str | None:
    """Return a file or an address on the hub as we write it; `None` if it is neither."""
    if _DATA_FILE.search(name) or Path(name).is_file():
        return name
    return f"hf:{name}{subset}:{split}" if _HUB_NAME.fullmatch(name) else None


def _use_supervised_names(
    options: dict[str, str], program: Program, known: dict[str, Option]
) -> list[str]:
    """Replace the actor's options by the ones of `sft` and `reward_model`; return notes."""
    notes = []
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


def _find_targets(
    name: str, value: str, answer: str, known: dict[str, Option], base: Mapping[str, Any]
) -> dict[str, str] | str:
    """Return our options with their values, or the reason why there are none."""
    for suffix in _SAME_VALUE:
        answer = answer.removesuffix(suffix)
    parts = _PART.findall(answer)
    if value.lower() in _NO_VALUE and not any(value in _VALUES.get(part, ()) for part, _ in parts):
        return _unset([known[target] for target, _ in parts if target in known], base)
    if name == "custom_reward_function.path" or name.endswith(".custom_reward_function.path"):
        return {"reward.function": value}
    if name.endswith("custom_reward_function.name"):
        return {"reward.function:name": value}
    if not _ANSWER.fullmatch(answer):
        is_off = value.lower() == "false" and answer.startswith(("set ", "config.reward."))
        return "off here, too" if is_off else answer
    values = split_items(value)
    if len(values) == len(parts) > 1:
        return {target: item for (target, _), item in zip(parts, values, strict=True)}
    targets = {}
    for target, constant in parts:
        if constant and value.lower() == "false":
            return f"off, as without {answer}"
        targets[target] = constant or _convert(known[target], value)
        if constant == "True" and re.fullmatch(r"0*\.?0*", value):
            # A weight of 0 turns off what it weights.
            targets[target] = "False"
    return targets


def _unset(options: list[Option], base: Mapping[str, Any]) -> dict[str, str] | str:
    """Return empty values for what the base sets, or the reason why it keeps a value."""
    changed = [x for x in options if base[x.name] != x.default]
    empty = {x.name: loading.UNSET if x.default is None else x.default for x in changed}
    if others := [name for name, value in empty.items() if value not in ("", loading.UNSET)]:
        name = others[0]
        origin = base["experiment_name"]
        return f"config.{name}={base[name]} of {origin} cannot be unset; set a value"
    return empty


def _convert(option: Option, value: str) -> str:
    """Return a value in our notation."""
    text = value
    is_in_brackets = is_bracketed(value) and not option.facts.is_json
    if option.facts.is_list or is_in_brackets:
        items = split_items(value)
        if option.name == "trainer.logger":
            # Steps are always printed on the console.
            items = [item for item in items if item != "console"]
        text = ",".join(items)
    elif quoted := _QUOTED.fullmatch(value):
        text = quoted[2]
    if option.name == "reward.clip" and (limits := re.fullmatch(r"-([\d.]+),(\1)", text)):
        return limits[1]
    text = _VALUES.get(option.name, {}).get(text, text)
    if option.value_type is bool:
        return text.lower()
    # At most twelve digits and a small exponent; the option's range refuses other numbers.
    if option.value_type is int and re.fullmatch(r"\d{1,12}(?:\.0*|e\d{1,2})", text):
        return str(int(float(text)))
    return text


def _join_reward_function(options: dict[str, str]) -> list[str]:
    """Join the file and the name of a reward function, two options of verl; return notes."""
    name = options.pop("reward.function:name", "")
    if "reward.function" in options:
        options["reward.function"] += f":{name or 'compute_score'}"
        return []
    return [f"custom_reward_function.name={shorten(name)}: without its path"] if name else []


def _count_trl_batches(
    flags: Mapping[str, str], options: dict[str, str], program: Program
) -> list[str]:
    """Set the sizes that several options of TRL determine, for one process; return notes."""
    if _TRL_SIZES[0] not in flags:
        return []
    sizes = [flags.get(name, "1") for name in (*_TRL_SIZES, "num_generations")]
    if not all(_COUNT.fullmatch(size) for size in sizes):
        return [f"{', '.join(_TRL_SIZES)}: set config.data.train_batch_size, in prompts"]
    per_device, accumulated, mini_batches, episodes, samples = map(int, sizes)
    batch = max(per_device * accumulated // samples, 1)
    sized = {"data.train_batch_size": batch}
    if program.command == "train":
        sized["actor.ppo_mini_batch_size"] = max(batch // mini_batches, 1)
    if program.command == "train" and "total_episodes" in flags:
        sized["trainer.total_training_steps"] = -(-episodes // batch)
    for name, size in sized.items():
        options.setdefault(name, str(size))
    by_samples = " / num_generations" if samples > 1 else ""
    return [
        f"config.data.train_batch_size={batch}: {_TRL_SIZES[0]} x {_TRL_SIZES[1]}{by_samples}, of "
        "one process; multiply sizes of batches by the number of processes, and divide steps by it"
    ]


def _adapt_openrlhf(options: dict[str, str]) -> list[str]:
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
        options.pop("algorithm.use_kl_in_reward", None)
        for ours, in_loss in (
            ("algorithm.kl_ctrl.kl_coef", "actor.kl_loss_coef"),
            ("algorithm.kl_penalty", "actor.kl_loss_type"),
        ):
            if ours in options:
                options[in_loss] = options.pop(ours)
    return notes


def _needs_critic(estimator: str) -> bool:
    """Return whether a value of `algorithm.adv_estimator`, valid or not, needs a critic."""
    return estimator in ADVANTAGE_ESTIMATORS.names(lambda entry: entry.needs_critic)


def _begin_critic_as_reward_model(options: dict[str, str]) -> None:
    """Set the critic's initial weights, which TRL and OpenRLHF take from the reward model."""
    initial_path = options.get("reward.model_path") or options.get("model.path")
    if not _needs_critic(options.get("algorithm.adv_estimator", Algorithm().adv_estimator)):
        options["critic.path"] = ""
        options.pop("critic.keep_head", None)
    elif "reward.model_path" in options and initial_path:
        path = options.setdefault("critic.path", initial_path)
        # Only a reward model has a head to keep.
        if path == options["reward.model_path"]:
            options["critic.keep_head"] = "true"
        else:
            options.pop("critic.keep_head", None)


def _remove_invalid(options: dict[str, str], program: Program) -> list[str]:
    """Remove the values that are invalid by themselves, and return a line for each problem."""
    notes = []
    values = {}
    for name, text in list(options.items()):
        if not all(character.isprintable() or character == "\n" for character in text):
            del options[name]
            notes.append(f"config.{name}={shorten(text)!r}: expected printable characters")
            continue
        if VARIABLE.search(text):
            continue
        try:
            values[name] = loading.parse_option(name, text)
        except UserError as error:
            del options[name]
            notes.append(str(error))
    try:
        loading.load_config(program.base, values, command=program.command)
    except UserError as error:
        notes.append(str(error))
    return notes
