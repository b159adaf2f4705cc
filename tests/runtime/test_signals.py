"""SIGTERM and Ctrl-C: recorded while there is a step to save, and otherwise the end at once."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from jax_ppo.runtime import signals
from waiting import HANG_SECONDS, is_running, wait_until

ROOT = pathlib.Path(__file__).parents[2]
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}

PROGRAM = """
import hashlib, os, signal, sys, threading, time, warnings
from jax_ppo.runtime import signals
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have ignored it
signals.LIMIT_SECONDS = 0.2

def say(text):
    print(text, flush=True)

def wait():
    # In C, where the interpreter runs no signal handlers, for many minutes.
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

def starting():
    say("ready")
    wait()

def loop():
    signals.defer_signals()
    say("ready")
    while signals.received_signal() is None:
        time.sleep(0.01)
    # The second one is what `timeout` sends to the process's group: at once, on an idle machine.
    signals._SAME_SIGNAL_SECONDS = 3600
    os.kill(os.getpid(), signals.received_signal())
    time.sleep(0.6)  # longer than the limit
    signals.record_saved_step(7)

def stuck():
    signals.defer_signals()
    threading.Thread(target=say_when_received, daemon=True).start()
    say("ready")
    wait()

def say_when_received():
    while signals._active._received_at is None:
        time.sleep(0.01)
    say("received")

def limited():
    signals.defer_signals()
    time.sleep(0.6)  # before the signal: does not count
    with signals.limited("scoring the rewards"):
        say("ready")
        wait()

def workers():
    from jax_ppo.config.schema import Reward
    from jax_ppo.rewards import worker_pool
    from jax_ppo.rewards.samples import RewardRow
    signals.defer_signals()
    options = Reward(function=sys.argv[2], timeout=100.0)
    with signals.limited("scoring the rewards"):
        worker_pool.RewardWorkers(options, 1).score([RewardRow("x")], ["y"])

