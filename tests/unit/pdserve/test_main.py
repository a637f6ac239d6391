"""The command's first lines, which run before what a command needs is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest

from pdserve.__main__ import main


class _Interrupted(ModuleType):
    def __getattr__(self, name: str) -> object:
        raise KeyboardInterrupt


def test_ctrl_c_while_the_command_is_loaded_ends_it_without_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pdserve.cli", _Interrupted("pdserve.cli"))
    assert main() == 130


def test_the_exit_code_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ModuleType("pdserve.cli")
    monkeypatch.setattr(loaded, "main", lambda: 7, raising=False)
    monkeypatch.setitem(sys.modules, "pdserve.cli", loaded)
    assert main() == 7


def test_a_plan_has_no_huge_pages() -> None:
    asked = """
import sys
from pdserve.cli import main
assert main(["plan", "--trace", "nosuch", "--ttft", "1", "--tpot", "1"]) == 2
import numpy
print(numpy._core.multiarray._get_madvise_hugepage())
"""
    environment = {**os.environ}
    environment.pop("NUMPY_MADVISE_HUGEPAGE", None)
    command = [sys.executable, "-c", asked]
    assert subprocess.check_output(command, env=environment, text=True) == "False\n"
