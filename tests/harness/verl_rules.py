"""verl's rules for rewards, where it is installed: `pip install --no-deps verl` is enough."""

import importlib.util
from pathlib import Path
from types import ModuleType


def load_verl_rule(name: str) -> ModuleType | None:
    """Return a module of verl's scores from its own file: the package itself imports much more."""
    package = importlib.util.find_spec("verl")
    if package is None:
        return None
    path = Path(package.submodule_search_locations[0], "utils", "reward_score", f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"verl_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
