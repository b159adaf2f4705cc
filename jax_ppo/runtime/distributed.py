"""Runs of several processes: how they find each other, and how they end together.

With a single process nothing happens here. Otherwise every process runs the same program, and JAX
connects them before the first computation. After SIGTERM they agree on a step to save
(`agree_on_signal`); when one of them fails or is lost, all end (`faults`).
"""

import importlib.util
import itertools
import json
import os
import re
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jax_ppo.config import schema
from jax_ppo.errors import UserError
from jax_ppo.runtime import compat, faults, sharding, signals

# jax.distributed.initialize() detects Slurm by these; srun sets all of them, sbatch alone does not.
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
# Keys of the store that JAX's coordination service shares between the processes.
_STOP_REQUESTS = "jax_ppo/stop/requests"
_STOP_DECISIONS = "jax_ppo/stop/decisions"
_stop_questions = itertools.count()
_START_SECONDS = 300  # hosts may start minutes apart; JAX's equal limit prints a stack trace
EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def initialize(options: schema.Distributed) -> None:
    """Connect the processes of this run, before any computation; a second call does nothing.

    Addresses come from the options, else from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID, else from Slurm, Open MPI or a TPU pod of several hosts. Raise `UserError` if
    only some of the variables are set, one is malformed, or the service does not start.
    """
    arguments = _arguments(options, os.environ)
    if arguments is None or jax.distributed.is_initialized():
        return
    # JAX's handler of SIGTERM would replace the one of `signals`. Its processes agree on the step
    # number after the largest one, which a run that resumes, or has yet to start, never asks for.
    jax.config.update("jax_enable_preemption_service", False)
    timer = threading.Timer(_START_SECONDS, _end_unconnected)
    timer.daemon = True
    timer.start()
    try:
        if arguments.get("process_id") == 0:
            _require_free_port(arguments["coordinator_address"])
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=2 * _START_SECONDS,
            heartbeat_timeout_seconds=options.heartbeat_seconds,
        )
    except (OSError, jax.errors.JaxRuntimeError) as error:
        raise UserError(
            f"JAX's coordination service cannot be used ({error}); is its port in use? "
            "config.distributed.coordinator_address names another"
        ) from error
    finally:
        timer.cancel()
    faults.end_with_others()
    # A signal that ends one process at once ends all, with its exit code: they are restarted alike.
    signals.on_abrupt_end(faults.announce_failure)


def _require_free_port(address: str) -> None:
    """Raise `OSError` if a server listens on the port: JAX may crash, or share the port."""
    _, _, port = address.rpartition(":")
    try:
        socket.create_connection(("localhost", int(port)), timeout=1).close()
    except OSError:  # also where this machine cannot look `localhost` up
        return
    raise OSError("a server listens there")


def _end_unconnected() -> None:
    """End this process with one line: not all others have connected in time."""
    address = compat.distributed_state().coordinator_address or ""
    cause = "one has not started, has ended since, or cannot reach it"
    host = address.rpartition(":")[0].strip("[]")
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):  # the latter if a part has more than 63 characters
        cause = f"the name {host!r} does not resolve on this machine; give an IP address"
    faults.end_abruptly(
        f"not all processes have connected to {address} within {_START_SECONDS} s: {cause}",
        faults.LOST_EXIT_CODE,
    )


def is_main() -> bool:
    """Return whether this is the process that prints and writes what only one may write."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Wait until every process has reached the barrier of this name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def allgather_json(value: Any) -> list[Any]:
    """Gather the JSON values of all processes, in their order; every process must call it."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = _allgather(np.int32(len(text)))
    # A power of two, so that another length rarely compiles another program.
    width = max(1024, 1 << int(lengths.max() - 1).bit_length())
    texts = _allgather(np.pad(text, (0, width - len(text))))
    return [json.loads(bytes(row[:length])) for row, length in zip(texts, lengths, strict=True)]


def require_equal(values: dict[str, Any], what: str) -> None:
    """Raise `UserError` on every process unless all have the same values, by their names."""
    first, *others = allgather_json(values)
    for process, other in enumerate(others, 1):
        for name, value in first.items():
            if other.get(name) != value:
                raise UserError(
                    f"{name}: process {process} has {other.get(name)!r}, process 0 {value!r}; give "
                    f"all processes the same {what}"
                )


