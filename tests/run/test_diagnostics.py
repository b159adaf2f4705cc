"""Each diagnostic is shown for a run that has the problem, once, and for no healthy run."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from jax_ppo.run.diagnostics import DIAGNOSTICS, Diagnosis
from jax_ppo.training.progress import Progress

HEALTHY = {
    "actor/entropy": 1.0,
    "actor/first_log_ratio": 1e-6,
    "actor/inexact_logprobs": 0.0,
    "actor/ratio_mean": 1.01,
    "critic/explained_variance": 0.3,
    "critic/returns_std": 0.5,
    "critic/values_std": 0.2,
    "critic/values_within_responses": 0.4,
    "kl/reference": 0.01,
    "perf/compiled_programs": 0.0,
    "response_length/mean": 4.0,
    "response_length/truncated_share": 0.1,
    "reward/max": 1.0,
    "reward/mean": 0.5,
    "reward/min": 0.0,
    "reward/std": 0.5,
    "reward/uniform_groups": 0.5,
    "rollout/duplicates": 0.1,
    "rollout/logprob_difference": 1e-4,
    "rollout/most_common": 0.1,
    "rollout/slot_use": 0.8,
    "seconds/compile": 0.0,
    "seconds/host": 0.1,
    "seconds/reward": 0.1,
    "seconds/step": 1.0,
    "seconds/update": 0.3,
    "update/padding": 0.1,
}
STEPS = 100
PROBLEMS = {
    "nothing_left": {"response_length/masked_share": 1.0},
    "entropy": {"actor/entropy": 0.001},
    "kl": {"kl/reference": 5.0},
    "ratio": {"actor/ratio_mean": 1.3},
    "reward_size": {"reward/max": 1e30},
    "constant_reward": {"reward/min": 0.0, "reward/max": 0.0},
    "truncation": {"response_length/truncated_share": 0.7},
    "first_ratio": {"actor/first_log_ratio": 0.7},
    "inexact": {"actor/inexact_logprobs": 2.0},
    "mismatch": {"rollout/logprob_difference": 0.2},
    "explained_variance": {"critic/explained_variance": -0.2},
    "flat_critic": {"critic/values_std": 1e-4},
    "prompt_only_critic": {"critic/values_within_responses": 1e-3},
    "idle_slots": {"rollout/slot_use": 0.1},
    "host_time": {"seconds/reward": 0.8},
    "equal_groups": {"reward/uniform_groups": 0.95},
    "duplicates": {"rollout/duplicates": 0.8},
    "host_bound": {"seconds/host": 0.8, "seconds/update": 0.0},
    "padding": {"update/padding": 0.7},
    "warm_compilation": {"seconds/compile": 0.7, "perf/compiled_programs": 3},
}


def observe(rows, **options):
    """Return the messages of a run with these metrics, by name, in order."""
    options = {"algorithm__adv_estimator": "grpo", "rollout__n": 2} | options
    diagnosis = Diagnosis(tiny.config(**options), total_steps=STEPS)
    progress = Progress()
    return [
        (kind, message)
        for step, row in enumerate(rows, start=1)
        for kind, message in diagnosis.observe(HEALTHY | row).items()
        if progress.warn(kind, message, step)
    ]


def test_every_diagnostic_has_a_problem_here():
    shown_below = {"runaway_length", "first_kl"}
    assert {diagnostic.name for diagnostic in DIAGNOSTICS} == {*PROBLEMS, *shown_below}


def test_samples_of_older_weights_are_named_as_the_cause():
    """Regression: a run that samples ahead was only told to change its types."""
    rows = [PROBLEMS["mismatch"]] * 3
    for staleness, cause in ((0, "model.dtype=float32"), (1, "rollout.max_staleness=1")):
        options = {"algorithm__rollout_is": "token", "rollout__max_staleness": staleness}
        ((_, message),) = observe(rows, **options)
        assert cause in message and message.count("config.") == 4 + staleness


UPDATE = [name for name in HEALTHY if name.startswith(("actor/", "critic/"))]


@given(st.sets(st.sampled_from(sorted(HEALTHY))))
@settings(deadline=None)
def test_figures_without_a_value_are_blamed_for_nothing(names):
    """Regression: the entropy of a step without responses to learn from was NaN, a "collapse"."""
    assert observe([dict.fromkeys(names, math.nan)] * STEPS) == []


def test_a_step_without_a_response_to_learn_from_says_so_alone():
    rows = [{"response_length/masked_share": 1.0} | dict.fromkeys(UPDATE, math.nan)] * 3
    ((name, message),) = observe(rows)
    assert name == "nothing_left" and "no response is left to learn from: all" in message
    assert "config.algorithm.mask_truncated=True" in message and "entropy" not in message
    assert observe([{"response_length/masked_share": 0.99}] * STEPS) == []


def test_a_policy_that_begins_apart_from_its_reference_is_not_said_to_run_away():
    """The limit of 1 nat counts from the 3 nats of the first step."""
    rows = [{"kl/reference": x} for x in (3.0, 2.0, 3.9, 4.1)]
    ((first, began), (then, runs_away)) = observe(rows)
    assert first == "first_kl" and "to the reference was 3 nats per token" in began
    assert then == "kl" and "is 4.1 nats per token" in runs_away
    resumed = Diagnosis(tiny.config(), STEPS, first_kl=3.0)
    assert resumed.observe(HEALTHY | rows[2]) == {}
    assert resumed.observe(HEALTHY | rows[3]).keys() == {"kl"}


def test_a_filter_that_leaves_no_prompt_says_so():
    config = tiny.config(
        algorithm__adv_estimator="grpo", rollout__n=2, algorithm__filter_groups__enable=True
    )
    diagnosis = Diagnosis(config, STEPS)
    (message,) = diagnosis.observe({"reward/uniform_groups": 1.0, "rollout/draws": 3}).values()
    assert "no prompt is left to learn from" in message and "in 3 batches" in message
    assert not diagnosis.observe({"reward/uniform_groups": 0.9, "rollout/draws": 3})


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_that_ends_and_returns_is_said_once_with_a_number_and_an_option(name):
    rows = [{}] * STEPS + [PROBLEMS[name]] * STEPS + [{}] * STEPS + [PROBLEMS[name]] * STEPS
    ((said, message),) = observe(rows)
    assert said == name and "config." in message and any(c.isdigit() for c in message)


@given(st.lists(st.booleans(), min_size=1).filter(any))
def test_a_warning_has_its_first_step_last_step_and_count(present):
    progress = Progress()
    steps = [step for step, holds in enumerate(present, start=1) if holds]
    assert [progress.warn("kl", f"step {step}: far", step) for step in steps].count(True) == 1
    # A resumed run continues the count.
    progress = Progress(**json.loads(json.dumps(progress.history())))
    assert not progress.warn("kl", "again", len(present) + 1)
    assert progress.warnings["kl"] == {
        "text": f"step {steps[0]}: far",
        "first_step": steps[0],
        "last_step": len(present) + 1,
        "count": len(steps) + 1,
    }
    (text,) = progress.warning_texts()
    assert text == (
        f"step {steps[0]}: far\n({len(steps) + 1} times, last in step {len(present) + 1})"
    )


def test_a_run_of_few_steps_is_told_of_a_constant_reward():
    diagnosis = Diagnosis(tiny.config(), total_steps=2)
    assert diagnosis.observe(HEALTHY | PROBLEMS["constant_reward"]) == {}
    assert set(diagnosis.observe(HEALTHY | PROBLEMS["constant_reward"])) == {"constant_reward"}


def test_a_reward_that_failed_everywhere_is_said_to_have_failed():
    """Regression: a bug in the function was answered by advice about answers and demonstrations."""
    config = tiny.config()
    samples = config.data.train_batch_size * config.rollout.n
    row = HEALTHY | PROBLEMS["constant_reward"] | {"reward/rule_failures": samples}
    text = Diagnosis(config, total_steps=1).observe(row)["constant_reward"]
    assert text.startswith("every response of the last step had the reward 0: ")
    assert text.endswith("The reward failed on each of them: the first failure was logged")
    some = Diagnosis(config, total_steps=1).observe(row | {"reward/rule_failures": samples - 1})
    assert some["constant_reward"].endswith("may help")


def test_one_step_of_ratios_off_1_is_no_pattern():
    """Regression: the message says "in each of the last 3 steps"."""
    assert observe([{"actor/first_log_ratio": 0.7}, *[{}] * 5]) == []


def test_lengths_that_run_away_with_the_reward_are_said():
    longest = tiny.config().data.max_response_length
    growth = [
        {"response_length/mean": longest * (0.2 + step / 40), "reward/mean": step / 20}
        for step in range(30)
    ]
    ((name, message),) = observe(growth)
    assert name == "runaway_length" and "overlong_buffer_len" in message
    # Longer responses alone are no problem.
    assert observe([row | {"reward/mean": 0.5} for row in growth]) == []


def test_a_constant_reward_is_said_with_wrong_responses():
    diagnosis = Diagnosis(tiny.config(), STEPS)
    said = {}
    for _ in range(10):
        said |= diagnosis.observe(HEALTHY | PROBLEMS["constant_reward"], ["looked for '4', in '5'"])
    assert said["constant_reward"].endswith("may help\n  looked for '4', in '5'")


@pytest.mark.parametrize("name", ["equal_groups", "duplicates"])
def test_a_policy_that_solves_its_prompts_may_repeat_itself(name):
    assert observe([PROBLEMS[name] | {"reward/accuracy": 0.95}] * STEPS) == []
    assert observe([PROBLEMS[name] | {"reward/accuracy": 0.5}] * STEPS) != []


def test_one_response_to_all_prompts_is_said():
    ((name, message),) = observe([{"rollout/most_common": 0.8}] * STEPS)
    assert name == "duplicates" and "80% of all responses are identical" in message


def test_equal_groups_are_no_problem_of_estimators_that_do_not_compare_them():
    assert observe([PROBLEMS["equal_groups"]] * STEPS, algorithm__adv_estimator="gae") == []


def test_idle_slots_of_runs_that_sample_ahead_do_not_name_the_option():
    ahead = {"rollout__max_staleness": 1, "algorithm__rollout_is": "token"}
    observed = observe([PROBLEMS["idle_slots"]] * STEPS, **ahead)
    assert [name for name, _ in observed] == ["idle_slots"]
    assert not any("max_staleness" in message for _, message in observed)


def test_metrics_that_a_run_does_not_have_are_no_problem():
    diagnosis = Diagnosis(tiny.config(), STEPS)
    for _ in range(STEPS):
        assert diagnosis.observe({"actor/entropy": 1.0}) == {}


@pytest.mark.parametrize(("turns", "named"), [(None, False), (5, True)])
def test_dialogues_that_are_cut_off_name_the_limit_of_turns_too(turns, named):
    config = tiny.config(
        rollout__multi_turn__environment="jax_ppo.environments.calculator:Calculator",
        rollout__multi_turn__max_assistant_turns=turns,
    )
    diagnosis = Diagnosis(config, STEPS)
    for _ in range(STEPS):
        messages = diagnosis.observe(HEALTHY | PROBLEMS["truncation"])
    (left,) = Diagnosis(config, STEPS).observe(PROBLEMS["nothing_left"]).values()
    for message, after in ((messages["truncation"], " before"), (left, ", and")):
        limit = f"or config.rollout.multi_turn.max_assistant_turns=5{after}"
        assert (limit in message) == named
