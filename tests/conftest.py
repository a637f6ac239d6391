"""Fixtures and options that several kinds of tests use."""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from httpx._transports import default as transports
from hypothesis import HealthCheck, Phase, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.support.cluster.memory import memory_of
from tests.support.stores.redis_server import RedisServer, redis_server

ROOT = Path(__file__).resolve().parents[1]
NOT_QUICK = ("tests/unit/engine/runner/", "tests/unit/bench/", "tests/unit/tools/test_train_mtp.py")
"""Unit tests that compute with kernels, train a layer with Paddle, or replay benchmarks."""

# Thousands of collected tests, and whatever the tests of a process have imported, are looked at in
# each full collection of garbage. With Python's threshold of 700 objects these are a third of the
# time of a test that parses the tree.
gc.set_threshold(50_000)
# A model that a test has run hangs in a cycle of few objects and much memory: hundreds of such
# tests in a row would take more than a machine has before so many objects ask for a collection.
MOST_GROWTH_BYTES = 1 << 30
_collected = {"bytes": 0}

# Each client would load the certificates of all authorities, which takes longer than a request, and
# tests make thousands of clients.
transports.create_ssl_context = functools.cache(httpx.create_ssl_context)  # type: ignore[attr-defined]


def _is_of_this_test(record: logging.LogRecord) -> bool:
    """False for a gRPC event that completes after its own test has closed its event loop.

    gRPC has one completion queue for a process. It hands a late event to the loop of the test
    that runs by then, which logs an error that has nothing to do with that test.
    """
    error = record.exc_info[1] if record.exc_info else None
    is_late_event = "PollerCompletionQueue._handle_events" in record.getMessage()
    return not (is_late_event and str(error) == "Event loop is closed")


logging.getLogger("asyncio").addFilter(_is_of_this_test)

# The same examples in every run, however slow the machine is.
settings.register_profile(
    "pdserve",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# For mutants (`tools/mutate.py`): what matters there is the failure, not its smallest example.
settings.register_profile(
    "unshrunk",
    parent=settings.get_profile("pdserve"),
    phases=(Phase.explicit, Phase.generate),
)
# All examples of every test, which `tests.support.examples` reduces in everyday runs.
settings.register_profile("thorough", parent=settings.get_profile("pdserve"))
settings.load_profile("pdserve")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-combination",
        action="store_true",
        help="equality: every policy × order × mode × method, not only all pairs of them",
    )
    parser.addoption(
        "--endurance", action="store_true", help="those marked endurance, and no others"
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="without the folders whose tests take a kernel or minutes",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore what a quick run leaves out, before its modules are imported."""
    place = collection_path.relative_to(ROOT).as_posix()
    place = place if collection_path.is_file() else f"{place}/"
    return True if config.getoption("--quick") and place.startswith(NOT_QUICK) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everyday runs leave out what takes minutes; `make test-endurance` runs that alone."""
    is_wanted = config.getoption("--endurance")
    chosen, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        is_long = bool(item.get_closest_marker("endurance"))
        (chosen if is_long is is_wanted else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(chosen, key=lambda item: _place(item.nodeid))


def pytest_collection_finish() -> None:
    """Leave out the thousands of collected tests where tests collect garbage."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logfinish() -> None:
    """Collect garbage where tests have taken much memory of this process since the last time."""
    if memory_of(os.getpid()) - _collected["bytes"] > MOST_GROWTH_BYTES:
        gc.collect()
        _collected["bytes"] = memory_of(os.getpid())


TOGETHER = (
    "tests/integration/on_shared_clusters/",
    "tests/unit/engine/runner/",
    "tests/equality/",
    "tests/unit/test_",
)
"""What one process takes as a whole, the one that takes longest first. Tests of the first
share clusters of up to five processes. Those of the second compile kernels that the demo model does
not use, where none are cached yet (`tests.support.compiled_kernels` compiles those of the demo
model before): several processes that need one at once would each compile it, a minute of CPU time
each. Those of the third share runners of the demo model, and those of the last, which look at all
sources, what these were parsed to (`tests.unit.tree.parsed`)."""
LONGEST = ("tests/integration/", "tests/contract/", "tests/simulation/")
"""Folders whose files take longest."""


def _folder_of(nodeid: str) -> str | None:
    """Return what of `TOGETHER` a test belongs to."""
    return next((folder for folder in TOGETHER if nodeid.startswith(folder)), None)


def _place(nodeid: str) -> int:
    """Return a test's place in a run: what takes longest begins first, so that processes end
    together."""
    if folder := _folder_of(nodeid):
        return TOGETHER.index(folder)
    return len(TOGETHER) + (not nodeid.startswith(LONGEST))


class WholeFolders(LoadFileScheduling):  # type: ignore[misc]
    """Give each process whole files in the order of collection, and the folders of `TOGETHER`."""

    def _split_scope(self, nodeid: str) -> str:
        return _folder_of(nodeid) or super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> WholeFolders | None:
    """Replace `--dist loadfile`; None leaves other ways of distribution to xdist."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # by numbers of tests, which do not say how long
    return WholeFolders(config, log)


@pytest.fixture(scope="session")
def _shared_redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def redis_url(_shared_redis: RedisServer) -> str:
    """The address of a real, empty Redis; the server is shared, its content is not."""
    with _shared_redis.client() as client:
        client.flushall()
    return _shared_redis.url
