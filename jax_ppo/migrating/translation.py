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
from jax_ppo.config.schema import flatten_options, options_by_name
from jax_ppo.config.suggestions import DataOptions, Program, find_nearest, read_framework
from jax_ppo.errors import UserError, shorten
from jax_ppo.migrating import adaptations
from jax_ppo.migrating.peer_commands import VARIABLE, answer_of, is_known, read_command
from jax_ppo.registries import ADVANTAGE_ESTIMATORS, AGGREGATIONS, POLICY_LOSSES

# "config.A", "config.A=V", and such parts joined by "and" or "with".
_PART = re.compile(r"config\.([\w.]+)(?:=([\w.]+))?")
_ANSWER = re.compile(rf"{_PART.pattern}(?: (?:and|with) {_PART.pattern})*")
# A remark in an answer for readers; the value does not change.
_REMARK = re.compile(r", (in|of|on) [^:=]*$")
_NO_VALUE = ("null", "none", "")
# Reasons that say which options do the same, and values that switch off.
_IMPLIED = re.compile(r"set config\.|the sum of |config\.[\w.]+ above 0$")
_OFF = re.compile(r"false|0*\.?0*", re.IGNORECASE)
_GREEDY = re.compile(r"config\.([\w.]+)=0 is greedy")
# Variables of the shell that are always set, or have a default.
_IS_SET = re.compile(r"\$HOME\b|\$\{HOME\}|\$\{\w+:-.*\}")
_QUOTED = re.compile(r"""(["'])(.*)\1""", re.DOTALL)
# A name on the Hugging Face hub, and the end of a file's name.
_HUB_NAME = re.compile(r"\w[\w-]*/[\w.-]+")
_DATA_FILE = re.compile(r"\.(jsonl?|csv|tsv|parquet|arrow)(\.gz)?(\[.*\])?$", re.IGNORECASE)
# What a base configuration adds to a command that does not name it.
_NAMED = ("model.path", "reward.model_path", "data.train_files", "trainer.total_training_steps")
# Texts around prompts, which the data of a command do not need.
_AROUND_PROMPTS = ("data.instruction", "data.prompt_template", "data.system_prompt")
# Values that a registry knows by other names; the others are in the frameworks' tables.
_OTHER_NAMES = {
    "algorithm.adv_estimator": ADVANTAGE_ESTIMATORS.other_names(),
    "actor.policy_loss": POLICY_LOSSES.other_names(),
    "actor.loss_agg_mode": AGGREGATIONS.other_names(),
}


@dataclasses.dataclass(frozen=True)
class Translation:
    """A translated command."""

    program: Program  # what the command starts in its framework, and what runs the same here
    options: dict[str, str]  # values by name, without `config.`, that the command gives
    defaults: dict[str, str]  # the framework's, where they differ from the base configuration
    unchanged: frozenset[str]  # those of `options` that the base has, and `command()` leaves out
    notes: list[str]  # one line for each reason why results differ unless the user acts
    remarks: list[str]  # lines about what needs no action

    def command(self) -> str:
        """Return our command on several lines, quoted for a shell; variables stay variables."""
        lines = [f"python -m jax_ppo.{self.program.command} --config={self.program.base}"]
        for name, value in {**self.options, **self.defaults}.items():
            if name not in self.unchanged:
                lines.append(f"    --config.{name}={_quote_for_shell(value)}")
        return " \\\n".join(lines)


def _quote_for_shell(value: str) -> str:
    """Quote a value; variables stay variables, and everything else is text that never runs."""
    # Splitting by a group yields texts and variables in turn.
    parts = enumerate(VARIABLE.split(value))
    quoted = [f'"{part}"' if i % 2 else shlex.quote(part) for i, part in parts if part]
    return "".join(quoted) or "''"


