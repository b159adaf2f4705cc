"""`python -m jax_ppo` lists the commands and runs them."""

import contextlib
import datetime
import importlib
import io
import json
import logging
import os
import pkgutil
import signal
import subprocess
import sys
import types

import pytest

import jax_ppo
import tiny
from jax_ppo import __main__ as commands
from jax_ppo import command
from jax_ppo.errors import UserError
from jax_ppo.reporting import sinks
from whole_run import run_python


def test_without_arguments_the_commands_are_listed():
    output = run_python("-m", "jax_ppo").stdout
    for name in commands.COMMANDS:
        assert f"\n  {name} " in output
    assert f"jax_ppo {jax_ppo.__version__}" in output
    assert "python -m jax_ppo train --config=arithmetic" in output


@pytest.mark.parametrize("name", ["train", "check", ""])
def test_ctrl_c_while_modules_are_loaded_is_one_line(name, tmp_path):
    """Regression: in the first half of a second it was a traceback."""
    for module in ("ml_collections", "tqdm", "difflib"):
        (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    module = f"jax_ppo.{name}".rstrip(".")
    result = run_python("-m", module, check=False, PYTHONPATH=str(tmp_path))
    assert result.returncode == -signal.SIGINT and result.stderr == "stopped by SIGINT\n"


def test_a_command_gets_its_options(capsys):
    with pytest.raises(SystemExit, match=r"config\.actor\.clip_rato: .*clip_ratio\?"):
        commands.main(["train", "--config=arithmetic", "--config.actor.clip_rato=1"])
    with pytest.raises(SystemExit):
        commands.main(["reward_model", "--help"])
    printed = capsys.readouterr().out
    assert "usage: python -m jax_ppo.reward_model" in printed
    # Only what the command reads.
    assert "\nsupervised.center_coef = " in printed and "\nactor." not in printed
    commands.main(["config", "--help"])
    commands.main(["translate", "verl", "--help"])
    printed = capsys.readouterr().out
    assert "\nactor.optim.lr = " in printed and "jax_ppo.translate verl|trl" in printed
    commands.main(["--version"])
    assert capsys.readouterr().out == f"{jax_ppo.__version__}\n"


def test_no_command_says_that_torch_is_missing(tmp_path):
    """Whichever of them imports transformers first, and why."""
    hidden = (
        "import importlib.util as util\nfind = util.find_spec\n"
        "util.find_spec = lambda name, *package: None if name == 'torch' else find(name, *package)"
    )
    (tmp_path / "sitecustomize.py").write_text(hidden)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    environment.pop("TRANSFORMERS_NO_ADVISORY_WARNINGS", None)
    code = "import jax_ppo, transformers; print(transformers.utils.is_torch_available())"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("False\n", "")


def test_a_wrong_command_gets_the_nearest():
    with pytest.raises(SystemExit, match="trian: no such command.*Did you mean 'train'"):
        commands.main(["trian"])


@pytest.mark.parametrize(("installed", "remedy"), [(True, ""), (False, "pip install tensorboard")])
def test_the_curves_line_names_what_is_missing(monkeypatch, installed, remedy):
    spec = object() if installed else None
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: spec)
    line = sinks.describe_curves("output/run")
    assert line.startswith("curves: tensorboard --logdir output/run/tensorboard")
    assert remedy in line and ("pip" in line) == bool(remedy)
    assert "--logdir 'my runs/a/tensorboard'" in sinks.describe_curves("my runs/a")


