"""Confine this process, then become the Python interpreter that runs a model's code.

Run as a script in a new process, by `sandbox.py`; it imports nothing of the package.
"""

import ctypes
import os
import resource
import signal
import struct
import sys

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

NO_NAMESPACES = "the network and other processes"
NO_LANDLOCK = "this user's files"
NO_LIMITS = "more memory, time or files than the limits"

_libc = ctypes.CDLL(None, use_errno=True)


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


def main() -> None:
    """Run `main.py` of the working folder; with "probe", print what cannot be denied to it.

    The arguments are what to do, bytes of memory, seconds of processor time, and folders that may
    be read.
    """
    what, memory, seconds, *readable = sys.argv[1:]
    _end_with_parent()
    missing = []
    for limit, value in (
        (resource.RLIMIT_AS, int(memory)),
        (resource.RLIMIT_FSIZE, int(memory)),
        (resource.RLIMIT_CPU, int(seconds)),
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
    main()
