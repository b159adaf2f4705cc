"""The packages and their allowed imports, checked on the sources without running them."""

import ast
import graphlib
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

FOUNDATIONS = {"errors", "types", "registries", "kernels"}
# Allowed imports of each package. Lower packages come first and never import higher ones.
MAY_IMPORT = {
    "errors": set(),
    "types": set(),
    "registries": set(),
    "kernels": set(),
    "processes": {"errors"},
    "thoughts": set(),
    "http_client": {"errors"},
    "timed_threads": set(),
    "demonstration": {"types"},
    "storage": {"errors"},
    "config": {"errors", "registries", "storage"},
    "migrating": {"errors", "registries", "config"},
    "runtime": {"errors", "config", "storage"},
    "models": FOUNDATIONS | {"config", "storage", "runtime"},
    "rewards": {
        *("errors", "types", "registries", "config", "processes", "http_client", "thoughts"),
        "timed_threads",
    },
    "data": {"errors", "types", "registries", "storage", "processes", "thoughts"},
    "training": FOUNDATIONS | {"config", "storage", "runtime", "models", "data"},
    "sampler": FOUNDATIONS | {"config", "runtime", "models", "http_client"},
    "reporting": {"errors", "config", "runtime", "training"},
}
MAY_IMPORT["environments"] = {
    *("errors", "types", "config", "data", "rewards", "runtime", "sampler", "processes"),
    *("http_client", "thoughts", "timed_threads"),
}
MAY_IMPORT["ppo"] = MAY_IMPORT["training"] | {"training", "sampler", "rewards", "environments"}
MAY_IMPORT["memory"] = MAY_IMPORT["ppo"] | {"ppo"}
MAY_IMPORT["run"] = MAY_IMPORT["memory"] | {"memory", "reporting"}
MAY_IMPORT["plan"] = {"errors", "config", "runtime", "memory"}
MAY_IMPORT["command"] = {"errors", "config", "storage", "runtime", "reporting", "data"}
RUNNING = {"train", "sft", "reward_model", "critic", "evaluate", "score"}
MAY_IMPORT |= dict.fromkeys(RUNNING, {"command"})
MAY_IMPORT["translate"] = {"config", "errors", "migrating"}
MAY_IMPORT["report"] = {"config", "errors", "storage", "reporting"}
MAY_IMPORT["check"] = {"config", "errors", "run"}
MAY_IMPORT["api"] = MAY_IMPORT["run"] | {"run", "command"}

HOST = {"data", "rewards"}  # run on the host, without jax
COMMANDS = RUNNING | {"check", "report", "translate", "plan"}
# The files that say how arrays are split: layouts, and what devices exchange.
PARTITION_SPECS = {
    "jax_ppo/runtime/sharding.py",
    "jax_ppo/runtime/parallelism/split_attention.py",
    "jax_ppo/runtime/parallelism/experts.py",
    "jax_ppo/runtime/parallelism/rows.py",
    "jax_ppo/runtime/parallelism/pipeline.py",
    "jax_ppo/runtime/parallelism/vocabulary.py",
}
# Loaded before the options are validated, so they load nothing heavy.
LATE = (
    "jax_ppo/config/",
    "jax_ppo/__init__.py",
    "jax_ppo/command.py",
    "jax_ppo/errors.py",
    "jax_ppo/registries.py",
    "jax_ppo/runtime/compat.py",
    "jax_ppo/runtime/faults.py",
    "jax_ppo/runtime/heartbeat.py",
    "jax_ppo/runtime/signals.py",
)
KERNEL_LIBRARIES = {"jax", "jaxtyping", "jax_ppo", *sys.stdlib_module_names}
HEAVY = {"jax", "flax", "transformers"}
# Workers, which start without the rest, end with their parent by a system call; what confines a
# model's code consists of such calls.
PRIVATE_PARTS = {
    "jax_ppo/runtime/compat.py",
    "jax_ppo/processes.py",
    "jax_ppo/environments/sandbox.py",
}
# Names that are public in spite of their underscore.
PUBLIC_NAMES = {"_asdict", "_exit", "_fields", "_replace"}
MOST_TAKERS_OF_CONFIG = 35
UNPICKLING = {"pickle", "cloudpickle", "dill", "joblib", "shelve"}
# Public names that more than one module defines: `main` of commands, and what the two
# implementations of models have in common.
SHARED_NAMES = {"main", "Attention", "Layer", "MLP"}


