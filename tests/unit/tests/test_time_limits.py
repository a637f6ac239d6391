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


def test_building_images_is_no_part_of_the_limit_of_the_first_test() -> None:
    """Its fixtures have limits of their own, which together are longer."""
    marks: list[Any] = []
    item: Any = SimpleNamespace(nodeid="tests/compose/test_some.py", add_marker=marks.append)
    import_module("tests.compose.conftest").pytest_collection_modifyitems([item])
    assert [mark.kwargs for mark in marks] == [{"func_only": True}]
