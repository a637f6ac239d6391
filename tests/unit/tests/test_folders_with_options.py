"""Folders that only runs with an option of theirs collect are ignored whole elsewhere."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT, WITH_OPTION, pytest_ignore_collect
from tests.unit.tree import name_of


def config(*given: str) -> Any:
    """Return what pytest knows of a run with these options."""
    return SimpleNamespace(getoption=lambda option, default=False: option in given or default)


def test_every_folder_that_adds_an_option_is_known() -> None:
    added = {
        f"{name_of(path.parent)}/": option
        for path in sorted(ROOT.glob("tests/*/conftest.py"))
        for option in re.findall(r'addoption\(\s*"(--[a-z-]+)"', path.read_text())
    }
    assert added == WITH_OPTION


@pytest.mark.parametrize("folder", WITH_OPTION)
def test_a_folder_is_ignored_before_its_conftest_is_imported(folder: str) -> None:
    assert pytest_ignore_collect(ROOT / folder, config())
    assert pytest_ignore_collect(ROOT / folder / "conftest.py", config())


@pytest.mark.parametrize(("folder", "option"), WITH_OPTION.items())
def test_a_folder_is_collected_with_its_own_option(folder: str, option: str) -> None:
    assert not pytest_ignore_collect(ROOT / folder, config(option))
    others = [other for other in WITH_OPTION.values() if other != option]
    assert pytest_ignore_collect(ROOT / folder, config(*others))


def test_other_folders_are_collected() -> None:
    for name in ("tests/unit", "tests/gpu", "tests/unit/compose", "tests/integration"):
        assert not pytest_ignore_collect(ROOT / name, config())
