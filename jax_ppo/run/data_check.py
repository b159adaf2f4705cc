"""Describe the data of a run, and find the problems that would prevent training on them."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jax_ppo.config.schema import Config, Data, Model, Reward
from jax_ppo.data import responses
from jax_ppo.data import tokenizer as tokenizer_lib
from jax_ppo.data.chat_templates import encode_prompt
from jax_ppo.data.messages import join_contents
from jax_ppo.data.tokenize_prompts import encode_prompts, tokenize_prompts
from jax_ppo.environments.loading import describe_tools, load_environment_class
from jax_ppo.errors import UserError, counted, printable_lines, shorten
from jax_ppo.rewards import reward_functions, row_rules
from jax_ppo.run import rule_trial
from jax_ppo.run.parts import batches_in_order
from jax_ppo.run.rule_trial import MADE_UP
from jax_ppo.run.run_examples import (
    load_examples,
    make_encoding,
    tokenize_run_responses,
    validate_run_responses,
)
from jax_ppo.types import Example

_MAX_SHOWN = 5  # problems of one kind that are listed
_MOST_IN_WORKERS = 64  # responses that a function, or a rule without a time bound, is tried on
_NO_LIMIT = 2**31  # tokens of a prompt
# The responses that the rows of a command must have.
_FIELDS = {
    "sft": responses.DEMONSTRATION_FIELDS,
    "reward_model": responses.PREFERENCE_FIELDS,
}


def check_data(config: Config, command: str = "train") -> dict[str, Any]:
    """Return a report on the data that the options name, for train, sft or reward_model.

    Tokens are counted with the tokenizer of `model.path`, if that is set. The report is JSON:
    `command`, `training` and `held_out` (`None` without validation files), each as `_describe`
    returns it, `overlap` (held-out prompts that are training prompts, too), `problems` (lines, each
    of which would end a run before its first step), `warnings` (lines), `first_prompt` and
    `first_prompt_note` (which row it is, and its tokens). Raise `UserError` if the data cannot be
    read.
    """
    read_key = None if command == "train" else config.supervised.response_key
    training, held_out = load_examples(config.data, config.seed, read_key)
    if command == "train":
        environment_class = load_environment_class(config.rollout.multi_turn)
        training, held_out = (describe_tools(environment_class, e) for e in (training, held_out))
    tokenizer = _load_tokenizer(config.model, config.data.date)
    rewards = _RewardReview(not_run=f"{command} reads no rewards")
    if command == "train":
        rewards = _RewardReview(not_run="an environment gives the rewards")
        if not config.rewards_by_environment_alone:
            rewards = _review_rewards(training, held_out, config.reward)
    parts = [
        _describe(examples, tokenizer, config.reward, config.data, rewards.not_run)
        if examples
        else None
        for examples in (training, held_out)
    ]
    assert parts[0] is not None, "without training examples loading fails"
    first_prompt, note = _render_first(training, tokenizer, config.data)
    problems = [*rewards.problems, *_find_row_problems(config.data, training, parts[0])]
    problems += _find_first_failure(
        config.data,
        config.seed,
        _FIELDS.get(command, ()),
        config.supervised.response_key,
        tokenizer=None if problems else tokenizer,
        examples=(training, held_out),
    )
    warnings = [*rewards.warnings]
    for name, part in zip(("training", "held-out"), parts, strict=True):
        warnings += [f"{name} data: {line}" for line in part["rule"]["warnings"]] if part else []
    return {
        "command": command,
        "training": parts[0],
        "held_out": parts[1],
        "overlap": len(_prompts(training) & _prompts(held_out)),
        "function_calls": [call._asdict() for call in rewards.calls],
        "first_prompt": first_prompt,
        "first_prompt_note": note,
        "problems": problems,
        "warnings": warnings,
    }


def format_report(report: dict[str, Any]) -> str:
    """Return a report as text."""
    lines = [f"data for `{report['command']}`", ""]
    for name in ("training", "held_out"):
        part = report[name]
        if part is not None:
            lines += [f"{name.replace('_', '-')} data", *_format_part(part), ""]
    if report["held_out"] is not None:
        lines += [f"held-out prompts that are also training prompts: {report['overlap']}", ""]
    if report["function_calls"]:
        lines += [*map(_format_call, report["function_calls"]), ""]
    first_prompt = printable_lines(report["first_prompt"])
    note = report["first_prompt_note"]
    lines += [f"the first prompt, as the model reads it ({note}):", *first_prompt.splitlines(), ""]
    lines += [f"warning: {warning}" for warning in report["warnings"]]
    lines += [f"problem: {problem}" for problem in report["problems"]]
    if not report["problems"]:
        lines.append(f"no problems for `{report['command']}`")
    return "\n".join(lines)


def _prompts(examples: Sequence[Example]) -> set[str]:
    return {join_contents(example.prompt) for example in examples}


def _load_tokenizer(options: Model, date: str) -> Any:
    """Return the tokenizer that a run would use, `None` if no model is named."""
    for name in ("tokenizer_path", "path"):
        if path := getattr(options, name):
            return tokenizer_lib.load_tokenizer(path, f"config.model.{name}", date)
    return None


def _describe(
    examples: Sequence[Example], tokenizer: Any, reward: Reward, data: Data, not_run: str
) -> dict[str, Any]:
    """Return counts over examples; `not_run` says why their rule is not run, "" if it is."""
    columns = collections.Counter(name for example in examples for name in example.extra_info)
    return {
        "rows": len(examples),
        "columns": dict(columns.most_common()),
        "data_sources": dict(collections.Counter(e.data_source for e in examples).most_common()),
        "chats": sum(not isinstance(example.prompt, str) for example in examples),
        "with_ground_truth": sum(bool(example.ground_truth) for example in examples),
        "with_response": sum(example.response is not None for example in examples),
        "rule": _describe_rule(examples, reward, not_run),
        "preferences": sum(example.rejected is not None for example in examples),
        "duplicates": len(examples) - len(_prompts(examples)),
        "prompt_tokens": _count_tokens(examples, tokenizer, data),
    }


def _describe_rule(examples: Sequence[Example], options: Reward, not_run: str) -> dict[str, Any]:
    """Return the rule's results on the responses in the data and on perfect answers."""
    trial = rule_trial.Trial(not_run=not_run)
    perfect: dict[str, Any] = {"tried": 0, "right": 0, "impossible": []}
    warnings = []
    if not not_run:
        trial = rule_trial.try_rule(examples, options, _MOST_IN_WORKERS, calls_functions=True)
        tried, right, impossible = rule_trial.count_perfect_answers(examples, options)
        perfect = {"tried": tried, "right": right, "impossible": list(impossible)}
        warnings = rule_trial.describe_trial(trial, rule_trial.find_other_forms(examples, options))
    return {**trial._asdict(), "perfect": perfect, "warnings": warnings}


