"""A trial of the rule before a run: on responses of the data, and on what the prompts ask for."""

import contextlib
import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax_ppo.config.schema import Reward
from jax_ppo.data.messages import join_contents
from jax_ppo.rewards import reward_functions
from jax_ppo.rewards.batch import describe_misses, score_batch, scored_misses
from jax_ppo.rewards.custom import validate_columns
from jax_ppo.rewards.row_rules import AUTO, JUDGE, rules_of_source
from jax_ppo.rewards.rule_table import RULES
from jax_ppo.rewards.worker_pool import RewardWorkers, isolate
from jax_ppo.types import Example

MADE_UP = ("The answer is 1.", "")  # responses that user-defined functions are tried on
_FIRST_ROWS = 8  # that are tried before a run


class Trial(NamedTuple):
    """Findings of a trial: numbers of responses, and texts that are empty if there is nothing."""

    not_run: str = ""  # why
    tried: int = 0
    wrong: int = 0
    failed: int = 0  # the rule could not score them
    first_failure: str = ""
    misses: tuple[str, ...] = ()  # lines about wrong responses


def describe_error(failure: str) -> str:
    """Return the first line of the error that a failure's text ends with.

    A traceback's error is unindented, and its message may have several lines.
    """
    *frames, end = re.split(r'^ +File ".*$', failure.strip(), flags=re.MULTILINE)
    lines = end.splitlines()
    return next((x for x in lines if frames and x[:1].strip()), lines[-1]).strip()


def try_rule(
    examples: Sequence[Example], options: Reward, most_in_workers: int, calls_functions: bool
) -> Trial:
    """Score the responses that the data themselves have.

    `find_obstacles` finds nothing in the rows. A rule without a time bound, or a function, gets at
    most `most_in_workers` responses; user-defined functions are called with `calls_functions`
    alone.
    """
    if not reward_functions.has_rules(options):
        return Trial(not_run="the reward comes from a reward model alone")
    if options.url and not options.function:
        return Trial(not_run="config.reward.url is not called before a run")
    if reward_functions.functions_of(options) and not calls_functions:
        return Trial(not_run="functions are not called before a run; `check` calls them")
    # A reference answer, which is the response of rows without another, need not have its form.
    solved = [
        e for e in examples if e.response not in (None, "", e.ground_truth) and e.rejected is None
    ]
    if not solved:
        return Trial(not_run="the rows have no responses besides reference answers")
    needs_workers = reward_functions.needs_workers(solved, options)
    rule = reward_functions.resolve_reward_function(options)
    validate_columns(rule, examples)
    if needs_workers:
        solved = solved[:most_in_workers]
    responses = [example.response or "" for example in solved]
    scorer = isolate(rule, options, needs_workers)
    with scorer if isinstance(scorer, RewardWorkers) else contextlib.nullcontext():
        scored = score_batch(scorer, solved, responses, options)
    misses = scored_misses(solved, responses, scored)
    return Trial(
        tried=len(solved),
        wrong=len(misses),
        failed=scored.failures,
        first_failure=scored.first_failure,
        misses=describe_misses(misses, reward_functions.is_by_rules(options)),
    )


class FunctionCall(NamedTuple):
    """The result of a user's function on the responses `MADE_UP` to a row."""

    function: str
    data_source: str
    ground_truth: Any
    extra_info: list[str]  # the keys
    scores: list[float | None]  # `None` where the call failed
    failure: str = ""  # the last line about the first that failed


