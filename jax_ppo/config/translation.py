"""Translate commands of other frameworks into ours, using the tables of their options."""

import dataclasses
import itertools
import re
import shlex
from collections.abc import Iterator

from jax_ppo.config import loading, peer_options
from jax_ppo.config.option import Option
from jax_ppo.config.peers import openrlhf, trl, verl
from jax_ppo.config.schema import all_options
from jax_ppo.errors import UserError, shorten

# The configuration that a translated command starts from: the sizes of the framework's example.
BASE_CONFIGS = {"verl": "gsm8k", "trl": "hh_rlhf", "openrlhf": "hh_rlhf"}
_TABLES = {
    "verl": verl.OPTIONS,
    "trl": trl.OPTIONS,
    "openrlhf": openrlhf.OPTIONS,
}
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
# A variable of the shell, also with a default: $NAME, ${NAME}, ${NAME:-8}.
_VARIABLE = re.compile(r"(\$(?:[A-Za-z_]\w*|\{\w+(?::-[\w./-]*)?\}))", re.ASCII)
_BRACKETS = ("[]", "()")
_QUOTED = re.compile(r"""(["'])(.*)\1""", re.DOTALL)
# A number of prompts, samples or processes.
_COUNT = re.compile(r"[1-9][0-9]{,11}")
# Values that have another name here.
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_SCHEDULES = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}
_VALUES = {
    "algorithm.adv_estimator": {
        "reinforce": "reinforce_plus_plus",
        "reinforce_baseline": "reinforce_plus_plus_baseline",
        "group_norm": "grpo",
    },
    "model.attention": {
        "flash_attention_2": "auto",
        "flash_attention_3": "auto",
        "sdpa": "auto",
        "eager": "xla",
    },
    "actor.policy_loss": {"ppo": "vanilla"},
    "actor.optim.lr_schedule": _SCHEDULES,
    "critic.optim.lr_schedule": _SCHEDULES,
    "model.dtype": _DTYPES,
    "actor.optim.param_dtype": _DTYPES,
    "actor.optim.gradient_dtype": _DTYPES,
}


@dataclasses.dataclass(frozen=True)
class Translation:
    """A translated command.

    Attributes:
      options: values by name, without `config.`.
      notes: one line for each option without a counterpart or in need of a review.
    """

    options: dict[str, str]
    notes: list[str]

    def command(self, base: str) -> str:
        """Return our command on several lines, quoted for a shell; variables stay variables."""
        lines = [f"python -m jax_ppo.train --config={base}"]
        for name, value in self.options.items():
            lines.append(f"    --config.{name}={_quote_for_shell(value)}")
        return " \\\n".join(lines)


def _quote_for_shell(value: str) -> str:
    """Quote a value; variables stay variables, and everything else is text that never runs."""
    # Splitting by a group yields texts and variables in turn.
    parts = _VARIABLE.split(value)
    texts = [shlex.quote(text) if text else "" for text in parts[::2]]
    variables = [f'"{variable}"' for variable in parts[1::2]]
    pairs = itertools.zip_longest(texts, variables, fillvalue="")
    return "".join(itertools.chain.from_iterable(pairs)) or "''"


def translate(framework: str, text: str) -> Translation:
    """Translate a command.

    Args:
      framework: "verl", "trl" or "openrlhf".
      text: the command; it may have several lines, each continued by a backslash.

    Raises:
      UserError: the framework is unknown, or the text is not a command.
    """
    if framework not in _TABLES:
        raise UserError(f"{framework}: expected one of {', '.join(_TABLES)}")
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise UserError(f"the command cannot be read: {error}") from error
    if framework == "verl":
        flags = dict(_read_hydra(words))
    else:
        flags = dict(_read_flags(words))
    known = {option.name: option for option in all_options()}
    options: dict[str, str] = {}
    notes: list[str] = []
    for name, value in flags.items():
        if name in _TRL_SIZES and _TRL_SIZES[0] in flags:
            continue
        targets = _find_targets(name, value, _TABLES[framework], known)
        if isinstance(targets, str):
            notes.append(f"{name}={shorten(value)}: {targets}")
            continue
        for target, target_value in targets.items():
            options[target] = target_value
            if _VARIABLE.search(target_value):
                notes.append(f"config.{target}: a variable of the shell")
            elif "$(" in target_value or "`" in target_value:
                notes.append(f"config.{target}: a command of the shell, which stays text")
    _join_reward_function(options)
    if framework == "trl":
        notes += _count_trl_batches(flags, options)
    if framework == "openrlhf":
        notes += _adapt_openrlhf(options)
    if framework in ("trl", "openrlhf"):
        _begin_critic_as_reward_model(options)
    notes += _remove_invalid(options, BASE_CONFIGS[framework])
    # Each note is one line of printable characters, whatever it quotes.
    return Translation(options=options, notes=[str(UserError(note)) for note in notes])


