"""Which rows of the documents each test covers, by its marker `covers`, read from the sources."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from tests.unit.tree import blocks, parsed

ROOT = Path(__file__).resolve().parents[2]


def ids_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the ids in the markers `@pytest.mark.covers("F23", …)` of a test."""
    return [
        str(ast.literal_eval(argument))
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call)
        if ast.unparse(decorator.func) == "pytest.mark.covers"
        for argument in decorator.args
    ]


@cache
def ids_by_test() -> dict[str, frozenset[str]]:
    """Return the ids that each test covers, by its name; a test without a marker covers none."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", text, re.MULTILINE):
            found[name]
        for node in blocks(parsed(text)) if "mark.covers" in text else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name].update(ids_of(node))
    return {name: frozenset(ids) for name, ids in found.items()}
