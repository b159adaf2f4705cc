"""Our kernels agree with other projects' own functions except for listed differences."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
def test_peers_agree_or_differ_for_the_reason_listed():
    """The environments are those that benchmarks/peers.sh makes.

    JAX_PPO_PEERS and JAX_PPO_VERL_PEERS name their Pythons.
    """
    named = {
        "--peers": os.environ.get("JAX_PPO_PEERS"),
        "--verl-peers": os.environ.get("JAX_PPO_VERL_PEERS"),
    }
    options = [part for option, python in named.items() if python for part in (option, python)]
    if not options:
        pytest.skip(
            "neither JAX_PPO_PEERS nor JAX_PPO_VERL_PEERS names the Python of an environment "
            "with the peers"
        )
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "oracles.py"),
        *options,
        "--cases",
        "2",
        "--out",
        "",
    ]
    ended = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, text=True
    )
    assert ended.returncode == 0, ended.stdout
