"""Code of a model runs with little time, memory, output and access."""

import contextlib
import os
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from jax_ppo.environments import sandbox
from jax_ppo.environments.sandbox import NO_NAMESPACES, describe_gaps, run_code


def run(code, timeout=10.0, memory_gib=1.0):
    return run_code(code, timeout, memory_gib)


@pytest.fixture(scope="module")
def gaps():
    return describe_gaps()


def test_output_and_errors_are_returned_without_the_folder():
    assert run("print(6 * 7)") == "42\n"
    output = run("print('begun', flush=True)\n1 / 0")
    assert output.startswith("begun\nTraceback") and output.endswith(
        "ZeroDivisionError: division by zero\n"
    )
    assert 'File "main.py", line 2' in output and "/tmp" not in output
    assert run("import sys; sys.exit(3)") == "\n[ended with exit code 3]"


def test_code_that_leaves_its_session_and_its_parent_is_stopped():
    def folders():
        links = (Path(entry, "cwd") for entry in Path("/proc").glob("[0-9]*"))
        found = set()
        for link in links:
            with contextlib.suppress(OSError):
                found.add(os.readlink(link))
        return {folder for folder in found if "/sandbox" in folder}

    before = folders()
    code = "import ctypes, os, time\nos.setsid(); ctypes.CDLL(None).prctl(1, 0); time.sleep(99)"
    assert "stopped after 2" in run(code, timeout=2.0)
    assert folders() <= before


def test_code_that_takes_too_long_is_stopped_with_its_processes(gaps):
    marker = f"marker{os.getpid()}"
    begun = time.monotonic()
    code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)', {marker!r}],"
        " start_new_session=True)\n"
        "print('waiting', flush=True)\ntime.sleep(99)"
    )
    assert run(code, timeout=1.0) == "waiting\n\n[stopped after 1 seconds]"
    assert time.monotonic() - begun < 5
    if NO_NAMESPACES in gaps:  # as in a chroot: a process that has left the session stays
        return
    time.sleep(0.2)
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert not [line for line in listed.splitlines() if line.endswith(marker)]


def test_memory_and_output_are_limited():
    assert "MemoryError" in run("x = bytearray(2**30)", memory_gib=0.5)
    output = run("while True: print('x' * 1000)")
    assert output.endswith("\n[output cut]") and len(output) < sandbox.MAX_OUTPUT + 100


def test_variables_files_and_processes_of_the_run_are_out_of_reach(monkeypatch, tmp_path, gaps):
    monkeypatch.setenv("HF_TOKEN", "hidden")
    (tmp_path / "secret.txt").write_text("hidden")
    assert "HF_TOKEN" not in run("import os; print(dict(os.environ))")
    if gaps:
        pytest.skip(f"this system cannot deny {gaps}")
    for path in (tmp_path / "secret.txt", f"/proc/{os.getpid()}/environ"):
        output = run(f"print(open({str(path)!r}, 'rb').read())")
        assert "PermissionError" in output and "hidden" not in output
    written = tmp_path / "written"
    assert "PermissionError" in run(f"open({str(written)!r}, 'w')") and not written.exists()
    assert "kill" not in run(
        f"import os\ntry: os.kill({os.getpid()}, 0); print('kill')\nexcept OSError: pass"
    )
    assert run("open('mine', 'w').write('x'); print(open('mine').read())") == "x\n"


def test_there_is_no_network(gaps):
    if gaps:
        pytest.skip(f"this system cannot deny {gaps}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        output = run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")
    assert "Network is unreachable" in output or "Cannot assign" in output


def test_what_the_system_cannot_deny_is_named(monkeypatch, tmp_path):
    """A launcher on a system without namespaces and Landlock, where code runs all the same."""
    text = Path(sandbox._LAUNCHER).read_text()
    broken = tmp_path / "launcher.py"
    broken.write_text(text.replace("sys.platform", "'other'"))
    monkeypatch.setattr(sandbox, "_LAUNCHER", str(broken))
    assert describe_gaps() == ["the network and other processes", "this user's files"]
    assert run("print(1)") == "1\n"


def test_calls_from_threads_do_not_disturb_each_other():
    outputs = {}
    threads = [
        threading.Thread(target=lambda i=i: outputs.update({i: run(f"print({i})")}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {i: f"{i}\n" for i in range(4)}