ODD_TEXT = "½ … ⏎ 猫 \U0001f408 \ud83d"
COMMANDS_THAT_PRINT = {
    "check": ["{folder}/rows.jsonl"],
    "plan": ["--help"],
    "translate": [
        "verl",
        f"python3 -m verl.trainer.main_ppo trainer.experiment_name='{ODD_TEXT[:-1]}'",
    ],
    "train": ["--help"],
}


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "gbk", "utf-8"])
@pytest.mark.parametrize("name", COMMANDS_THAT_PRINT)
def test_no_encoding_of_the_output_ends_a_command(name, encoding, tmp_path, monkeypatch):
    rows = [{"question": f"{ODD_TEXT} {i}", "answer": f"{ODD_TEXT} #### {i}"} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", output)
    arguments = [argument.format(folder=tmp_path) for argument in COMMANDS_THAT_PRINT[name]]
    with contextlib.suppress(SystemExit):
        importlib.import_module(f"jax_ppo.{name}").main([name, *arguments])
    print(ODD_TEXT, flush=True)
    assert len(output.buffer.getvalue()) > len(ODD_TEXT)


def test_a_run_with_checkpoints_keeps_its_options_until_the_resume_is_accepted(tmp_path):
    for has_checkpoints in (False, True):
        (tmp_path / "config.json").write_text("old")
        if has_checkpoints:
            (tmp_path / "checkpoints" / "3").mkdir(parents=True)
        with command.prepared_run(tiny.config(), tmp_path):
            kept = (tmp_path / "config.json").read_text() == "old"
        assert kept == has_checkpoints


@pytest.mark.parametrize("runner", command.RUNNERS.values())
def test_what_runs_a_command_exists(runner):
    assert callable(pkgutil.resolve_name(runner))


def test_a_warning_names_no_module(monkeypatch, capsys):
    """Regression: a library's format made it WARNING:jax_ppo.data.tokenize_prompts:..."""
    monkeypatch.setattr(logging.root, "handlers", [])

    def read_options(arguments, name):
        logging.getLogger("jax_ppo.data.tokenize_prompts").warning("a row is dropped")
        raise UserError("no row is left")

    monkeypatch.setattr(command.command_line, "read_command_line", read_options)
    with pytest.raises(SystemExit, match="no row is left"):
        command.run_command([], "train")
    assert capsys.readouterr().err == "warning: a row is dropped\n"


@pytest.mark.parametrize("raised", ["KeyboardInterrupt('gone')", "SystemExit(0)"])
def test_an_end_of_python_that_no_signal_asked_for_is_an_error(raised, tmp_path, monkeypatch):
    """Regression: the process ended as after a signal, and those beside it waited for ever."""
    (tmp_path / "ends.py").write_text(f"def run(options, folder):\n    raise {raised}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ends", raising=False)
    monkeypatch.setitem(command.RUNNERS, "train", "ends:run")
    options = (tiny.config(), tmp_path / "work")
    monkeypatch.setattr(command.command_line, "read_command_line", lambda *_: options)
    with pytest.raises(SystemExit) as ended:
        command.run_command([], "train")
    line = f"error: {raised} was raised at {tmp_path / 'ends.py'}:2, not by a signal"
    assert ended.value.code == line


def test_a_run_and_its_evaluations_keep_the_date_of_the_first_start(tmp_path, monkeypatch):
    """Regression: a template that writes the date made other prompts on the next day."""

    def date(workdir, today, evaluates=False, **options):
        clock = types.SimpleNamespace(today=lambda: datetime.date.fromisoformat(today))
        monkeypatch.setattr(command, "datetime", types.SimpleNamespace(date=clock))
        with command.prepared_run(tiny.config(**options), workdir, evaluates) as (resolved, _):
            return resolved.data.date

    run = tmp_path / "run"
    assert date(run, "2026-02-03") == "2026-02-03"
    assert date(run, "2026-02-04") == "2026-02-04", "nothing is trained yet"
    (run / "checkpoints" / "2").mkdir(parents=True)
    assert date(run, "2026-02-05") == "2026-02-04"
    assert date(run, "2026-02-05", data__date="2026-01-01") == "2026-01-01", "refused on resume"
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (run, run / "checkpoints" / "2", "~/run/actor", run / "best" / "actor"):
        found = date(tmp_path / "evaluation", "2026-02-06", True, model__path=str(path))
        assert found == "2026-02-04", path
    (tmp_path / "config.json").write_text('{"data": ["of another program"]}')
    for path in ("A/B", "~/model"):
        assert date(tmp_path / "evaluation", "2026-02-06", True, model__path=path) == "2026-02-06"
    (run / "config.json").write_text('{"experiment_name": "", "data": {}}')
    assert date(run, "2026-02-05") == "", "a run from before dates were kept writes today's"