def call_functions(examples: Sequence[Example], options: Reward) -> list[FunctionCall]:
    """Call the user's functions in a worker process, for the first row of each data source.

    After a source whose calls all failed, which may have taken `reward.timeout` each, a function is
    not called again.
    """
    first_rows = {example.data_source: example for example in reversed(examples)}
    calls = []
    for function in reward_functions.functions_of(options):
        alone = dataclasses.replace(
            options, function=function, terms="", url="", max_timeouts=1, workers=1
        )
        rule = reward_functions.resolve_reward_function(alone)
        validate_columns(rule, examples)
        workers = isolate(rule, alone, needs_workers=True)
        assert isinstance(workers, RewardWorkers), "there is one"
        with workers:
            for source, row in reversed(first_rows.items()):
                scored = score_batch(workers, [row] * len(MADE_UP), MADE_UP, alone)
                results = zip(scored.scores.tolist(), scored.failed, strict=True)
                scores = [None if failed else score for score, failed in results]
                failure = ""
                if scored.failures:
                    response = repr(MADE_UP[scores.index(None)])
                    _, _, cause = scored.first_failure.partition(f"ending in {response}:")
                    failure = describe_error(cause)
                keys = list(row.extra_info)
                calls.append(
                    FunctionCall(function, source, row.ground_truth, keys, scores, failure)
                )
                if scored.failed.all():
                    break
    return calls


def count_perfect_answers(
    examples: Sequence[Example], options: Reward
) -> tuple[int, int, tuple[str, ...]]:
    """Try perfect answers to rows; return how many, how many are right, and rules without any."""
    if options.function or (options.url and not options.terms):
        return 0, 0, (options.function or JUDGE,)
    terms = options.parsed_terms
    tried = right = 0
    without = dict.fromkeys(term.rule for term in terms if term.rule not in (*RULES, AUTO))
    for example in examples:
        for name, rule in rules_of_source(example.data_source, terms):
            if rule is not None and rule.perfect is not None:
                tried += 1
                right += not rule.find_obstacle(example.ground_truth)
            elif rule is not None:
                without[example.data_source if name == AUTO else name] = None
    return tried, right, tuple(without)


def find_other_forms(examples: Sequence[Example], options: Reward) -> str:
    r"""Return a line if prompts ask for a form, as `\boxed{}`, that their rule does not read.

    A prompt that ends with a form, as in "Answer:", lets the response begin with the answer.
    """
    if options.function or options.url:
        return ""
    terms = options.parsed_terms
    reads_any = any(term.argument == "flexible" for term in terms)
    forms = {marker for rule in RULES.values() for marker in rule.markers}
    found: dict[tuple[str, str], int] = {}
    for example in examples:
        prompt = join_contents(example.prompt)
        asked = [form for form in forms if form in prompt and not prompt.rstrip().endswith(form)]
        for _, rule in rules_of_source(example.data_source, terms):
            if rule is None or not rule.markers or (reads_any and rule is RULES["gsm8k"]):
                continue
            if asked and not {*rule.markers, "<answer>"} & set(asked):
                key = (sorted(asked)[0], rule.markers[0])
                found[key] = found.get(key, 0) + 1
    if not found:
        return ""
    (asked_form, read_form), count = max(found.items(), key=lambda item: item[1])
    suggestion = next(name for name in RULES if RULES[name].markers[:1] == (asked_form,))
    return (
        f"{count} of {len(examples)} prompts ask for `{asked_form}`, and their rule reads "
        f"`{read_form}`: right answers in the form asked for score as wrong; "
        f"config.reward.terms={suggestion}:1.0 reads them"
    )


def describe_trial(trial: Trial, other_forms: str) -> list[str]:
    """Return lines about what is probably wrong: all responses of the data, or the prompts."""
    lines = [other_forms] if other_forms else []
    if trial.tried and trial.wrong == trial.tried:
        lines.append(
            f"the rule scores all {trial.tried} responses of the data that were tried as wrong; "
            f"the first: {trial.misses[0]}"
        )
    return lines


def try_first_rows(examples: Sequence[Example], options: Reward) -> list[str]:
    """Return what is probably wrong with the first rows; functions are not called."""
    first = examples[:_FIRST_ROWS]
    trial = try_rule(first, options, _FIRST_ROWS, calls_functions=False)
    return describe_trial(trial, find_other_forms(first, options))
