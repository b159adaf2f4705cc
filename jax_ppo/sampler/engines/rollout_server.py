"""A server that samples: one that runs elsewhere, or a vLLM that this run starts and ends."""

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

from jax_ppo.config.schema import RolloutOptions
from jax_ppo.errors import UserError, shorten
from jax_ppo.http_client import HTTPClient, RequestFault
from jax_ppo.runtime import heartbeat
from jax_ppo.sampler.engines.protocols import Call, ServerProtocol, choose_protocol

KEY_VARIABLE = "JAX_PPO_ROLLOUT_KEY"
_START_SECONDS = 1800.0  # a large model takes minutes to load
_CONNECT_SECONDS = 60.0
_STOP_SECONDS = 5.0
_PAUSE = 0.2
# A module for vLLM's workers, with a method that `/collective_rpc` calls in each of them after
# `reload_weights`. On CPUs vLLM (0.32.0) computes logits from a packed copy of the output
# embedding. If that is tied to the input embedding, `reload_weights` does not renew the copy.
WORKER = "jax_ppo_vllm_worker"
WORKER_PROGRAM = """
class TiedHead:
    def renew_tied_head(self):
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        for layer in self.model_runner.get_model().modules():
            if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
"""
# Ends the process group with the run, and with the server: workers would keep their memory.
_SUPERVISOR = """
import glob, os, signal, subprocess, sys, threading, time
server = None
is_asked = False
def end(*ignored):
    global is_asked
    is_asked = True
    if server is not None:
        server.terminate()  # lets it and its workers remove what they have in shared memory
    threading.Timer(10, os.killpg, (0, signal.SIGKILL)).start()
def watch():
    sys.stdin.buffer.read()
    end()
signal.signal(signal.SIGTERM, end)
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
if is_asked:  # while it started
    server.terminate()
threading.Thread(target=watch, daemon=True).start()
def has_workers():
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            state, _, group = open(path).read().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if state != "Z" and int(group) == os.getpgrp() and f"/{os.getpid()}/" not in path:
            return True
server.wait()
while is_asked and has_workers():
    time.sleep(0.05)
os.killpg(0, signal.SIGKILL)
"""


class ServerProcess:
    """A server that this run starts and ends, with everything that it starts."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        """Start it with further variables; its output is appended to the file `log`."""
        self._log = log
        inherited = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SUPERVISOR, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=inherited | environment,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        """Return whether it has not ended."""
        return self._process.poll() is None

    def last_words(self) -> str:
        """Return the last error in its output, or its last line."""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line]
        errors = [line for line in lines if "Error" in line]
        return shorten((errors or lines or ["it wrote nothing"])[-1], 300)

    def stop(self) -> None:
        """End it and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()  # a forked child of this process may still hold the other end
        self._process.wait()


