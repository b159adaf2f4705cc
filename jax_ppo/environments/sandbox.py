"""Run code that a model wrote: in a separate process, with little time, memory and access.

The process has a temporary working folder, an environment without the run's variables, limits of
processor time, memory, files and output, and, where Linux allows it, no network, no other
processes (namespaces of an unprivileged user) and no files but its own and Python's (Landlock).
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_LAUNCHER = str(Path(__file__).with_name("sandbox_launcher.py"))
MAX_OUTPUT = 2**16  # bytes
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
_GIB = 2**30


def run_code(code: str, timeout: float, memory_gib: float) -> str:
    """Return what Python code prints, its errors included, and how it ended if abnormally.

    It may take `timeout` seconds and `memory_gib` GiB of address space.
    """
    return _run("run", code, timeout, memory_gib)


def describe_gaps() -> list[str]:
    """Return what this system cannot deny to code, such as "the network and other processes"."""
    return _run("probe", "", timeout=60.0, memory_gib=1.0).splitlines()


def _run(what: str, code: str, timeout: float, memory_gib: float) -> str:
    folder = os.path.realpath(tempfile.mkdtemp(prefix="sandbox"))
    try:
        # Half of a surrogate pair has no encoding.
        Path(folder, "main.py").write_bytes(code.encode(errors="replace"))
        limits = [str(int(memory_gib * _GIB)), str(int(timeout) + 1)]
        with subprocess.Popen(
            [sys.executable, "-I", _LAUNCHER, what, *limits, *_SYSTEM, sys.prefix, sys.base_prefix],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={
                "HOME": folder,
                "TMPDIR": folder,
                "PATH": "/usr/bin:/bin",
                "LANG": "C.UTF-8",
                "PYTHONHASHSEED": "0",
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",  # threads reserve address space
                "OPENBLAS_NUM_THREADS": "1",
            },
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            try:
                output, is_complete = _read(process.stdout.fileno(), time.monotonic() + timeout)
                if is_complete and len(output) < MAX_OUTPUT:
                    process.wait(timeout)
            except subprocess.TimeoutExpired:
                is_complete = False
            finally:
                _end(process)
    finally:
        # Not by TemporaryDirectory: before Python 3.11.8 its cleanup changes the permissions of
        # what symbolic links of the code point to. Processes that outlive it may still write.
        shutil.rmtree(folder, ignore_errors=True)
    text = output[:MAX_OUTPUT].decode(errors="replace").replace(f"{folder}/", "")
    if len(output) >= MAX_OUTPUT:
        return f"{text}\n[output cut]"
    if not is_complete:
        return f"{text}\n[stopped after {timeout:g} seconds]"
    if process.returncode not in (0, 1):  # 1: an exception, which is printed
        return f"{text}\n[ended with exit code {process.returncode}]"
    return text


def _read(descriptor: int, end: float) -> tuple[bytes, bool]:
    """Return what is written until MAX_OUTPUT or a time, and whether that was all."""
    output = b""
    while len(output) < MAX_OUTPUT:
        remaining = end - time.monotonic()
        if remaining <= 0 or not select.select([descriptor], [], [], remaining)[0]:
            return output, False
        part = os.read(descriptor, MAX_OUTPUT)
        if not part:
            return output, True
        output += part
    return output, True


def _end(process: subprocess.Popen) -> None:
    """End the launcher, which then kills the code, and whatever is left of its group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all have ended
        pass
