"""A process that can open hardly any more files: it refuses, and does not spin."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_transfer import open_files
from kv_transfer.core.limits import Limits
from kv_transfer.open_files import FEW, NEARLY_NONE, OpenFiles, files_left
from kv_transfer.zmq_transport import ZmqTransport
from tests.contract.kv_connector.cluster import LAYOUT

ROOM = 100
WAIT_S = 20.0


@pytest.fixture
def few_files() -> Iterator[None]:
    """Let this process open `ROOM` more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + ROOM, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def only_left(count: int) -> Iterator[None]:
    """Open files until `count` are left."""
    opened = [os.dup(0) for _ in range(files_left() - count)]
    try:
        yield
    finally:
        for file in opened:
            os.close(file)


@pytest.mark.usefixtures("few_files")
def test_files_that_are_left_are_counted() -> None:
    # Looking takes one itself.
    before = files_left()
    assert ROOM - 2 <= before <= ROOM
    with only_left(10):
        assert files_left() == 10
    assert files_left() == before


@pytest.mark.usefixtures("few_files")
def test_nothing_can_be_counted_without_a_file() -> None:
    opened = []
    with contextlib.suppress(OSError):
        while True:
            opened.append(os.dup(0))
    left = files_left()
    for file in opened:
        os.close(file)
    assert left == 0


@pytest.mark.parametrize(
    ("left", "wanted"),
    [
        (FEW, (False, False)),
        (FEW - 1, (True, False)),
        (NEARLY_NONE, (True, False)),
        (NEARLY_NONE - 1, (True, True)),
    ],
)
def test_the_two_levels(
    left: int, wanted: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "files_left", lambda: left)
    files = OpenFiles()
    assert files.look()
    assert (files.are_few, files.are_nearly_none) == wanted


def test_no_limit_and_no_folder_of_files_are_no_lack_of_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_folder(path: str) -> None:
        raise FileNotFoundError(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", no_folder)
        assert files_left() > FEW
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert files_left() > FEW


def test_files_are_not_counted_in_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "LOOK_EVERY_S", 3600.0)
    files = OpenFiles()
    assert [files.look() for _ in range(3)] == [True, False, False]


@pytest.mark.usefixtures("few_files")
def test_a_port_without_files_is_closed_and_opens_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(open_files, "LOOK_EVERY_S", 0.0)
    with contextlib.closing(
        ZmqTransport("127.0.0.1", 0, "127.0.0.1", LAYOUT, Limits())
    ) as transport:
        address = ("127.0.0.1", int(transport.endpoint.rpartition(":")[2]))
        with only_left(NEARLY_NONE - 1):
            transport.wait(0.0)
            assert transport.is_short_of_files
            _wait_until_refused(address)
            transport.wait(0.0)
        with only_left(FEW - 1):
            transport.wait(0.0)
            _wait_until_refused(address)
        transport.wait(0.0)
        assert [transport.is_short_of_files] == [False]
        socket.create_connection(address).close()
        transport.wait(0.0)
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "nearly all files that this process may open are open",
        "the KV port is open again",
    ]


def _wait_until_refused(address: tuple[str, int]) -> None:
    """ZMQ closes its listener in its own thread."""
    deadline_at_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_at_s:
        try:
            socket.create_connection(address, timeout=WAIT_S).close()
        except ConnectionRefusedError:
            return
    raise AssertionError("the port is open")
