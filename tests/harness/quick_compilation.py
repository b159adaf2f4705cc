"""Have XLA compile quickly: most of the suite's time is compilation.

These flags take 60 % of its CPU time away: no optimization by LLVM, fusions by XLA's older
emitters, which do not go through MLIR (jaxlib 0.12 has none), and no splitting of a program between
threads. A test that computes for minutes needs optimized programs: run it with XLA_FLAGS= in the
environment.
"""

import os
from collections.abc import Callable

from jax_ppo.runtime import xla_flags

FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)


def set_flags(report: Callable[[str], object]) -> None:
    """Set XLA_FLAGS, unless it is set, to the flags that the installed jaxlib knows."""
    os.environ.setdefault("XLA_FLAGS", FLAGS)
    xla_flags.drop_unknown(report)
