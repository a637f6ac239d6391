"""A browser for the session, and a tab for each test that must end without a complaint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.nodes import Role
from tests.support.browser import Browser, Tab, find_chromium, running_browser
from tests.support.cluster.cluster import Cluster, ClusterSpec, NodeSpec, running
from tests.support.cluster.topologies import SMALL_NODES
from tests.support.models.tiny_model import make_tiny_model
from tests.support.stores.redis_server import redis_server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--page", action="store_true", help="test the live page in a browser")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium here: `make test-page` installs it where that is possible")
    with running_browser(path) as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """Nothing that the page does may be refused by its own policy, or fail."""
    tab = browser.open_tab().resize(1240, 900)
    yield tab
    complaints = tab.complaints()
    tab.close()
    assert complaints == []


@pytest.fixture(scope="session")
def page_cluster(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode node, and a router whose page is looked at."""
    folder = tmp_path_factory.mktemp("page")
    spec = ClusterSpec(
        name="page",
        model=make_tiny_model(folder / "tiny"),
        nodes=(
            NodeSpec("prefill-1", Role.PREFILL),
            NodeSpec("decode-1", Role.DECODE, ("--local-prefill-threshold", "0")),
        ),
        flags=SMALL_NODES,
        can_be_slow=True,
    )
    with redis_server() as redis, running([spec], redis, Path(folder)) as (cluster,):
        yield cluster
