"""Translate a command of another framework into one of ours, by the table of peers' options."""

import dataclasses
import itertools
import re
import shlex
from collections.abc import Iterator

from jax_ppo.config import loading, peer_options
from jax_ppo.config.option import Option
from jax_ppo.config.schema import all_options
from jax_ppo.errors import UserError

# The configuration that a translated command starts from: the sizes of the framework's example.
BASE_CONFIGS = {"verl": "gsm8k", "trl": "hh_rlhf", "openrlhf": "hh_rlhf"}
_TABLES = {
    "verl": peer_options.VERL,
    "trl": peer_options.TRL,
    "openrlhf": peer_options.OPENRLHF,
}
# "config.A", "config.A=V", and such parts joined by "and" or "with".
_PART = re.compile(r"config\.([\w.]+)(?:=([\w.]+))?")
_ANSWER = re.compile(rf"{_PART.pattern}(?: (?:and|with) {_PART.pattern})*")
# Units that the value keeps: the answer mentions them for people.
_SAME_VALUE = (", in prompts", ", in packed rows", ", in prompts of all devices", ", on by default")
_NO_VALUE = ("null", "none", "")


@dataclasses.dataclass(frozen=True)
class Translation:
    """A translated command.

    Attributes:
      options: values by name, without `config.`.
      notes: what has no counterpart, or needs a look: a line each.
    """

    options: dict[str, str]
    notes: list[str]

    def command(self, base: str) -> str:
        """Return our command on several lines, quoted for a shell; variables stay variables."""
        lines = [f"python -m jax_ppo.train --config={base}"]
        for name, value in self.options.items():
            quoted = f'"{value}"' if "$" in value else shlex.quote(value)
            lines.append(f"    --config.{name}={quoted}")
        return " \\\n".join(lines)


def translate(framework: str, text: str) -> Translation:
    """Translate a command.

    Args:
      framework: "verl", "trl" or "openrlhf".
      text: the command, also of several lines that end in a backslash.

    Raises:
      UserError: the framework is unknown, or the text is not a command.
    """
    if framework not in _TABLES:
        raise UserError(f"{framework}: expected one of {', '.join(_TABLES)}")
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UserError(f"the command cannot be read: {error}") from error
    read = _read_hydra if framework == "verl" else _read_flags
    known = {option.name: option for option in all_options()}
    options: dict[str, str] = {}
    notes: list[str] = []
    for name, value in read(words):
        targets = _find_targets(name, value, _TABLES[framework], known)
        if isinstance(targets, str):
            notes.append(f"{name}={value}: {targets}")
            continue
        for target, target_value in targets.items():
            options[target] = target_value
            if target_value.startswith("$"):
                notes.append(f"config.{target}: a variable of the shell")
    _join_reward_function(options)
    notes += _remove_refused(options, BASE_CONFIGS[framework])
    return Translation(options=options, notes=notes)


def _read_hydra(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the overrides of a command of verl, without `actor_rollout_ref.`."""
    for word in words:
        match = re.fullmatch(r"\+{0,2}([\w.]+)=(.*)", word, re.DOTALL)
        if match and ("." in match[1] or match[1] in peer_options.VERL):
            yield match[1].removeprefix("actor_rollout_ref."), match[2]


def _read_flags(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags of a command, `--name value`, `--name=value` or `--name`."""
    for place, word in enumerate(words):
        if not word.startswith("--") or word == "--":
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            # A flag takes the words up to the next flag; one without any is a switch.
            values = itertools.takewhile(lambda word: not word.startswith("--"), words[place + 1 :])
            value = ",".join(values) or "True"
        yield name.replace("-", "_"), value


def _find_targets(
    name: str, value: str, table: dict[str, str], known: dict[str, Option]
) -> dict[str, str] | str:
    """Return our options with their values, or why there is none."""
    if value.lower() in _NO_VALUE:
        return {}
    answer = table.get(name)
    if answer is None:
        if name in known:
            return {name: _convert(known[name], value)}
        return "there is no such option"
    for suffix in _SAME_VALUE:
        answer = answer.removesuffix(suffix)
    if name == "custom_reward_function.path" or name.endswith(".custom_reward_function.path"):
        return {"reward.function": value}
    if name.endswith("custom_reward_function.name"):
        return {"reward.function:name": value}
    if not _ANSWER.fullmatch(answer):
        return answer
    parts = _PART.findall(answer)
    values = _as_list(value)
    if len(values) == len(parts) > 1:
        return {target: item for (target, _), item in zip(parts, values, strict=True)}
    targets = {}
    for target, constant in parts:
        if constant and value.lower() == "false":
            return f"off, as without {answer}"
        targets[target] = constant or _convert(known[target], value)
    return targets


def _convert(option: Option, value: str) -> str:
    """Return a value in our notation."""
    items = _as_list(value)
    if option.name == "trainer.logger":
        # The console is always written to.
        items = [item for item in items if item != "console"]
    text = ",".join(items)
    if option.name in ("trainer.test_freq", "trainer.save_freq") and text == "-1":
        return "0"
    if option.value_type is bool:
        return text.lower()
    if option.value_type is int and re.fullmatch(r"\d+\.0*|\d+e\d+", text):
        return str(int(float(text)))
    return text


def _as_list(value: str) -> list[str]:
    """Return the items of a list such as "['a','b']" or "a,b"; of a single value, itself."""
    is_bracketed = value[:1] + value[-1:] in ("[]", "()")
    items = value[1:-1] if is_bracketed else value
    return [item.strip(" '\"") for item in items.split(",")]


def _join_reward_function(options: dict[str, str]) -> None:
    """Join the file and the name of a reward function, which verl gives apart."""
    name = options.pop("reward.function:name", "compute_score")
    if "reward.function" in options:
        options["reward.function"] += f":{name}"


def _remove_refused(options: dict[str, str], base: str) -> list[str]:
    """Remove the values that are refused by themselves, and return a line for each problem."""
    notes = []
    values = {}
    for name, text in list(options.items()):
        if "$" in text:
            continue
        try:
            values[name] = loading.parse_option(name, text)
        except UserError as error:
            del options[name]
            notes.append(str(error))
    try:
        loading.load_config(base, values)
    except UserError as error:
        notes.append(str(error))
    return notes
