"""The command's first lines: what they do with a Ctrl-C that comes before it is loaded."""

from __future__ import annotations

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
