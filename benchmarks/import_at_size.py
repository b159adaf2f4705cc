"""Memory and time of reading a checkpoint of 7 billion parameters, in shards, onto several devices.

    python benchmarks/import_at_size.py

A folder of the shapes of Qwen2.5-7B is written once (15 GB of bfloat16 in four files, random bits that are small numbers), in
--folder or a temporary one. A process of its own then reads it as a run does, split over --devices devices of the CPU, while a
thread looks at what memory it holds. On a CPU the devices' memory is the host's: what the arrays hold at last is subtracted.
Pages of the mapped files are the operating system's to drop, and are told apart. Then tensors of every file are compared with
what the files hold, bit by bit. Takes some minutes; writes results/import_at_size.json.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import harness
import ml_dtypes
import numpy as np

GB = 1e9


def qwen_7b(layers: int):
    import programs

    sizes = programs.qwen2(
        layers=layers, hidden=3584, vocabulary=152064, query_heads=28, kv_heads=4, mlp=18944
    )
    return dataclasses.replace(sizes, head_dim=128)


def write_checkpoint(folder: Path, layers: int) -> None:
    """In the files that an export of 4 GiB each would have."""
    from jax_ppo.models.hf import config as hf_config
    from jax_ppo.models.hf.files import INDEX_FILE, write_safetensors
    from jax_ppo.models.hf.names import tensor_table
    from jax_ppo.models.hf.save import GIB

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
        json.dumps(hf_config.to_hf_config(architecture, "bfloat16"))
    )


class Watch(threading.Thread):
    """The most memory that this process holds, without and with pages of mapped files; looked at every few milliseconds."""

    def __init__(self):
        super().__init__(daemon=True)
        self.own = self.mapped = 0
        self._over = threading.Event()

    def run(self):
        while not self._over.wait(0.003):
            own, mapped = held()
            self.own, self.mapped = max(self.own, own), max(self.mapped, mapped)

    def stop(self):
        self._over.set()
        self.join()


def held() -> tuple[int, int]:
    """Bytes: anonymous and shared memory, and pages of files."""
    status = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("Rss")
    )
    size = {name: int(value.split()[0]) * 1024 for name, value in status.items()}
    return size["RssAnon"] + size["RssShmem"], size["RssFile"]


def read(folder: Path, devices: int) -> dict:
    """Loads it as a run does; figures of that."""
    import functools

    import jax
    import jax.numpy as jnp

    from jax_ppo.config import schema
    from jax_ppo.models import heads
    from jax_ppo.models.hf.files import SafetensorsCheckpoint
    from jax_ppo.models.hf.load import load_checkpoint, read_architecture
    from jax_ppo.models.hf.names import tensor_table
    from jax_ppo.models.hf.tensors import flatten_like
    from jax_ppo.models.transformer import Transformer
    from jax_ppo.runtime import sharding

    mesh = sharding.make_mesh(schema.MeshShape(data=1, fsdp=devices))
    architecture = read_architecture(folder)
    shapes = jax.eval_shape(
        functools.partial(heads.init_params, Transformer(architecture), head="lm"),
        jax.random.key(0),
    )
    where = sharding.tree_shardings(mesh, shapes, sharding.TRAIN_RULES)
    with SafetensorsCheckpoint(folder) as checkpoint:
        largest = max(2 * int(np.prod(checkpoint.shape(name))) for name in checkpoint.names())
    jax.block_until_ready(jnp.ones(8) + 1)
    before, watch, start = held()[0], Watch(), time.monotonic()
    watch.start()
    params = load_checkpoint(folder, architecture, where, jnp.bfloat16)
    seconds = time.monotonic() - start
    watch.stop()
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
        "beside_the_arrays_gigabytes": (watch.own - before - arrays) / GB,
        "of_the_largest_tensor": (watch.own - before - arrays) / largest,
        "mapped_gigabytes_at_most": watch.mapped / GB,
        "tensors_compared": compared,
        "tensors_equal": equal,
        "jax": jax.__version__,
    }


def compare(checkpoint, table, flat) -> tuple[int, int]:
    """How many tensors are bit for bit what the files hold, of how many: of every stacked one two layers, all others."""
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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoint is kept; a temporary one if not given"
    )
    parser.add_argument("--layers", type=int, default=28, help="28 are 7.6 billion parameters")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument(
        "--read",
        action="store_true",
        help="only read what --folder holds, and print the figures as JSON",
    )
    args = parser.parse_args()
    if args.read:
        print(json.dumps(read(args.folder, args.devices)))
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
        done = subprocess.run(
            command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
        )
    figures = json.loads(done.stdout)
    print(
        f"{figures['parameters'] / GB:.2f} billion parameters, {figures['gigabytes']:.1f} GB on {args.devices} devices, read "
        f"in {figures['seconds']:.0f} s"
    )
    print(
        f"beside the devices' arrays the host held {figures['beside_the_arrays_gigabytes']:.2f} GB at most, "
        f"{figures['of_the_largest_tensor']:.2f} of the largest tensor ({figures['largest_tensor_gigabytes']:.2f} GB)"
    )
    print(
        f"equal to the files, bit by bit: {figures['tensors_equal']} of {figures['tensors_compared']} tensors"
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
