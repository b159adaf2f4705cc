#!/usr/bin/env python3
"""Train on Google Kubernetes Engine: a JobSet for TPU slices (v4 to TPU7x) or H100 and H200 nodes.

launch/gke/jobset.py render NAME --accelerator v6e:4x4 --image IMAGE -- --config=... --workdir=gs://...
launch/gke/jobset.py start  NAME (the same)   submit it with kubectl
launch/gke/jobset.py watch  NAME              follow process 0 until the run ends
launch/gke/jobset.py stop   NAME              SIGTERM: the run saves a checkpoint and ends
launch/gke/jobset.py resume NAME              submit it again
launch/gke/jobset.py xpk    NAME (as render)  print the `xpk` command that does the same

Accelerators have the names of `jax_ppo.plan`. The cluster needs the JobSet controller, which xpk's
clusters have, and a node pool of the accelerator. The run is restarted without limit after exit
codes 143 and 130, which mean that a signal ended it, and after disruptions of nodes; after any
other failure --max-restarts times.
"""

import argparse
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
from subprocess import PIPE
from typing import Any, NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))  # of this checkout

from jax_ppo.errors import UserError, exit_on_user_error  # noqa: E402
from jax_ppo.runtime.topologies import Topology, parse_topology  # noqa: E402

SIGNAL_CODES = [130, 143]  # see jax_ppo/runtime/signals.py
LOST_CODE = 75  # exit code of processes that lost another one
COORDINATOR_PORT = 8476
JOB = "workers"
COMMANDS = ("train", "sft", "reward_model")
# Options of the JobSet that `xpk workload create` has no counterpart of, or sets by itself.
NOT_IN_XPK = ("namespace", "queue", "priority", "secret", "service_account", "data_claim")
POLL_SECONDS = float(os.environ.get("POLL_SECONDS", "10"))


class Pool(NamedTuple):
    """The nodes that an accelerator needs."""

    labels: dict[str, str]  # node labels that select the pool
    resource: str  # name of the device resource
    per_node: int  # devices
    nodes: int  # of each slice, or of the whole run for GPUs
    xpk: list[str]  # arguments by which xpk selects the pool


# GKE's labels of accelerators and names in xpk, compared with xpk 1.16.
TPUS = {
    "v4": ("tpu-v4-podslice", "v4"),
    "v5e": ("tpu-v5-lite-podslice", "v5litepod"),
    "v5p": ("tpu-v5p-slice", "v5p"),
    "v6e": ("tpu-v6e-slice", "v6e"),
    "tpu7x": ("tpu7x", "tpu7x"),
}
GPUS = {
    "h100": ("nvidia-h100-80gb", "h100-80gb-8"),
    "h100-mega": ("nvidia-h100-mega-80gb", "h100-mega-80gb-8"),
    "h200": ("nvidia-h200-141gb", "h200-141gb-8"),
}


