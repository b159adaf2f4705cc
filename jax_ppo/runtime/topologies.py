"""Machines to compile for without access to them, named as in v5e:8x8, h100:8 or cpu:8."""

import dataclasses
import math
import os
import re
from typing import Any

import jax

from jax_ppo.errors import UserError, counted, did_you_mean

GIB = 2**30
GPUS_PER_HOST = 8
EXAMPLES = "v5e:8x8, v5p:2x2x2, v6e:4x4, tpu7x:2x2x1, h100:8, h200:8 or cpu:8"


@dataclasses.dataclass(frozen=True)
class DeviceType:
    """A type of device."""

    platform: str  # "tpu", "cuda" or "cpu"
    memory: float | None  # bytes that each device of JAX has for programs; `None` if unknown
    jax_kind: str = ""  # JAX's name of the device (devices.py)
    # Shape of the smallest TPU host with several chips, of which larger machines' shapes are
    # multiples; a single chip is one host.
    chips_per_host: tuple[int, ...] = ()
    most_chips: int | None = None  # chips of the largest slice, which a fast network connects
    devices_per_chip: int = 1  # devices of JAX on each chip


# TPU: HBM per chip is 16 GB (v5e), 95 GB (v5p), 32 GB (v6e) and 192 GB (TPU7x, whose two cores are
# two devices of JAX), and the largest slice has 256, 6144, 256 and 9216 chips,
# https://cloud.google.com/tpu/docs/v5e, .../v5p, .../v6e, .../tpu7x. On v5e and v6e, 0.25 and
# 0.75 GiB of the memory are the system's, as the compiler's errors state ("... of 15.75G hbm").
# GPU: https://www.nvidia.com/en-us/data-center/h100 (80 GB) and .../h200 (141 GB).
DEVICE_TYPES = {
    "v5e": DeviceType("tpu", 15.75 * GIB, "TPU v5e", (2, 2), most_chips=256),
    "v5p": DeviceType("tpu", 95 * GIB, "TPU v5p", (2, 2, 1), most_chips=6144),
    "v6e": DeviceType("tpu", 31.25 * GIB, "TPU v6e", (2, 2), most_chips=256),
    "tpu7x": DeviceType("tpu", 96 * GIB, "TPU7x", (2, 2, 1), most_chips=9216, devices_per_chip=2),
    "h100": DeviceType("cuda", 84942979072, "NVIDIA H100 80GB HBM3"),
    "h200": DeviceType("cuda", 150754820096, "NVIDIA H200"),
    "cpu": DeviceType("cpu", None),
}

