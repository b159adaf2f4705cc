"""Compile sampler, scoring and updates for GPUs or TPUs on a machine without them.

    # the version of jax itself
    pip install --no-deps jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION nvidia-cudnn-cu12
    python benchmarks/compile_ahead.py cuda
    # the version that jax[tpu] requires
    pip install libtpu==VERSION
    python benchmarks/compile_ahead.py tpu

Uses Qwen2.5-0.5B's shapes. Reports whether each program compiles, how long that takes and how much
device memory it needs; it reports nothing about speed or numerical results. For CUDA nothing is
autotuned, and h100.txtpb describes the device to the compiler. Writes results/compile_ahead_*.json.
"""

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import programs

GIB = 2**30
PROGRAMS = ("sample", "score", "score critic", "update", "update critic")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("platform", choices=("cuda", "tpu"))
    parser.add_argument(
        "--topology",
        help="TPU: v5e:2x2, v5p:2x2x1, v6e:2x4, ...; CUDA: slices x hosts x devices, 1x1x1",
    )
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--layers", type=int, default=24)
    args = parser.parse_args()
    devices = topology(args.platform, args.topology)
    import dataclasses

    import harness
    import jax
    import programs

    from jax_ppo.config.schema import MeshShape
    from jax_ppo.runtime import sharding

    architecture = dataclasses.replace(programs.QWEN_05B, num_layers=args.layers)
    step = programs.Step(
        architecture,
        args.samples,
        args.prompt,
        args.response,
        dtype="bfloat16",
        remat=True,
        mesh=sharding.make_mesh(MeshShape(data=1, fsdp=-1), devices),
    )
    result = {
        "settings": vars(args),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "jax": jax.__version__,
        "attention": step.nets.actor.attention,
        "decoding": step.decoder.decoding,
    }
    for name in args.programs:
        result[name] = compiled(step, name)
        print(
            f"{devices[0].device_kind} x {len(devices)}: {name:14s}"
            + "  ".join(f"{key} {value:.3g}" for key, value in result[name].items()),
            flush=True,
        )
        harness.save(f"compile_ahead_{args.platform}", result)


def topology(platform: str, name: str | None) -> list[Any]:
    """Return the devices of a described machine, without access to it."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    import jax
    from jax.experimental import topologies

    jax.devices()  # plugins register when the first backend starts
    if platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=name or "v5e:2x2").devices
    target = (Path(__file__).parent / "h100.txtpb").read_text()
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=target, topology=name or "1x1x1"
    ).devices


def compiled(step: "programs.Step", name: str) -> dict:
    """Compile a program and report seconds, GiB per device and conditionals.

    At each conditional a GPU would wait for the host to select a branch.
    """
    start = time.perf_counter()
    lowered = step.lower(name)
    traced = time.perf_counter()
    program = lowered.compile()
    memory = program.memory_analysis()
    return {
        "trace_seconds": traced - start,
        "compile_seconds": time.perf_counter() - traced,
        "arguments_gib": memory.argument_size_in_bytes / GIB,
        "results_gib": memory.output_size_in_bytes / GIB,
        "reused_gib": memory.alias_size_in_bytes / GIB,
        "temporary_gib": memory.temp_size_in_bytes / GIB,
        "conditionals": program.as_text().count(" conditional("),
    }


if __name__ == "__main__":
    main()