def _read_hydra(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the overrides of a command of verl, without `actor_rollout_ref.`."""
    launcher_words = _count_launcher_words(words)
    for index, word in enumerate(words):
        match = re.fullmatch(r"(?:--|\+{0,2})([^=]+)=(.*)", word, re.DOTALL)
        if match is None:
            continue
        name = match[1].replace("-", "_")
        # Words before the program may set variables of the environment.
        is_override = 0 < launcher_words <= index
        if is_override or "." in name or name in verl.OPTIONS:
            yield name.removeprefix("actor_rollout_ref."), match[2]


def _read_flags(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags of a command, `--name value`, `--name=value` or `--name`."""
    words = words[_count_launcher_words(words) :]
    for index, word in enumerate(words):
        if not word.startswith("--") or word == "--":
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if not equals:
            # A flag takes the words up to the next flag; one without any is a switch.
            values = itertools.takewhile(lambda word: not word.startswith("--"), words[index + 1 :])
            value = ",".join(values) or "True"
        yield name.replace("-", "_"), value


def _count_launcher_words(words: list[str]) -> int:
    """Return the number of words before the script's own, such as `accelerate launch`."""
    if words and words[0].startswith("--"):
        return 0
    for count, word in enumerate(words, 1):
        if word.endswith(".py") or words[count - 2 : count - 1] == ["-m"]:
            return count
    return 0


def _find_targets(
    name: str, value: str, table: dict[str, str], known: dict[str, Option]
) -> dict[str, str] | str:
    """Return our options with their values, or the reason why there are none."""
    answer = peer_options.find_answer(table, name)
    if answer is None and name not in known:
        return "there is no such option"
    if value.lower() in _NO_VALUE:
        return {}
    if answer is None or (name in known and name not in table):
        return {name: _convert(known[name], value)}
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
    text = value
    is_in_brackets = value[:1] + value[-1:] in _BRACKETS and not option.facts.is_json
    if option.facts.is_list or is_in_brackets:
        items = _as_list(value)
        if option.name == "trainer.logger":
            # Steps are always printed on the console.
            items = [item for item in items if item != "console"]
        text = ",".join(items)
    elif quoted := _QUOTED.fullmatch(value):
        text = quoted[2]
    if option.name in ("trainer.test_freq", "trainer.save_freq") and text == "-1":
        return "0"
    text = _VALUES.get(option.name, {}).get(text, text)
    if option.value_type is bool:
        return text.lower()
    # At most twelve digits and a small exponent; the option's range refuses other numbers.
    if option.value_type is int and re.fullmatch(r"\d{1,12}(?:\.0*|e\d{1,2})", text):
        return str(int(float(text)))
    return text


def _as_list(value: str) -> list[str]:
    """Return the items of a list such as "['a','b']" or "a,b"; of a single value, itself."""
    if value[:1] + value[-1:] in _BRACKETS:
        value = value[1:-1]
    return [item.strip(" '\"") for item in value.split(",")]


def _join_reward_function(options: dict[str, str]) -> None:
    """Join the file and the name of a reward function, which are two options of verl."""
    name = options.pop("reward.function:name", "compute_score")
    if "reward.function" in options:
        options["reward.function"] += f":{name}"


def _count_trl_batches(flags: dict[str, str], options: dict[str, str]) -> list[str]:
    """Set the sizes that several options of TRL determine, for one process; return notes."""
    if _TRL_SIZES[0] not in flags:
        return []
    sizes = [flags.get(name, "1") for name in _TRL_SIZES]
    if not all(_COUNT.fullmatch(size) for size in sizes):
        return [f"{', '.join(_TRL_SIZES)}: set config.data.train_batch_size, in prompts"]
    per_device, accumulated, mini_batches, episodes = map(int, sizes)
    batch = per_device * accumulated
    options["data.train_batch_size"] = str(batch)
    options["actor.ppo_mini_batch_size"] = str(max(batch // mini_batches, 1))
    if "total_episodes" in flags:
        options["trainer.total_training_steps"] = str(-(-episodes // batch))
    return [
        f"config.data.train_batch_size={batch}: {_TRL_SIZES[0]} x {_TRL_SIZES[1]}, of one process; "
        "multiply it and config.actor.ppo_mini_batch_size by the number of processes, and divide "
        "config.trainer.total_training_steps by it"
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


def _begin_critic_as_reward_model(options: dict[str, str]) -> None:
    """Set the critic's initial weights, which TRL and OpenRLHF take from the reward model."""
    initial_path = options.get("reward.model_path") or options.get("model.path")
    if options.get("algorithm.adv_estimator", "gae") != "gae":
        options["critic.path"] = ""
    elif "reward.model_path" in options and initial_path:
        options.setdefault("critic.path", initial_path)


def _remove_invalid(options: dict[str, str], base: str) -> list[str]:
    """Remove the values that are invalid by themselves, and return a line for each problem."""
    notes = []
    values = {}
    for name, text in list(options.items()):
        if not all(character.isprintable() or character == "\n" for character in text):
            del options[name]
            notes.append(f"config.{name}={shorten(text)!r}: expected printable characters")
            continue
        if _VARIABLE.search(text):
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
