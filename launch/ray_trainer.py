#!/usr/bin/env python3
"""Train on a Ray cluster with Ray's JaxTrainer, one process per worker.

ray job submit --working-dir=. -- python launch/ray_trainer.py --accelerator=h100:16 -- \
    --config=gsm8k --workdir=/shared/gsm8k

Each GPU has one worker, and each host of a TPU slice. All nodes need jax_ppo and ray[train], and
the work directory must be a gs:// address or on a disk that they share. When a node is lost, Ray
starts all workers again, and they resume from the newest checkpoint.
"""

import argparse
import importlib
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_ppo.config import command_line
from jax_ppo.errors import UserError
from jax_ppo.runtime.topologies import parse_topology

# Variables of this process that workers on other machines do not have.
PASSED_VARIABLES = ("HF_HOME", "HF_TOKEN", "WANDB_API_KEY")
# Where they differ from the names of `jax_ppo.plan` (ray.util.accelerators).
RAY_NAMES = {
    **{"v5e": "v5litepod", "tpu7x": "v7x", "h100-mega": "h100"},
    **{"a100-40gb": "a100", "a100-80gb": "a100"},
}


def train_with_environment(variables: dict[str, str]) -> Callable[[dict[str, Any]], None]:
    """Return `train_on_worker` with environment variables that are set before it runs.

    They are part of the function, since Ray may show its settings.
    """

    def set_variables_and_train(settings: dict[str, Any]) -> None:
        os.environ.update(variables)
        train_on_worker(settings)

    return set_variables_and_train


def train_on_worker(settings: dict[str, Any]) -> None:
    """Run the command in this worker, connected to the others.

    Args:
      settings: the command, its arguments, and the folder to run it in.
    """
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    context = ray.train.get_context()
    rank = context.get_world_rank()
    address = None
    if rank == 0:
        with socket.socket() as server:
            server.bind(("", 0))
            address = f"{ray.util.get_node_ip_address()}:{server.getsockname()[1]}"
    os.environ |= {
        "JAX_COORDINATOR_ADDRESS": broadcast_from_rank_zero(address),
        "JAX_NUM_PROCESSES": str(context.get_world_size()),
        "JAX_PROCESS_ID": str(rank),
    }
    # Ray shows messages of all levels; Orbax's would bury the run's own.
    logging.getLogger("absl").setLevel(logging.WARNING)
    # Relative paths in the options are relative to the user's folder.
    os.chdir(settings["folder"])
    command = importlib.import_module(f"jax_ppo.{settings['command']}")
    command.main([settings["command"], *settings["arguments"]])


def read_command_line(words: list[str]) -> argparse.Namespace:
    """Return the options; `arguments` holds the arguments of the run, after --.

    Raise `SystemExit` if one of these is invalid.
    """
    index = [*words, "--"].index("--")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = ["train", "sft", "reward_model"]
    parser.add_argument("--command", choices=commands, default="train", help="(default: train)")
    parser.add_argument("--accelerator", default="cpu:1", help="v6e:4x4, v6e-16, h100:16, ...")
    parser.add_argument("--workers", type=int, help="processes (default: see above)")
    parser.add_argument("--cpus", type=float, default=1, help="of each worker (default: 1)")
    restarts = os.environ.get("MAX_RESTARTS") or "3"
    parser.add_argument(
        "--max-restarts", type=int, default=restarts, help="(default: $MAX_RESTARTS, or 3)"
    )
    options = parser.parse_args(words[:index])
    options.arguments = words[index + 1 :]
    try:
        options.scaling = scale_workers(options)
        # Reported here, rather than by each worker.
        _, workdir = command_line.read_command_line(
            [options.command, *options.arguments], options.command
        )
    except UserError as error:
        sys.exit(f"error: {error}")
    if isinstance(workdir, Path):
        workdir = str(workdir.absolute())
    options.workdir = workdir
    return options


def scale_workers(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of Ray's ScalingConfig; raise `UserError` for an unknown accelerator."""
    machine = parse_topology(options.accelerator, "--accelerator")
    print(machine, file=sys.stderr)
    kind, _, shape = machine.name.partition(":")
    name = RAY_NAMES.get(kind, kind).upper()
    resources = {"CPU": options.cpus}
    scaling: dict[str, Any] = {"num_workers": options.workers or machine.num_devices}
    if machine.device_type.platform == "tpu":
        scaling["num_workers"] = options.workers or machine.num_hosts
        return scaling | {"use_tpu": True, "accelerator_type": f"TPU-{name}", "topology": shape}
    if machine.device_type.platform == "cuda":
        scaling |= {"use_gpu": True, "accelerator_type": name}
        resources["GPU"] = 1
    return scaling | {"resources_per_worker": resources}


def main() -> None:
    """Start the workers and wait for the end of the run."""
    options = read_command_line(sys.argv[1:])
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.exceptions import TrainingFailedError
    from ray.train.v2.jax import JaxConfig, JaxTrainer

    variables = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    trainer = JaxTrainer(
        train_with_environment(variables),
        train_loop_config={
            "command": options.command,
            "arguments": options.arguments,
            "folder": os.getcwd(),
        },
        # jax_ppo connects the processes itself, on every kind of device.
        jax_config=JaxConfig(),
        scaling_config=ScalingConfig(**options.scaling),
        run_config=RunConfig(
            name="ray",
            storage_path=options.workdir,
            failure_config=FailureConfig(max_failures=options.max_restarts),
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