def _allgather(value: np.ndarray | np.int32) -> np.ndarray:
    """Return the arrays of all processes, [processes, ...], through the mesh in the context.

    JAX's own function uses all devices. It would wait for those that decode beside an update, which
    processes might start in different orders.
    """
    mesh = jax.sharding.get_mesh()
    layout = sharding.process_rows(jax.devices() if mesh.empty else mesh.devices.flat)
    assert isinstance(layout.mesh, Mesh), "it has devices"
    array = jax.make_array_from_process_local_data(layout, np.asarray(value)[None])
    with jax.set_mesh(layout.mesh):
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def agree_on_signal() -> bool:
    """Return whether a signal ends the run now; all processes record the same one.

    Every process must call it equally often, at the same points. The main process decides, and the
    others wait on the host; a signal to one of these takes effect at its next call or the one after
    it.
    """
    client, received = compat.distributed_state().client, signals.received_signal()
    if client is None:
        return received is not None
    if received is not None:
        client.key_value_set(
            f"{_STOP_REQUESTS}/{jax.process_index()}", str(int(received)), allow_overwrite=True
        )
    decision = f"{_STOP_DECISIONS}/{next(_stop_questions)}"
    if is_main():
        requests = {int(value) for _, value in client.key_value_dir_get(_STOP_REQUESTS)}
        number = signal.SIGINT if signal.SIGINT in requests else max(requests, default=0)
        client.key_value_set(decision, str(int(number)))
    # Without a time limit: the heartbeats end a process whose main process is dead.
    number = int(client.blocking_key_value_get(decision, faults.FOREVER_MS))
    if number:
        signals.record_signal(signal.Signals(number))
    return number != 0


def run_on_main(function: Callable[[], object]) -> None:
    """Call a function on the main process; raise its `UserError` or `OSError` on all processes."""
    message = ""
    if is_main():
        try:
            function()
        except (UserError, OSError) as error:
            message = str(error) or type(error).__name__
            if isinstance(error, OSError) and error.filename:
                message = f"{error.filename}: cannot be written or read: {error.strerror}"
    # An error of the main process must end every process, so all of them learn of it.
    message = allgather_json(message)[0]
    if message:
        raise UserError(message)


def _arguments(options: schema.Distributed, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the arguments for JAX: {} where it detects the cluster, `None` for one process."""
    # The options win over the environment, and JAX's variables over a cluster's.
    address, count, process = options.coordinator_address, options.num_processes, options.process_id
    if not address:
        missing = [name for name in EXPLICIT if not environ.get(name)]
        if missing and _cluster_size(environ) > 1:
            return {}
        if missing:
            if len(missing) == len(EXPLICIT):
                return None
            raise UserError(
                f"the environment sets some of {', '.join(EXPLICIT)} but not {', '.join(missing)}; "
                "set all three, or none for one process"
            )
        address, number, rank = (environ[name] for name in EXPLICIT)
        if not (number.isdecimal() and rank.isdecimal() and int(rank) < int(number)):
            raise UserError(
                f"JAX_PROCESS_ID={rank} with JAX_NUM_PROCESSES={number}: "
                "expected 0 to the number of processes - 1"
            )
        count, process = int(number), int(rank)
    if count == 1:
        return None
    port = re.fullmatch(r".+:([0-9]{1,5})", address)
    if port is None or not 0 < int(port[1]) < 2**16:
        raise UserError(f"the coordinator's address is {address!r}: expected HOST:PORT")
    return {"coordinator_address": address, "num_processes": count, "process_id": process}


def _cluster_size(environ: Mapping[str, str]) -> int:
    """Return the number of processes that Slurm, Open MPI or a TPU pod started, else 1."""
    names = ["OMPI_COMM_WORLD_SIZE"]
    if all(name in environ for name in SLURM):
        names.insert(0, "SLURM_NTASKS")
    for name in names:
        count = environ.get(name, "1")
        if not re.fullmatch(r"[0-9]{1,9}", count):
            raise UserError(f"the environment's {name}={count!r}: expected a whole number")
        if int(count) > 1:
            return int(count)
    return _tpu_hosts(environ)


def _tpu_hosts(environ: Mapping[str, str]) -> int:
    """Return the number of hosts of this machine's TPU slices, 1 if it has no TPU."""
    platforms = environ.get("JAX_PLATFORMS", "")
    # Importing jax sets this to 1 on machines without a TPU chip. The TPU device plugin of Google
    # Kubernetes Engine sets it to "true", in pods that have chips.
    skips_metadata = environ.get("TPU_SKIP_MDS_QUERY", "")
    no_tpu = importlib.util.find_spec("libtpu") is None or skips_metadata == "1"
    if no_tpu or (platforms and "tpu" not in platforms.split(",")):
        return 1
    # Kubernetes sets these variables; a Cloud TPU VM has both values in its metadata.
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES") or ""
    slices = environ.get("MEGASCALE_NUM_SLICES")
    if not hosts and not skips_metadata:
        hosts = _metadata("worker-network-endpoints", environ)
        match = re.search(r"MEGASCALE_NUM_SLICES:\s*'?(\d+)", _metadata("tpu-env", environ))
        slices = slices or (match and match.group(1))
    return len(hosts.split(",")) * int(slices or 1)


def _metadata(name: str, environ: Mapping[str, str]) -> str:
    """Return an attribute of this Google Cloud machine, '' elsewhere."""
    server = environ.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    # The metadata server is local: a proxy could not reach it.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=5) as reply:
            return reply.read().decode()
    except (urllib.error.URLError, TimeoutError):
        return ""
