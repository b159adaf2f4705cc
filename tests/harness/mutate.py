"""Apply seeded mutations to the package and report the share that the default suite catches.

    python tests/harness/mutate.py --count 200 --seed 0

A mutation changes one operator, constant, condition or statement. It is caught if a test fails or
does not end in time. Each is tried on a copy of the project, so that this checkout stays unchanged,
with the tests that reached the mutated function in one recorded run of the default suite: the
fastest first, until one fails.

Requires pytest-cov. `--coverage FOLDER` keeps the recorded run for later invocations.
"""

import argparse
import ast
import collections
import copy
import dataclasses
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Iterator
from typing import Any

import edited_copies

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = "jax_ppo"


def swaps(*pairs: tuple[Any, Any]) -> dict[Any, Any]:
    """Return a table in which each of a pair stands for the other."""
    return dict([*pairs, *(pair[::-1] for pair in pairs)])


COMPARISONS = swaps(
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
)
OPERATORS = swaps((ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.BitAnd, ast.BitOr))
OPERATORS |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
NAMES = swaps(("minimum", "maximum"), ("min", "max"), ("argmin", "argmax"), ("any", "all"))


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change.

    Attributes:
      file: the source file, relative to the repository.
      line: its first line there.
      function: first and last line of the outermost function around it; the line itself at module
        level.
      in_function: whether there is a function around it.
      before, after: the changed node as source.
      source: the whole mutated file.
    """

    file: str
    line: int
    function: tuple[int, int]
    in_function: bool
    before: str
    after: str
    source: str


def mutants(node: ast.AST) -> Iterator[ast.AST]:
    """Yield changed copies of a node."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            changed = copy.deepcopy(node)
            changed.ops = [COMPARISONS[type(operator)]()]
            yield changed
        case ast.BinOp(op=operator) if type(operator) in OPERATORS and not _is_text(node):
            changed = copy.deepcopy(node)
            changed.op = OPERATORS[type(operator)]()
            yield changed
        case ast.BoolOp(op=operator):
            changed = copy.deepcopy(node)
            changed.op = ast.Or() if isinstance(operator, ast.And) else ast.And()
            yield changed
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()):
            yield copy.deepcopy(node.operand)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.IfExp():
            yield ast.IfExp(node.test, copy.deepcopy(node.orelse), copy.deepcopy(node.body))
        case ast.Attribute(attr=name) if name in NAMES:
            changed = copy.deepcopy(node)
            changed.attr = NAMES[name]
            yield changed
        case ast.If(test=test):
            changed = copy.deepcopy(node)
            changed.test = ast.UnaryOp(ast.Not(), copy.deepcopy(test))
            yield changed
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()


def _is_text(node: ast.BinOp) -> bool:
    """Return whether an operator may join text or types, where any other one is an error."""
    joined = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set)
    sides = (node.left, node.right)
    return any(
        isinstance(side, joined)
        or (isinstance(side, ast.Constant) and not isinstance(side.value, int | float))
        for side in sides
    )


def all_mutations() -> list[Mutation]:
    """Return every mutation of the package, in a fixed order."""
    found = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        module = ast.parse(path.read_text())
        _remove_annotations(module)
        functions = [
            (node.lineno, node.end_lineno)
            for node in ast.walk(module)
            if isinstance(node, ast.FunctionDef)
        ]
        for parent in ast.walk(module):
            for field, value in ast.iter_fields(parent):
                for index, node in enumerate(value if isinstance(value, list) else [value]):
                    if not isinstance(node, ast.AST):
                        continue
                    for changed in mutants(node):
                        around = [f for f in functions if f[0] <= node.lineno <= f[1]]
                        _put(parent, field, index, changed)
                        found.append(
                            Mutation(
                                file=path.relative_to(ROOT).as_posix(),
                                line=node.lineno,
                                function=min(around, default=(node.lineno, node.end_lineno)),
                                in_function=bool(around),
                                before=ast.unparse(node).partition("\n")[0],
                                after=ast.unparse(changed).partition("\n")[0],
                                source=ast.unparse(ast.fix_missing_locations(module)),
                            )
                        )
                        _put(parent, field, index, node)
    return found


def _put(parent: ast.AST, field: str, index: int, node: ast.AST) -> None:
    value = getattr(parent, field)
    if isinstance(value, list):
        value[index] = node
    else:
        setattr(parent, field, node)


