"""The documents name only files, folders and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PACKAGES = ("pdserve", "common", "kv_transfer", "engine", "node", "router", "bench")
# Written by a user who follows a page, or by a tool.
MADE_LATER = ("compose/.env", "compose/keys", "compose/models", "node/kv.key")


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


def test_what_is_said_to_be_installed_is_in_the_checkout() -> None:
    """The package is in no index: extras are installed as `'.[name]'`."""
    sources = [path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")]
    by_name = "pip install '" + "pdserve"
    assert [path.name for path in (*PAGES, *sources) if by_name in path.read_text()] == []


def test_paths_are_found_on_the_pages() -> None:
    assert "router/app.py" in paths_on(ROOT / "CONTRIBUTING.md")
    assert "engine/core/planning/planner.py" in paths_on(ROOT / "docs" / "scheduling.md")
