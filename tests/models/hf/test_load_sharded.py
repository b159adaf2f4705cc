"""Loading onto several devices and processes: each reads only its own blocks of the model.

The export is written from the sharded arrays, so that equal files mean equal parameters. Each
process writes its files and holds no more than two tensors.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_reference as reference
from jax_ppo.models.hf import weight_files
from jax_ppo.models.hf.save import export_checkpoint
from waiting import finish_all

PROGRAM = """
import collections, json, sys, weakref
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

process, processes, address, source, out = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
jax.config.update("jax_platforms", "cpu")
if processes > 1:
    jax.distributed.initialize(address, processes, process)

from flax import traverse_util
from jax_ppo.models.hf.files import SafetensorsCheckpoint
from jax_ppo.models.hf.load import load_checkpoint, read_architecture
from jax_ppo.models.hf.names import tensor_table
from jax_ppo.models.hf.tensors import TensorMapping
from jax_ppo.models.hf import save, weight_files

devices = len(jax.devices())
axes = ("data", "fsdp", "model")
mesh = jax.make_mesh((devices // 4, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)

def spec(path):
    if path[0] in ("embed", "lm_head"):
        return P("model", "fsdp")
    if path[-1] == "kernel":
        is_output = path[-2] in ("o_proj", "down_proj")
        return P(None, "model", "fsdp") if is_output else P(None, "fsdp", "model")
    return P(None, "model") if path[-1] == "bias" else P("data") if "input_norm" in path else P()

read, blocks = SafetensorsCheckpoint.read, collections.defaultdict(list)

def counting_read(self, name, index=()):
    values = read(self, name, index)
    blocks[name].append(values.shape)
    return values

SafetensorsCheckpoint.read = counting_read
architecture = read_architecture(source)
places = {path: NamedSharding(mesh, spec(path)) for path in tensor_table(architecture, "lm")}
params = load_checkpoint(source, architecture, traverse_util.unflatten_dict(places))
for path, array in traverse_util.flatten_dict(params).items():
    assert array.sharding.is_equivalent_to(places[path], array.ndim), path
files, write = [], weight_files.write_safetensors

def recording_write(path, *arguments):
    files.append(path.name)
    write(path, *arguments)

weight_files.write_safetensors = recording_write
held, most = collections.Counter(), 0

def counting_write(row, values, tensor):
    values = write_tensor(row, values, tensor)
    global most
    key = len(held)
    held[key] = values.nbytes
    weakref.finalize(values, held.__setitem__, key, 0)
    most = max(most, held.total())
    return values

write_tensor, TensorMapping.write = TensorMapping.write, counting_write
weight_files.MAX_SHARD_BYTES = 30_000
save.export_checkpoint(params, architecture, out)
print(json.dumps({"blocks": blocks, "files": files, "most bytes": most}))
"""

LARGEST_TENSOR = 96 * 32 * 4  # the embedding


def start(arguments, devices):
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes):
    """Wait for the processes and return the last line that each printed."""
    printed = finish_all(processes)
    for process, (_, errors) in zip(processes, printed, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in printed]


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Write a checkpoint, and in `~one` the export of one device next to it."""
    reference.save(tmp_path / "source", "qwen2", vocab_size=96)
    architecture, params = reference.load(tmp_path / "source")
    monkeypatch.setattr(weight_files, "MAX_SHARD_BYTES", 30_000)
    export_checkpoint(params, architecture, tmp_path / "one")
    return tmp_path / "source"


def same_files(one, other):
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir()) and len(names) > 4
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.slow
def test_eight_devices(source, tmp_path):
    [report] = finish([start([0, 1, "", source, tmp_path / "eight"], devices=8)])
    blocks = report["blocks"]
    same_files(tmp_path / "one", tmp_path / "eight")
    # Four blocks per matrix, halves of [out, in] along both axes; two devices share each read.
    assert blocks["model.layers.1.self_attn.q_proj.weight"] == [[16, 16]] * 4
    assert blocks["model.layers.0.mlp.down_proj.weight"] == [[16, 24]] * 4
    assert blocks["model.layers.0.self_attn.k_proj.bias"] == [[8]] * 2
    assert blocks["model.norm.weight"] == [[32]]


@pytest.mark.slow
def test_two_processes(source, tmp_path, coordinator_address):
    processes = [
        start([i, 2, coordinator_address, source, tmp_path / "two"], devices=2) for i in range(2)
    ]
    reports = finish(processes)
    for report in reports:  # each process reads the half that its devices hold
        assert report["blocks"]["model.layers.1.self_attn.q_proj.weight"] == [[16, 16]] * 2
        assert 0 < report["most bytes"] <= 2 * LARGEST_TENSOR
    same_files(tmp_path / "one", tmp_path / "two")
    files = sorted(path.name for path in (tmp_path / "two").glob("*.safetensors"))
    assert [report["files"] for report in reports] == [files[::2], files[1::2]]
