"""Shell scripts that stand in for the programs that the launchers call."""

import pathlib
import time

LAUNCH = pathlib.Path(__file__).parents[2] / "launch"
# Arguments that a launcher must hand on as they are.
TRICKY = ["--config=configs/a b.py", '--config.reward.function=it\'s "$HOME"; echo *', "", "--n=1"]


def script(path, body):
    path.write_text(f"#!/usr/bin/env bash\n{body}")
    path.chmod(0o755)
    return path


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