# The facts of a device that CUDA's compiler uses. The two types differ in the size and the
# bandwidth of their memory.
GPU_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{description}"
"""
# Bytes per second, as the devices themselves report them.
GPU_BANDWIDTHS = {"h100": 3352320000000, "h200": 4800000000000}


class CompilerMissingError(RuntimeError):
    """The compiler for a type of device is not installed."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine."""

    kind: str
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the name in the user's notation."""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    @property
    def device_type(self) -> DeviceType:
        """Return the type of the devices."""
        return DEVICE_TYPES[self.kind]

    @property
    def num_devices(self) -> int:
        """Return the number of devices of JAX."""
        return math.prod(self.shape) * self.device_type.devices_per_chip

    @property
    def num_hosts(self) -> int:
        """Return the number of hosts; up to eight chips of v5e and v6e count as one host's."""
        chips = math.prod(self.shape)
        if self.device_type.platform == "cpu" or (len(self.shape) == 2 and chips <= 8):
            return 1
        return -(-chips // math.prod(self.device_type.chips_per_host or (GPUS_PER_HOST,)))

    @property
    def available_bytes(self) -> float | None:
        """Return the bytes that programs may use on each device; `None` if unknown.

        On GPUs JAX takes a part of the memory, three quarters unless the environment changes that
        (docs.jax.dev/en/latest/gpu_memory_allocation.html).
        """
        memory = self.device_type.memory
        if memory is None or self.device_type.platform != "cuda":
            return memory
        text = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or "0.75"
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not 0 < share < math.inf:
            raise UserError(f"XLA_PYTHON_CLIENT_MEM_FRACTION={text}: expected a number above 0")
        return memory * share


def parse_topology(text: str) -> Topology:
    """Return the machine of this name; raise `UserError` for an unknown type, or a wrong shape."""
    kind, _, shape_text = text.partition(":")
    if kind not in DEVICE_TYPES:
        hint = did_you_mean(kind.lower(), DEVICE_TYPES)
        raise UserError(f"--topology={text}: unknown type {kind!r}; expected {EXAMPLES}.{hint}")
    device_type = DEVICE_TYPES[kind]
    if not re.fullmatch(r"[1-9]\d{0,4}(x[1-9]\d{0,4})*", shape_text):
        raise UserError(f"--topology={text}: expected TYPE:SHAPE, for example {EXAMPLES}")
    shape = tuple(int(size) for size in shape_text.split("x"))
    if len(shape) != (dimensions := len(device_type.chips_per_host) or 1):
        numbers = counted(dimensions, "number")
        raise UserError(
            f"--topology={text}: a shape of {kind} has {numbers}, for example {EXAMPLES}"
        )
    # It consists of whole hosts, as many as there are.
    chips, hosts = math.prod(shape), device_type.chips_per_host
    if hosts and chips > 1:
        nearest = tuple(-(-size // host) * host for size, host in zip(shape, hosts, strict=True))
        if nearest != shape:
            raise UserError(
                f"--topology={text}: machines of {kind} are multiples of "
                f"{'x'.join(map(str, hosts))} chips; the nearest larger one is "
                f"{kind}:{'x'.join(map(str, nearest))}"
            )
    most_chips = device_type.most_chips
    if most_chips is not None and chips > most_chips:
        raise UserError(
            f"--topology={text}: a slice of {kind} has at most {most_chips} chips, these are "
            f"{chips}"
        )
    if device_type.platform == "cuda" and chips > GPUS_PER_HOST and chips % GPUS_PER_HOST:
        raise UserError(
            f"--topology={text}: a host has {GPUS_PER_HOST} GPUs; the nearest larger machine is "
            f"{kind}:{-(-chips // GPUS_PER_HOST) * GPUS_PER_HOST}"
        )
    return Topology(kind, shape)


def prepare_environment(topology: Topology) -> None:
    """Make JAX use as many CPU devices as the machine has, and no accelerator: a run may use it."""
    os.environ |= {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        # libtpu otherwise looks for the TPU that the machine belongs to, or for its lock.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", topology.num_devices)


def described_devices(topology: Topology) -> list[jax.Device]:
    """Return the devices of a machine, to compile for but not to run on.

    Raise `CompilerMissingError` without their compiler, `UserError` if it lacks the machine.
    """
    if topology.device_type.platform == "cpu":
        return cpu_devices(topology)
    from jax.experimental import topologies

    chips = math.prod(topology.shape)
    description: dict[str, Any] = {"platform": "tpu", "topology_name": topology.name}
    if topology.device_type.platform == "cuda":
        hosts = -(-chips // GPUS_PER_HOST)
        description = {
            "platform": "cuda",
            "topology_name": "",
            "target_config": GPU_TARGET.format(
                bandwidth=GPU_BANDWIDTHS[topology.kind],
                memory=topology.device_type.memory,
                description=topology.device_type.jax_kind,
            ),
            "topology": f"1x{hosts}x{chips // hosts}",  # slices x hosts x devices
        }
    elif chips == 1:  # the compiler takes hosts of four chips unless told otherwise
        description["chips_per_host_bounds"] = (1, 1, 1)
    jax.devices()  # plugins register when the first backend starts
    try:
        return list(topologies.get_topology_desc(**description).devices)
    except (RuntimeError, NotImplementedError) as error:
        # An installed compiler refuses a machine with an error of another type.
        if isinstance(error, jax.errors.JaxRuntimeError):
            reason = str(error).partition("\n")[0]
            raise UserError(f"--topology={topology.name}: {reason}") from error
        raise CompilerMissingError(COMPILERS[topology.device_type.platform]) from error


COMPILERS = {
    "tpu": "libtpu is not installed (`pip install jax[tpu]`; it needs no TPU)",
    "cuda": "CUDA's compiler is not installed (`pip install jax[cuda12]`; it needs no GPU)",
}


def cpu_devices(topology: Topology) -> list[jax.Device]:
    """Return as many CPU devices as the machine has; raise `UserError` if there are fewer."""
    devices = jax.devices("cpu")
    if len(devices) < topology.num_devices:
        raise UserError(
            f"--topology={topology.name}: this process has {len(devices)} CPU devices; call "
            "`prepare_environment` before the first use of JAX"
        )
    return devices[: topology.num_devices]
