"""Processes connect by options or environment, and none hangs when another fails."""

import concurrent.futures
import http.server
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

import pytest

from jax_ppo.config import schema
from jax_ppo.errors import UserError
from jax_ppo.runtime import coordination, distributed
from jax_ppo.runtime.lifeline import WITHOUT_A_WORD
from waiting import HANG_SECONDS, finish_all, keep_port, wait_until

ROOT = pathlib.Path(__file__).parents[2]
EXPLICIT = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "9",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "2",
}


def arguments(environ, **options):
    return distributed._arguments(schema.Distributed(**options), environ)


class TestArguments:
    def test_nothing_said_is_one_process(self):
        assert arguments({}) is None

    def test_options_come_first(self):
        options = {"coordinator_address": "other:2", "num_processes": 2, "process_id": 1}
        assert arguments(EXPLICIT | SLURM, **options) == options

    def test_then_the_environment(self):
        assert arguments(EXPLICIT | SLURM) == {
            "coordinator_address": "host:1",
            "num_processes": 4,
            "process_id": 3,
        }

    def test_one_of_one_is_one_process(self):
        assert (
            arguments(
                {
                    "JAX_COORDINATOR_ADDRESS": "host:1",
                    "JAX_NUM_PROCESSES": "1",
                    "JAX_PROCESS_ID": "0",
                }
            )
            is None
        )
        assert arguments({}, coordinator_address="host:1", num_processes=1, process_id=0) is None

    def test_slurm_in_a_step_of_several_tasks(self):
        assert arguments(SLURM) == {}
        assert arguments(SLURM | {"SLURM_NTASKS": "1"}) is None
        in_the_batch_script = {
            name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"
        }
        assert arguments(in_the_batch_script) is None

    def test_open_mpi(self):
        assert arguments({"OMPI_COMM_WORLD_SIZE": "2"}) == {}
        assert arguments({"OMPI_COMM_WORLD_SIZE": "1"}) is None

    @pytest.mark.parametrize("name", EXPLICIT)
    def test_half_an_address_is_refused(self, name):
        with pytest.raises(UserError, match="but not") as error:
            arguments({name: EXPLICIT[name]})
        assert name not in str(error.value).split("but not")[1].split(";")[0]
        assert arguments({name: EXPLICIT[name]} | SLURM) == {}  # Slurm supplies the other options

    @pytest.mark.parametrize("process", ["4", "-1", "x"])
    def test_a_process_beyond_the_number_is_refused(self, process):
        with pytest.raises(UserError, match="JAX_PROCESS_ID"):
            arguments(EXPLICIT | {"JAX_PROCESS_ID": process})


