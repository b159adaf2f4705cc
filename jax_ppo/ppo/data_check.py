"""Describe the data of a run, and find the problems that would prevent training on them."""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_ppo.config.schema import Config, Data, Model, Reward
from jax_ppo.data import tokenizer as tokenizer_lib
from jax_ppo.data.prompt_batches import bucket_width
from jax_ppo.errors import UserError, printable_lines
from jax_ppo.ppo.sample_records import prompt_text
from jax_ppo.rewards import registry, row_validation
from jax_ppo.rewards.batch_functions import BatchFunction
from jax_ppo.rewards.samples import RewardRow
from jax_ppo.training.setup import load_examples
from jax_ppo.types import Example

_MAX_SHOWN = 5  # problems of one kind that are listed
_BAR = 40  # characters of the longest bar of a histogram


def check_data(config: Config) -> dict[str, Any]:
    """Return a report on the data that the options name.

    Args:
      config: all options. Tokens are counted with the tokenizer of `model.path`, if that is set.

    Returns:
      JSON: `training` and `held_out` (`None` without validation files), each as `_describe` returns
      it, `overlap` (held-out prompts that are training prompts, too), `problems` (lines, each of
      which would end a run before its first step) and `first_prompt`.

    Raises:
      UserError: the data cannot be read.
    """
    training, held_out = load_examples(config.data, config.seed)
    tokenizer = _load_tokenizer(config.model)
    described = _describe(training, tokenizer, config)
    return {
        "training": described,
        "held_out": _describe(held_out, tokenizer, config) if held_out else None,
        "overlap": len(set(map(prompt_text, training)) & set(map(prompt_text, held_out))),
        "first_prompt": _render(training[0], tokenizer, config.data.chat_template),
        "problems": _find_problems(config, training, held_out, described),
    }


def format_report(report: dict[str, Any]) -> str:
    """Return a report as text."""
    lines = []
    for name in ("training", "held_out"):
        part = report[name]
        if part is not None:
            lines += [f"{name.replace('_', '-')} data", *_format_part(part), ""]
    if report["held_out"] is not None:
        lines += [f"held-out prompts that are also training prompts: {report['overlap']}", ""]
    first_prompt = printable_lines(report["first_prompt"])
    lines += ["the first prompt, as the model reads it:", *first_prompt.splitlines(), ""]
    lines += [f"problem: {problem}" for problem in report["problems"]] or ["no problems"]
    return "\n".join(lines)


def _load_tokenizer(options: Model) -> Any:
    """Return the tokenizer that a run would use, `None` if no model is named."""
    if options.tokenizer_path:
        return tokenizer_lib.load_tokenizer(
            options.tokenizer_path, option="config.model.tokenizer_path"
        )
    if options.path:
        return tokenizer_lib.load_tokenizer(options.path, option="config.model.path")
    return None


def _describe(examples: Sequence[Example], tokenizer: Any, config: Config) -> dict[str, Any]:
    """Return counts over examples; `prompt_tokens` is `None` without a tokenizer."""
    columns = collections.Counter(name for example in examples for name in example.extra_info)
    prompts = collections.Counter(map(prompt_text, examples))
    return {
        "rows": len(examples),
        "columns": dict(columns.most_common()),
        "data_sources": dict(collections.Counter(e.data_source for e in examples).most_common()),
        "chats": sum(not isinstance(example.prompt, str) for example in examples),
        "with_ground_truth": sum(bool(example.ground_truth) for example in examples),
        "with_response": sum(example.response is not None for example in examples),
        "rejected_solutions": _count_rejected(examples, config.reward),
        "preferences": sum(example.rejected is not None for example in examples),
        "duplicates": len(examples) - len(prompts),
        "prompt_tokens": _count_tokens(examples, tokenizer, config.data),
    }


def _count_rejected(examples: Sequence[Example], options: Reward) -> int:
    """Return how many of the data's own responses their rule scores as wrong."""
    solved = [example for example in examples if example.response and example.rejected is None]
    # A user-defined function, or a rule without a time bound, is not run here.
    if not registry.has_rules(options) or registry.needs_workers(solved, options):
        return 0
    obstacles = row_validation.find_obstacles(solved, options.function, options.terms)
    if next(obstacles, None) is not None:
        return 0
    rule = registry.resolve_reward_function("", options.gsm8k_method, options.terms)
    assert not isinstance(rule, BatchFunction), "user-defined functions are not run here"
    results = (rule(RewardRow.from_example(e), e.response or "") for e in solved)
    return sum(result.correct is False for result in results)


