"""Reward functions of the user's own: found, checked, called, and their answer read."""

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_ppo.errors import UserError, did_you_mean
from jax_ppo.rewards.rules import RewardResult

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_function(function: str) -> Callable[..., Any]:
    """The function named by `module:function` or `path/to/file.py:function`.

    Raises:
      UserError: not of that form, no such module, file or function, an error while the module is imported, or a
        function that can not be called with ARGUMENTS by name.
    """
    module_name, colon, name = function.rpartition(":")
    if not colon or not module_name or not name.isidentifier():
        raise UserError(f"config.reward.function={function!r}: expected module:function or path/to/file.py:function")
    module = _module(module_name, function)
    found = getattr(module, name, None)
    if not callable(found):
        callables = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise UserError(f"config.reward.function={function!r}: {module_name} has no function {name!r}; it has "
                          f"{', '.join(callables) or 'none'}.{did_you_mean(name, callables)}")
    _check_signature(found, function)
    return found


def to_result(value: Any) -> RewardResult:
    """The result behind what a function returned.

    A number (Python's, NumPy's, an array of one) is the score. A dict holds "score", and may hold "acc", correct from
    0.5 on, and other numbers to report. What else it holds, such as the answer that was found, is left out.

    Raises:
      TypeError: something else, a dict without "score", or a score that is text.
    """
    if not isinstance(value, dict):
        return RewardResult(_number(value))
    if "score" not in value:
        raise TypeError(f"the reward function returned a dict with {', '.join(map(repr, value)) or 'nothing'}; "
                        "expected 'score'")
    extra = {}
    for name, item in value.items():
        if name not in ("score", "acc") and _is_number(item):
            extra[str(name)] = _number(item)
    acc = math.nan if value.get("acc") is None else _number(value["acc"])
    return RewardResult(_number(value["score"]), None if math.isnan(acc) else acc >= 0.5, extra)


def _module(module_name, function):
    path = Path(module_name).expanduser()
    try:
        if module_name.endswith(".py"):
            if not path.is_file():
                known = [file.name for file in path.parent.glob("*.py")]
                raise UserError(f"config.reward.function={function!r}: there is no file {path} (looked from "
                                  f"{Path.cwd()}).{did_you_mean(path.name, known)}")
            return _import_file(path)
        return importlib.import_module(module_name)
    except UserError:
        raise
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        hint = ". Expected a module that Python can import from here, or path/to/file.py:function" if absent else ""
        raise UserError(f"config.reward.function={function!r}: importing {module_name} failed: "
                          f"{type(error).__name__}: {error}{hint}") from error


def _import_file(path):
    name = f"reward_function_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in it look themselves up there
    spec.loader.exec_module(module)
    return module


def _check_signature(found, function):
    try:
        signature = inspect.signature(found)
    except ValueError:  # some built-in callables have none to look at
        return
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise UserError(f"config.reward.function={function!r}: it is called as "
                          f"f({', '.join(f'{a}=...' for a in ARGUMENTS)}), but takes {signature}: {error}") from error


def _is_number(value):
    return not isinstance(value, (str, bytes)) and hasattr(value, "__float__") and getattr(value, "size", 1) == 1


def _number(value):
    if not _is_number(value):
        raise TypeError(f"the reward function returned {value!r} of type {type(value).__name__}; expected a number")
    return float(value.item() if hasattr(value, "item") else value)
