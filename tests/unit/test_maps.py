"""Each package says in its `__init__` what its modules are, and the router stays in few rooms."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("common", "router", "pdserve", "node", "kv_transfer", "engine", "simulator")
MAPPED = (*PRODUCT, "bench")
OTHERS = ("grammars", "placement", "http_serving", "protos")
SUPPORT = ("tests/support",)
SUITES = tuple(f"tests/{name}" for name in ("clients", "compose", "page", "soak", "upgrade"))
MOST_ROUTER_ROOMS = 12
MOST_MODULES = 15
NO_PART = ("__", "test_", "with_", "conftest")
"""Beginnings of names of modules that a map need not name."""
ENTRY = re.compile(r"^ {0,8}(\w+)(?:/|  )", re.MULTILINE)


def packages(tops: tuple[str, ...] = MAPPED) -> list[Path]:
    return sorted(init.parent for top in tops for init in (ROOT / top).rglob("__init__.py"))


def mapped() -> list[Path]:
    return packages((*MAPPED, *SUPPORT, *SUITES))


def children(package: Path) -> list[str]:
    """Modules and packages directly in `package`."""
    modules = [path.stem for path in package.glob("*.py") if not path.stem.startswith(NO_PART)]
    return sorted(modules + [path.parent.name for path in package.glob("*/__init__.py")])


def docstring_of(package: Path) -> str:
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text()), clean=False) or ""


def map_of(package: Path) -> str:
    """What the docstring of `package` says before its decisions."""
    return docstring_of(package).partition("\nDecisions:\n")[0]


def maps_over(package: Path) -> str:
    """The maps of `package` and of the packages that it lies in."""
    above = [package, *package.relative_to(ROOT).parents]
    return "\n".join(map_of(ROOT / one) for one in above if (ROOT / one / "__init__.py").exists())


@pytest.mark.parametrize("package", mapped(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_map_names_every_module_of_its_package(package: Path) -> None:
    named = set(re.findall(r"\w+", maps_over(package)))
    assert [name for name in children(package) if name not in named] == []


@pytest.mark.parametrize("package", mapped(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_map_names_no_module_that_is_gone(package: Path) -> None:
    entries = ENTRY.findall(map_of(package))
    there = {path.stem for path in package.rglob("*.py")}
    there |= {path.name for path in package.rglob("*") if path.is_dir()}
    assert [name for name in entries if name not in there] == []


def test_the_architecture_names_every_room() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`(?:\w+/)*(\w+)/`", page))
    rooms = packages((*PRODUCT, *OTHERS))
    assert [room.relative_to(ROOT).as_posix() for room in rooms if room.name not in named] == []


def test_the_architecture_names_no_room_that_is_gone() -> None:
    """Each row of a package's table begins with modules and rooms of that package."""
    page = (ROOT / "ARCHITECTURE.md").read_text()
    tables = re.findall(r"^\| `([\w/]+)/` \| subject \|\n\|-.*\n((?:\|.*\n)+)", page, re.M)
    assert len(tables) > 5
    gone = [
        f"{top}/{name}"
        for top, rows in tables
        for row in rows.splitlines()
        for name in re.findall(r"`(\w+)/?`", row.split(" | ")[0])
        if not (ROOT / top / name).is_dir() and not (ROOT / top / f"{name}.py").exists()
    ]
    assert gone == []


def test_every_module_beside_rooms_is_in_the_architecture() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`(?:\w+/)*(\w+)/?`", page))
    divided = ("engine", "router", "pdserve", "node", "engine/core", "engine/runner", "kv_transfer")
    assert [
        f"{top}/{name}" for top in divided for name in children(ROOT / top) if name not in named
    ] == []


def test_every_top_package_has_a_map() -> None:
    assert [top for top in MAPPED if len(ENTRY.findall(map_of(ROOT / top))) < 3] == []


def test_a_package_is_seen_at_a_glance() -> None:
    """A longer list hides what belongs together: it has rooms."""
    tops = (*MAPPED, *OTHERS, *SUPPORT)
    modules = {p: len([m for m in p.glob("*.py") if m.stem[0] != "_"]) for p in packages(tops)}
    assert {one: count for one, count in modules.items() if count > MOST_MODULES} == {}


def test_the_router_has_few_rooms() -> None:
    rooms = children(ROOT / "router")
    assert len(rooms) <= MOST_ROUTER_ROOMS, f"wanted at most {MOST_ROUTER_ROOMS}: {rooms}"
