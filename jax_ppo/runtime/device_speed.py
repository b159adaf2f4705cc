"""Peak rates of accelerators, by JAX's name of the device."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class PeakRates:
    """Peak rates of one JAX device, per second.

    Attributes:
      flops: dense bfloat16 floating point operations.
      memory_bytes: bytes from and to its memory; 0 if unknown.
      link_bytes: bytes that it can send to other devices of the same host or slice; 0 if unknown.
    """

    flops: float
    memory_bytes: float = 0
    link_bytes: float = 0


# TPU: "peak compute per chip", "HBM bandwidth" and "interchip interconnect bandwidth" in
# cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e and /tpu7x; a chip of TPU7x is two devices. GPU:
# NVIDIA's data sheets of the A100, L4, H100 SXM, H200 and B200, without sparsity; NVLink's
# bandwidth is stated for both directions together.
_V5E = PeakRates(197e12, 819e9, 1600e9 / 8)
_V5P = PeakRates(459e12, 2765e9, 4800e9 / 8)
_V6E = PeakRates(918e12, 1640e9, 3584e9 / 8)
PEAK_RATES = {
    "TPU v4": PeakRates(275e12, 1228e9, 2400e9 / 8),
    "TPU v5 lite": _V5E,
    "TPU v5e": _V5E,
    "TPU v5": _V5P,
    "TPU v5p": _V5P,
    "TPU v6 lite": _V6E,
    "TPU v6e": _V6E,
    "TPU7x": PeakRates(2307e12 / 2, 7380e9 / 2, 9600e9 / 8 / 2),
    "NVIDIA A100-SXM4-40GB": PeakRates(312e12, 1555e9, 600e9 / 2),
    "NVIDIA A100-SXM4-80GB": PeakRates(312e12, 2039e9, 600e9 / 2),
    "NVIDIA L4": PeakRates(121e12, 300e9),
    "NVIDIA H100 80GB HBM3": PeakRates(989e12, 3350e9, 900e9 / 2),
    "NVIDIA H200": PeakRates(989e12, 4800e9, 900e9 / 2),
    "NVIDIA B200": PeakRates(2250e12, 8000e9, 1800e9 / 2),
}


def total_peak_flops() -> float | None:
    """Return the peak FLOPs per second of all devices of the run; `None` if one is unknown."""
    rates = [PEAK_RATES.get(device.device_kind) for device in jax.devices()]
    known = [rate.flops for rate in rates if rate is not None]
    if len(known) < len(rates):
        return None
    return sum(known)
