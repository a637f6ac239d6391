"""Where tests and their helpers lie, and what of the product they may touch."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.unit.tree import ROOT, name_of, nodes, parsed, python_files

UNIT = ROOT / "tests/unit"
OF_NAMED_TUPLES = frozenset({"_asdict", "_fields", "_make", "_replace"})
NOT_THE_PRODUCT = ("tests/", "bench/", "tools/")
MOST_FLAT = 15
"""How many test modules lie flat in a folder whose package has rooms."""
# These name modules of one room only of their package, and are about what is above it.
ABOVE_ROOMS = {
    "engine/core/test_scheduler_preemption.py": "the scheduler; it reads the status of sequences",
    "engine/core/test_scheduler_ratio.py": "the scheduler; it reads the status of sequences",
    "engine/core/test_scheduler_steps.py": "the scheduler; it reads the status of sequences",
    "router/api/test_fields_on_every_endpoint.py": "the endpoints; it reads names of a limit",
    "router/api/test_generation_endpoints.py": "the endpoints; it reads the seeds of choices",
}
# How often each of these touches private members of the product. The list only becomes shorter:
# what a test must see, the code shows to everyone.
TOUCHING = {
    "tests/support/engine/build.py": 4,
    "tests/unit/engine/runner/kernels/sampling/test_kernel_folders.py": 1,
    "tests/unit/engine/core/blocks/test_block_pool.py": 1,
    "tests/unit/engine/runner/cpu/test_packed_weights.py": 1,
    "tests/unit/engine/runner/paddle/test_tiled_attention.py": 1,
    "tests/unit/engine/runner/test_layer_hook.py": 1,
}


PRIVATE = re.compile(r"\b_[A-Za-z]\w*")
DEFINED = re.compile(
    r"(?:\bdef |\bclass |\b(?:self|cls)\.|^ *)(_[A-Za-z]\w*)(?=[(:\[]| *(?:=[^=]|:))", re.MULTILINE
)


def files_of_tests() -> list[Path]:
    return [path for path in python_files() if name_of(path).startswith("tests/")]


def test_unit_tests_lie_in_the_folder_that_their_code_has() -> None:
    folders = {path.parent.relative_to(UNIT) for path in UNIT.rglob("test_*.py")}
    assert len(folders) > 50, "the tests were found"
    assert {folder.as_posix() for folder in folders if not (ROOT / folder).is_dir()} == set()


def rooms_of(package: Path) -> set[str]:
    return {path.parent.name for path in package.glob("*/*.py")}


def folders_above_rooms() -> list[Path]:
    """Return the packages that have rooms and tests in their folder."""
    folders = {path.parent.relative_to(UNIT) for path in UNIT.rglob("test_*.py")} - {Path()}
    return sorted(folder for folder in folders if rooms_of(ROOT / folder))


def flat_tests(package: Path) -> list[Path]:
    return sorted((UNIT / package).glob("test_*.py"))


def test_few_tests_of_the_product_lie_above_rooms() -> None:
    counts = {f"{one}/": len(flat_tests(one)) for one in folders_above_rooms()}
    assert len(counts) > 10, "the folders were found"
    product = {name: count for name, count in counts.items() if name not in NOT_THE_PRODUCT}
    assert {name: count for name, count in product.items() if count > MOST_FLAT} == {}


def test_a_test_that_is_named_after_a_module_lies_in_its_room() -> None:
    found = {
        name_of(path): name_of(module)
        for package in folders_above_rooms()
        for path in flat_tests(package)
        if not (ROOT / package / (name := path.name.removeprefix("test_"))).exists()
        for room in rooms_of(ROOT / package)
        for module in (ROOT / package / room).rglob(name)
        if UNIT not in module.parents
    }
    assert found == {}


def parts_imported(path: Path, package: Path) -> set[str]:
    """Return which modules and rooms of `package` a file names."""
    prefix = package.as_posix().replace("/", ".") + "."
    names = {name.removeprefix(prefix) for name in imported(path) if name.startswith(prefix)}
    return {name.partition(".")[0] for name in names}


def test_a_test_of_one_room_lies_in_it() -> None:
    found = {
        path.relative_to(UNIT).as_posix(): parts
        for package in folders_above_rooms()
        for path in flat_tests(package)
        if len(parts := parts_imported(path, package)) == 1 and parts <= rooms_of(ROOT / package)
    }
    assert {name: parts for name, parts in found.items() if name not in ABOVE_ROOMS} == {}
    assert ABOVE_ROOMS.keys() <= found.keys(), "these no longer need their exception"


@cache
def imported(path: Path) -> frozenset[str]:
    """Return the dotted names that a file imports: modules, and what it takes from them."""
    names = set[str]()
    for node in nodes(parsed(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def test_no_two_modules_have_one_name() -> None:
    """Pytest would collect one of them alone, where their folders are no packages."""
    found = (ROOT / "tests").rglob("test_*.py")
    paths = [one for one in found if not (one.parent / "__init__.py").exists()]
    names = Counter(path.name for path in paths)
    assert [name for name, count in names.items() if count > 1] == []


def test_nothing_is_imported_from_a_test_module() -> None:
    """What two test modules need is a helper beside them, or in `tests/support`."""
    modules = {
        name_of(path).removesuffix(".py").replace("/", ".")
        for path in files_of_tests()
        if path.name.startswith("test_")
    }
    found = {
        f"{name_of(path)}: {name}"
        for path in python_files()
        if "tests." in path.read_text()
        for name in imported(path)
        if name in modules or name.rpartition(".")[0] in modules
    }
    assert found == set()


def test_helpers_of_one_folder_lie_beside_its_tests() -> None:
    """What unit tests of several folders import is in `tests/support`."""
    found = {
        f"{name_of(path)}: {name}"
        for path in files_of_tests()
        for name in imported(path)
        if name.startswith("tests.unit.") and (module := home_of(name))
        if module.parent not in path.parents
    }
    assert found == set()


def home_of(name: str) -> Path | None:
    """Return the file of the module that a dotted name is, or is in; None where it is a package."""
    for dotted in (name, name.rpartition(".")[0]):
        path = ROOT / f"{dotted.replace('.', '/')}.py"
        if path.is_file():
            return path
    return None


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_NAMED_TUPLES


def defined_in(tree: ast.AST) -> set[str]:
    """Return the private names of functions, classes, constants and attributes that are made."""
    names = set[str]()
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return {name for name in names if is_private(name)}


@cache
def private_names_of_the_product() -> frozenset[str]:
    product = [p for p in python_files() if not name_of(p).startswith(NOT_THE_PRODUCT)]
    return frozenset().union(*(DEFINED.findall(path.read_text()) for path in product))


def is_self(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "super")


def touched_in(tree: ast.AST) -> Counter[str]:
    """Return how often `tree` touches each private name of other objects, or imports it."""
    touched = Counter[str]()
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and not is_self(node.value):
            touched[node.attr] += 1
        elif isinstance(node, ast.ImportFrom):
            touched.update(alias.name for alias in node.names)
    return Counter({name: count for name, count in touched.items() if is_private(name)})


def touched_of_the_product(path: Path) -> int:
    """Return how often a file of tests touches what only the product makes private."""
    text = path.read_text()
    if not PRIVATE.search(text):
        return 0
    tree = parsed(text)
    touched, own = touched_in(tree), defined_in(tree)
    product = private_names_of_the_product()
    return sum(n for name, n in touched.items() if name in product and name not in own)


@pytest.mark.parametrize(
    ("source", "touched"),
    [
        ("pool._free", 1),
        ("world.node._inbox._messages.clear()", 2),
        ("from router.live import feed\nfeed._json(1)", 1),
        ("from tools.train_mtp import _parser", 1),
        ("class A:\n  def f(self):\n    return self._x + super()._x", 0),
        ("plan._replace(x=1)", 0),
        ("object.__init__", 0),
    ],
)
def test_what_counts_as_touching(source: str, touched: int) -> None:
    assert touched_in(ast.parse(source)).total() == touched


def test_tests_touch_no_private_members() -> None:
    found = {name_of(path): touched_of_the_product(path) for path in files_of_tests()}
    more = {name: count for name, count in found.items() if count > TOUCHING.get(name, 0)}
    assert more == {}, "these touch more private members than before"
    fewer = {name: found.get(name, 0) for name in TOUCHING if found.get(name, 0) < TOUCHING[name]}
    assert fewer == {}, "these touch fewer: write that into TOUCHING"