class RolloutServer:
    """The server of a run, which `is_ours` if the run starts it."""

    def __init__(self, options: RolloutOptions) -> None:
        """Take the address, or choose a port; raise `UserError` if the interpreter has no vLLM."""
        # The option that says where the server is.
        url, self.setting = options.url, f"config.rollout.url={options.url!r}"
        self.is_ours = not url
        if self.is_ours:
            self._python = str(Path(options.vllm.python).expanduser())
            self.setting = f"config.rollout.vllm.python={self._python!r}"
            program = (  # a folder named vllm would be found as a package; it has no modules
                "import importlib.util as i, sys; "
                "sys.exit(not i.find_spec('vllm') or i.find_spec('vllm.entrypoints') is None)"
            )
            try:
                lacks_vllm = subprocess.run([self._python, "-c", program], check=False).returncode
            except OSError as error:
                raise UserError(f"{self.setting}: {error.strerror}") from None
            if lacks_vllm:
                raise UserError(
                    f"{self.setting}: this interpreter has no vLLM; name one of an environment "
                    "with `pip install vllm`"
                )
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))  # a port that nothing listens on
                self.port = listener.getsockname()[1]
            url = f"http://127.0.0.1:{self.port}"
        # Proxies are for outside servers. The engine itself re-requests missing responses.
        self.client = HTTPClient(url.rstrip("/"), KEY_VARIABLE, options.url_timeout, by_proxy=False)
        self._process: ServerProcess | None = None
        self.protocol, self.is_connected = ServerProtocol(), False  # until `connect` chooses
        self._has_run = False

    @property
    def is_running(self) -> bool:
        """Return whether a server of ours was started and has not ended."""
        return self._process is not None and self._process.is_running

    def last_words(self) -> str:
        """Return the last error, or line, of a server of ours that has ended; else ""."""
        if self._process is None or self._process.is_running:
            return ""
        return f"; vLLM ended: {self._process.last_words()}"

    def launch(
        self,
        arguments: Mapping[str, Any],
        flags: Sequence[str],
        variables: dict[str, str],
        log: Path,
    ) -> None:
        """Start vLLM with arguments and flags of its command, and environment variables."""
        if self._process is not None:
            self._process.stop()
        command = [self._python, "-m", "vllm.entrypoints.openai.api_server"]
        command += [f"--{name}={value}" for name, value in arguments.items()]
        self._process = ServerProcess([*command, *flags], variables, log)
        self.is_connected = False

    def connect(self, seconds: float | None = None) -> Collection[str]:
        """Choose the protocol by the server's routes, when it answers, and return these.

        Raise `UserError` if it refuses the request, does not answer in time, or lacks routes;
        `RequestFault` if it was started by this run, and ended.
        """
        if seconds is None:
            seconds = _START_SECONDS if self.is_ours else _CONNECT_SECONDS
        deadline = time.monotonic() + seconds
        with heartbeat.activity("waiting for the rollout server"):
            while True:
                try:
                    routes = list(self.client.get("/openapi.json", timeout=10.0)["paths"])
                    break
                except RequestFault as fault:
                    problem = str(fault)
                    # A proxy in front of a server that is still starting may answer 404.
                    if fault.is_final and fault.status != HTTPStatus.NOT_FOUND:
                        raise UserError(f"{self.setting}: {problem}") from None
                except (LookupError, TypeError):
                    problem = "/openapi.json lists no routes"
                if self.is_ours and not self.is_running:
                    raise RequestFault(f"no answer{self.last_words()}", is_final=not self._has_run)
                if time.monotonic() > deadline:
                    raise UserError(f"{self.setting}: no answer in {seconds:.0f} s: {problem}")
                time.sleep(_PAUSE)
        self.protocol, missing = choose_protocol(routes)
        if missing:
            hint = self.protocol.hint
            raise UserError(f"{self.setting}: the server lacks {', '.join(missing)}{hint}")
        self.is_connected = self._has_run = True
        return routes

    def post_all(self, calls: Sequence[Call]) -> None:
        """Make calls in order; raise `RequestFault` for the first that does not succeed."""
        for route, body in calls:
            reply = self.client.post(route, json.dumps(body))
            if isinstance(reply, dict) and reply.get("success") is False:
                raise RequestFault(f"{route}: {reply.get('message', 'it failed')}")

    def revive(self) -> None:
        """After a fault, end a server of ours, or wait until a server that is not ours answers."""
        time.sleep(_PAUSE)
        if self._process is None:
            self.connect(self.client.timeout)
        else:
            self._process.stop()  # whether it died, hangs or sent a reply that cannot be used
            self._process, self.is_connected = None, False

    def stop(self, last_calls: Sequence[Call]) -> None:
        """End a server of ours; make calls of another that need not succeed."""
        if self._process is not None:
            self._process.stop()
        elif self.is_connected:
            self.client = dataclasses.replace(self.client, timeout=_STOP_SECONDS)
            self.try_all(last_calls)

    def try_all(self, calls: Sequence[Call]) -> None:
        """Make calls that need not succeed, such as on a server that was restarted."""
        for call in calls:
            with contextlib.suppress(RequestFault):
                self.post_all([call])
