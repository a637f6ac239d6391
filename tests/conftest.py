"""Fixtures and options that several kinds of tests use."""

from __future__ import annotations

import functools
import gc
import logging
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from httpx._transports import default as transports
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

from tests.support import templates, told_reports, whole_files
from tests.support.cluster.memory import own_memory
from tests.support.stores.redis_server import RedisServer, redis_server

ROOT = Path(__file__).resolve().parents[1]
NOT_QUICK = ("tests/unit/engine/runner/", "tests/unit/bench/", "tests/unit/tools/test_train_mtp.py")
"""Unit tests that compute with kernels, train a layer with Paddle, or replay benchmarks."""
WITH_OPTION = {
    "tests/chart/": "--chart",
    "tests/compose/": "--compose",
    "tests/gpu_kernels/": "--kernels",
    "tests/models/": "--models",
    "tests/page/": "--page",
}
"""Folders that are ignored without an option of theirs. Each process of a run would import their
`conftest.py`, with what these import: clients of OpenAI and Docker take longer than all others."""

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
# With its 5 s a test would fail where a process that it asks stands still for as long.
for _what in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, _what, 60.0)

# Hypothesis also draws constants of the modules of this tree that are imported at the time: the
# examples of a test would depend on the tests before it.
providers._get_local_constants = lambda: providers._local_constants


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


def heed_ctrl_c() -> None:
    """Heed Ctrl-C: a shell's background job, and all that it starts, would ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    heed_ctrl_c()
    config.pluginmanager.register(whole_files)
    config.pluginmanager.register(told_reports)
    config.pluginmanager.register(templates)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore what a run leaves out, before its modules are imported. None leaves it to pytest."""
    place = collection_path.relative_to(ROOT).as_posix()
    place = place if collection_path.is_file() else f"{place}/"
    options = (option for folder, option in WITH_OPTION.items() if place.startswith(folder))
    is_left_out = not all(config.getoption(option, default=False) for option in options)
    is_slow = config.getoption("--quick") and place.startswith(NOT_QUICK)
    return True if is_left_out or is_slow else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everyday runs leave out what takes minutes; `make test-endurance` runs that alone."""
    is_wanted = config.getoption("--endurance")
    chosen, left_out = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        is_long = bool(item.get_closest_marker("endurance"))
        is_chosen = is_long is is_wanted or isinstance(item, whole_files.WholeFile)
        (chosen if is_chosen else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = chosen


def pytest_collection_finish() -> None:
    """Leave out the thousands of collected tests where tests collect garbage."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """Collect garbage once at the end, which pytest does five times, and Python again.

    Each time they would look at whatever tests have kept: the trees of all sources, for example.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Collect garbage where tests have taken much memory of this process since the last time."""
    has_run = yield
    if own_memory() - _collected["bytes"] > MOST_GROWTH_BYTES:
        gc.collect()
        _collected["bytes"] = own_memory()
    return has_run


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
