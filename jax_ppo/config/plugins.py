"""Functions of the user's own, named on the command line: found, imported, and checked to take what they will be given."""

import functools
import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jax_ppo.errors import UserError, did_you_mean


def load_plugin(
    function: str, option: str, arguments: tuple[str, ...], by_name: bool
) -> Callable[..., Any]:
    """The function named by `module:function` or `path/to/file.py:function`.

    Args:
      option: the option that names it, for messages.
      arguments: names of what it will be called with.
      by_name: called as f(name=...) rather than f(value, ...).

    Raises:
      UserError: not of that form, no such module, file or function, an error while the module is imported, or a function
        that can not be called with these arguments.
    """
    given = f"config.{option}={function!r}"
    module_name, colon, name = function.rpartition(":")
    if not colon or not module_name or not name.isidentifier():
        raise UserError(f"{given}: expected module:function or path/to/file.py:function")
    module = _module(module_name, given)
    found = getattr(module, name, None)
    if not callable(found):
        callables = [
            n for n, value in vars(module).items() if callable(value) and not n.startswith("_")
        ]
        raise UserError(
            f"{given}: {module_name} has no function {name!r}; it has "
            f"{', '.join(callables) or 'none'}.{did_you_mean(name, callables)}"
        )
    _check_signature(found, given, arguments, by_name)
    return found


def _module(module_name, given):
    path = Path(module_name).expanduser()
    try:
        if module_name.endswith(".py"):
            if not path.is_file():
                known = [file.name for file in path.parent.glob("*.py")]
                raise UserError(
                    f"{given}: there is no file {path} (looked from {Path.cwd()}).{did_you_mean(path.name, known)}"
                )
            return _import_file(path.resolve())
        return importlib.import_module(module_name)
    except UserError:
        raise
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(
            f"{error.name}."
        )
        hint = (
            ". Expected a module that Python can import from here, or path/to/file.py:function"
            if absent
            else ""
        )
        raise UserError(
            f"{given}: importing {module_name} failed: {type(error).__name__}: {error}{hint}"
        ) from error


@functools.cache
def _import_file(path):
    name = f"jax_ppo_plugin_{path.stem}_{zlib.crc32(bytes(path)):08x}"  # files of one name may lie in two folders
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in it look themselves up there
    spec.loader.exec_module(module)
    return module


def _check_signature(found, given, arguments, by_name):
    try:
        signature = inspect.signature(found)
    except ValueError:  # some built-in callables have none to look at
        return
    try:
        if by_name:
            signature.bind(**dict.fromkeys(arguments))
        else:
            signature.bind(*arguments)
    except TypeError as error:
        call = ", ".join(f"{a}=..." if by_name else a for a in arguments)
        raise UserError(
            f"{given}: it is called as f({call}), but takes {signature}: {error}"
        ) from error