def _count_tokens(
    examples: Sequence[Example], tokenizer: Any, options: Data
) -> dict[str, Any] | None:
    """Return quantiles of the prompts' lengths, and the share that is too long."""
    if tokenizer is None:
        return None
    encoding = dataclasses.replace(make_encoding(options), max_prompt_length=_NO_LIMIT)
    written = [example for example in examples if join_contents(example.prompt).strip()]
    encoded = encode_prompts(written, tokenizer, encoding, "config.data.train_files")
    lengths = np.array([len(ids) for ids in encoded if ids is not None] or [0])
    limit = options.max_prompt_length
    return {
        "mean": float(lengths.mean()),
        **{f"p{q}": int(np.percentile(lengths, q)) for q in (0, 50, 90, 99, 100)},
        "limit": limit,
        "too_long": float((lengths > limit).mean()),
        "dropped": options.filter_overlong_prompts,
    }


class _RewardReview(NamedTuple):
    """Problems with the rewards of rows, or the reason why their rule is not run."""

    not_run: str = ""  # why their rule is not run on the responses that they have
    problems: Sequence[str] = ()
    warnings: Sequence[str] = ()
    calls: Sequence[rule_trial.FunctionCall] = ()


def _review_rewards(
    training: Sequence[Example], held_out: Sequence[Example], options: Reward
) -> _RewardReview:
    """Find the rows that rules cannot score and a missing package, and call the functions."""
    examples = [*training, *held_out]
    obstacles, missing = list[str](), ""
    if not reward_functions.scores_any_row(options):
        obstacles = list(row_rules.find_obstacles(examples, options))
        missing = row_rules.find_missing_package(examples, options)
    problems, warnings = [missing] * bool(missing) + obstacles[:_MAX_SHOWN], list[str]()
    if len(obstacles) > _MAX_SHOWN:
        problems.append(f"{len(obstacles) - _MAX_SHOWN} more reasons why rows cannot be scored")
    if not any("config.data.ground_truth_key" in obstacle for obstacle in obstacles):
        warnings += row_rules.find_unread_references(examples)
    if obstacles and not missing and any(example.response is not None for example in training):
        warnings.append("rows of supervised training: --for=sft or --for=reward_model")
    not_run = "no rule can score some rows" if problems else ""
    calls = rule_trial.call_functions(examples, options)
    for call in calls:
        tried = zip(MADE_UP, call.scores, strict=True)
        failed = " and on ".join(repr(text) for text, score in tried if score is None)
        source = f"data source {call.data_source!r}"
        if failed:
            line = f"{call.function} fails on {failed}, {source}: {call.failure}"
            (warnings if any(score is not None for score in call.scores) else problems).append(line)
    return _RewardReview(not_run or "a function fails" * bool(problems), problems, warnings, calls)


