"""PPO for language models in JAX.

`python -m jax_ppo` lists the commands. The Python API, loaded on first use:

    from jax_ppo import load_config, train, load_policy, sample, kernels

    config = load_config("arithmetic", trainer__total_training_steps=10)
    summary = train(config, "output/arithmetic")
    policy = load_policy("output/arithmetic")
    print(sample(policy, ["Tom has 3 apples. He buys 4 more. How many does he have?"]))
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from jax_ppo.train import train as train

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would ask for torch
if TYPE_CHECKING:
    from jax_ppo import kernels as kernels
    from jax_ppo.api import Policy as Policy
    from jax_ppo.api import load_policy as load_policy
    from jax_ppo.api import sample as sample
    from jax_ppo.config.loading import load_config as load_config

__version__ = "0.2.0"
__all__ = ["Policy", "__version__", "kernels", "load_config", "load_policy", "sample", "train"]

_ATTRIBUTES = {
    "Policy": "jax_ppo.api",
    "load_config": "jax_ppo.config.loading",
    "load_policy": "jax_ppo.api",
    "sample": "jax_ppo.api",
}


def __getattr__(name: str) -> Any:
    """Import an attribute of the public API on first use."""
    if name == "kernels":
        return importlib.import_module("jax_ppo.kernels")
    if name in _ATTRIBUTES:
        return getattr(importlib.import_module(_ATTRIBUTES[name]), name)
    raise AttributeError(f"module 'jax_ppo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _print_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print an error that ends a command; Ctrl-C, also while modules load, in one line."""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped by SIGINT", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


# The package is imported for a command: `python -m jax_ppo...` (Python looks for it under this
# name), or the console script.
if sys.argv and (sys.argv[0] == "-m" or sys.argv[0].endswith("jax-ppo")):
    sys.excepthook = _print_error
