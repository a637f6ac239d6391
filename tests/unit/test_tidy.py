"""Style that a machine can check: sizes, names, and words that do not belong in the tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Container
from pathlib import Path
from typing import TypeGuard

import pytest

from tests.unit.tree import all_files, blocks, name_of, nodes, parsed, python_files

MOST_LINES = 450
MOST_TEST_LINES = 600
MOST_FUNCTION_LINES = 70
MOST_FIELDS = 6

# Longer than that, each with the reason why splitting would not make it clearer.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}

TEXT_SUFFIXES = frozenset(
    {
        "",
        ".cfg",
        ".css",
        ".html",
        ".in",
        ".js",
        ".json",
        ".lua",
        ".md",
        ".proto",
        ".py",
        ".sh",
        ".toml",
        ".txt",
        ".yaml",
        ".yml",
    }
)
# Names that say nothing about what is inside.
EMPTY_NAMES = re.compile(r"(^|_)(utils?|helpers?|managers?|misc|stuff)$")
# Nothing there is about blocks of KV, and nothing else is a block (docs/glossary.md).
WITHOUT_BLOCKS = ("engine/runner/weights/", "engine/runner/kernels/products/")
# llvmlite's own names.
LLVM_BLOCKS = frozenset({"block", "append_basic_block"})
# Built from parts, so that this file does not find itself.
UNWANTED = re.compile(
    "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "/wo" + "rk/", "/ro" + "ot/", "/tmp" + "/"])
)


def text_files() -> list[Path]:
    return [path for path in all_files() if path.suffix in TEXT_SUFFIXES]


def most_lines(name: str) -> int:
    """A list of cases may be longer than code that is read from top to bottom."""
    return MOST_TEST_LINES if name.startswith("tests/") else MOST_LINES


def test_the_walk_finds_the_tree() -> None:
    names = {name_of(path) for path in all_files()}
    assert {
        "pyproject.toml",
        "common/settings/config.py",
        "protos/pdserve_node.proto",
        ".ci/run",
    } <= names


def test_files_are_short() -> None:
    long = {name_of(p): len(p.read_text().splitlines()) for p in python_files()}
    long = {name: count for name, count in long.items() if count > most_lines(name)}
    assert long.keys() == LONG_FILES.keys(), f"too long, or no longer so: {long}"


def test_functions_are_short() -> None:
    long = {}
    for path in python_files():
        for node in blocks(parsed(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                count = node.end_lineno - node.lineno + 1
                if count > MOST_FUNCTION_LINES:
                    long[f"{name_of(path)}:{node.name}"] = count
    assert long.keys() == LONG_FUNCTIONS.keys(), (
        f"over {MOST_FUNCTION_LINES} lines, or no longer so: {long}"
    )


def test_a_public_class_of_the_product_has_a_name_of_its_own() -> None:
    homes: dict[str, list[str]] = {}
    for path in python_files():
        if name_of(path).startswith(("tests/", "bench/", "tools/")):
            continue
        for node in parsed(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name_of(path))
    assert len(homes) > 500, "the product was found"
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def _kind(element: ast.expr) -> object:
    """What elements of one list have in common; None for what stands for itself."""
    match element:
        case ast.Constant(int() | float()):
            return float
        case ast.Constant(value):
            return type(value)
        case ast.Tuple():
            return tuple
        case ast.Call(func):
            return ast.unparse(func)
    return None


def _is_call(node: ast.AST, name: str) -> TypeGuard[ast.Call]:
    is_named = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return is_named and node.func.id == name  # type: ignore[attr-defined]


def records_by_position(source: str) -> list[str]:
    """Tuples of more fields than a reader can count, made, taken apart or declared.

    A list of values of one kind is no record, nor is an enumeration by `range`, and what a team of
    threads is given are the arguments of a call.
    """
    allowed: set[ast.AST] = set()
    for node in nodes(tree := parsed(source)):
        if _is_call(node, "run_team"):
            allowed.update(node.args)
        if isinstance(node, ast.Assign) and _is_call(node.value, "range"):
            allowed.update(node.targets)
    found = []
    for node in nodes(tree):
        if isinstance(node, ast.Tuple) and len(node.elts) > MOST_FIELDS and node not in allowed:
            kinds = {_kind(element) for element in node.elts}
            if isinstance(node.ctx, ast.Store) or None in kinds or len(kinds) > 1:
                found.append(f"{node.lineno}: {ast.unparse(node)[:60]}")
    return found


def large_named_tuples(tree: ast.Module) -> dict[str, ast.ClassDef]:
    """Return the named tuples with so many fields that their order is not known by heart."""
    return {
        node.name: node
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base) == "NamedTuple" for base in node.bases)
        and sum(isinstance(one, ast.AnnAssign) for one in node.body) > MOST_FIELDS
    }


def made_by_position(tree: ast.AST, names: Container[str]) -> list[int]:
    """Return the lines of calls of `names` with arguments by position; `*whole` is one of them."""
    return [
        node.lineno
        for node in nodes(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
        if any(not isinstance(one, ast.Starred) for one in node.args) or len(node.args) > 1
    ]


def test_large_named_tuples_are_made_by_name() -> None:
    sources = {
        name_of(path): path.read_text()
        for path in python_files()
        if not name_of(path).startswith(("tests/", "bench/", "tools/"))
    }
    inside = {
        name: large_named_tuples(parsed(source))
        for name, source in sources.items()
        if "NamedTuple" in source
    }
    large = frozenset().union(*inside.values())
    assert len(large) > 5, "they were found"
    found = [
        f"{name}:{line}"
        for name, source in sources.items()
        if any(one in source for one in large)
        for line in made_by_position(parsed(source), large)
    ]
    found += [
        f"{name}:{line}"
        for name, classes in inside.items()
        for one in classes.values()
        for line in made_by_position(one, ("cls",))
    ]
    assert found == []


def test_records_have_names_for_their_fields() -> None:
    found = [
        f"{name_of(path)}:{line}"
        for path in python_files()
        if not name_of(path).startswith(("tests/", "bench/", "tools/"))
        for line in records_by_position(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "is_record"),
    [
        ("a, b, c, d, e, f, g = row", True),
        ("row = (x.a, x.b, x.c, x.d, x.e, x.f, x.g)", True),
        ("row: tuple[int, int, int, str, str, str, float]", True),
        ("row = ('a', 1, 2, 3, 4, 5, 6)", True),
        ("run_team(f, 2, (a, b, c, d, e, f, g))", False),
        ("other(f, 2, (a, b, c, d, e, f, g))", True),
        ("for a, b, c, d, e, f, g in rows: pass", True),
        ("a, b, c, d, e, f, g = range(7)", False),
        ("a, b, c, d, e, f = row", False),
        ("names = ('a', 'b', 'c', 'd', 'e', 'f', 'g')", False),
        ("rows = (Row(1), Row(2), Row(3), Row(4), Row(5), Row(6), Row(7))", False),
    ],
)
def test_what_a_record_by_position_is(line: str, is_record: bool) -> None:
    assert bool(records_by_position(line)) == is_record


def test_modules_say_what_they_hold() -> None:
    empty = [name_of(path) for path in python_files() if EMPTY_NAMES.search(path.stem)]
    assert not empty


def test_modules_open_with_a_docstring() -> None:
    silent = [
        name_of(path)
        for path in python_files()
        if path.stat().st_size and ast.get_docstring(parsed(path.read_text())) is None
    ]
    assert not silent


def test_no_machine_paths_and_no_unfinished_business() -> None:
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if UNWANTED.search(line)
    ]
    assert not found


@pytest.mark.covers("B28")
def test_lines_end_cleanly() -> None:
    untidy = []
    for path in text_files():
        text = path.read_text()
        if re.search(r"[ \t]$|\r", text, re.MULTILINE) or (text and not text.endswith("\n")):
            untidy.append(name_of(path))
    assert not untidy


def test_proto_files_have_distinctive_names() -> None:
    names = [path.name for path in all_files() if path.suffix == ".proto"]
    assert names
    # Two unrelated files of one name collide in a process's descriptor pool.
    assert [name for name in names if not name.startswith("pdserve_")] == []


@pytest.mark.parametrize(
    ("name", "is_empty"),
    [
        ("utils", True),
        ("string_helpers", True),
        ("cache_manager", True),
        ("manage_leases", False),
        ("planner", False),
    ],
)
def test_what_counts_as_an_empty_name(name: str, is_empty: bool) -> None:
    assert bool(EMPTY_NAMES.search(name)) is is_empty


def names_in(tree: ast.AST) -> set[str]:
    """Return what a source defines, imports and calls by name, without the names of llvmlite."""
    return {
        name
        for node in nodes(tree)
        if not (isinstance(node, ast.Attribute) and node.attr in LLVM_BLOCKS)
        for field in ("id", "attr", "arg", "name", "asname")
        if isinstance(name := getattr(node, field, None), str)
    }


def test_a_block_is_one_of_kv() -> None:
    """Formats call a group or a tile a block in strings, and in comments that quote them."""
    paths = [path for path in python_files() if name_of(path).startswith(WITHOUT_BLOCKS)]
    found = {name_of(path): names_in(parsed(path.read_text())) | {path.stem} for path in paths}
    assert "GROUP_SIZES" in found["engine/runner/weights/stored_tensor.py"]
    blocks_in = {
        path: sorted(name for name in names if "block" in name.lower())
        for path, names in found.items()
    }
    assert {path: names for path, names in blocks_in.items() if names} == {}


JIT = ("njit", "numba.njit", "jit", "numba.jit")


def _holding_the_lock(tree: ast.AST) -> list[int]:
    """The lines of functions that numba compiles without `nogil`."""
    found = []
    for node in nodes(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in JIT:
            options = {word.arg: ast.unparse(word.value) for word in node.keywords}
            found += [node.lineno] if options.get("nogil") != "True" else []
        elif isinstance(node, ast.FunctionDef):
            found += [one.lineno for one in node.decorator_list if ast.unparse(one) in JIT]
    return found


def test_compiled_functions_release_the_interpreter_lock() -> None:
    """Else a step holds up heartbeats, and routers take its node for dead."""
    found = [
        f"{name_of(path)}:{line}"
        for path in python_files()
        if not name_of(path).startswith(("tests/", "bench/", "tools/"))
        for line in _holding_the_lock(parsed(path.read_text()))
    ]
    assert found == []
    for form in ("@njit\n", "@numba.njit(cache=True)\n", "@njit(nogil=False)\n"):
        assert _holding_the_lock(ast.parse(f"{form}def f(): pass"))
    assert not _holding_the_lock(ast.parse("@njit(nogil=True)\ndef f(): pass"))