def violations(path: str, source: str) -> list[str]:
    """Return the violations of the design in a file; `path` is relative to the repository."""
    tree = ast.parse(source)
    found = [f"{path}:{line}: {what}" for line, what in _unsafe(tree)]
    if path.startswith("jax_ppo/"):
        found += [
            f"{path}:{line}: {what}"
            for line, what in (
                *_imports(path, tree),
                *_partition_specs(path, tree),
                *_private(path, tree),
            )
        ]
    return found


def _imports(path, tree):
    package_name = path.split("/")[1].removesuffix(".py")
    for line, module in _imported(path, tree):
        package, _, rest = module.partition(".")
        other = rest.partition(".")[0]
        if package == "jax_ppo" and other and other != package_name:
            # The package binds the name of the function `train`.
            if other in COMMANDS and path != "jax_ppo/__init__.py":
                yield line, f"nobody imports {other}"
            elif package_name in MAY_IMPORT and other not in MAY_IMPORT[package_name]:
                yield line, f"{package_name} must not import {other}"
        if package in ("jax", "jaxlib") and package_name in HOST:
            yield line, f"{package_name} stays on the host, without {package}"
        if package == "flax" and package_name != "models":
            yield line, "flax stays in models"
        if package_name == "kernels" and package not in KERNEL_LIBRARIES:
            yield line, f"kernels import jax only, not {package}"
    if path.startswith(LATE):
        for line, module in _imported(path, ast.Module(tree.body, []), inside=False):
            if module.partition(".")[0] in HEAVY:
                yield line, f"{module} is loaded before the options are checked"


def _imported(path, tree, inside=True):
    """Yield (line, dotted module) of each import, also those in functions if `inside`."""
    for node in ast.walk(tree) if inside else _outside_functions(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parent = path.split("/")[: -node.level]
                module = ".".join([*parent, module] if module else parent)
            # In `from jax_ppo import metrics` the package is among the imported names.
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}" if module == "jax_ppo" else module


def _outside_functions(node):
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _outside_functions(child)


def _partition_specs(path, tree):
    if path in PARTITION_SPECS:
        return
    for line in _lines_with_partition_spec(tree):
        yield line, "PartitionSpec stays in runtime/sharding.py and runtime/parallelism"


def _private(path, tree):
    """Yield (line, message) of each private part of a library."""
    if path in PRIVATE_PARTS:
        return
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        if "jax_ppo" not in names:
            for name in names:
                if name == "ctypes" or (name.startswith("_") and not name.startswith("__")):
                    yield node.lineno, f"{name}: private parts stay in runtime/compat.py"
    own = {getattr(node, "name", None) for node in ast.walk(tree)}
    own |= {getattr(node, "id", None) for node in ast.walk(tree) if _is_stored(node)}
    own |= {node.attr for node in ast.walk(tree) if _is_stored(node) and hasattr(node, "attr")}
    for node in ast.walk(tree):
        # What `self` has may come from a class of ours in another file.
        if getattr(getattr(node, "value", None), "id", "") in ("self", "cls"):
            continue
        name = getattr(node, "attr", "")
        if name.startswith("_") and not name.startswith("__") and name not in own | PUBLIC_NAMES:
            yield node.lineno, f"{name}: private parts stay in runtime/compat.py"


def _is_stored(node):
    """Return whether `self._name = ...` or `_name: type` defines the name; `x._name = ...` not."""
    if isinstance(node, ast.Attribute):
        return isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") in ("self", "cls")
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _lines_with_partition_spec(tree):
    for node in ast.walk(tree):
        names = {getattr(node, "id", None), getattr(node, "attr", None)}
        names |= {
            alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)
        }
        if "PartitionSpec" in names:
            yield node.lineno


