"""Names of machines, such as v5e:8x8, h100:8 or cpu:8, and the facts about their devices.

Launchers read this module from a checkout where JAX may be missing: functions import it.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jax_ppo.errors import UserError, counted, nearest_name
from jax_ppo.runtime import backends

if TYPE_CHECKING:
    import jax

GIB = 2**30
EXAMPLES = (
    "v4:2x2x2, v5e:8x8 (or v5e-64, v5litepod-64), v5p:2x2x2, v6e:4x4, tpu7x:2x2x1, a100-40gb:8, "
    "a100-80gb:8, l4:1, l40s:8, h100:8, h200:8, b200:8, gb200:4 or cpu:8"
)
_CHIPS_PER_TPU_HOST = 4


@dataclasses.dataclass(frozen=True)
class DeviceType:
    """A type of device; memory and rates are those of one device of JAX, 0 where unknown."""

    platform: str  # "tpu", "cuda" or "cpu"
    memory: float = 0  # bytes that a GPU reports, or that a TPU's programs can use
    flops: float = 0  # peak dense bfloat16 floating point operations per second
    memory_rate: float = 0  # bytes per second from and to its memory
    jax_kinds: tuple[str, ...] = ()  # JAX's names of the device
    slices: tuple[str, ...] = ()  # shapes of TPU slices, in chips
    cores_per_chip: int = 1  # TensorCores of a TPU, which names such as v5p-128 count
    devices_per_chip: int = 1  # devices of JAX on each chip
    per_host: int = 8  # GPUs


def _cubes(most_chips: int, *smaller: str) -> tuple[str, ...]:
    """Return the parts of a cube of 4x4x4 chips, and the shapes of whole cubes, sides ascending."""
    sides = range(4, 257, 4)
    squares = [(a, b) for a in sides for b in sides if a <= b and a * b * b <= most_chips]
    cubes = (f"{a}x{b}x{c}" for a, b in squares for c in sides if b <= c <= most_chips // (a * b))
    return (*smaller, "2x2x1", "2x2x2", "2x2x4", "2x4x4", *cubes)


_SQUARES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
# TPU: rates and slices of cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x, whose chips
# are two devices of JAX. The memory is what libtpu's compiler leaves to programs ("exceeds
# available HBM (15.75G)"); the rest is the system's.
# GPU: rates of NVIDIA's data sheets for A100, L4, L40S, H100 and H200 (SXM), DGX B200 and GB200
# NVL72, without sparsity. Memory as openxla/xla's backends/gpu/target_config/specs have it; L4 and
# L40S are not there, and theirs, which varies with the driver, is the least that users report.
DEVICE_TYPES = {
    "v4": DeviceType("tpu", 30.75 * GIB, 275e12, 1200e9, ("TPU v4",), _cubes(4096), 2),
    "v5e": DeviceType("tpu", 15.75 * GIB, 197e12, 819e9, ("TPU v5e", "TPU v5 lite"), _SQUARES),
    "v5p": DeviceType("tpu", 95.73 * GIB, 459e12, 2765e9, ("TPU v5p", "TPU v5"), _cubes(6144), 2),
    "v6e": DeviceType("tpu", 31.24 * GIB, 918e12, 1640e9, ("TPU v6e", "TPU v6 lite"), _SQUARES),
    "tpu7x": DeviceType(
        "tpu", 94.74 * GIB, 2307e12 / 2, 7380e9 / 2, ("TPU7x",), _cubes(9216, "1x1x1"), 2, 2
    ),
    "a100-40gb": DeviceType("cuda", 42298834944, 312e12, 1555e9, ("NVIDIA A100-SXM4-40GB",)),
    "a100-80gb": DeviceType("cuda", 85100068864, 312e12, 2039e9, ("NVIDIA A100-SXM4-80GB",)),
    "l4": DeviceType("cuda", 23583784960, 121e12, 300e9, ("NVIDIA L4",)),
    "l40s": DeviceType("cuda", 47674136986, 362e12, 864e9, ("NVIDIA L40S",)),
    "h100": DeviceType("cuda", 84942979072, 989e12, 3350e9, ("NVIDIA H100 80GB HBM3",)),
    "h200": DeviceType("cuda", 150754820096, 989e12, 4800e9, ("NVIDIA H200",)),
    "b200": DeviceType("cuda", 191514411008, 2250e12, 8000e9, ("NVIDIA B200",)),
    "gb200": DeviceType("cuda", 197897748480, 2500e12, 8000e9, ("NVIDIA GB200",), per_host=4),
    "cpu": DeviceType("cpu"),
}
DEVICE_TYPES["h100-mega"] = DEVICE_TYPES["h100"]  # on GKE, in hosts with a faster network
_OTHER_KINDS = {"v5litepod": "v5e", "a100-40": "a100-40gb", "a100-80": "a100-80gb"}
# What CUDA's compiler is told, from the same files and, for the L4 and the L40S, NVIDIA's paper on
# Ada: capability and extension, multiprocessors, and for each its float32 units, shared memory,
# that of a block, and threads; bytes of the L2 cache, and GHz.
_GPU_FACTS = {
    "a100": (8, 0, "NONE", 108, 64, 167936, 166912, 2048, 41943040, 1.41),
    "l4": (8, 9, "NONE", 58, 128, 102400, 101376, 1536, 50331648, 2.04),
    "l40s": (8, 9, "NONE", 142, 128, 102400, 101376, 1536, 100663296, 2.52),
    "h100": (9, 0, "ACCELERATED_FEATURES", 132, 128, 233472, 232448, 2048, 52428800, 1.98),
    "h200": (9, 0, "ACCELERATED_FEATURES", 132, 128, 233472, 232448, 2048, 52428800, 1.98),
    "b200": (10, 0, "ACCELERATED_FEATURES", 148, 128, 233472, 232448, 2048, 132644864, 1.965),
    "gb200": (10, 0, "ACCELERATED_FEATURES", 152, 128, 233472, 232448, 2048, 135528448, 2.062),
}
_GPU_TARGET = """
gpu_device_info {{
  cuda_compute_capability {{ major: {} minor: {} feature_extension: {} }}
  core_count: {} fpus_per_core: {} shared_memory_per_core: {} shared_memory_per_block_optin: {}
  threads_per_core_limit: {} l2_cache_size: {} clock_rate_ghz: {}
  memory_bandwidth: {device.memory_rate:.0f} device_memory_size: {device.memory}
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{device.jax_kinds[0]}"
"""


class CompilerMissingError(RuntimeError):
    """The compiler for a type of device is not installed."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """A machine."""

    kind: str
    shape: tuple[int, ...]
    device_type: DeviceType

    @property
    def name(self) -> str:
        """Return the name in the notation of `DEVICE_TYPES`."""
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    def __str__(self) -> str:
        """Return the name and the number of chips."""
        noun = {"tpu": "chip", "cuda": "GPU"}.get(self.device_type.platform, "CPU device")
        return f"{self.name} ({counted(math.prod(self.shape), noun)})"

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
        is_tpu = self.device_type.platform == "tpu"
        return -(-chips // (_CHIPS_PER_TPU_HOST if is_tpu else self.device_type.per_host))

    @property
    def memory_share(self) -> float:
        """Return the part of a device's memory that JAX takes, on GPUs three quarters by default.

        The environment changes it (docs.jax.dev/en/latest/gpu_memory_allocation.html).
        """
        if self.device_type.platform != "cuda":
            return 1.0
        text = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or "0.75"
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if not 0 < share < math.inf:
            raise UserError(f"XLA_PYTHON_CLIENT_MEM_FRACTION={text}: expected a number above 0")
        return share

    @property
    def available_bytes(self) -> float | None:
        """Return the bytes that programs may use on each device; `None` if unknown."""
        return self.device_type.memory * self.memory_share or None

    def halves(self) -> "Iterator[Topology]":
        """Yield the machines with a half, a quarter, ... of the devices."""
        device, chips = self.device_type, math.prod(self.shape)
        while chips % 2 == 0:
            chips //= 2
            sides = tuple(map(int, _nearest_size(device, f"{chips}x1").split("x")))
            if math.prod(sides) == chips:
                yield Topology(self.kind, sides, device)


def parse_topology(
    text: str, option: str = "--topology", other: DeviceType | None = None
) -> Topology:
    """Return the machine of this name; raise `UserError`, with the nearest name, if there is none.

    A TPU slice is TYPE:SHAPE in chips, or TYPE-N as Google names it, where N counts TensorCores if
    a chip has two. Other machines are TYPE:NUMBER. Case does not matter. `other` describes the
    devices of a type that the table lacks.
    """
    known = (*DEVICE_TYPES, *_OTHER_KINDS)
    kind, colon, size = text.lower().removeprefix("tpu-").partition(":")
    if "-" in kind and not colon and kind not in known:
        kind, _, size = kind.rpartition("-")
    kind = _OTHER_KINDS.get(kind, kind)
    device = DEVICE_TYPES.get(kind, other)
    if device is None:
        longer = [each for each in DEVICE_TYPES if each.startswith(f"{kind}-")]
        near = " or ".join(longer) or nearest_name(kind, DEVICE_TYPES)
        more = "; for another device add --hbm-gib and --tflops" * (option == "--topology")
        raise UserError(
            f"{option}={text}: unknown type {kind!r}; expected {EXAMPLES}{more}."
            + f" Did you mean {near}?" * bool(near)
        )
    nearest = _nearest_size(device, size)
    machine = Topology(kind, tuple(map(int, nearest.split("x"))), device)
    cores = math.prod(machine.shape) * device.cores_per_chip
    if size != (nearest if colon else str(cores)) or not (colon or device.slices):
        raise UserError(f"{option}={text}: there is no such machine; did you mean {machine.name}?")
    return machine


def _nearest_size(device: DeviceType, size: str) -> str:
    """Return the size of the machine closest to `size`: of equally large slices, the most compact.

    A number counts the TensorCores of a TPU; more GPUs than a host has are those of whole hosts.
    """
    number: float = 8
    if re.fullmatch(r"[0-9]{1,5}(x[0-9]{1,5})*", size):
        number = math.prod(map(int, size.split("x")))
    if not device.slices:
        if device.platform == "cuda" and number > device.per_host:
            number = -(-number // device.per_host) * device.per_host
        return str(max(1, int(number)))
    if "x" not in size:
        number /= device.cores_per_chip

    def distance(shape: str) -> tuple[bool, float, int]:
        sides = list(map(int, shape.split("x")))
        return shape != size, abs(math.prod(sides) - number), max(sides)

    return min(device.slices, key=distance)


def prepare_environment(topology: Topology) -> None:
    """Make JAX use as many CPU devices as the machine has, and no accelerator: a run may use it."""
    import jax

    os.environ |= {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        # libtpu otherwise looks for the TPU that the machine belongs to, or for its lock.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    if topology.device_type.platform == "cuda":
        backends.add_gpu_flags()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", topology.num_devices)


def described_devices(topology: Topology) -> "list[jax.Device]":
    """Return the devices of a machine, to compile for but not to run on.

    Raise `CompilerMissingError` without their compiler, `UserError` if it lacks the machine.
    """
    import jax
    from jax.experimental import topologies

    device = topology.device_type
    if device.platform == "cpu":
        return jax.devices("cpu")[: topology.num_devices]

    chips = math.prod(topology.shape)
    description: dict[str, Any] = {"platform": "tpu", "topology_name": topology.name}
    if device.platform == "cuda":
        facts = _GPU_FACTS.get(topology.kind.partition("-")[0])
        if facts is None:
            raise CompilerMissingError(f"no compiler knows {topology.kind}")
        hosts = topology.num_hosts
        description = {
            "platform": "cuda",
            "topology_name": "",
            "target_config": _GPU_TARGET.format(*facts, device=device),
            "topology": f"1x{hosts}x{chips // hosts}",  # slices x hosts x devices
        }
    elif topology.kind == "v4":  # its two cores are one device of JAX
        description["chip_config_name"] = "megacore"
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
        raise CompilerMissingError(COMPILERS[device.platform]) from error


COMPILERS = {
    "tpu": "libtpu is not installed (`pip install jax[tpu]`; it needs no TPU)",
    "cuda": "CUDA's compiler is not installed (`pip install jax[cuda12]`; it needs no GPU)",
}
