"""The documents name only files, folders and headings that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.unit.tree import nodes, parsed

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PACKAGES = ("pdserve", "common", "kv_transfer", "engine", "node", "router", "simulator", "bench")
SHARED = ("grammars", "placement", "protos", "http_serving")
SOURCES = sorted(path for top in (*PACKAGES, *SHARED) for path in (ROOT / top).rglob("*.py"))
INITS = [path for path in SOURCES if path.name == "__init__.py"]
MOST_PAGE_LINES = {"ARCHITECTURE.md": 300, "README.md": 220}
MOST_DECISIONS = 15
# Written by a user who follows a page, or by a tool.
MADE_LATER = ("build/", "compose/.env", "compose/keys", "compose/models", "node/kv.key")


def paths_on(page: Path) -> list[str]:
    """Return what the page names as paths below one of the repository's folders."""
    quoted = re.findall(r"`([\w.-]+(?:/[\w.-]*)+)(?::[\w.]+)?`", page.read_text())
    return [
        path
        for path in quoted
        if (ROOT / path.partition("/")[0]).is_dir() and not path.startswith(MADE_LATER)
    ]


def anchor(heading: str) -> str:
    """Return the name under which a heading can be linked."""
    return re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_on_a_page_exists(page: Path) -> None:
    assert [path for path in paths_on(page) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_on_a_page_leads_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists():
            broken.append(target)
        elif heading:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            if heading not in {anchor(one) for one in headings}:
                broken.append(target)
    assert broken == []


@pytest.mark.parametrize(("name", "most"), MOST_PAGE_LINES.items())
def test_the_first_pages_are_short(name: str, most: int) -> None:
    """What is longer belongs on a page of `docs/`, or in the `__init__` of a room."""
    assert len((ROOT / name).read_text().splitlines()) <= most


def test_the_architecture_has_few_decisions() -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text().partition("\n## Decisions\n")[2]
    decisions = re.findall(r"^\*\*.+?\*\*", section, re.M | re.S)
    assert 5 < len(decisions) <= MOST_DECISIONS, "the others stand in the `__init__` of their room"


def test_the_first_paragraph_says_what_computes_where() -> None:
    first = (ROOT / "README.md").read_text().split("\n\n")[1]
    assert "CPU" in first
    assert "GPU" in first


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_measures_nothing_by_a_plan(page: Path) -> None:
    """Its reader has not seen the plan: a page says what is, and which bound holds."""
    assert re.findall(r"(?i)\b(?:goals?|wanted)\b", page.read_text()) == []


def test_figures_are_those_of_the_present_code() -> None:
    """History is git's: nothing is compared with what the code was."""
    page = (ROOT / "docs" / "figures.md").read_text()
    assert re.findall(r"(?i)\b(?:before|earlier|formerly|used to|until then)\b", page) == []


@pytest.mark.parametrize("name", ["glossary.md", "walks.md"])
def test_what_a_page_points_at_is_there(name: str) -> None:
    page = (ROOT / "docs" / name).read_text()
    places = re.findall(r"`([\w/]+\.py):([\w.]+)`", page)
    assert len(places) > 30
    missing = [
        f"{path}:{names}"
        for path, names in places
        for part in names.split(".")
        if not re.search(
            rf"^\s*(?:class |(?:async )?def )?{part}\b", (ROOT / path).read_text(), re.M
        )
    ]
    assert missing == []


def test_the_glossary_explains_each_word_once() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text()
    cells = re.findall(r"^\| (?!word |-)(.+?) \|", page, re.M)
    words = [word for cell in cells for word in cell.split(", ")]
    assert len(words) > 60
    assert sorted({word for word in words if words.count(word) > 1}) == []


def test_the_figures_of_the_first_page_have_their_source() -> None:
    numbers = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?")
    page = (ROOT / "README.md").read_text()
    table = page.partition("\n## Figures\n")[2].partition("\n## ")[0]
    figures = "\n".join(re.findall(r"^\|.*\|(.*)\|$", table, re.M))
    start = page.partition("A first start")[2].partition("\n\n")[0].partition("](")[0]
    said = set(numbers.findall(figures + start))
    known = set(numbers.findall((ROOT / "docs" / "figures.md").read_text()))
    assert len(said) > 30
    assert sorted(said - known) == []


@pytest.mark.parametrize("init", INITS, ids=lambda path: path.parent.relative_to(ROOT).as_posix())
def test_every_path_in_a_map_exists(init: Path) -> None:
    """Paths begin at the root or at the package, or name a module of the room."""
    docstring = ast.get_docstring(parsed(init.read_text())) or ""
    roots = (ROOT, init.parent, *init.parents)
    missing = [
        path
        for path in re.findall(r"`((?:\w+/)+\w+\.\w+)`", docstring)
        if not any((root / path).exists() for root in roots)
    ]
    assert missing == []


def test_what_is_said_to_be_installed_is_in_the_checkout() -> None:
    """The package is in no index: extras are installed as `'.[name]'`."""
    sources = [path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")]
    by_name = re.compile(r"pip install '?" + "pdserve")
    assert [path.name for path in (*PAGES, *sources) if by_name.search(path.read_text())] == []


def unknown_modules(source: str, modules: frozenset[str]) -> list[str]:
    """Return names `module.Name` and `module.py` in strings and comments of no known module.

    A module is known that is in the tree, or that the source itself imports.
    """
    tree = parsed(source)
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    texts = [
        node.value
        for node in nodes(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    prose = "\n".join([*texts, *re.findall(r"#.*", source)])
    named = re.findall(r"`([a-z_]+)\.(?:[A-Z]\w+|py)(?:\.\w+)*`", prose)
    return sorted(set(named) - modules - imported)


def test_what_the_code_says_of_modules_is_true() -> None:
    """A module that was renamed is not named any more, in docstrings and comments either."""
    modules = frozenset(path.stem for path in SOURCES)
    found = {
        path.relative_to(ROOT).as_posix(): unknown_modules(path.read_text(), modules)
        for path in SOURCES
    }
    elsewhere = {"pydantic", "gguf"}  # Libraries that are named where they are not imported.
    assert {path: names for path, names in found.items() if set(names) - elsewhere} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('"""See `gone.Thing`."""', ["gone"]),
        ("# as `gone.py` does", ["gone"]),
        ('"""See `here.Thing`, `there.Thing` and `self.x`."""\nimport there', []),
    ],
)
def test_what_counts_as_an_unknown_module(source: str, names: list[str]) -> None:
    assert unknown_modules(source, frozenset({"here"})) == names


def test_paths_are_found_on_the_pages() -> None:
    assert "router/app.py" in paths_on(ROOT / "CONTRIBUTING.md")
    assert "engine/core/planning/planner.py" in paths_on(ROOT / "docs" / "scheduling.md")