def find_pool(machine: Topology, slices: int) -> Pool:
    """Return the nodes of a machine; raise `UserError` if the manifest cannot ask GKE for it."""
    size = machine.name.partition(":")[2]
    if machine.kind in TPUS:
        label, name = TPUS[machine.kind]
        chips = math.prod(machine.shape)
        per_node = min(chips, 4)
        labels = {
            "cloud.google.com/gke-tpu-accelerator": label,
            "cloud.google.com/gke-tpu-topology": size,
        }
        xpk = [f"--tpu-type={name}-{size}", f"--num-slices={slices}"]
        return Pool(labels, "google.com/tpu", per_node, chips // per_node, xpk)
    if machine.kind not in GPUS or machine.num_devices % machine.device_type.per_host:
        nodes = " or ".join(GPUS)
        raise UserError(f"--accelerator={machine.name}: expected TPUs, or nodes of eight {nodes}")
    if slices != 1:
        raise UserError("--slices: GPU nodes have none; ask for more GPUs, such as h100:32")
    label, device_type = GPUS[machine.kind]
    labels = {"cloud.google.com/gke-accelerator": label}
    xpk = [f"--device-type={device_type}", f"--num-nodes={machine.num_hosts}"]
    return Pool(labels, "nvidia.com/gpu", machine.device_type.per_host, machine.num_hosts, xpk)


def render_jobset(options: argparse.Namespace) -> dict[str, Any]:
    """Return the JobSet: one job per slice, one pod per node, one process per pod."""
    pool = find_pool(options.accelerator, options.slices)
    job_spec = {
        "completionMode": "Indexed",
        "completions": pool.nodes,
        "parallelism": pool.nodes,
        # Pods are not replaced one by one: the processes of a run start and end together.
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                # The job fails with BackoffLimitExceeded ...
                {
                    "action": "Count",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                {"action": "Count", "onExitCodes": _exit_codes("In", SIGNAL_CODES)},
                # The pod that was lost decides, not the pods that lost it.
                {"action": "Ignore", "onExitCodes": _exit_codes("In", [LOST_CODE])},
                # ... or else with PodFailurePolicy.
                {"action": "FailJob", "onExitCodes": _exit_codes("NotIn", SIGNAL_CODES)},
            ]
        },
        "template": {"spec": _pod_spec(options, pool)},
    }
    labels = {}
    if options.queue:
        labels["kueue.x-k8s.io/queue-name"] = options.queue
    if options.priority:
        labels["kueue.x-k8s.io/priority-class"] = options.priority
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": options.name,
            "namespace": options.namespace,
            "labels": labels,
            # Each slice has its own node pool.
            "annotations": {
                "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
            },
        },
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": options.max_restarts,
                "rules": [
                    {
                        "name": "interrupted",
                        "action": "RestartJobSetAndIgnoreMaxRestarts",
                        "onJobFailureReasons": ["BackoffLimitExceeded"],
                    }
                ],
            },
            "replicatedJobs": [
                {"name": JOB, "replicas": options.slices, "template": {"spec": job_spec}}
            ],
        },
    }


def _exit_codes(operator: str, codes: list[int]) -> dict[str, Any]:
    return {"containerName": "jax-ppo", "operator": operator, "values": codes}


def _pod_spec(options: argparse.Namespace, pool: Pool) -> dict[str, Any]:
    selector = dict(pool.labels)
    tolerations = [{"key": pool.resource, "operator": "Exists", "effect": "NoSchedule"}]
    if options.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        tolerations.append({"key": "cloud.google.com/gke-spot", "operator": "Exists"})
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if options.data_claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": options.data_claim}})
        mounts.append({"name": "data", "mountPath": "/data"})
    devices = {pool.resource: str(pool.per_node)}
    container = {
        "name": "jax-ppo",
        "image": options.image,
        # Kubernetes reads $$ as $, and replaces $(NAME).
        "args": [options.command, *(word.replace("$", "$$") for word in options.arguments)],
        "env": _environment(options, pool),
        # HF_TOKEN and WANDB_API_KEY, if the secret exists.
        "envFrom": [{"secretRef": {"name": options.secret, "optional": True}}],
        "resources": {"requests": devices, "limits": devices},
        "volumeMounts": mounts,
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace_seconds,
        "nodeSelector": selector,
        "tolerations": tolerations,
        "containers": [container],
        "volumes": volumes,
    }
    if options.service_account:
        spec["serviceAccountName"] = options.service_account
    return spec


