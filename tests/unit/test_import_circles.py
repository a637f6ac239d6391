"""No modules of the product import each other, for types or inside functions either.

Import-linter holds the order of rooms; this holds the order of modules within a room, where a
circle means that no file can be read before the others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

import pytest

from tests.unit.tree import name_of, nodes, parsed, python_files

NOT_THE_PRODUCT = ("tests/", "bench/", "tools/")


def imported_by(tree: ast.Module, modules: Iterable[str]) -> set[str]:
    """Return which of `modules` a module imports, or imports names of."""
    named = set[str]()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            named.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            dotted = {f"{node.module}.{alias.name}" for alias in node.names}
            named |= dotted | {node.module}
    return named & set(modules)


def in_circles(imports: Mapping[str, set[str]]) -> list[str]:
    """Return the modules from which imports lead back to themselves, and those between circles.

    Modules that import nothing that is left, and then those that nothing left imports, are taken
    away until none is.
    """
    left = dict(imports)
    while True:
        wanted = set().union(*left.values()) if left else set()
        ends = {one for one, uses in left.items() if not uses & left.keys() or one not in wanted}
        if not ends:
            return sorted(left)
        left = {one: uses - ends for one, uses in left.items() if one not in ends}


def test_no_modules_import_each_other() -> None:
    trees = {
        name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): parsed(
            path.read_text()
        )
        for path in python_files()
        if not name_of(path).startswith(NOT_THE_PRODUCT)
    }
    imports = {name: imported_by(tree, trees) - {name} for name, tree in trees.items()}
    assert sum(map(len, imports.values())) > 3000, "the imports were found"
    assert in_circles(imports) == []


@pytest.mark.parametrize(
    ("imports", "circle"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}}, ["a", "b"]),
        ({"top": {"a"}, "a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}, ["a", "b", "c"]),
    ],
)
def test_what_a_circle_is(imports: dict[str, set[str]], circle: list[str]) -> None:
    assert in_circles(imports) == circle


def test_imports_for_types_and_inside_functions_count() -> None:
    source = "if TYPE_CHECKING:\n from a.b import C\ndef f():\n import d\n from e import g"
    assert imported_by(ast.parse(source), ["a.b", "d", "e.g", "e", "h"]) == {"a.b", "d", "e.g", "e"}
