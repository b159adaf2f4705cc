"""Run code that a model wrote: in a separate process, with little time, memory and access.

The process has a temporary working folder, an environment without the run's variables, limits of
processor time, memory, files and output, and, where Linux allows it, no network, no other
processes (namespaces of an unprivileged user) and no files but its own and Python's (Landlock).

The new process runs this file as a script, which confines it and then becomes the interpreter of
the code. The file imports nothing of the package.
"""

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MAX_OUTPUT = 2**16  # bytes
# What the system may be unable to deny to the code.
NO_NAMESPACES = "the network and other processes"
NO_LANDLOCK = "this user's files"
NO_LIMITS = "more memory, time or files than the limits"

_LAUNCHER = __file__
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38  # of prctl(2)
# Of unshare(2): separate network, processes, shared memory and mounts, without any rights.
_NAMESPACES = 0x40000000 | 0x20000000 | 0x08000000 | 0x00020000 | 0x10000000
_SOCKETS = b"/run"  # the folder of the system's sockets, which Landlock does not deny
_MAX_PROCESSES, _MAX_FILES = 64, 64
# Landlock's system calls have the same numbers on all architectures.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ALL_ACCESS = 2**13 - 1  # of files, in its first version
_FILE_ACCESS = 1 | 2 | 4  # execute, write, read
_READ_ACCESS = 1 | 4 | 8  # execute, read, list

_libc = ctypes.CDLL(None, use_errno=True)


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
        limits = [str(int(memory_gib * 2**30)), str(int(timeout) + 1)]
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
    with contextlib.suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave_namespaces() -> bool:
    """Leave the network and the processes of the system; return whether it is allowed."""
    if sys.platform != "linux" or _libc.unshare(_NAMESPACES):
        return False
    if os.path.exists(_SOCKETS) and _libc.mount(b"tmpfs", _SOCKETS, b"tmpfs", 0, None):
        return False
    resource.setrlimit(resource.RLIMIT_NPROC, (_MAX_PROCESSES, _MAX_PROCESSES))
    return True


def _restrict_files(folder: str, readable: list[str]) -> bool:
    """Leave access to a folder, and to read others; return whether the system can do it."""
    if sys.platform != "linux" or _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    attributes = struct.pack("=Q", _ALL_ACCESS)
    ruleset = _libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    rules = [(folder, _ALL_ACCESS), ("/dev/null", _FILE_ACCESS), ("/dev/urandom", _FILE_ACCESS)]
    for path, access in rules + [(path, _READ_ACCESS) for path in readable]:
        if not os.path.exists(path):
            continue
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = access if os.path.isdir(path) else access & _FILE_ACCESS
        rule = struct.pack("=Qi", allowed, opened)
        if _libc.syscall(_ADD_RULE, ruleset, 1, rule, 0):
            return False
    return bool(_libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)


def _confine_and_run(what: str, memory: int, seconds: int, readable: list[str]) -> None:
    """Run `main.py`, limited to bytes, seconds and folders; "probe": print what stays allowed."""
    _end_with_parent()
    missing = []
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_NOFILE, _MAX_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        try:
            resource.setrlimit(limit, (value, value))
        except (ValueError, OSError):  # macOS has no limit of address space
            missing = [NO_LIMITS]
    missing += [] if _leave_namespaces() else [NO_NAMESPACES]
    # The next child is the first process of the new namespace, and all others end with it. SIGTERM
    # ends it whatever it has done to its session or to what its parent's end means to it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        # As a shell reports a signal.
        os._exit(code if code >= 0 else 128 - code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    _end_with_parent()
    missing += [] if _restrict_files(os.getcwd(), readable) else [NO_LANDLOCK]
    if what == "probe":
        print(*missing, sep="\n", end="", flush=True)
        os._exit(0)
    os.execv(sys.executable, [sys.executable, "-s", "main.py"])


if __name__ == "__main__":
    _confine_and_run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
