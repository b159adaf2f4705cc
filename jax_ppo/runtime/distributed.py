"""Several processes: how they find each other, and how they end together.

Where one process is all there is, nothing happens here. Otherwise every process runs the same program, and JAX connects
them before the first computation. SIGTERM, a cluster's notice that it takes the machines back, is for the checkpoints:
see `Checkpointer.should_stop`.
"""

import importlib.util
import os
import re
import sys
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

import jax
from jax.experimental import multihost_utils

from jax_ppo.config import schema
from jax_ppo.errors import UserError

# jax.distributed.initialize() detects Slurm by these; srun sets all of them, sbatch alone does not.
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
EXPLICIT = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def initialize(options: schema.Distributed) -> None:
    """Connects the processes of this run. Call it before any computation; a second call does nothing.

    Addresses come from the options, else from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, else from
    Slurm, Open MPI or a TPU pod of several hosts. Without any of these there is one process. Raises UserError where
    the environment tells only half.
    """
    arguments = _arguments(options, os.environ)
    if arguments is None or jax.distributed.is_initialized():
        return
    jax.distributed.initialize(**arguments, heartbeat_timeout_seconds=options.heartbeat_seconds)


def is_main() -> bool:
    """Whether this is the process that prints and writes what only one may write."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until every process has come to the barrier of this name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def run_or_abort(function: Callable[[], object]) -> object:
    """Returns function(). In a run of several processes an exception ends this process at once, with code 1.

    Leaving in the ordinary way would wait for the other processes, which wait for this one in a collective. After the
    abrupt end their collectives fail, which brings them here too.
    """
    try:
        return function()
    except (
        BaseException
    ) as error:  # KeyboardInterrupt and SystemExit would leave the others waiting just the same
        finished = isinstance(error, SystemExit) and not error.code
        if finished or not jax.distributed.is_initialized() or jax.process_count() == 1:
            raise
        print(
            f"process {jax.process_index()} of {jax.process_count()} ends the run:", file=sys.stderr
        )
        if isinstance(error, SystemExit):
            print(error.code, file=sys.stderr)  # sys.exit("error: ..."): the message says it all
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _arguments(options: schema.Distributed, environ: Mapping[str, str]) -> dict | None:
    """What jax.distributed.initialize needs to be told, {} where it finds out by itself, None for one process."""
    if options.coordinator_address:
        return _unless_alone(options.coordinator_address, options.num_processes, options.process_id)
    missing = [name for name in EXPLICIT if not environ.get(name)]
    if not missing:
        address, count, process = (environ[name] for name in EXPLICIT)
        if not (count.isdecimal() and process.isdecimal() and int(process) < int(count)):
            raise UserError(
                f"JAX_PROCESS_ID={process} with JAX_NUM_PROCESSES={count}: expected 0 to the number of processes - 1"
            )
        return _unless_alone(address, int(count), int(process))
    if _cluster_size(environ) > 1:
        return {}
    if len(missing) < len(EXPLICIT):
        raise UserError(
            f"the environment sets some of {', '.join(EXPLICIT)} but not {', '.join(missing)}; set all three, or none "
            "for one process"
        )
    return None


def _unless_alone(address, count, process):
    if count == 1:
        return None
    return {"coordinator_address": address, "num_processes": count, "process_id": process}


def _cluster_size(environ) -> int:
    """Processes that Slurm, Open MPI or a TPU pod started, 1 where none of them did."""
    if all(name in environ for name in SLURM) and int(environ["SLURM_NTASKS"]) > 1:
        return int(environ["SLURM_NTASKS"])
    if int(environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        return int(environ["OMPI_COMM_WORLD_SIZE"])
    return _tpu_hosts(environ)


def _tpu_hosts(environ) -> int:
    """Hosts of the TPU slices that this machine is part of, 1 where it has no TPU of its own."""
    platforms = environ.get("JAX_PLATFORMS", "")
    # Importing jax sets TPU_SKIP_MDS_QUERY on machines without a TPU chip.
    no_tpu = importlib.util.find_spec("libtpu") is None or "TPU_SKIP_MDS_QUERY" in environ
    if no_tpu or (platforms and "tpu" not in platforms.split(",")):
        return 1
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get(
        "TPU_WORKER_HOSTNAMES"
    )  # set by Kubernetes
    slices = environ.get("MEGASCALE_NUM_SLICES")
    if not hosts:  # a Cloud TPU VM keeps both in its metadata
        hosts = _metadata("worker-network-endpoints", environ)
        told = re.search(r"MEGASCALE_NUM_SLICES:\s*'?(\d+)", _metadata("tpu-env", environ))
        slices = slices or (told and told.group(1))
    return len(hosts.split(",")) * int(slices or 1)


def _metadata(name, environ) -> str:
    """An attribute of this Google Cloud machine, '' elsewhere."""
    server = environ.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=5) as reply:
            return reply.read().decode()
    except (urllib.error.URLError, TimeoutError):
        return ""
