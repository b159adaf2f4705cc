"""Import the user's functions that options name, and verify their signatures before the run."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from jax_ppo.errors import UserError, did_you_mean, shorten
from jax_ppo.registries import IN_MEMORY


def load_plugin(
    function: str,
    option: str,
    arguments: tuple[str, ...],
    by_name: bool,
    other_arguments: Callable[[Callable[..., Any]], tuple[str, ...] | None] = lambda plugin: None,
) -> Callable[..., Any]:
    """Return the function that `module:function` or `path/to/file.py:function` names.

    It is called with `arguments`, as f(name=...) if `by_name`, else as f(value, ...);
    `other_arguments` returns those of a function with another signature, else `None`. Raise
    `UserError`, which names `option`, if the value is malformed, an import fails, the function does
    not exist, or it cannot be called with these arguments.
    """
    setting = f"config.{option}={function!r}"
    plugin: Callable[..., Any] = IN_MEMORY.get(function) or _import_function(function, setting)
    _validate_signature(plugin, setting, other_arguments(plugin) or arguments, by_name)
    return plugin


def _import_function(function: str, setting: str) -> Callable[..., Any]:
    module_name, colon, name = function.rpartition(":")
    if module_name == "memory" and "@" in name:
        raise UserError(f"{setting}: a function of another Python process; pass it again")
    if not colon or not module_name or not name.isidentifier():
        raise UserError(f"{setting}: expected module:function or path/to/file.py:function")
    module = _import_plugin(module_name, setting)
    plugin: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(plugin):
        # The functions that the module does have help with a misspelled name.
        callables = [
            attribute
            for attribute, value in vars(module).items()
            if callable(value) and not attribute.startswith("_")
        ]
        raise UserError(
            f"{setting}: {module_name} has no function {name!r}; it has "
            f"{shorten(', '.join(callables), 200) or 'none'}.{did_you_mean(name, callables)}"
        )
    return plugin


def further_parameters(function: Callable[..., Any], known: Collection[str]) -> tuple[str, ...]:
    """Return the names of a function's parameters without a default that are not known."""
    parameters = inspect.signature(function).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return tuple(
        p.name
        for p in parameters
        if p.name not in known and p.default is p.empty and p.kind in named
    )


def describe_result(value: object) -> str:
    """Return what a function returned, for messages: its shape if it has one, else its type."""
    if value is None:
        return "None"
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" if shape is None else f"an array of shape {shape}"


def _import_plugin(module_name: str, setting: str) -> ModuleType:
    try:
        if module_name.endswith(".py"):
            path = Path(module_name).expanduser()
            if not path.is_file():
                known = [file.name for file in path.parent.glob("*.py")]
                raise UserError(
                    f"{setting}: there is no file {path} (looked from {Path.cwd()})."
                    f"{did_you_mean(path.name, known)}"
                )
            return _import_file(path.resolve())
        return importlib.import_module(module_name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit() in the user's module is a failure, too
        hint = ""
        # Distinguish a missing module from a failing import inside the user's module.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            hint = (
                ". Expected a module that Python can import from here, or path/to/file.py:function"
            )
        raise UserError(
            f"{setting}: importing {module_name} failed: {type(error).__name__}: {error}{hint}"
        ) from error


@functools.cache
def _import_file(path: Path) -> ModuleType:
    # The checksum separates files of the same name in different folders.
    name = f"jax_ppo_plugin_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in it look themselves up there
    with folder_importable(path.parent):
        spec.loader.exec_module(module)
    # Last, for imports that its functions make later.
    sys.path.append(str(path.parent))
    return module


@contextlib.contextmanager
def folder_importable(folder: Path) -> Iterator[None]:
    """Let the block import the modules of a folder, as a script there can."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def _validate_signature(
    function: Callable[..., Any], setting: str, arguments: tuple[str, ...], by_name: bool
) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in callables have no signature
        return
    try:
        if by_name:
            # Binding tests the call without making it, so that mistakes are found before the run.
            signature.bind(**dict.fromkeys(arguments))
        else:
            signature.bind(*arguments)
    except TypeError as error:
        call = ", ".join(f"{name}=..." if by_name else name for name in arguments)
        raise UserError(
            f"{setting}: expected signature f({call}), got {signature}: {error}"
        ) from error