def _unsafe(tree):
    """Yield (line, message) of each way to execute text or data that was read or generated."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                yield node.lineno, f"{node.func.id}() runs text"
            for keyword in node.keywords:
                on = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in ("trust_remote_code", "allow_pickle") and on:
                    yield node.lineno, f"{keyword.arg}=True runs what was read"
    for line, module in _imported("", tree):
        if module.partition(".")[0] in UNPICKLING:
            yield line, f"{module} runs what it reads"


SOURCES = [
    p.relative_to(ROOT).as_posix()
    for folder in ("jax_ppo", "configs", "benchmarks", "tests")
    for p in sorted((ROOT / folder).rglob("*.py"))
]


@pytest.mark.parametrize("path", [*SOURCES, "setup.py"])
def test_every_file_keeps_to_the_design(path):
    assert violations(path, (ROOT / path).read_text()) == []


def test_the_files_are_looked_at():
    assert {
        "jax_ppo/config/loading.py",
        "jax_ppo/kernels/losses.py",
        "tests/test_architecture.py",
    } <= set(SOURCES)
    packages = {
        path.split("/")[1].removesuffix(".py") for path in SOURCES if path.startswith("jax_ppo/")
    }
    assert MAY_IMPORT.keys() == packages - {"__init__", "__main__"}, "list every package"


@pytest.mark.parametrize("path", sorted(PARTITION_SPECS))
def test_every_file_that_may_split_arrays_does(path):
    assert list(_lines_with_partition_spec(ast.parse((ROOT / path).read_text())))


SPLITS = "PartitionSpec stays in runtime/sharding.py and runtime/parallelism"
PRIVATE = "private parts stay in runtime/compat.py"


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("kernels/losses", "import numpy as np", "kernels import jax only, not numpy"),
        ("kernels/losses", "from jax_ppo.types import Rollout", "kernels must not import types"),
        ("config/loading", "from jax_ppo import runtime", "config must not import runtime"),
        (
            "models/heads",
            "def f():\n    from jax_ppo.training.state import x",
            "models must not import training",
        ),
        ("training/packing", "import jax_ppo.ppo.update", "training must not import ppo"),
        ("runtime/sharding", "from .. import training", "runtime must not import training"),
        ("data/tokenize_prompts", "import jax.numpy as jnp", "data stays on the host, without jax"),
        ("run/ppo_training", "from jax_ppo import config, train", "nobody imports train"),
        ("training/state", "import flax.linen as nn", "flax stays in models"),
        ("training/state", "from jax.sharding import PartitionSpec as P", SPLITS),
        ("training/state", "import jax\nx = jax.sharding.PartitionSpec()", SPLITS),
        ("config/loading", "if True:\n    import jax", "jax is loaded before the options are"),
        ("__init__", "from transformers import AutoTokenizer", "loaded before the options are"),
        ("runtime/meshes", "from jax._src import mesh", f"_src: {PRIVATE}"),
        ("runtime/backends", "from jaxlib import _jax", f"_jax: {PRIVATE}"),
        ("training/checksums", "def f(path):\n    path._store = None", f"_store: {PRIVATE}"),
        ("data/files", "import pickle", "pickle runs what it reads"),
        (
            "data/files",
            "import numpy\nnumpy.load('x', allow_pickle=True)",
            "allow_pickle=True runs",
        ),
        ("data/files", "f('x', trust_remote_code=True)", "trust_remote_code=True runs"),
        ("rewards/number_rules", "y = eval('1 + 1')", "eval() runs text"),
    ],
)
def test_each_rule_catches_what_it_is_for(module, source, message):
    (only,) = violations(f"jax_ppo/{module}.py", source)
    assert message in only


def test_code_beside_the_package_runs_no_text_either():
    assert violations("configs/a.py", "f('x', trust_remote_code=True)")
    assert not violations("tests/test_x.py", "from jax.sharding import PartitionSpec")


def test_few_functions_take_all_options():
    """Commands, builders and validation do; others take the sections or values that they read."""
    takers = [taker for path in SOURCES for taker in _takers_of_all_options(path)]
    assert len(takers) <= MOST_TAKERS_OF_CONFIG, takers


def _takers_of_all_options(path):
    if not path.startswith("jax_ppo/") or path.startswith("jax_ppo/models/hf/"):
        return  # there, `Config` is the contents of a config.json
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            annotations = [ast.unparse(x.annotation) for x in parameters if x.annotation]
            if any(re.search(r"\bConfig\b", text) for text in annotations):
                yield f"{path}:{node.lineno}: {node.name}"


def test_no_files_import_each_other_in_a_circle():
    """Imports in functions and for type checkers count, too; `graphlib` names a circle."""
    files = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path in SOURCES
        if path.startswith("jax_ppo/")
    }
    imported: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Import):
                imported[name] |= {alias.name for alias in node.names} & files.keys()
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    imported[name] |= {whole if whole in files else node.module} & files.keys()
    assert imported["jax_ppo.ppo.step"] > {"jax_ppo.ppo.update", "jax_ppo.types"}
    graphlib.TopologicalSorter(imported).prepare()


def test_a_public_name_means_one_thing():
    files_by_name: dict[str, list[str]] = {}
    for path in (ROOT / "jax_ppo").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_":
                files_by_name.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    repeated = {name: files for name, files in files_by_name.items() if len(files) > 1}
    assert repeated.keys() == SHARED_NAMES, repeated
