"""The page of other systems' failures: each row once, each named test exists, no row is silent."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "bugs_others_had.md"
NUM_ROWS = 120


@cache
def rows() -> list[tuple[str, list[str]]]:
    """Return (id, cells) of every row, in the order of the page."""
    found = []
    for line in PAGE.read_text().splitlines():
        match = re.fullmatch(r"\| (F\d{2,3}) \| (.+) \|", line)
        if match:
            found.append((match[1], match[2].split(" | ")))
    return found


@cache
def existing_tests() -> frozenset[str]:
    return frozenset(
        node.name
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def named_tests(text: str) -> list[str]:
    return re.findall(r"`(test_\w+)`", text)


def test_every_number_has_one_row() -> None:
    wanted = {f"F{number:02}" for number in range(1, NUM_ROWS + 1)}
    numbers = [number for number, _ in rows()]
    assert set(numbers) == wanted
    assert len(numbers) == NUM_ROWS


def test_every_test_on_the_page_exists() -> None:
    assert sorted(set(named_tests(PAGE.read_text())) - existing_tests()) == []


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
    named = set(re.findall(r"\bF\d{2,3}\b", summary))
    assert named
    assert named <= numbers


def test_numbers_named_in_tests_are_rows_of_the_page() -> None:
    numbers = {number for number, _ in rows()}
    named = {
        number
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for number in re.findall(r"\bF\d{2,3}\b", ast.get_docstring(node) or "")
    }
    assert named
    assert named <= numbers
