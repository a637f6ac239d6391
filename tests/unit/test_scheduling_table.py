"""The table of scheduling requirements: each number once; its tests and files exist.

The tests of a row cover it, and what a test covers is a row.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.unit.covered import ids_by_test, ids_of

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "scheduling.md"
LAST = {"S": 61, "B": 29, "C": 31, "E": 84}


@cache
def rows() -> dict[str, list[str]]:
    """The other cells of each row, by its number; a number that comes twice has twice as many."""
    found: dict[str, list[str]] = {}
    for line in TABLE.read_text().splitlines():
        match = re.fullmatch(r"\| ([SBCE]\d\d) \| (.+) \|", line)
        if match:
            found.setdefault(match[1], []).extend(match[2].split(" | "))
    return found


@pytest.mark.parametrize("letter", LAST)
def test_every_number_has_one_row(letter: str) -> None:
    wanted = [f"{letter}{number:02}" for number in range(1, LAST[letter] + 1)]
    assert [number for number in rows() if number.startswith(letter)] == wanted
    assert {number: len(rows()[number]) for number in wanted} == dict.fromkeys(wanted, 3)


def test_every_test_it_names_exists() -> None:
    named = re.findall(r"`(test_\w+)`", TABLE.read_text())
    assert named
    assert sorted(set(named) - set(ids_by_test())) == []


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


def test_every_test_of_a_row_covers_the_row() -> None:
    silent = [
        f"{test} is a test of {number}"
        for number, cells in rows().items()
        for test in re.findall(r"`(test_\w+)`", cells[-1])
        if number not in ids_by_test().get(test, ())
    ]
    assert silent == []


def test_every_row_that_a_test_covers_exists() -> None:
    covered = {number for ids in ids_by_test().values() for number in ids}
    assert {number for number in covered if number[0] in LAST} - set(rows()) == set()


def test_no_other_letter_is_covered() -> None:
    covered = {number for ids in ids_by_test().values() for number in ids}
    assert {number[0] for number in covered} == {*LAST, *"FGJKMTVW"}


def test_no_test_has_a_number_in_its_name() -> None:
    numbered = re.compile(r"test_(?:[sbcefgjkvw]\d{2,3}_)")
    assert [name for name in ids_by_test() if numbered.match(name)] == []


def test_ids_are_read_from_the_marker_alone() -> None:
    source = '@pytest.mark.covers("E45", "S17")\n@pytest.mark.gpu\ndef test_f23_x():\n "F24."'
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert ids_of(function) == ["E45", "S17"]