def _remove_annotations(module: ast.Module) -> None:
    """Leave out what nothing reads when the program runs, but for the fields of classes."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            arguments = node.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                argument.annotation = None


def record(folder: pathlib.Path) -> None:
    """Run the default suite once, with the lines that each test reaches and the time it takes."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
    command += [f"--cov={PACKAGE}", "--cov-context=test", "--cov-report="]
    command += [f"--junitxml={folder}/times.xml"]
    environment = os.environ | {"COVERAGE_FILE": f"{folder}/coverage"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)


class Record:
    """The lines that each test reached in one run of the suite.

    Attributes:
      seconds: duration of each test, by its id.
    """

    def __init__(self, folder: pathlib.Path):
        import coverage

        self._data = coverage.CoverageData(str(folder / "coverage"))
        self._data.read()
        self.seconds: dict[str, float] = collections.defaultdict(lambda: 1.0)
        for case in xml.etree.ElementTree.parse(folder / "times.xml").iter("testcase"):
            # tests.folder.test_file or tests.folder.test_file.TestClass
            path, *classes = re.split(r"\.(?=Test)", case.get("classname"))
            name = "::".join([path.replace(".", "/") + ".py", *classes, case.get("name")])
            self.seconds[name] = float(case.get("time"))

    def tests_that_reach(self, mutation: Mutation, budget: float) -> list[str]:
        """Return the tests to run, fastest first; of at most `budget` seconds, but at least one.

        These are the tests that reached the function, and all of its module's test file. A
        fixture that several tests share is recorded for the first of them alone: where one reached
        the function, the tests of its file count. Python runs the body of a module once per
        process, and other processes are not recorded: a mutation outside functions, or in one that
        no test reached, is tried with the tests of its package, which `tests/` mirrors.
        """
        first, last = mutation.function
        contexts = self._data.contexts_by_lineno(str(ROOT / mutation.file))
        recorded = {
            context
            for line, names in contexts.items()
            if first <= line <= last
            for context in names
            if context
        }
        reached = {context.partition("|")[0] for context in recorded}
        shared = {c.partition("::")[0] for c in recorded if c.endswith("|setup")}
        folder, _, module = mutation.file.replace(PACKAGE, "tests", 1).rpartition("/")
        shared.add(f"{folder}/test_{module}")
        reached |= {test for test in self.seconds if test.partition("::")[0] in shared}
        if not mutation.in_function or not recorded:
            reached |= {test for test in self.seconds if test.startswith(f"{folder}/")}
        chosen: list[str] = []
        total = 0.0
        for test in sorted(reached, key=lambda name: (self.seconds[name], name)):
            total += self.seconds[test]
            if chosen and total > budget:
                break
            chosen.append(test)
        return chosen


def is_caught(
    runner: edited_copies.Runner, mutation: Mutation, tests: list[str], timeout: float
) -> bool:
    """Return whether a test fails on a mutated copy of the project, or does not end in time."""
    arguments = ["-x", "-q", "-p", "no:cacheprovider", *tests]
    with edited_copies.edited_copy(mutation.file, mutation.source) as folder:
        code, _ = runner.run(folder, arguments, timeout)
    return code != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="mutations to try")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--budget", type=float, default=60, help="seconds of tests per mutation")
    parser.add_argument("--coverage", type=pathlib.Path, help="folder of the recorded run")
    arguments = parser.parse_args()
    recorded = arguments.coverage or pathlib.Path(tempfile.mkdtemp(prefix="mutate_"))
    recorded.mkdir(exist_ok=True, parents=True)
    if not (recorded / "coverage").exists():
        record(recorded)
    reach = Record(recorded)
    drawn = random.Random(arguments.seed).sample(all_mutations(), arguments.count)
    runner = edited_copies.Runner()
    outcomes = []
    for number, mutation in enumerate(drawn, 1):
        start = time.monotonic()
        tests = reach.tests_that_reach(mutation, arguments.budget)
        expected = sum(reach.seconds[test] for test in tests)
        caught = bool(tests) and is_caught(runner, mutation, tests, timeout=120 + 5 * expected)
        outcome = "caught" if caught else "survived" if tests else "reached by no test"
        outcomes.append(outcome)
        seconds = time.monotonic() - start
        print(
            f"{number}/{len(drawn)} {outcome:9} {seconds:5.0f} s  {mutation.file}:{mutation.line}  "
            f"{mutation.before}  ->  {mutation.after}",
            flush=True,
        )
    runner.stop()
    share = outcomes.count("caught") / len(outcomes)
    print(f"{share:.1%} of {len(outcomes)} mutations were caught (seed {arguments.seed})")


if __name__ == "__main__":
    main()
