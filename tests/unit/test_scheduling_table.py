"""The table of scheduling requirements: every number once, every test and every file it names."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "scheduling.md"
LAST = {"S": 60, "B": 29, "C": 31, "E": 84}


@cache
def rows() -> dict[str, list[str]]:
    """The other cells of each row, by its number; a number that comes twice has twice as many."""
    found: dict[str, list[str]] = {}
    for line in TABLE.read_text().splitlines():
        match = re.fullmatch(r"\| ([SBCE]\d\d) \| (.+) \|", line)
        if match:
            found.setdefault(match[1], []).extend(match[2].split(" | "))
    return found


@cache
def existing_tests() -> frozenset[str]:
    names = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
    return frozenset(names)


@pytest.mark.parametrize("letter", LAST)
def test_every_number_has_one_row(letter: str) -> None:
    wanted = [f"{letter}{number:02}" for number in range(1, LAST[letter] + 1)]
    assert [number for number in rows() if number.startswith(letter)] == wanted
    assert {number: len(rows()[number]) for number in wanted} == dict.fromkeys(wanted, 3)


def test_every_test_it_names_exists() -> None:
    named = re.findall(r"`(test_\w+)`", TABLE.read_text())
    assert named
    assert sorted(set(named) - existing_tests()) == []


def test_every_place_it_names_exists() -> None:
    missing = []
    for number, cells in rows().items():
        if not number.startswith("S"):
            continue
        for path, name in re.findall(r"`([\w/]+(?:\.py)?)(?::([\w.]+))?`", cells[1]):
            place = ROOT / path
            last = name.rpartition(".")[2]
            if not place.exists() or (last and not re.search(rf"\b{last}\b", place.read_text())):
                missing.append(f"{number}: {path}:{name}")
    assert missing == []


def test_every_row_is_held_by_a_test_or_says_why_not() -> None:
    reasons = ("by reading", "another system's rule")
    silent = [
        number
        for number, cells in rows().items()
        if "`test_" not in cells[-1] and not cells[-1].startswith(reasons)
    ]
    assert silent == []


def test_tests_named_after_a_number_are_in_its_row() -> None:
    named = Counter(re.findall(r"`(test_\w+)`", TABLE.read_text()))
    unlisted = [
        name
        for name in existing_tests()
        if re.match(r"test_[cbe]\d\d_", name) and name not in named
    ]
    assert unlisted == []
