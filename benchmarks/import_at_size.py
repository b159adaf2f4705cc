"""Measure memory and time of reading a 7-billion-parameter checkpoint onto several devices.

    python benchmarks/import_at_size.py

A folder with Qwen2.5-7B's shapes is written once (15 GB of bfloat16 in four files, random bits that
are small numbers), in --folder or a temporary one. A separate process then reads it as a run does,
sharded over --devices CPU devices, while a thread samples its memory use. On a CPU the devices'
memory is host memory, so the final size of the arrays is subtracted. Pages of memory-mapped files
can be dropped by the operating system and are reported separately. Afterwards tensors of every file
are compared bit by bit with the files. Takes a few minutes; writes results/import_at_size.json.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jax_ppo.config import schema
from jax_ppo.models import heads
from jax_ppo.models.architecture import Architecture
from jax_ppo.models.hf import config_export
from jax_ppo.models.hf.files import SafetensorsCheckpoint, write_safetensors
from jax_ppo.models.hf.load import load_checkpoint, read_architecture
from jax_ppo.models.hf.model_folders import INDEX_FILE
from jax_ppo.models.hf.names import tensor_table
from jax_ppo.models.hf.tensors import flatten_like
from jax_ppo.models.hf.weight_files import GIB
from jax_ppo.models.transformer import Transformer
from jax_ppo.runtime import meshes, sharding

GB = 1e9


def qwen_7b(layers: int) -> Architecture:
    """Return Qwen2.5-7B's architecture with this number of layers."""
    return Architecture(
        family="qwen2",
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=layers,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        qkv_bias=True,
        max_position_embeddings=32768,
        tied=False,
    )


def write_checkpoint(folder: Path, layers: int) -> None:
    """Write a random checkpoint in files of at most 4 GiB, as an export does."""
    architecture = qwen_7b(layers)
    block = np.random.default_rng(0).normal(0, 0.02, 1 << 22).astype(ml_dtypes.bfloat16)
    rows = {
        name: row.hf_shape
        for row in tensor_table(architecture, "lm").values()
        for name in row.names()
    }
    shards, size = [[]], 0
    for name, shape in rows.items():
        count = int(np.prod(shape))
        if shards[-1] and size + 2 * count > 4 * GIB:
            shards, size = [*shards, []], 0
        shards[-1].append((name, shape))
        size += 2 * count
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        arrays = (
            np.resize(np.roll(block, number), shape) for number, (_, shape) in enumerate(shard)
        )
        write_safetensors(folder / file, {name: ("BF16", shape) for name, shape in shard}, arrays)
        weight_map |= {name: file for name, _ in shard}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(
        json.dumps(config_export.to_hf_config(architecture, "bfloat16"))
    )


