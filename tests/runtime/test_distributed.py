"""Processes connect by options or environment."""

import socket

import pytest

from jax_ppo.config import schema
from jax_ppo.errors import UserError
from jax_ppo.runtime import distributed
from serving import QuietHandler, serving
from waiting import keep_port
from whole_run import run_python

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


FROM_EXPLICIT = {"coordinator_address": "host:1", "num_processes": 4, "process_id": 3}
OPTIONS = {"coordinator_address": "other:2", "num_processes": 2, "process_id": 1}
IPV6 = OPTIONS | {"coordinator_address": "[::1]:65535"}
ALONE = {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "options", "expected"),
    [
        ({}, {}, None),
        # Options come first, then the environment.
        (EXPLICIT | SLURM, OPTIONS, OPTIONS),
        (EXPLICIT | SLURM, {}, FROM_EXPLICIT),
        ({}, IPV6, IPV6),
        # One of one is one process.
        (EXPLICIT | ALONE, {}, None),
        ({}, OPTIONS | {"num_processes": 1, "process_id": 0}, None),
        # In a step of several tasks, not in one of one or in the batch script.
        (SLURM, {}, {}),
        (SLURM | {"SLURM_NTASKS": "1"}, {}, None),
        ({name: x for name, x in SLURM.items() if name != "SLURM_STEP_NODELIST"}, {}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, {}, {}),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, {}, None),
    ],
)
def test_processes_connect_by_options_or_environment(environ, options, expected):
    assert arguments(environ, **options) == expected


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:x", "host:0", "host:65536"])
def test_an_address_without_a_host_or_a_port_is_refused(address):
    with pytest.raises(UserError, match=f"is '{address}': expected HOST:PORT"):
        arguments({}, **OPTIONS | {"coordinator_address": address})
    with pytest.raises(UserError, match="expected HOST:PORT"):
        arguments(EXPLICIT | {"JAX_COORDINATOR_ADDRESS": address})


@pytest.mark.parametrize("name", EXPLICIT)
def test_half_an_address_is_refused(name):
    with pytest.raises(UserError, match="but not") as error:
        arguments({name: EXPLICIT[name]})
    assert name not in str(error.value).split("but not")[1].split(";")[0]
    assert arguments({name: EXPLICIT[name]} | SLURM) == {}  # Slurm supplies the other options


@pytest.mark.parametrize("process", ["4", "-1", "x"])
def test_a_process_beyond_the_number_is_refused(process):
    with pytest.raises(UserError, match="JAX_PROCESS_ID"):
        arguments(EXPLICIT | {"JAX_PROCESS_ID": process})


class Metadata(QuietHandler):
    def do_GET(self):
        value = self.headers["Metadata-Flavor"] == "Google" and self.server.attributes.get(
            self.path.rpartition("/")[2]
        )
        self.answer(200 if value else 404, (value or "").encode())


@pytest.fixture
def machine(monkeypatch):
    """A TPU machine: a function from attributes in its metadata to its environment."""
    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: name == "libtpu")
    with serving(Metadata) as server:

        def environ(**attributes):
            server.attributes = {
                name.replace("_", "-"): value for name, value in attributes.items()
            }
            return {"GCE_METADATA_IP": f"localhost:{server.server_port}"}

        yield environ


class TestTpuPods:
    def test_hosts_are_counted_from_the_metadata(self, machine):
        assert arguments(machine(worker_network_endpoints="a:0:10.0.0.1,b:1:10.0.0.2")) == {}
        assert arguments(machine(worker_network_endpoints="a:0:10.0.0.1")) is None
        slices = "X: '1'\nMEGASCALE_NUM_SLICES: '2'"
        assert arguments(machine(worker_network_endpoints="a", tpu_env=slices)) == {}

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


def test_one_process_is_the_main_one_and_waits_for_nobody():
    distributed.initialize(schema.Distributed())
    assert distributed.is_main()
    distributed.barrier("alone")


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


PROGRAM = """
import sys
from jax_ppo.config import schema
from jax_ppo.errors import exit_on_user_error
from jax_ppo.runtime import distributed
distributed._START_SECONDS = 1
with exit_on_user_error():
    distributed.initialize(schema.Distributed(sys.argv[1], 2, int(sys.argv[2])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("resolves", [True, False])
def test_a_process_that_the_others_do_not_join_ends_with_one_line(coordinator_address, resolves):
    cause = "one has not started, has ended since, or cannot reach it"
    if not resolves:
        coordinator_address = "no-such-host.invalid:1234"
        cause = (
            "the name 'no-such-host.invalid' does not resolve on this machine; give an IP address"
        )
    process = run_python("-c", PROGRAM, coordinator_address, 1, check=False)
    assert process.returncode == 75
    (line,) = process.stderr.splitlines()
    assert line.endswith(
        f": not all processes have connected to {coordinator_address} within 1 s: {cause}"
    )


def test_a_coordinator_address_in_use_is_named():
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        process = run_python("-c", PROGRAM, address, 0, check=False)
    assert process.returncode == 1
    assert "is its port in use? config.distributed.coordinator_address" in process.stderr
    assert "Traceback" not in process.stderr
