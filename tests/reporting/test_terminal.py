"""What a run leaves on a terminal: nothing tears its lines, and a pipe gets no progress bar."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pyte
import pytest

LINES = 400  # more than a run prints, so that nothing scrolls away
BAR = re.compile(r"\d+%\|")
STEP = re.compile(r"step \d/4 .*? s\b.*")


def command(workdir):
    return [sys.executable, "-m", "jax_ppo.train", "--config=arithmetic:smoke"] + [
        f"--workdir={workdir}",
        "--config.trainer.log_samples=1",
    ]


def run_in_terminal(arguments, columns, cwd):
    """Run a command in a terminal of this width; return its screen."""
    screen = pyte.Screen(columns, LINES)
    stream = pyte.ByteStream(screen)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
    # These variables would win over the size of the terminal.
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        arguments,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    # Reading fails once the last process that had the terminal has ended.
    with contextlib.suppress(OSError):
        while data := os.read(ours, 65536):
            stream.feed(data)
    os.close(ours)
    assert process.wait() == 0
    return screen


@pytest.mark.exhaustive
@pytest.mark.parametrize("columns", [80, 200])
def test_nothing_tears_the_lines_of_a_run(columns, tmp_path, request):
    screen = run_in_terminal(command(tmp_path / "run"), columns, request.config.rootpath)
    rows = [row.rstrip() for row in screen.display]
    steps = [row for row in rows if STEP.fullmatch(row)]
    assert [line[:8] for line in steps] == [f"step {step}/4" for step in range(1, 5)]
    assert all(len(line) < columns and "left" not in line for line in steps)
    text = "\n".join(rows)
    assert len(re.findall(r"\nevaluation after step \d: accuracy", text)) == 3
    assert not BAR.search(text), "bars are gone at the end"
    assert "\noptions on the command line: trainer.log_samples=1\n" in text
    outcome = (
        r"\naccuracy 0\.\d+ → 0\.\d+ \(95 % .*; best .* after step \d\) in \d:\d\d\nreport: .*\n"
    )
    assert re.search(outcome, text)


@pytest.mark.exhaustive
def test_a_pipe_gets_lines_alone(tmp_path, request):
    process = subprocess.run(
        command(tmp_path / "run"), cwd=request.config.rootpath, capture_output=True, check=True
    )
    output = (process.stdout + process.stderr).decode()
    assert "\r" not in output and "\x1b" not in output and not BAR.search(output)
    assert len(re.findall(r"(?m)^step \d/4 .* s  \d+:\d\d left$", output)) == 4
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \w+: computing in float32", output)
