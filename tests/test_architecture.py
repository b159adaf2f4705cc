"""The rooms and the directions in which they may know each other, read off the sources without running them."""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

FOUNDATIONS = {
    "kernels",
    "types",
    "schema",
    "sharding",
    "packing",
    "models",
    "errors",
    "hub",
    "plugins",
    "notation",
    "dispatch",
}
ALGORITHM = {"state", "sampler", "scoring", "experience", "objectives", "update"}
REPORTS = {"evaluate", "checkpoint", "console", "metrics", "distributed"}
HOST = {"data", "rewards"}
COMMANDS = {"train", "sft", "reward_model"}

# What a room may import of the project, besides itself. Rooms that are not here (train and what it is made of) may
# import any but train.
MAY_IMPORT = (
    {room: FOUNDATIONS for room in FOUNDATIONS}
    | {room: FOUNDATIONS | ALGORITHM for room in ALGORITHM}
    | {room: FOUNDATIONS | ALGORITHM | REPORTS for room in REPORTS}
    | {room: {"types", "hub", "errors", "plugins"} for room in HOST}
    | {
        "kernels": set(),
        "types": set(),
        "errors": set(),
        "hub": {"errors"},
        "plugins": {"errors"},
        "schema": set(),
        "dispatch": set(),
        "notation": {"errors", "schema"},
        "consistency": {"errors", "schema", "notation"},
        "config": {"errors", "schema", "consistency"},
        "sampler": FOUNDATIONS,
        "console": {"distributed"},
        "journal": REPORTS | {"compilation"},
    }
)
# Loaded before the options are checked, so they load nothing heavy.
LATE = {
    "jax_ppo/config.py",
    "jax_ppo/consistency.py",
    "jax_ppo/notation.py",
    "jax_ppo/schema.py",
    "jax_ppo/__init__.py",
}
HEAVY = {"jax", "flax", "transformers"}
UNPICKLING = {"pickle", "cloudpickle", "dill", "joblib", "shelve"}


def violations(path: str, source: str) -> list[str]:
    """What a file does against the design; `path` is relative to the repository, with slashes."""
    tree = ast.parse(source)
    found = [f"{path}:{line}: {what}" for line, what in _unsafe(tree)]
    if path.startswith("jax_ppo/"):
        found += [
            f"{path}:{line}: {what}"
            for line, what in (*_imports(path, tree), *_partition_specs(path, tree))
        ]
    return found


def _imports(path, tree):
    room = path.split("/")[1].removesuffix(".py")
    for line, module in _imported(path, tree):
        package, _, rest = module.partition(".")
        other = rest.partition(".")[0]
        if package == "jax_ppo" and other and other != room:
            if other in COMMANDS:
                yield line, f"nobody imports {other}"
            elif room in MAY_IMPORT and other not in MAY_IMPORT[room]:
                yield line, f"{room} must not know {other}"
        if package in ("jax", "jaxlib") and room in HOST:
            yield line, f"{room} stays on the host, without {package}"
        if package == "flax" and room != "models":
            yield line, "flax stays in models"
        if room == "kernels" and package not in {"jax", "jax_ppo", *sys.stdlib_module_names}:
            yield line, f"kernels import jax only, not {package}"
    if path in LATE:
        for line, module in _imported(path, ast.Module(tree.body, []), inside=False):
            if module.partition(".")[0] in HEAVY:
                yield line, f"{module} is loaded before the options are checked"


def _imported(path, tree, inside=True):
    """(line, dotted module) of each import; those inside functions too, unless told otherwise."""
    for node in ast.walk(tree) if inside else _outside_functions(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parent = path.split("/")[: -node.level]
                module = ".".join([*parent, module] if module else parent)
            for (
                alias
            ) in node.names:  # in `from jax_ppo import metrics` it is they that name the room
                yield node.lineno, f"{module}.{alias.name}" if module == "jax_ppo" else module


def _outside_functions(node):
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _outside_functions(child)


def _partition_specs(path, tree):
    if path == "jax_ppo/sharding.py":
        return
    for node in ast.walk(tree):
        names = {getattr(node, "id", None), getattr(node, "attr", None)}
        names |= {
            alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)
        }
        if "PartitionSpec" in names:
            yield node.lineno, "PartitionSpec stays in sharding.py"


