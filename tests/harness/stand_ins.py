"""Shell scripts that stand in for the programs that the launchers call."""

import pathlib
import subprocess

from waiting import HANG_SECONDS

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"
# Arguments that a launcher must hand on as they are.
TRICKY = ["--config=configs/a b.py", '--config.reward.function=it\'s "$HOME"; echo *', "", "--n=1"]


def capture(*command, **options):
    """Run a command to its end, and return it with its output and its errors."""
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, **options)


def script(path, body):
    path.write_text(f"#!/usr/bin/env bash\n{body}")
    path.chmod(0o755)
    return path
