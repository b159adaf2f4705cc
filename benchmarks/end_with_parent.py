"""Replace this process by a command that Linux kills when its parent process ends.

    python end_with_parent.py PARENT_PROCESS_ID COMMAND [ARGUMENT ...]

A benchmark may be killed with SIGKILL, which it cannot handle. Without this, its workers would
compute until the end of their turn and disturb the next measurement. Elsewhere than on Linux the
command runs unchanged; a worker then ends after its turn, when its standard input is closed.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent = int(sys.argv[1])
    if sys.platform == "linux":
        # The setting survives exec.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # The parent may have ended before the setting took effect.
        if os.getppid() != parent:
            sys.exit("the parent process has ended")
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
