"""Edits of Python source by syntax, which do not depend on formatting.

An edit names a definition (a function, class or module-level variable) and gives a fragment of its
body, as Python source, with the fragment that replaces it. It therefore survives reformatting,
comments and moves between files.
"""

import ast
import functools
import pathlib
from collections.abc import Iterator


def find_definitions(
    root: pathlib.Path, name: str
) -> Iterator[tuple[pathlib.Path, ast.Module, ast.stmt]]:
    """Yield (file, module, definition) for each definition whose dotted name ends in `name`.

    The search includes all files below `root`. The dotted name of a method is
    `package.module.Class.method`, so both `Class.method` and `module.Class.method` match it.
    """
    for path, source in _read_sources(root):
        if name.rpartition(".")[2] not in source:
            continue
        dotted = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        if not any(f".{dotted}{known}".endswith(f".{name}") for known in _names(source)):
            continue
        module = ast.parse(source)  # not kept: an edit changes it
        for qualified_name, definition in _definitions(module, dotted):
            if f".{qualified_name}".endswith(f".{name}"):
                yield path, module, definition


@functools.cache
def _read_sources(root: pathlib.Path) -> tuple[tuple[pathlib.Path, str], ...]:
    """Return the files below `root` and their sources, read once in a process."""
    return tuple((path, path.read_text()) for path in sorted(root.rglob("*.py")))


@functools.cache
def _names(source: str) -> tuple[str, ...]:
    """Return the names that a source defines, each with a dot in front: `.Class.method`."""
    return tuple(name for name, _ in _definitions(ast.parse(source), ""))


def _definitions(scope: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in scope.body:
        match node:
            case ast.FunctionDef(name=name):
                yield f"{prefix}.{name}", node
            case ast.ClassDef(name=name):
                yield f"{prefix}.{name}", node
                yield from _definitions(node, f"{prefix}.{name}")
            case ast.Assign(targets=[ast.Name(id=name)]):
                yield f"{prefix}.{name}", node


def apply_edit(root: pathlib.Path, name: str, old: str, new: str) -> tuple[pathlib.Path, str]:
    """Return the one file that the edit applies to and its edited source.

    Args:
      root: the folder of the package.
      name: the definition, see `find_definitions`.
      old: an expression or statements that occur exactly once in the definition.
      new: what replaces them, of the same kind.

    Raises:
      LookupError: `old` does not occur exactly once.
    """
    matches = []
    for path, module, definition in find_definitions(root, name):
        count = sum(1 for _ in _occurrences(definition, old))
        matches += [(path, module, definition)] * count
    if len(matches) != 1:
        raise LookupError(f"{name} has {len(matches)} times {old!r}")
    path, module, definition = matches[0]
    parent, field, start, length = next(_occurrences(definition, old))
    replacement = _parse(new)
    value = getattr(parent, field)
    if isinstance(value, list):
        value[start : start + length] = replacement
    else:
        (only,) = replacement
        setattr(parent, field, only)
    return path, ast.unparse(ast.fix_missing_locations(module))


def _parse(source: str) -> list[ast.AST]:
    """Return the nodes of a fragment: one expression, or statements."""
    body = ast.parse(source).body
    if len(body) == 1 and isinstance(body[0], ast.Expr):
        return [body[0].value]
    return body


def _occurrences(root: ast.AST, source: str) -> Iterator[tuple[ast.AST, str, int, int]]:
    """Yield (parent, field, start, length) of each occurrence of the fragment below `~root`."""
    wanted = [ast.dump(node) for node in _parse(source)]
    for parent in ast.walk(root):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list):
                dumps = [ast.dump(item) if isinstance(item, ast.AST) else "" for item in value]
                for start in range(len(dumps) - len(wanted) + 1):
                    if dumps[start : start + len(wanted)] == wanted:
                        yield parent, field, start, len(wanted)
            elif isinstance(value, ast.AST) and [ast.dump(value)] == wanted:
                yield parent, field, 0, 1
