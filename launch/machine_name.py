#!/usr/bin/env python3
"""Print a machine, such as v5e:8x8, v5e-64, v5litepod-64 or H100:8, in a launcher's notation.

launch/machine_name.py gcloud v5e:8x8          its accelerator type and runtime version
launch/machine_name.py sky v6e-8 h100:8        launch/sky.yaml for the cheapest of these machines

It needs Python 3.10 or newer, and nothing else.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jax_ppo.errors import UserError, exit_on_user_error  # noqa: E402
from jax_ppo.runtime.topologies import Topology, parse_topology  # noqa: E402

# Names of Cloud TPU, and runtime versions from the page "TPU software versions" of its
# documentation. SkyPilot would give v5e the version of v5p.
CLOUD_TPUS = {
    "v4": ("v4", "tpu-ubuntu2204-base"),
    "v5e": ("v5litepod", "v2-alpha-tpuv5-lite"),
    "v5p": ("v5p", "v2-alpha-tpuv5"),
    "v6e": ("v6e", "v2-alpha-tpuv6e"),
}


def name_for_gcloud(machine: Topology) -> tuple[str, str]:
    """Return accelerator type and runtime version; raise `UserError` for what it does not have."""
    if machine.kind not in CLOUD_TPUS:
        raise UserError(
            f"{machine.name}: Cloud TPU slices are v4, v5e, v5p or v6e; tpu7x and GPUs "
            "need GKE: see launch/gke/jobset.py"
        )
    name, version = CLOUD_TPUS[machine.kind]
    cores = machine.num_devices * machine.device_type.cores_per_chip
    usual = parse_topology(f"{name}-{cores}")
    if usual != machine:
        raise UserError(f"{machine.name}: {name}-{cores} has the shape of {usual.name}")
    return f"{name}-{cores}", version


def write_sky_task(machines: list[Topology]) -> str:
    """Return launch/sky.yaml with these machines in the place of its own."""
    lines = []
    for machine in machines:
        if machine.device_type.platform == "tpu":
            name, version = name_for_gcloud(machine)
            lines.append(f"    - accelerators: tpu-{name}\n")
            lines.append(f"      accelerator_args: {{runtime_version: {version}}}\n")
        elif machine.device_type.platform == "cuda" and machine.num_hosts == 1:
            kind = {"a100-40gb": "A100"}.get(machine.kind, machine.kind.upper())
            lines.append(f"    - accelerators: {kind}:{machine.num_devices}\n")
        else:
            raise UserError(f"{machine.name}: expected TPUs, or GPUs of one host")
    task = (ROOT / "launch/sky.yaml").read_text()
    return re.sub(r"(?<=  any_of:\n)(    .*\n)+", "".join(lines), task, count=1)


def main(words: list[str]) -> None:
    """Print what the command line asks for; on the standard error, the machines that it names."""
    launcher, *names = words or [""]
    if launcher not in ("gcloud", "sky") or not names or (launcher == "gcloud" and names[1:]):
        sys.exit(__doc__)
    with exit_on_user_error():
        option = "--type" if launcher == "gcloud" else "machine"
        machines = [parse_topology(name, option) for name in names]
        if launcher == "sky":
            text = write_sky_task(machines)
        else:
            text = " ".join(name_for_gcloud(machines[0])) + "\n"
    for name, machine in zip(names, machines, strict=True):
        print(machine if name == machine.name else f"{name} is {machine}", file=sys.stderr)
    print(text, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
