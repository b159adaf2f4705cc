"""PPO for language models in JAX.

`python -m jax_ppo` lists the commands. The Python API, loaded on first use:

    from jax_ppo import load_config, check, train, evaluate, score, load_policy, sample, kernels

    config = load_config("arithmetic", trainer__total_training_steps=10)
    result = train(config, "output/arithmetic")
    policy = load_policy("output/arithmetic")
    print(sample(policy, ["Tom has 3 apples. He buys 4 more. How many does he have?"]))
"""

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would ask for torch

if TYPE_CHECKING:
    from jax_ppo import kernels as kernels
    from jax_ppo.api import Policy as Policy
    from jax_ppo.api import RunResult as RunResult
    from jax_ppo.api import check as check
    from jax_ppo.api import evaluate as evaluate
    from jax_ppo.api import load_policy as load_policy
    from jax_ppo.api import sample as sample
    from jax_ppo.api import score as score
    from jax_ppo.api import train as train
    from jax_ppo.config.loading import load_config as load_config

__version__ = "0.2.0"
_FUNCTIONS = ("train", "evaluate", "score", "check")  # also commands, which are modules
_OF_API = ("Policy", "RunResult", "load_policy", "sample", *_FUNCTIONS)
__all__ = ["__version__", "kernels", "load_config", *_OF_API]


class _Package(ModuleType):
    """The package, whose functions keep their names when commands of these names are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _FUNCTIONS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import an attribute of the public API on first use."""
    if name == "kernels":
        return importlib.import_module("jax_ppo.kernels")
    if name == "load_config":
        return importlib.import_module("jax_ppo.config.loading").load_config
    if name in _OF_API:
        return getattr(importlib.import_module("jax_ppo.api"), name)
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
