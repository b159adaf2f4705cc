"""`python -m jax_ppo` lists the commands and runs them."""

import subprocess
import sys

import pytest

import jax_ppo
from jax_ppo import __main__ as commands
from jax_ppo import command


def test_without_arguments_the_commands_are_listed():
    command = [sys.executable, "-m", "jax_ppo"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in commands.COMMANDS:
        assert f"\n  {name} " in output
    assert f"jax_ppo {jax_ppo.__version__}" in output
    assert "python -m jax_ppo train --config=arithmetic" in output


def test_a_command_gets_its_options(capsys):
    with pytest.raises(SystemExit, match=r"config\.actor\.clip_rato: .*clip_ratio\?"):
        commands.main(["train", "--config=arithmetic", "--config.actor.clip_rato=1"])
    with pytest.raises(SystemExit):
        commands.main(["reward_model", "--help"])
    assert "usage: python -m jax_ppo.reward_model" in capsys.readouterr().out
    commands.main(["config"])
    assert "\nactor.optim.lr  " in capsys.readouterr().out
    commands.main(["--version"])
    assert capsys.readouterr().out == f"{jax_ppo.__version__}\n"


def test_a_wrong_command_gets_the_nearest():
    with pytest.raises(SystemExit, match="trian: no such command.*Did you mean 'train'"):
        commands.main(["trian"])


@pytest.mark.parametrize(("installed", "remedy"), [(True, ""), (False, "pip install tensorboard")])
def test_the_curves_line_names_what_is_missing(monkeypatch, installed, remedy):
    spec = object() if installed else None
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: spec)
    line = command.describe_curves("output/run")
    assert line.startswith("curves: tensorboard --logdir output/run/tensorboard")
    assert remedy in line and ("pip" in line) == bool(remedy)
