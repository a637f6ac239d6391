"""No process that a test starts outlives the process of the test run, whatever ends that one."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.unit.tree import ROOT, name_of, nodes, parsed, python_files

ENDS_BY_PIPE = {
    "tests/support/browser.py",
    "tests/support/templates.py",
}
"""Their processes read other pipes than their standard input, and end with those."""
OWN_RUNS = ("tests/clients/", "tests/compose/", "tests/gpu/", "tests/rdma/")
"""Their tests run in one process, or are programs."""


def starts() -> Iterator[tuple[str, ast.Call, str]]:
    """Yield each start of a process: its file, its call and the function around it."""
    for path in python_files():
        name = name_of(path)
        if not name.startswith("tests/") or name.startswith(OWN_RUNS):
            continue
        source = path.read_text(encoding="utf-8")
        if "Popen(" not in source:
            continue
        for function in nodes(parsed(source)):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "subprocess.Popen":
                    yield name, call, ast.get_source_segment(source, function) or ""


def ends_with_its_input(call: ast.Call) -> bool:
    """Return whether a process has an input that ends when the process that started it does."""
    return any(
        one.arg == "stdin" and ast.unparse(one.value).endswith("PIPE") for one in call.keywords
    )


def test_processes_end_with_their_input_or_are_started_to_end_with_their_parent() -> None:
    found = list(starts())
    assert len(found) > 15
    outliving = {
        f"{name}:{call.lineno}"
        for name, call, function in found
        if name not in ENDS_BY_PIPE
        and not ends_with_its_input(call)
        and "ending_with_parent(" not in function
    }
    assert not outliving


def test_what_ends_by_other_pipes_is_there() -> None:
    assert {name for name, *_ in starts()} >= ENDS_BY_PIPE
    assert all((ROOT / name).is_file() for name in ENDS_BY_PIPE)
