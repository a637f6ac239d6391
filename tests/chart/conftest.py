"""The tests of the chart require downloads, so only `make test-chart` runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chart import tools
from tests.chart.manifests import Chart
from tests.support.commands import CannotRun


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chart", action="store_true", help="render the Helm chart, test the rules")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder more time; in a run of several folders all are passed."""
    for item in items:
        if item.nodeid.startswith("tests/chart/"):
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def chart() -> Chart:
    return Chart(_tool(tools.helm))


@pytest.fixture(scope="session")
def schemas() -> Path:
    return _tool(tools.schemas)


@pytest.fixture(scope="session")
def promtool() -> Path:
    return _tool(tools.promtool)


def _tool(get: Callable[[], Path]) -> Path:
    """Return a program, or skip the test with the reason."""
    try:
        return get()
    except CannotRun as reason:
        pytest.skip(str(reason))
