"""Have JAX and XLA compile quickly: most of the suite's time is compilation.

The flags take 60 % of its CPU time away: no optimization by LLVM, fusions by XLA's older
emitters, which do not go through MLIR (jaxlib 0.12 has none), and no splitting of a program between
threads. A test that computes for minutes needs optimized programs: run it with XLA_FLAGS= in the
environment.
"""

import os
import shlex
import threading
from collections.abc import Callable

from jax_ppo.runtime import backends

FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
)


def set_flags(report: Callable[[str], object]) -> None:
    """Set XLA_FLAGS, unless it is set, to the flags that the installed jaxlib knows."""
    os.environ.setdefault("XLA_FLAGS", FLAGS)
    drop_unknown(report)


def drop_unknown(report: Callable[[str], object]) -> None:
    """Take the flags out of XLA_FLAGS that the installed jaxlib refuses, and report it."""
    if refused := backends.refused_flags():
        flags = shlex.split(os.environ["XLA_FLAGS"])
        os.environ["XLA_FLAGS"] = shlex.join(flag for flag in flags if flag not in refused)
        os.environ[backends.TRIED] = os.environ["XLA_FLAGS"]
        report(f"XLA_FLAGS: without {shlex.join(refused)}, which the installed jaxlib refuses")


def share_contexts() -> None:
    """Have JAX before 0.12 lower ten programs in one MLIR context, as JAX 0.12 does.

    It takes 5 of the 17 ms in which an eager operation is compiled to make one (measured with
    jax 0.10.2). A context keeps the constants of its programs, hence only ten.
    """
    from jax._src.interpreters import mlir

    if hasattr(mlir, "_create_ir_context") or not hasattr(mlir, "make_ir_context"):
        return
    mlir._create_ir_context = mlir.make_ir_context
    last = threading.local()

    def make_ir_context():
        if not getattr(last, "uses", 0):
            last.context, last.uses = mlir._create_ir_context(), 10
        last.uses -= 1
        return last.context

    mlir.make_ir_context = make_ir_context
