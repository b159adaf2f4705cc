import os
import subprocess

import jax
import pytest

import jax_ppo
import quick_compilation
import tiny
from jax_ppo.errors import UserError
from jax_ppo.runtime import backends, compat
from whole_run import run_command

KNOWN = "--xla_backend_optimization_level=0"


@pytest.fixture(autouse=True)
def untried(monkeypatch):
    monkeypatch.delenv("JAX_PPO_TRIED_XLA_FLAGS", raising=False)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param("--xla_nothing=true", marks=pytest.mark.slow),
        pytest.param("--xla_backend_optimization_level=high", marks=pytest.mark.exhaustive),
    ],
)
def test_a_command_ends_in_one_line_that_names_a_flag_that_xla_refuses(wrong, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{KNOWN} {wrong}")
    result = run_command("train", "--config=arithmetic", check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: XLA_FLAGS: ")
    assert wrong in result.stderr and KNOWN not in result.stderr


def test_the_python_api_refuses_a_flag_that_would_end_the_process(monkeypatch, tmp_path):
    """Regression: only commands asked, and a notebook's kernel died."""
    monkeypatch.setenv("XLA_FLAGS", f"{KNOWN} --xla_nothing=true")
    for call in (jax_ppo.load_policy, lambda folder: jax_ppo.train(tiny.config(), folder)):
        with pytest.raises(UserError, match="^XLA_FLAGS: .* --xla_nothing=true"):
            call(tmp_path)


def test_refused_flags_are_dropped_with_one_line_and_the_others_are_tried_once(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"{KNOWN} --xla_nothing=true --xla_neither")
    lines = []
    quick_compilation.drop_unknown(lines.append)
    assert os.environ["XLA_FLAGS"] == KNOWN
    assert lines == [
        "XLA_FLAGS: without --xla_nothing=true --xla_neither, which the installed jaxlib refuses"
    ]
    monkeypatch.setattr(subprocess, "run", None)  # no child is started again
    quick_compilation.drop_unknown(lines.append)
    backends.require_settings()
    assert len(lines) == 1


def test_flags_are_left_to_jaxlib_where_a_child_cannot_try_them(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_nothing=true")
    with pytest.raises(UserError, match="--xla_nothing=true"):
        backends.require_settings()
    monkeypatch.setattr(compat, "PARSES_XLA_FLAGS", "raise SystemExit(1)")
    backends.require_settings()


def test_blanks_are_no_file_of_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", " ")
    backends.require_settings()
    assert "XLA_FLAGS" not in os.environ


def test_a_quotation_that_is_not_closed_is_refused_as_a_whole(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_nothing='a b")
    assert backends.refused_flags() == ["--xla_nothing='a b"]


def test_jaxlib_knows_each_flag_for_gpus_in_the_table(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", " ".join(backends.GPU_FLAGS | backends.GPU_VARIANTS))
    assert backends.refused_flags() == []


@pytest.mark.parametrize(
    ("given", "ours", "result", "line"),
    [
        ("", "--xla_gpu_autotune_level=1", "--xla_gpu_autotune_level=1", ""),
        (KNOWN, "--xla_gpu_ftz=true", f"{KNOWN} --xla_gpu_ftz=true", ""),
        ("--xla_gpu_ftz=false", "--xla_gpu_ftz=true", "--xla_gpu_ftz=false", "XLA_FLAGS sets it"),
        (KNOWN, "--xla_nothing=true", KNOWN, "the installed jaxlib refuses it"),
    ],
)
def test_flags_for_gpus_are_added_unless_the_user_or_jaxlib_has_others(
    monkeypatch, capsys, given, ours, result, line
):
    monkeypatch.setattr(backends, "GPU_FLAGS", {ours: "why"})
    monkeypatch.setenv("XLA_FLAGS", given)
    backends.add_gpu_flags()
    backends.add_gpu_flags()  # what is there is not added again
    assert os.environ["XLA_FLAGS"] == result
    expected = f"note: a run leaves out {ours}: {line}\n" if line else ""
    assert capsys.readouterr().err == 2 * expected


def test_programs_of_tests_share_what_they_are_lowered_in():
    contexts = [jax.jit(lambda x, y=y: x + y).lower(1).compiler_ir().context for y in range(3)]
    assert contexts[1] in (contexts[0], contexts[2])  # ten programs share one
