"""What knows several back ends is one module, and a runner is assembled without asking for one."""

from __future__ import annotations

import ast

from engine.runner.start.choose import BACK_ENDS
from tests.unit.tree import ROOT, name_of, parsed, python_files

MOST_LINES, MOST_PARAMETERS = 40, 7
OF_ONE = {"engine/runner/cpu/", "engine/runner/gpu/", "engine/runner/paddle/"}
CHOOSES = {"engine/runner/start/choose.py", "common/settings/config.py"}
LIBRARIES = {"common/files/code_cache.py", "engine/runner/paddle_import.py"}
"""They mean numba's files and Paddle's module."""


def test_names_of_back_ends_stand_where_one_is_chosen() -> None:
    product = ("common/", "engine/", "node/", "pdserve/", "router/", "simulator/", "kv_transfer/")
    naming = {
        name_of(path)
        for path in python_files()
        if name_of(path).startswith(product)
        if any(name in path.read_text() for name in BACK_ENDS)
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in BACK_ENDS
    }
    assert naming >= CHOOSES
    others = naming - CHOOSES - LIBRARIES
    assert {name for name in others if not name.startswith(tuple(OF_ONE))} == set()


def test_a_runner_is_assembled_in_one_view() -> None:
    tree = parsed((ROOT / "engine/runner/start/assemble.py").read_text())
    (made,) = (
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "assemble_runner"
    )
    assert made.end_lineno is not None
    assert made.end_lineno - made.lineno + 1 <= MOST_LINES
    assert len(made.args.args) + len(made.args.kwonlyargs) <= MOST_PARAMETERS