def _find_first_failure(
    data: Data,
    seed: int,
    fields: tuple[str, ...],
    response_key: str,
    tokenizer: Any,
    examples: tuple[Sequence[Example], Sequence[Example]],
) -> list[str]:
    """Return what would end a run before its first batch; without a tokenizer, only in the rows."""
    training, held_out = examples
    try:
        if fields:
            validate_run_responses(data, response_key, fields, training, held_out)
        if tokenizer is None:
            return []
        if fields:
            prompts = tokenize_run_responses(data, tokenizer, fields, training, held_out)[0].prompts
        else:
            encoding = make_encoding(data)
            prompts = tokenize_prompts(training, tokenizer, encoding)
            if held_out:
                tokenize_prompts(held_out, tokenizer, encoding, data.held_out_option)
        batches_in_order(data, seed, prompts)
    except UserError as error:
        return [str(error)]
    return []


def _find_row_problems(data: Data, training: Sequence[Example], part: dict[str, Any]) -> list[str]:
    """Return what else would end a run on the training rows, which `part` describes."""
    problems = []
    trial = part["rule"]
    if trial["tried"] and trial["failed"] == trial["tried"]:
        problems.append(
            f"the reward failed on each of {trial['tried']} responses: "
            f"{rule_trial.describe_error(trial['first_failure'])} (all of it is logged)"
        )
    empty = [
        example.describe_location(row)
        for row, example in enumerate(training, 1)
        if not join_contents(example.prompt).strip()
    ]
    if empty:
        problems.append(f"{counted(len(empty), 'empty prompt')}, the first is {empty[0]}")
    tokens = part["prompt_tokens"]
    refuses = not data.filter_overlong_prompts and data.truncation == "error"
    if tokens and tokens["too_long"] and refuses:
        problems.append(
            f"{tokens['too_long']:.1%} of the prompts are longer than "
            f"config.data.max_prompt_length={tokens['limit']}, and config.data.truncation='error'"
        )
    return problems


def _format_part(part: dict[str, Any]) -> list[str]:
    rule, perfect = part["rule"], part["rule"]["perfect"]
    tried = f"{rule['tried']} tried, {rule['wrong']} wrong, {rule['failed']} not scored"
    if rule["not_run"]:
        tried = f"not run: {rule['not_run']}"
    answers = "not run"
    if perfect["tried"]:
        answers = f"{perfect['tried']} tried, {perfect['right']} right"
    if perfect["impossible"]:
        answers += f"; none can be made for {', '.join(perfect['impossible'])}"
    lines = [
        f"  rows {part['rows']}, of which {part['duplicates']} repeat another's prompt",
        f"  chats {part['chats']}, with a ground truth {part['with_ground_truth']}, with a "
        f"response {part['with_response']}, preferences {part['preferences']}",
        f"  own responses by their rule: {tried}",
        f"  perfect answers by their rule: {answers}",
        f"  data sources: {_format_counts(part['data_sources'])}",
        f"  columns in extra_info: {_format_counts(part['columns'])}",
    ]
    tokens = part["prompt_tokens"]
    if tokens is None:
        return [*lines, "  tokens: not counted; config.model.path names no model"]
    fate = "dropped" if tokens["dropped"] else "truncated or refused"
    return [
        *lines,
        f"  tokens of a prompt: mean {tokens['mean']:.1f}, median {tokens['p50']}, 90 % "
        f"{tokens['p90']}, 99 % {tokens['p99']}, longest {tokens['p100']}",
        f"  longer than config.data.max_prompt_length={tokens['limit']}: "
        f"{tokens['too_long']:.2%}, {fate}",
    ]


def _format_call(call: dict[str, Any]) -> str:
    scores = [
        f"{text!r} " + ("fails" if score is None else f"scores {score:g}")
        for text, score in zip(MADE_UP, call["scores"], strict=True)
    ]
    return printable_lines(
        f"{call['function']} on the first row of data source {call['data_source'] or '(none)'}: "
        f"{', '.join(scores)}\n  ground_truth is {shorten(repr(call['ground_truth']))}; extra_info "
        f"has {', '.join(map(str, call['extra_info'])) or 'nothing'}"
    )


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name or '(none)'} ({count})" for name, count in counts.items()) or "none"


def _render_first(examples: Sequence[Example], tokenizer: Any, options: Data) -> tuple[str, str]:
    """Return the first prompt that is kept (or the first) as the model gets it, and its row."""
    if tokenizer is None:
        return join_contents(examples[0].prompt), "before its chat template: no model is named"
    encoding = make_encoding(options)
    if not encoding.filter_overlong_prompts and encoding.truncation == "error":
        encoding = dataclasses.replace(encoding, max_prompt_length=_NO_LIMIT)
    rows = [(row, e) for row, e in enumerate(examples, 1) if join_contents(e.prompt).strip()]
    shown = [example for _, example in rows]
    for attempt in (encoding, dataclasses.replace(encoding, max_prompt_length=_NO_LIMIT)):
        encoded = encode_prompts(shown, tokenizer, attempt, "config.data.train_files")
        for (row, example), ids in zip(rows, encoded, strict=True):
            if ids is None:
                continue
            text = tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
            note = f"example {row}, {len(ids)} tokens"
            whole = encode_prompt(tokenizer, example.prompt, encoding.chat_template, example.tools)
            if (length := len(whole)) > len(ids):
                note += f" of {length}, config.data.truncation={options.truncation}"
            return text, note
    return "", "all prompts are empty"