def forked():
    signals.defer_signals()
    reader, writer = os.pipe()
    # Libraries and reward functions fork in spite of Python's warning of it.
    warnings.simplefilter("ignore", DeprecationWarning)
    child = os.fork()
    if child == 0:
        os.write(writer, b"1")
        time.sleep(3600)
    os.read(reader, 1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGTERM
    time.sleep(0.3)
    assert signals.received_signal() is None
    say("ready")
    loop()

with signals.handle_stop_signals(ends_process=True):
    globals()[sys.argv[1]]()
    signals.raise_if_stopped(say)
"""


def acknowledged(number):
    return f"{number.name}: {signals._ACKNOWLEDGEMENT}\n"


def run(way, number, *, argument="", again=False):
    """Send a signal once the program is ready, and another one once it has received the first.

    Returns exit code, output, errors, and the seconds since the first signal.
    """
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, way, argument],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n", process.communicate()
        started = time.monotonic()
        process.send_signal(number)
        if again:
            assert process.stdout.readline() == "received\n", process.communicate()
            time.sleep(2 * signals._SAME_SIGNAL_SECONDS)
            process.send_signal(number)
        try:
            output, errors = process.communicate(timeout=HANG_SECONDS)
        finally:
            process.kill()
        return process.returncode, output, errors, time.monotonic() - started


@pytest.mark.parametrize("number", CODES)
def test_before_a_step_can_be_saved_the_process_ends_at_once(number):
    code, _, errors, _ = run("starting", number)
    assert code == CODES[number]
    assert errors == f"stopped by {number.name} before a step could be saved\n"


@pytest.mark.parametrize("number", CODES)
def test_a_step_is_saved_and_named_however_long_it_takes(number):
    code, output, errors, _ = run("loop", number)
    assert (code, errors) == (CODES[number], acknowledged(number))
    assert output == f"stopped by {number.name}, saved step 7\n"


def test_a_second_signal_ends_the_process_at_once():
    code, _, errors, _ = run("stuck", signal.SIGINT, again=True)
    stopped = "stopped by SIGINT, not saved: a second signal followed\n"
    assert (code, errors) == (130, acknowledged(signal.SIGINT) + stopped)


def test_work_with_a_limit_is_not_waited_for_longer():
    code, _, errors, seconds = run("limited", signal.SIGTERM)
    stopped = "stopped by SIGTERM, not saved: scoring the rewards did not end within 0.2 s\n"
    assert (code, errors) == (143, acknowledged(signal.SIGTERM) + stopped)
    assert seconds >= 0.2


def test_a_hung_reward_function_and_its_children_are_killed(tmp_path):
    (tmp_path / "hung.py").write_text(
        "import os, subprocess, time\n"
        "def score(**columns):\n"
        "    child = subprocess.Popen(['sleep', '3600'])\n"
        "    print(f'{os.getpid()} {child.pid}', file=open(__file__ + '.pids', 'w'))\n"
        "    os.write(1, b'ready\\n')\n"
        "    time.sleep(3600)\n"
    )
    code, _, errors, _ = run("workers", signal.SIGTERM, argument=f"{tmp_path}/hung.py:score")
    stopped = acknowledged(signal.SIGTERM) + "stopped by SIGTERM, not saved"
    assert code == 143 and errors.startswith(stopped)
    assert errors.count("\n") == 2
    pids = (tmp_path / "hung.py.pids").read_text().split()
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)))


def test_a_signal_to_a_forked_child_ends_the_child_alone():
    code, output, errors, _ = run("forked", signal.SIGTERM)
    assert (code, errors) == (143, acknowledged(signal.SIGTERM))
    assert output.endswith("stopped by SIGTERM, saved step 7\n")


class TestPythonApi:
    """The process belongs to the caller: exceptions in its main thread, and its own handlers."""

    @pytest.fixture(autouse=True)
    def interruptible(self, monkeypatch):
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        monkeypatch.setattr(signals, "LIMIT_SECONDS", 0.2)
        yield
        signal.signal(signal.SIGINT, previous)

    def test_the_callers_handlers_are_restored(self):
        before = [signal.getsignal(number) for number in CODES]
        with signals.handle_stop_signals(ends_process=False):
            inside = [signal.getsignal(number) for number in CODES]
        assert [signal.getsignal(number) for number in CODES] == before
        assert not set(map(id, before)) & set(map(id, inside))
        assert signal.set_wakeup_fd(-1) == -1

    @pytest.mark.parametrize(
        ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
    )
    def test_a_stopped_run_raises_after_it_saved(self, number, error):
        lines = []
        with pytest.raises(error) as caught, signals.handle_stop_signals(ends_process=False):
            signals.defer_signals()
            signals.raise_if_stopped(lines.append)  # nothing yet
            os.kill(os.getpid(), number)
            assert signals.received_signal() == number
            signals.record_saved_step(3)
            signals.raise_if_stopped(lines.append)
        assert lines == [f"stopped by {number.name}, saved step 3"]
        assert caught.value.args in ((lines[0],), (143,))

    @pytest.mark.parametrize("way", ["starting", "second signal", "limit"])
    def test_what_does_not_end_is_interrupted(self, way):
        with (
            pytest.raises(KeyboardInterrupt),
            signals.handle_stop_signals(ends_process=False) as stop,
        ):
            if way != "starting":
                signals.defer_signals()
            os.kill(os.getpid(), signal.SIGINT)
            if way == "second signal":
                wait_until(lambda: stop._received_at is not None)
                time.sleep(2 * signals._SAME_SIGNAL_SECONDS)
                os.kill(os.getpid(), signal.SIGINT)
            with signals.limited("it") if way == "limit" else signals.contextlib.nullcontext():
                time.sleep(HANG_SECONDS)

    def test_a_thread_that_is_waited_for_is_not_taken_for_ended(self):
        release = threading.Event()
        thread = threading.Thread(target=release.wait)
        thread.start()
        threading.Timer(3 * signals._POLL_SECONDS, release.set).start()
        with pytest.raises(KeyboardInterrupt), signals.handle_stop_signals(ends_process=False):
            threading.Timer(signals._POLL_SECONDS, os.kill, (os.getpid(), signal.SIGINT)).start()
            thread.join()
            time.sleep(HANG_SECONDS)
        # From Python 3.13 on, an interrupted wait does not take the thread for ended.
        assert release.is_set() or thread.is_alive()

    def test_an_ignored_signal_stays_ignored(self):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with signals.handle_stop_signals(ends_process=False):
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.received_signal() is None