def translate(framework: str, text: str) -> Translation:
    """Translate a command of "verl", "trl" or "openrlhf", continued by backslashes.

    The text may also be the path of a shell script that contains the command, or of a Python script
    with TRL's classes. What the run would refuse is changed, with a note. Raise `UserError` if the
    framework is unknown, or the text is not a command.
    """
    command = read_command(framework, text)
    program = command.program
    base = _load_base(program.base, program.command)
    given = _Translator(framework, program, base, command.flags, {}).options
    by_default = _Translator(framework, program, base, {}, program.defaults).options
    translator = _Translator(framework, program, base, command.flags, program.defaults)
    values, notes, remarks = translator.options, translator.notes, translator.remarks
    if not command.has_program:
        remarks.append(f"no program: read as options of {program.name}")
    if "data.train_files" in values:
        by_default |= dict.fromkeys(_AROUND_PROMPTS, "")
        if "data.val_files" not in values:
            values["data.val_files"] = ""
            if not any("config.data.val_files" in note for note in command.notes):
                remarks.append("config.data.val_files: the command names no held-out data")
    by_default |= {name: x for name, x in program.always.items() if name not in values}
    values = {**by_default, **values}
    if program.command == "train":
        notes += adaptations.begin_critic(framework, values, base)
        unread = [x for x in given if x.startswith("critic.") and x not in values]
        if unread:
            remarks.append(f"{', '.join(unread)}: this estimator has no critic")
    notes += adaptations.adapt_run_length(values, given, base)
    notes += adaptations.make_valid(values, program, base, by_default)
    unchanged = {name for name in values if _is_unchanged(name, values, base)}
    is_default = {x for x in values if by_default.get(x) == values[x] != given.get(x)}
    defaults = {x: values[x] for x in values if x in is_default - unchanged}
    if defaults:
        first = f"config.{next(iter(defaults))}"
        remarks.append(
            f"the last {len(defaults)} options, from {first} on: defaults of {framework}"
        )
    if texts := [f"config.{x}={base[x]}" for x in _NAMED if base[x] and x not in values]:
        notes.append(f"{', '.join(texts)}: set by {program.base}, not by the command")
    return Translation(
        program=program,
        options={name: x for name, x in values.items() if name not in is_default},
        defaults=defaults,
        unchanged=frozenset(unchanged),
        # Each note is one line of printable characters, whatever it quotes.
        notes=[str(UserError(note)) for note in command.notes + notes],
        remarks=[str(UserError(remark)) for remark in remarks],
    )


@functools.cache
def _load_base(name: str, command: str) -> dict[str, Any]:
    return flatten_options(dataclasses.asdict(loading.load_config(name, command=command)))


def _is_unchanged(name: str, values: Mapping[str, str], base: Mapping[str, Any]) -> bool:
    """Return whether the base has the same value, or is unset and means the same."""
    meaning = {"critic.path": "model.path", "rollout.mesh.model": "mesh.model"}.get(name, name)
    if meaning != name and not base[name]:
        return values[name] in ("", values.get(meaning, str(base[meaning])))
    return (
        not VARIABLE.search(values[name]) and loading.parse_option(name, values[name]) == base[name]
    )


class _Translator:
    """Our options for the flags of a command, and notes about others."""

    def __init__(
        self,
        framework: str,
        program: Program,
        base: Mapping[str, Any],
        given: Mapping[str, str],
        defaults: Mapping[str, str],
    ) -> None:
        self.framework, self.program, self.base, self.given = framework, program, base, given
        self.flags = {**defaults, **given}
        self.options: dict[str, str] = {}
        self.notes: list[str] = []  # about what changes results
        self.remarks: list[str] = []  # about what does not
        self._origins: dict[str, str] = {}
        self._untranslated: dict[str, list[str]] = {}  # the flags without our options, by reason
        named = _name_data_sets(read_framework(framework).data, self.flags, self.options)
        if framework == "trl" and (rewards := adaptations.translate_rewards(self.flags)):
            named |= {"reward_funcs", "reward_weights"}
            self.options |= rewards
        # Mini-batches and episodes are PPO's.
        sizes = adaptations.TRL_SIZES[: 4 if program.command == "train" else 2]
        if sizes[0] in self.flags:
            named |= set(sizes)
        for name in self.flags:
            if name not in named:
                self._translate(name, self.flags[name])
        self.notes += [x for name in self._origins for x in _note_shell(name, self.options[name])]
        self._adapt()
        self._tell_untranslated()

    def _translate(self, name: str, value: str) -> None:
        known = options_by_name()
        if not is_known(self.program, self.framework, name):
            names = {**read_framework(self.framework).options, **self.program.options, **known}
            nearest = find_nearest(name, names)
            guess = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
            self.notes.append(f"{name}={shorten(value)}: there is no such option{guess}")
            return
        answer = answer_of(self.program, self.framework, name) or f"config.{name}"
        switch = _find_switch_that_is_off(name, self.flags, known)
        if self.framework == "trl" and name.startswith("lora_"):
            is_off = self.flags.get("use_peft", "False").lower() == "false"
            switch = "use_peft" if is_off else None
        targets = self._find_targets(name, value, answer)
        if switch or isinstance(targets, str):
            reason = f"{switch} is False" if switch else str(targets)
            if name in self.given or not switch:
                self._untranslated.setdefault(reason, []).append(name)
            return
        for target, text in targets.items():
            if target in self._origins and self.options[target] != text:
                lines = self.remarks if "micro_batch" in target else self.notes
                lines.append(
                    f"{self._origins[target]}={shorten(self.options[target])}: "
                    f"{name}={shorten(value)} sets config.{target} as well, and counts"
                )
            if name in self.given:
                self._origins[target] = name
            self.options[target] = text

    def _find_targets(self, name: str, value: str, answer: str) -> dict[str, str] | str:
        """Return our options with their values, or the reason why there are none."""
        known = options_by_name()
        answer = _REMARK.sub("", answer)
        parts = _PART.findall(answer)
        if value.lower() in _NO_VALUE and not any(value in self._names(part) for part, _ in parts):
            return _unset([known[target] for target, _ in parts if target in known], self.base)
        if name.endswith("warmup_steps") and value == "-1":
            return {}  # verl's name for unset
        if (greedy := _GREEDY.fullmatch(answer)) and value.lower() in ("true", "false"):
            return {greedy[1]: "0"} if value.lower() == "false" else {}
        if f".{name}".endswith(".custom_reward_function.path"):
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
            targets[target] = constant or _convert(known[target], value, self._names(target))
            if constant == "True" and _OFF.fullmatch(value):
                # A weight of 0 turns off what it weights.
                targets[target] = "False"
        return targets

    def _names(self, option: str) -> dict[str, str]:
        own = read_framework(self.framework).values.get(option, {})
        return _OTHER_NAMES.get(option, {}) | own

    def _adapt(self) -> None:
        options = self.options
        if options.get("mesh.fsdp") == "-1":
            # All devices split the parameters, and none are left for copies.
            options.setdefault("mesh.data", "1")
        # The file and the name of a reward function are two options of verl.
        function = options.pop("reward.function:name", "")
        if self.framework == "verl" and "reward.function" in options:
            options["reward.function"] += f":{function or 'compute_score'}"
        elif function:
            self.notes.append(f"custom_reward_function.name={shorten(function)}: without its path")
        if self.framework == "trl":
            self.notes += adaptations.count_trl_batches(self.flags, options, self.program)
        if self.program.command != "train":
            self.notes += adaptations.use_supervised_names(options, self.program)
        elif self.framework == "openrlhf":
            self.notes += adaptations.adapt_openrlhf(options)

    def _tell_untranslated(self) -> None:
        """Note the flags without our options: a line for each that changes results."""
        for reason, names in self._untranslated.items():
            wanted = re.findall(r"config\.([\w.]+\w)", reason)
            is_done = _IMPLIED.match(reason) and all(self.options.get(x) for x in wanted)
            harmless = is_done or reason in read_framework(self.framework).no_effect
            words = re.findall(r"\w+", reason.lower())
            quiet = []
            for name in names:
                value = self.flags[name]
                # What a reason names is what happens here: "AdamW with ...", also as adamw_torch.
                is_same = value.lower().partition("_torch")[0] in words
                if harmless or is_same or _OFF.fullmatch(value) or reason.endswith(" is False"):
                    quiet += [name] if name in self.given and not is_done else []
                    continue
                default = "" if name in self.given else f"{self.framework}'s default "
                self.notes.append(f"{default}{name}={shorten(value)}: {reason}")
            if quiet:
                self.remarks.append(f"{', '.join(quiet)}: {reason}")