class MemorySampler(threading.Thread):
    """Thread that samples this process's peak memory every few milliseconds.

    Attributes:
      own: Peak bytes of anonymous and shared memory.
      mapped: Peak bytes of memory-mapped file pages.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.own = self.mapped = 0
        self._stop_requested = threading.Event()

    def run(self) -> None:
        """Sample until stopped."""
        while not self._stop_requested.wait(0.003):
            own, mapped = memory_in_use()
            self.own, self.mapped = max(self.own, own), max(self.mapped, mapped)

    def stop(self) -> None:
        """Stop sampling and wait for the thread."""
        self._stop_requested.set()
        self.join()


def memory_in_use() -> tuple[int, int]:
    """Return the bytes of anonymous and shared memory, and of file pages."""
    status = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("Rss")
    )
    size = {name: int(value.split()[0]) * 1024 for name, value in status.items()}
    return size["RssAnon"] + size["RssShmem"], size["RssFile"]


def measure_import(folder: Path, devices: int) -> dict:
    """Load the checkpoint as a run does and return the measurements."""
    mesh = meshes.make_mesh(schema.MeshShape(data=1, fsdp=devices))
    architecture = read_architecture(folder)
    shapes = jax.eval_shape(
        functools.partial(heads.init_params, Transformer(architecture), head="lm"),
        jax.random.key(0),
    )
    where = sharding.tree_shardings(mesh, shapes, sharding.TRAIN_RULES)
    with SafetensorsCheckpoint(folder) as checkpoint:
        largest = max(2 * int(np.prod(checkpoint.shape(name))) for name in checkpoint.names())
    jax.block_until_ready(jnp.ones(8) + 1)
    before, sampler, start = memory_in_use()[0], MemorySampler(), time.monotonic()
    sampler.start()
    params = load_checkpoint(folder, architecture, where, jnp.bfloat16)
    seconds = time.monotonic() - start
    sampler.stop()
    arrays = sum(
        shard.data.nbytes for x in jax.tree.leaves(params) for shard in x.addressable_shards
    )
    flat = flatten_like(params, tensor_table(architecture, "lm"), "`params`")
    with SafetensorsCheckpoint(folder) as checkpoint:
        equal, compared = compare(checkpoint, tensor_table(architecture, "lm"), flat)
    return {
        "parameters": sum(x.size for x in flat.values()),
        "seconds": seconds,
        "gigabytes": arrays / GB,
        "largest_tensor_gigabytes": largest / GB,
        "beside_the_arrays_gigabytes": (sampler.own - before - arrays) / GB,
        "of_the_largest_tensor": (sampler.own - before - arrays) / largest,
        "mapped_gigabytes_at_most": sampler.mapped / GB,
        "tensors_compared": compared,
        "tensors_equal": equal,
        "jax": jax.__version__,
    }


def compare(checkpoint: Any, table: Mapping[Any, Any], flat: Mapping[Any, Any]) -> tuple[int, int]:
    """Compare tensors bit by bit with the files.

    Two layers of every stacked tensor and all other tensors are compared.

    Returns:
      Number of equal tensors and number of compared tensors.
    """
    equal = compared = 0
    for path, row in table.items():
        names = row.names()
        for layer in {0, len(names) - 1} if row.layers else {0}:
            ours = np.asarray(flat[path][layer] if row.layers else flat[path])
            theirs = checkpoint.read(names[layer])
            equal += np.array_equal(
                (ours.T if row.transposed else ours).view(np.uint16), theirs.view(np.uint16)
            )
            compared += 1
    return equal, compared


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="checkpoint folder; default: a temporary one")
    parser.add_argument(
        "--layers", type=int, default=28, help="28 layers have 7.6 billion parameters"
    )
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument(
        "--read",
        action="store_true",
        help="only read --folder and print the measurements as JSON",
    )
    args = parser.parse_args()
    if args.read:
        print(json.dumps(measure_import(args.folder, args.devices)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "qwen2_7b"
        if not (folder / "config.json").exists():
            print(f"writing {folder}", file=sys.stderr, flush=True)
            write_checkpoint(folder, args.layers)
        environment = {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={args.devices}",
            "JAX_PLATFORMS": "cpu",
        }
        command = [
            sys.executable,
            __file__,
            "--read",
            f"--folder={folder}",
            f"--devices={args.devices}",
        ]
        process = subprocess.run(
            harness.end_with_this_process(command),
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    figures = json.loads(process.stdout)
    print(
        f"{figures['parameters'] / GB:.2f} billion parameters, {figures['gigabytes']:.1f} GB "
        f"on {args.devices} devices, read in {figures['seconds']:.0f} s"
    )
    print(
        "peak host memory in addition to the devices' arrays: "
        f"{figures['beside_the_arrays_gigabytes']:.2f} GB, "
        f"{figures['of_the_largest_tensor']:.2f} times the largest tensor "
        f"({figures['largest_tensor_gigabytes']:.2f} GB)"
    )
    print(
        f"bitwise equal to the files: {figures['tensors_equal']} of "
        f"{figures['tensors_compared']} tensors"
    )
    settings = {"layers": args.layers, "devices": args.devices}
    print(
        "written:",
        harness.save(
            "import_at_size", {"machine": harness.machine(), "settings": settings} | figures
        ),
    )


if __name__ == "__main__":
    main()
