"""The registries of estimators, losses and aggregations, and what reads their entries."""

import inspect
import os

import pytest

from jax_ppo.config.schema import all_options
from jax_ppo.registries import (
    ADVANTAGE_ESTIMATORS,
    AGGREGATIONS,
    IMPORTANCE_WEIGHTS,
    POLICY_LOSSES,
    REGISTRIES,
)
from whole_run import ROOT, run_python

ENTRIES = [entry for registry in REGISTRIES for entry in registry.values()]
OPTIONS = {option.name: option for option in all_options()}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.path.partition(":")[2])
def test_an_entry_has_its_function(entry):
    assert callable(entry.function)
    assert entry.summary and "\n" not in entry.summary


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.title)
def test_the_arguments_of_a_function_are_set_by_options_with_its_defaults(registry):
    section = registry.options[0].rpartition(".")[0]
    for entry in registry.values():
        for argument, option in entry.arguments.items():
            default = inspect.signature(entry.function).parameters[argument].default
            assert default in (inspect.Parameter.empty, OPTIONS[f"{section}.{option}"].default)


def test_the_pages_say_when_to_use_each_estimator_and_loss():
    for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES, IMPORTANCE_WEIGHTS):
        assert all(entry.when for entry in registry.values())


def test_an_option_offers_the_entries_of_its_registry():
    for registry in REGISTRIES:
        for name in registry.options:
            assert set(OPTIONS[name].facts.choices) <= set(registry)
        named = {choice for name in registry.options for choice in OPTIONS[name].facts.choices}
        assert named == set(registry)
    assert "k3+" not in OPTIONS["algorithm.kl_penalty"].facts.choices


def test_a_users_function_needs_nothing():
    entry = ADVANTAGE_ESTIMATORS.lookup("mine.py:median")
    assert not entry.needs_critic and not entry.needs_groups and not entry.whitens
    with pytest.raises(KeyError):
        AGGREGATIONS.lookup("mean")


def test_an_estimator_a_loss_and_a_kl_need_one_entry_each():
    """Choices, help, pages, validation, notes, translation and a step read the entry alone."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "harness")))
    finished = run_python("-c", "import one_entry\none_entry.main()", PYTHONPATH=path)
    for line in ("midrange: score less the middle", "tanh: tanh of the log-", "offset: 3 + |d|"):
        assert line in finished.stdout
