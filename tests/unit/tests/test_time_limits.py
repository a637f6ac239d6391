"""Folders whose tests have a longer time limit leave that of all other tests alone."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.mark.parametrize("name", ["chart", "compose", "models"])
def test_a_folder_gives_its_own_tests_more_time_and_no_others(name: str) -> None:
    """In a run of several folders, pytest passes the tests of all of them to each conftest."""
    marked: list[str] = []

    def item(nodeid: str) -> Any:
        return SimpleNamespace(nodeid=nodeid, add_marker=lambda _: marked.append(nodeid))

    own = f"tests/{name}/test_some.py::test_one"
    items = [item(own), item("tests/unit/test_tidy.py::test_one")]
    import_module(f"tests.{name}.conftest").pytest_collection_modifyitems(items)
    assert marked == [own]