def _note_shell(name: str, value: str) -> list[str]:
    """Return a note about what the shell, or nobody, puts into an option's value."""
    if not all(map(_IS_SET.fullmatch, VARIABLE.findall(value))):
        return [f"config.{name}: a variable of the shell, to be set where the command runs"]
    if "$" in VARIABLE.sub("", value) or "`" in value:
        return [f"config.{name}: an expression of the shell, which stays text"]
    return []


def _find_switch_that_is_off(
    name: str, flags: Mapping[str, str], known: dict[str, Option]
) -> str | None:
    """Return `enable` of the innermost group that has one, if it is off and no option of ours."""
    groups = itertools.accumulate(name.split(".")[:-1], "{}.{}".format)
    switches = [f"{group}.enable" for group in groups if f"{group}.enable" in flags]
    is_off = bool(switches) and switches[-1] != name and flags[switches[-1]].lower() == "false"
    return switches[-1] if is_off and switches[-1] not in known else None


def _name_data_sets(
    data: tuple[DataOptions, ...], flags: Mapping[str, str], options: dict[str, str]
) -> set[str]:
    """Set our options of data sets, and return the flags that named them."""
    named: set[str] = set()
    used = {name for name, value in flags.items() if value not in ("no", "None")}
    for group in data:
        values = {name: flags[name] for name in group.names if name in flags}
        if not values or (group.only_with and not used.intersection(group.only_with)):
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


def _unset(options: list[Option], base: Mapping[str, Any]) -> dict[str, str] | str:
    """Return empty values for what the base sets, or the reason why it keeps a value."""
    changed = [x for x in options if base[x.name] != x.default]
    empty = {x.name: loading.UNSET if x.default is None else x.default for x in changed}
    if others := [name for name, value in empty.items() if value not in ("", loading.UNSET)]:
        name = others[0]
        origin = base["experiment_name"]
        return f"config.{name}={base[name]} of {origin} cannot be unset; set a value"
    return empty


def _convert(option: Option, value: str, names: Mapping[str, str]) -> str:
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
    text = names.get(text, text)
    if option.value_type is bool:
        return text.lower()
    # At most twelve digits and a small exponent; the option's range refuses other numbers.
    if option.value_type is int and re.fullmatch(r"\d{1,12}(?:\.0*|e\d{1,2})", text):
        return str(int(float(text)))
    return text