def _environment(options: argparse.Namespace, pool: Pool) -> list[dict[str, Any]]:
    variables: list[dict[str, Any]] = [{"name": "HF_HOME", "value": options.hf_home}]
    # GKE itself connects the pods of a TPU slice.
    if pool.resource == "nvidia.com/gpu":
        address = f"{options.name}-{JOB}-0-0.{options.name}:{COORDINATOR_PORT}"
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        variables += [
            {"name": "JAX_COORDINATOR_ADDRESS", "value": address},
            {"name": "JAX_NUM_PROCESSES", "value": str(pool.nodes)},
            {"name": "JAX_PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        ]
    return variables


def render_xpk_command(options: argparse.Namespace) -> list[str]:
    """Return the `xpk workload create` command of the same run; xpk passes on no secrets."""
    pool = find_pool(options.accelerator, options.slices)
    if options.accelerator.name in ("v5e:1x1", "v5e:2x2"):
        name = options.accelerator.name
        raise UserError(f"--accelerator: xpk has no {name}; its smallest is v5e:2x4")
    variables = f"HF_HOME={shlex.quote(options.hf_home)}"
    if pool.resource == "nvidia.com/gpu":
        # xpk sets these under other names, and puts the command in double quotes: avoid them here.
        variables += (
            " JAX_COORDINATOR_ADDRESS=$JAX_COORDINATOR_ADDRESS:$JAX_COORDINATOR_PORT"
            " JAX_NUM_PROCESSES=$NNODES JAX_PROCESS_ID=$NODE_RANK"
        )
    run = ["python", "-m", "jax_ppo", options.command, *options.arguments]
    return [
        *("xpk", "workload", "create", f"--workload={options.name}"),
        f"--cluster={options.cluster}",
        *pool.xpk,
        f"--docker-image={options.image}",
        *(["--spot"] if options.spot else []),
        f"--max-restarts={options.max_restarts}",
        f"--termination-grace-period-seconds={options.grace_seconds}",
        f"--command={variables} exec {shlex.join(run)}",
    ]


def to_yaml(manifest: dict[str, Any]) -> str:
    """Return the manifest as YAML."""
    import yaml  # not needed to watch or stop a run

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    return yaml.dump(manifest, Dumper=Dumper, sort_keys=False)


def kubectl(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run kubectl, and return it with its exit code and, if asked for, its output."""
    return subprocess.run(["kubectl", *words], text=True, **options)


def submit(manifest: str, name: str, where: str) -> int:
    """Submit a manifest, in place of a run that has ended, and return kubectl's exit code."""
    state = "--output=jsonpath={.status.terminalState}"
    found = kubectl("get", "jobset", name, where, "--ignore-not-found", state, stdout=PIPE)
    if found.stdout:  # kubectl would leave it as it is
        stop(name, where)
    return kubectl("apply", where, "--filename=-", input=manifest).returncode


def watch(name: str, where: str) -> int:
    """Follow process 0 through restarts; return 0 if the run completed, else 1."""
    selector = f"--selector=jobset.sigs.k8s.io/jobset-name={name}"
    selector += ",jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
    while True:
        kubectl("logs", where, selector, "--follow", "--tail=100")
        jobset = kubectl("get", "jobset", name, where, "--output=json", stdout=PIPE)
        if jobset.returncode != 0:
            return jobset.returncode
        status = json.loads(jobset.stdout).get("status", {})
        state = status.get("terminalState")
        if state:
            messages = [each["message"] for each in status.get("conditions", [])]
            print(f"{name}: {state}: {'; '.join(messages)}", file=sys.stderr)
            return int(state != "Completed")
        restarts = status.get("restarts", 0)
        print(f"{name}: waiting for process 0; {restarts} restarts so far", file=sys.stderr)
        time.sleep(POLL_SECONDS)


def stop(name: str, where: str) -> int:
    """Delete the JobSet and wait until its processes have saved and ended."""
    return kubectl("delete", "jobset", name, where, "--cascade=foreground").returncode


def read_command_line(words: list[str]) -> argparse.Namespace:
    """Return the options; `arguments` holds the arguments of the run, after --."""
    index = [*words, "--"].index("--")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=["render", "start", "watch", "stop", "resume", "xpk"])
    parser.add_argument("name", help="name of the JobSet")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--accelerator", help="v5e:4x4 or v5e-16, tpu7x:2x2x1, h100:16, ...")
    parser.add_argument("--image", help="built from launch/gke/Dockerfile")
    parser.add_argument("--slices", type=_positive, default=1, help="TPU slices (default: 1)")
    parser.add_argument("--command", choices=COMMANDS, default="train", help="(default: train)")
    parser.add_argument("--spot", action="store_true", help="use spot nodes")
    parser.add_argument("--queue", help="Kueue's LocalQueue")
    parser.add_argument("--priority", help="Kueue's WorkloadPriorityClass")
    restarts = os.environ.get("MAX_RESTARTS") or "3"
    parser.add_argument(
        "--max-restarts", type=_count, default=restarts, help="(default: $MAX_RESTARTS, or 3)"
    )
    parser.add_argument("--grace-seconds", type=_positive, default=300, help="to save on SIGTERM")
    parser.add_argument("--secret", default="jax-ppo", help="of variables (default: jax-ppo)")
    parser.add_argument("--service-account", help="that may read and write the bucket")
    parser.add_argument("--data-claim", help="PersistentVolumeClaim to mount at /data")
    parser.add_argument("--hf-home", help="default: /data/huggingface with --data-claim, else /tmp")
    parser.add_argument("--cluster", default="$CLUSTER", help="name of the cluster, for xpk")
    options = parser.parse_args(words[:index])
    options.arguments = words[index + 1 :]
    if not re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", options.name):
        # Names of pods, which are also host names, are longer by about 20 characters.
        parser.error("name: expected up to 40 lower-case letters, digits and hyphens")
    if options.priority and not options.queue:
        parser.error("--priority needs --queue: without a queue the run is not submitted to Kueue")
    if options.verb == "xpk":
        for name in NOT_IN_XPK:
            if getattr(options, name) != parser.get_default(name):
                parser.error(f"xpk does not take --{name.replace('_', '-')}; use render or start")
    if options.verb in ("render", "start", "xpk"):
        if not (options.accelerator and options.image):
            parser.error(f"{options.verb} needs --accelerator and --image")
        options.accelerator = parse_topology(options.accelerator, "--accelerator")
        print(options.accelerator, file=sys.stderr)
        if not options.hf_home:
            options.hf_home = "/data/huggingface" if options.data_claim else "/tmp/huggingface"
    elif "--" in words:
        parser.error("only render, start and xpk take arguments after --")
    return options


def _positive(text: str) -> int:
    number = _count(text)
    if not number:
        raise argparse.ArgumentTypeError("expected at least 1")
    return number


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return int(text)


def main() -> int:
    """Run the command line, and return the exit code."""
    options = read_command_line(sys.argv[1:])
    # The file in which `start` stores the manifest for `resume`.
    home = os.environ.get("XDG_STATE_HOME") or pathlib.Path.home() / ".local/state"
    record = pathlib.Path(home) / "jax_ppo" / "gke" / f"{options.namespace}.{options.name}.yaml"
    where = f"--namespace={options.namespace}"
    if options.verb == "xpk":
        # The shell fills in the cluster's name.
        print(
            shlex.join(render_xpk_command(options)).replace(
                "'--cluster=$CLUSTER'", '--cluster="$CLUSTER"'
            )
        )
    elif options.verb == "render":
        print(to_yaml(render_jobset(options)), end="")
    elif options.verb == "start":
        manifest = to_yaml(render_jobset(options))
        code = submit(manifest, options.name, where)
        if code == 0:
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(manifest)
        return code
    elif options.verb == "resume":
        if not record.exists():
            sys.exit(f"error: no start of {options.name} is recorded on this machine; use start")
        return submit(record.read_text(), options.name, where)
    elif options.verb == "watch":
        return watch(options.name, where)
    else:
        return stop(options.name, where)
    return 0


if __name__ == "__main__":
    with exit_on_user_error():
        sys.exit(main())