def _count_tokens(
    examples: Sequence[Example], tokenizer: Any, options: Data
) -> dict[str, Any] | None:
    """Return quantiles of the prompts' lengths, a histogram, and the share that is too long.

    Returns `None` without a tokenizer.
    """
    if tokenizer is None:
        return None
    lengths = np.array(
        [
            len(tokenizer_lib.encode_prompt(tokenizer, e.prompt, options.chat_template))
            for e in examples
        ]
    )
    limit = options.max_prompt_length
    buckets = collections.Counter(bucket_width(int(length), 10**9) for length in lengths)
    return {
        "mean": float(lengths.mean()),
        **{f"p{q}": int(np.percentile(lengths, q)) for q in (0, 50, 90, 99, 100)},
        "histogram": {str(width): buckets[width] for width in sorted(buckets)},
        "limit": limit,
        "too_long": float((lengths > limit).mean()),
        "dropped": options.filter_overlong_prompts,
    }


def _find_problems(
    config: Config, training: Sequence[Example], held_out: Sequence[Example], part: dict[str, Any]
) -> list[str]:
    problems = []
    options = config.reward
    scores_rows = registry.has_rules(options) and not config.rewards_by_environment_alone
    if scores_rows and (options.terms or not options.url):
        obstacles = list(
            row_validation.find_obstacles([*training, *held_out], options.function, options.terms)
        )
        problems += obstacles[:_MAX_SHOWN]
        if len(obstacles) > _MAX_SHOWN:
            problems.append(f"{len(obstacles)} examples in all cannot be scored")
    empty = [row for row, example in enumerate(training, 1) if not prompt_text(example).strip()]
    if empty:
        problems.append(f"{len(empty)} prompts are empty, the first is example {empty[0]}")
    usable = part["rows"]
    tokens = part["prompt_tokens"]
    if tokens and tokens["too_long"]:
        if config.data.filter_overlong_prompts:
            usable = round(usable * (1 - tokens["too_long"]))
        elif config.data.truncation == "error":
            problems.append(
                f"{tokens['too_long']:.1%} of the prompts are longer than "
                f"config.data.max_prompt_length={tokens['limit']}, and config.data.truncation="
                "'error'"
            )
    if tokens and usable < config.data.train_batch_size:
        problems.append(
            f"{usable} prompts are left, and config.data.train_batch_size="
            f"{config.data.train_batch_size} asks for that many per step"
        )
    return problems


def _format_part(part: dict[str, Any]) -> list[str]:
    lines = [
        f"  rows {part['rows']}, of which {part['duplicates']} repeat another's prompt",
        f"  chats {part['chats']}, with a ground truth {part['with_ground_truth']}, with a "
        f"response {part['with_response']}, preferences {part['preferences']}",
        f"  own responses that the rule scores as wrong: {part['rejected_solutions']}",
        f"  data sources: {_format_counts(part['data_sources'])}",
        f"  columns besides the prompt: {_format_counts(part['columns'])}",
    ]
    tokens = part["prompt_tokens"]
    if tokens is None:
        return [*lines, "  tokens: not counted; config.model.path names no model"]
    fate = "dropped" if tokens["dropped"] else "truncated or refused"
    lines += [
        f"  tokens of a prompt: mean {tokens['mean']:.1f}, median {tokens['p50']}, 90 % "
        f"{tokens['p90']}, 99 % {tokens['p99']}, longest {tokens['p100']}",
        f"  longer than config.data.max_prompt_length={tokens['limit']}: "
        f"{tokens['too_long']:.2%}, {fate}",
    ]
    most = max(tokens["histogram"].values())
    for width, count in tokens["histogram"].items():
        lines.append(f"  up to {width:>6} {'#' * max(1, count * _BAR // most)} {count}")
    return lines


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name or '(none)'} ({count})" for name, count in counts.items()) or "none"


def _render(example: Example, tokenizer: Any, chat_template: bool) -> str:
    """Return a prompt as the model reads it, or its messages without a tokenizer."""
    if tokenizer is None:
        return prompt_text(example)
    try:
        return tokenizer_lib.render_prompt(tokenizer, example.prompt, chat_template)[0]
    except Exception as error:
        raise UserError(f"the first prompt cannot be rendered: {error}") from error