def _unsafe(tree):
    """Ways to run what was read or generated."""
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
    assert {"jax_ppo/config.py", "jax_ppo/kernels/losses.py", "tests/test_architecture.py"} <= set(
        SOURCES
    )
    rooms = {
        path.split("/")[1].removesuffix(".py") for path in SOURCES if path.startswith("jax_ppo/")
    }
    assert MAY_IMPORT.keys() <= rooms, "a room was renamed: rename it here too"


@pytest.mark.parametrize(
    ("path", "source", "message"),
    [
        ("jax_ppo/kernels/losses.py", "import numpy as np", "kernels import jax only, not numpy"),
        (
            "jax_ppo/kernels/losses.py",
            "from jax_ppo.types import Rollout",
            "kernels must not know types",
        ),
        ("jax_ppo/config.py", "from jax_ppo import sharding", "config must not know sharding"),
        (
            "jax_ppo/models/heads.py",
            "def f():\n    from jax_ppo.state import x",
            "models must not know state",
        ),
        ("jax_ppo/packing.py", "import jax_ppo.update", "packing must not know update"),
        ("jax_ppo/sharding.py", "from . import checkpoint", "sharding must not know checkpoint"),
        ("jax_ppo/models/heads.py", "from .. import metrics", "models must not know metrics"),
        ("jax_ppo/models/heads.py", "from ..metrics import say", "models must not know metrics"),
        (
            "jax_ppo/update.py",
            "from jax_ppo.checkpoint import Checkpointer",
            "update must not know checkpoint",
        ),
        (
            "jax_ppo/sampler/generate.py",
            "from jax_ppo import scoring",
            "sampler must not know scoring",
        ),
        ("jax_ppo/metrics.py", "from jax_ppo import ppo", "metrics must not know ppo"),
        (
            "jax_ppo/data/prompts.py",
            "import jax.numpy as jnp",
            "data stays on the host, without jax",
        ),
        ("jax_ppo/data/prompts.py", "from jax_ppo import config", "data must not know config"),
        ("jax_ppo/rewards/rules.py", "from jax_ppo.data import rows", "rewards must not know data"),
        ("jax_ppo/ppo.py", "from jax_ppo import config, train", "nobody imports train"),
        ("jax_ppo/state.py", "import flax.linen as nn", "flax stays in models"),
        (
            "jax_ppo/state.py",
            "from jax.sharding import PartitionSpec as P",
            "PartitionSpec stays in sharding.py",
        ),
        (
            "jax_ppo/state.py",
            "import jax\nx = jax.sharding.PartitionSpec()",
            "PartitionSpec stays in sharding.py",
        ),
        (
            "jax_ppo/config.py",
            "if True:\n    import jax",
            "jax is loaded before the options are checked",
        ),
        (
            "jax_ppo/__init__.py",
            "from transformers import AutoTokenizer",
            "loaded before the options are checked",
        ),
        ("jax_ppo/data/files.py", "import pickle", "pickle runs what it reads"),
        (
            "benchmarks/peer.py",
            "import numpy\nnumpy.load('x', allow_pickle=True)",
            "allow_pickle=True runs",
        ),
        ("configs/a.py", "f('x', trust_remote_code=True)", "trust_remote_code=True runs"),
        ("jax_ppo/rewards/rules.py", "y = eval('1 + 1')", "eval() runs text"),
    ],
)
def test_each_rule_catches_what_it_is_for(path, source, message):
    (only,) = violations(path, source)
    assert message in only


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "jax_ppo/kernels/losses.py",
            "import math\nimport jax.numpy as jnp\nfrom jax_ppo.kernels import masked",
        ),
        ("jax_ppo/config.py", "def devices():\n    import jax\n    return jax.devices()"),
        ("jax_ppo/models/heads.py", "import flax.linen as nn\nfrom jax_ppo import sharding"),
        ("jax_ppo/sharding.py", "from jax.sharding import PartitionSpec as P"),
        (
            "jax_ppo/state.py",
            '"""No PartitionSpec, pickle or eval()."""\nimport jax\njax.eval_shape(f)\nmodel.eval()',
        ),
        ("jax_ppo/ppo.py", "from jax_ppo import data, metrics, rewards, update"),
        ("tests/test_x.py", "from jax.sharding import PartitionSpec\nf(trust_remote_code=False)"),
    ],
)
def test_what_is_right_passes(path, source):
    assert violations(path, source) == []