class Metadata(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        value = self.headers["Metadata-Flavor"] == "Google" and self.server.attributes.get(
            self.path.rpartition("/")[2]
        )
        self.send_response(200 if value else 404)
        self.end_headers()
        self.wfile.write((value or "").encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def machine(monkeypatch):
    """A TPU machine: a function from attributes in its metadata to its environment."""
    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: name == "libtpu")
    with http.server.HTTPServer(("localhost", 0), Metadata) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def environ(**attributes):
            server.attributes = {
                name.replace("_", "-"): value for name, value in attributes.items()
            }
            return {"GCE_METADATA_IP": f"localhost:{server.server_port}"}

        yield environ
        server.shutdown()
        thread.join()


class TestTpuPods:
    def test_hosts_are_counted_from_the_metadata(self, machine):
        assert arguments(machine(worker_network_endpoints="a:0:10.0.0.1,b:1:10.0.0.2")) == {}
        assert arguments(machine(worker_network_endpoints="a:0:10.0.0.1")) is None
        assert (
            arguments(
                machine(worker_network_endpoints="a", tpu_env="X: '1'\nMEGASCALE_NUM_SLICES: '2'")
            )
            == {}
        )

    def test_a_machine_without_metadata_is_alone(self, machine):
        assert arguments(machine()) is None
        with keep_port() as silent:
            assert arguments({"GCE_METADATA_IP": f"localhost:{silent.getsockname()[1]}"}) is None

    def test_kubernetes_names_the_hosts(self, machine):
        assert arguments({"TPU_WORKER_HOSTNAMES": "a,b"}) == {}
        assert arguments({"TPU_WORKER_HOSTNAMES": "localhost"}) is None
        assert arguments({"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "2"}) == {}

    def test_the_device_plugin_of_kubernetes_does_not_hide_the_hosts(self, machine):
        """It sets TPU_SKIP_MDS_QUERY in all pods that have chips."""
        pod = machine(worker_network_endpoints="a,b") | {"TPU_SKIP_MDS_QUERY": "true"}
        assert arguments(pod | {"TPU_WORKER_HOSTNAMES": "a,b"}) == {}
        assert arguments(pod | {"TPU_WORKER_HOSTNAMES": "localhost"}) is None
        assert arguments(pod) is None, "the variable asks not to read the metadata"

    def test_a_run_on_the_cpu_is_alone(self, machine):
        several = machine(worker_network_endpoints="a,b")
        assert arguments(several | {"JAX_PLATFORMS": "cpu"}) is None
        assert arguments(several | {"JAX_PLATFORMS": "tpu,cpu"}) == {}
        assert arguments(several | {"TPU_SKIP_MDS_QUERY": "1"}) is None


class TestOneProcess:
    def test_is_main_and_waits_for_nobody(self):
        distributed.initialize(schema.Distributed())
        assert distributed.is_main()
        distributed.barrier("alone")

    def test_errors_are_raised_as_they_are(self):
        assert distributed.run_or_abort(lambda: 5) == 5
        with pytest.raises(ZeroDivisionError):
            distributed.run_or_abort(lambda: 1 / 0)
        with pytest.raises(SystemExit, match="enough"):
            distributed.run_or_abort(lambda: sys.exit("enough"))


PROGRAM = """
import os, signal, sys, time, jax, jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax_ppo.config import schema
from jax_ppo.runtime import distributed, signals

number, address, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
distributed._REASON_SECONDS = 60  # before another process's message a busy machine does other work

def main():
    distributed.barrier("start")
    print("main" if distributed.is_main() else "other", flush=True)
    for _ in range(3):
        indices = multihost_utils.process_allgather(np.float32(jax.process_index()))
        assert indices.tolist() == [0.0, 1.0]
    assert distributed.allgather_json({"number": number}) == [{"number": 0}, {"number": 1}]
    if number == 1 and way == "raise":
        raise ZeroDivisionError("on purpose")
    if number == 1 and way == "interrupt":
        raise KeyboardInterrupt
    if number == 1 and way == "message":
        sys.exit("error: fix this")
    if way == f"kill {number}":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == f"kill late {number}":
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if way.startswith("kill late"):
        return  # the work of the other is done
    if way == f"freeze {number}":
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == f"terminate {number}":
        os.kill(os.getpid(), signal.SIGTERM)
    if way == "finish":
        sys.exit(0)
    while True:
        multihost_utils.process_allgather(np.float32(0))

options = schema.Distributed(
    coordinator_address=address,
    num_processes=2,
    process_id=number,
    heartbeat_seconds=10 if way.startswith("freeze") else 100,
)
distributed.initialize(options)
distributed.initialize(options)  # a second time does nothing
with signals.handle_stop_signals(ends_process=True):
    distributed.run_or_abort(main)
"""


def start_two_processes(way, address):
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, number, address, way],
            cwd=ROOT,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for number in "01"
    ]


@pytest.mark.slow
def test_a_frozen_process_is_named_and_ends_the_others(coordinator_address):
    processes = start_two_processes("freeze 1", coordinator_address)
    try:
        _, errors = processes[0].communicate(timeout=HANG_SECONDS)
        assert processes[1].poll() is None
    finally:
        processes[1].kill()
        processes[1].communicate()
    line = "the run ends: process 1: no sign of life for 10 s: it hangs, or its machine does"
    assert line in errors.splitlines()
    # JAX aborts: launchers start again after 128 + SIGABRT.
    assert processes[0].returncode == -signal.SIGABRT


@pytest.mark.parametrize(
    "way",
    [
        "kill 1",
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in ("raise", "finish", "message", "terminate 1")
        ),
        *(
            pytest.param(way, marks=pytest.mark.exhaustive)
            for way in ("interrupt", "kill 0", "kill late 0", "kill late 1")
        ),
    ],
)
def test_two_processes_end_together(way, coordinator_address):
    processes = start_two_processes(way, coordinator_address)
    # The service holds the standard error of process 0, so this waits for its end, too.
    (output, errors), (other_output, other_errors) = finish_all(processes)
    codes = [process.returncode for process in processes]
    assert (output.split()[-1], other_output.split()[-1]) == ("main", "other")
    if way == "finish":
        assert codes == [0, 0]
        return
    if way.startswith("kill"):
        killed = int(way[-1])
        assert codes[killed] == -signal.SIGKILL and codes[1 - killed] == 75, errors + other_errors
        survivor_errors = (errors, other_errors)[1 - killed]
        # Its connection to the coordination service does not break, so JAX does not end it first.
        assert "Terminating process" not in survivor_errors
        line = f"process {1 - killed} of 2 ends the run: process {killed}: {WITHOUT_A_WORD}"
        assert line in survivor_errors.splitlines()
        assert "Traceback" not in survivor_errors
        return
    if way == "terminate 1":
        # One that a signal ends before there is a step to save: all are restarted.
        assert codes == [143, 143], errors + other_errors
        assert "process 0 of 2 ends the run: process 1: stopped by SIGTERM before a step" in errors
        return
    assert codes == [1, 1], errors + other_errors
    reason = {
        "raise": "ZeroDivisionError: on purpose",
        "interrupt": "KeyboardInterrupt",
        "message": "error: fix this",
    }[way]
    assert f"process 0 of 2 ends the run: process 1: {reason}" in errors
    assert "Traceback" not in errors
    assert f"process 1 of 2 ends the run: {reason}" in other_errors
    assert ("Traceback" in other_errors) == (way != "message")


