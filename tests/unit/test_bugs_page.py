"""The page of other systems' failures: each row once, each test on it exists and covers its row."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.unit.covered import ids_by_test

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "bugs_others_had.md"
NUM_ROWS = {"F": 150, "G": 27, "J": 32, "K": 28, "M": 15, "T": 47, "V": 5, "W": 17}
"""By letter: handoffs and what is around them; grammars and tool calls; coding agents and chat
templates; ordinary values and models; machines; texts, tokens and counts of answers; classes of
vulnerabilities; what clients send."""


@cache
def rows() -> list[tuple[str, list[str]]]:
    """Return (id, cells) of every row, in the order of the page."""
    found = []
    for line in PAGE.read_text().splitlines():
        match = re.fullmatch(r"\| ([FGJKMTVW]\d{2,3}) \| (.+) \|", line)
        if match:
            found.append((match[1], match[2].split(" | ")))
    return found


def named_tests(text: str) -> list[str]:
    return re.findall(r"`(test_\w+)`", text)


def test_every_number_has_one_row() -> None:
    wanted = {
        f"{letter}{number:02}" for letter, most in NUM_ROWS.items() for number in range(1, most + 1)
    }
    numbers = [number for number, _ in rows()]
    assert set(numbers) == wanted
    assert len(numbers) == sum(NUM_ROWS.values())


def test_every_test_on_the_page_exists() -> None:
    assert sorted(set(named_tests(PAGE.read_text())) - set(ids_by_test())) == []


def test_every_test_of_a_row_covers_the_row() -> None:
    silent = [
        f"{test} is a test of {number}"
        for number, cells in rows()
        for test in named_tests(cells[-1])
        if number not in ids_by_test().get(test, ())
    ]
    assert silent == []


def test_every_row_has_a_test_or_a_reason() -> None:
    with_tests, _, without = PAGE.read_text().partition("## Rows without a test")
    silent = [
        number
        for number, cells in rows()
        if f"| {number} |" in with_tests and not named_tests(cells[-1])
    ]
    assert silent == []
    reasons = [cells[-1] for number, cells in rows() if f"| {number} |" in without]
    assert reasons
    assert all(len(reason) > len("No.") and not named_tests(reason) for reason in reasons)


def test_every_row_that_the_summary_names_exists() -> None:
    numbers = {number for number, _ in rows()}
    summary = PAGE.read_text().partition("## The classes")[2].partition("## Allocation")[0]
    named = set(re.findall(r"\b[FGJKMTVW]\d{2,3}\b", summary))
    assert named
    assert named <= numbers


def test_every_row_that_a_test_covers_has_tests() -> None:
    with_tests = {number for number, cells in rows() if named_tests(cells[-1])}
    covered = {number for ids in ids_by_test().values() for number in ids}
    assert {number for number in covered if number[0] in NUM_ROWS} - with_tests == set()
