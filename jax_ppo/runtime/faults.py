"""How a run ends when one of its processes fails or is lost, or when nothing moves.

JAX's coordination service notices a process that is killed, or whose machine no longer answers,
within `distributed.heartbeat_seconds`, and JAX then aborts the others. This file adds:

- A process that fails stores the reason with the service, where a thread of every other process
  waits for it: all end at once, with the same exit code.
- A process that hangs keeps answering. `limit_stalls` has faulthandler print the stacks of its
  threads, and end it, once nothing has called `report_progress` for too long.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from jax_ppo.runtime import compat

LOST_EXIT_CODE = os.EX_TEMPFAIL  # another process was lost: a restart may succeed
_FAILURE = "jax_ppo/failure"  # in the store of JAX's coordination service
FOREVER_MS = 7 * 24 * 3600 * 1000
_LAST_BARRIER_MS = 3600 * 1000  # one process may still upload what another has ready
_REASON_SECONDS = 5  # how long a failed collective waits for another process's reason
_TELL_SECONDS = 1  # how long process 0, which has the service, stays for others to read a failure
_REPORTS_PER_LIMIT = 100
_stall_limit = 0.0
_reported_at = 0.0


def run_or_abort(function: Callable[[], object]) -> object:
    """Return function(); in a run of several processes, exit at once on an exception.

    An ordinary exit would wait for the others, which wait in a collective. The exit code is 1, or
    75 if most likely another process was lost; the others end with it, too.
    """
    try:
        result = function()
    # KeyboardInterrupt and SystemExit would leave the others waiting, too.
    except BaseException as error:
        # A signal ends all processes after the same step.
        ordinary_codes = (None, 0, 128 + signal.SIGTERM, 128 + signal.SIGINT)
        finished = isinstance(error, SystemExit) and error.code in ordinary_codes
        # jax.process_count() needs devices, which may be what failed.
        if finished or compat.distributed_state().num_processes == 1:
            _disconnect()
            raise
        import jax  # late: commands report progress before they load it

        code = 1
        # A program that is called again raises ValueError("UNKNOWN: ...") for a broken connection.
        is_status = isinstance(error, ValueError) and re.match("[A-Z_]+: ", str(error))
        is_error_of_program = is_status or isinstance(error, jax.errors.JaxRuntimeError)
        if is_error_of_program and "RESOURCE_EXHAUSTED" not in str(error):
            # Another process may be lost: the thread that waits for failures ends this one.
            time.sleep(_REASON_SECONDS)
            code = LOST_EXIT_CODE
        if isinstance(error, SystemExit):
            # sys.exit("error: ..."): the message is complete without a traceback.
            reason = str(error.code)
        else:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            traceback.print_exc()
        announce_failure(reason, code)
        end_abruptly(reason, code)
    _disconnect()
    return result


def end_with_others() -> None:
    """Let this process of several end, from now on, as soon as another one has failed."""
    import jax

    state = compat.distributed_state()

    def wait() -> None:
        # At the end of the run the call fails.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            failure = json.loads(state.client.blocking_key_value_get(_FAILURE, FOREVER_MS))
            if failure["process"] != state.process_id:
                if state.process_id == 0:
                    time.sleep(_TELL_SECONDS)
                end_abruptly(f"process {failure['process']}: {failure['reason']}", failure["code"])

    thread = threading.Thread(target=wait, name="failures", daemon=True)
    thread.start()

    def disconnect() -> None:
        if compat.distributed_state().client is not None:
            jax.distributed.shutdown()
        thread.join(_REASON_SECONDS)

    # At exit Python would end the thread within its call, which aborts the process.
    atexit.register(disconnect)


def announce_failure(reason: str, code: int) -> None:
    """Tell the other processes that this one fails, and with which exit code all end."""
    import jax

    state = compat.distributed_state()
    failure = {"process": state.process_id, "reason": reason, "code": code}
    # Only the first failure is stored; the others follow from it.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        state.client.key_value_set(_FAILURE, json.dumps(failure))
    if state.process_id == 0:
        time.sleep(_TELL_SECONDS)


def end_abruptly(reason: str, code: int) -> NoReturn:
    """End this process at once with an exit code, and a line with the reason."""
    state = compat.distributed_state()
    subject = "error"
    if state.num_processes > 1:
        subject = f"process {state.process_id} of {state.num_processes} ends the run"
    sys.stdout.flush()
    print(f"{subject}: {reason}", file=sys.stderr, flush=True)
    os._exit(code)


@contextlib.contextmanager
def limit_stalls(seconds: float) -> Iterator[None]:
    """End the process if nothing moves in the block for so long; 0 sets no limit.

    It prints the stacks of its threads, after the line "Timeout (H:MM:SS)!", and exits with code 1.
    """
    global _stall_limit, _reported_at
    _stall_limit, _reported_at = seconds, 0.0
    try:
        report_progress()
        yield
    finally:
        _stall_limit = 0.0
        faulthandler.cancel_dump_traceback_later()


def report_progress() -> None:
    """Record that the run has reached a phase, or makes progress in it."""
    global _reported_at
    now = time.monotonic()
    # Each call starts a thread; reports may be as frequent as scored responses.
    if _stall_limit and now - _reported_at > _stall_limit / _REPORTS_PER_LIMIT:
        _reported_at = now
        faulthandler.dump_traceback_later(_stall_limit, exit=True, file=2)


def _disconnect() -> None:
    """Wait until all processes are done, and disconnect: at exit JAX would abort if one dies."""
    import jax

    client = compat.distributed_state().client
    if client is not None:
        # A process that does not arrive reports its own error.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            client.wait_at_barrier("the end of the run", _LAST_BARRIER_MS)
        jax.distributed.shutdown()