@pytest.mark.parametrize(
    "environ", [SLURM | {"SLURM_NTASKS": "2(x3)"}, {"OMPI_COMM_WORLD_SIZE": "two"}]
)
def test_a_number_of_processes_that_is_none_is_named(environ):
    with pytest.raises(UserError, match="(SLURM_NTASKS|OMPI_COMM_WORLD_SIZE)=.*whole number"):
        distributed._cluster_size(environ)


def test_a_file_that_the_main_process_cannot_write_is_named(tmp_path):
    """Regression: "[Errno 2] No such file or directory: ..." was all that a user saw."""
    with pytest.raises(UserError, match="/x/y: cannot be written or read: No such file or direct"):
        distributed.run_on_main((tmp_path / "x" / "y").touch)


@pytest.mark.parametrize("error", [OSError(), UserError("no room"), OSError(28, "No space left")])
def test_an_error_of_the_main_process_is_raised_whatever_its_text(error):
    def fail() -> None:
        raise error

    with pytest.raises(UserError) as caught:
        distributed.run_on_main(fail)
    assert str(caught.value) == (str(error) or "OSError")


@pytest.mark.slow
@pytest.mark.parametrize("resolves", [True, False])
def test_a_process_that_the_others_do_not_join_ends_with_one_line(coordinator_address, resolves):
    cause = "one has not started, has ended since, or cannot reach it"
    if not resolves:
        coordinator_address = "no-such-host.invalid:1234"
        cause = (
            "the name 'no-such-host.invalid' does not resolve on this machine; give an IP address"
        )
    program = f"""
from jax_ppo.config import schema
from jax_ppo.runtime import distributed
distributed._START_SECONDS = 1
options = schema.Distributed(
    coordinator_address={coordinator_address!r}, num_processes=2, process_id=1
)
distributed.initialize(options)
"""
    process = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert process.returncode == 75
    (line,) = process.stderr.splitlines()
    assert line.endswith(
        f": not all processes have connected to {coordinator_address} within 1 s: {cause}"
    )


def test_a_coordinator_address_in_use_is_one_line():
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        with pytest.raises(UserError, match="is the port in use"):
            coordination.ServiceProcess(address, 2, heartbeat_timeout=0)


HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


def test_the_service_waits_for_the_others_and_the_next_one_for_it(coordinator_address, capfd):
    """As after the death of process 0, while the machine of another process is slow."""
    forever = {"heartbeat_timeout": 100_000}
    first = coordination.ServiceProcess(coordinator_address, 2, **forever)
    host, port = coordinator_address.split(":")
    with (
        concurrent.futures.ThreadPoolExecutor() as pool,
        socket.create_connection((host, int(port))) as connection,
    ):
        # Its answer shows that the service has accepted the connection.
        connection.sendall(HTTP2_GREETING)
        assert connection.recv(1)
        for pipe in (first._process.stdin, first._process.stdout):
            pipe.close()
        second = pool.submit(coordination.ServiceProcess, coordinator_address, 2, **forever)
        errors = []

        def waits():
            errors.append(capfd.readouterr().err)
            return f"something listens on {coordinator_address}" in "".join(errors)

        wait_until(waits)
        assert first._process.poll() is None and not second.done()
    second.result().shutdown()
    assert first._process.wait(HANG_SECONDS) == 0
