import functools
import importlib.util
import pathlib
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@functools.cache
def load_example(file):
    """Return the module of a file in examples/."""
    spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def example():
    """Return a function from a name such as `losses/sapo` to the module."""
    return lambda name: load_example(EXAMPLES / f"{name}.py")
