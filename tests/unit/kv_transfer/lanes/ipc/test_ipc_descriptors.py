"""A descriptor that is handed over a Unix socket: to whom, from whom, and what else may come."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from common.errors import HandoffFailed
from kv_transfer.lanes.ipc import descriptors
from kv_transfer.lanes.ipc.descriptors import OfferedDescriptor, address_of, fetch_descriptor

NOBODY = 65534


def new_file() -> int:
    descriptor = os.memfd_create("a-pool")
    os.write(descriptor, b"a pool")
    return descriptor


def num_open() -> int:
    """Return how many descriptors of such files this process has."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # The one that lists them.
            links.append(str(path.readlink()))
    return sum("memfd:a-pool" in link for link in links)


@pytest.fixture
def offered() -> Iterator[OfferedDescriptor]:
    offered = OfferedDescriptor(new_file())
    offered.start()
    yield offered
    offered.close()


def test_a_nonce_gets_the_file_as_often_as_it_is_asked_for(offered: OfferedDescriptor) -> None:
    before = num_open()
    for _ in range(3):
        found = fetch_descriptor(offered.nonce)
        assert os.pread(found, 100, 0) == b"a pool"
        assert not os.get_inheritable(found)
        os.close(found)
    assert num_open() == before


def test_a_nonce_that_nobody_has() -> None:
    with pytest.raises(HandoffFailed, match="no process of this host offers that card memory"):
        fetch_descriptor(secrets.token_bytes(descriptors.NONCE_BYTES))


def test_what_was_handed_out_outlives_the_offer(offered: OfferedDescriptor) -> None:
    found = fetch_descriptor(offered.nonce)
    offered.close()
    offered.close()
    assert os.pread(found, 100, 0) == b"a pool"
    os.close(found)
    with pytest.raises(HandoffFailed):
        fetch_descriptor(offered.nonce)


@pytest.mark.covers("F148")
def test_an_offer_outlives_a_time_without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ECONNABORTED]
    accept = socket.socket.accept

    def accept_later(listening: socket.socket) -> tuple[socket.socket, Any]:
        if errors:
            raise OSError(errors.pop(0), "not now")
        return accept(listening)

    monkeypatch.setattr(descriptors, "AGAIN_S", 0.0)
    monkeypatch.setattr(socket.socket, "accept", accept_later)
    offered = OfferedDescriptor(new_file())
    offered.start()
    os.close(fetch_descriptor(offered.nonce))
    offered.close()
    assert not errors


def test_an_offer_that_was_never_made_leaves_nothing() -> None:
    before = num_open()
    offered = OfferedDescriptor(new_file())
    assert num_open() == before + 1
    del offered
    assert num_open() == before


def as_nobody(work: Callable[[], bool]) -> bool:
    """Return what `work` returns in a process of another user."""
    child = os.fork()
    if not child:
        is_so = False
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            is_so = work()
        finally:
            os._exit(0 if is_so else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_is_given_nothing(offered: OfferedDescriptor) -> None:
    nonce = offered.nonce

    def is_refused() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(5)
            asking.connect(address_of(nonce))
            answer, found, _, _ = socket.recv_fds(asking, 100, 8)
            return (answer, found) == (b"", [])

    assert as_nobody(is_refused)
    os.close(fetch_descriptor(nonce))  # Others are served all the same.


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_nothing_is_taken_from_another_user() -> None:
    nonce = secrets.token_bytes(descriptors.NONCE_BYTES)
    ready, done = os.pipe(), os.pipe()

    def offer() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
            listening.bind(address_of(nonce))
            listening.listen(1)
            os.write(ready[1], b"1")
            return os.read(done[0], 1) == b"1"

    results: list[bool] = []
    helper = threading.Thread(target=lambda: results.append(as_nobody(offer)))
    helper.start()
    os.read(ready[0], 1)
    with pytest.raises(HandoffFailed, match="another user's"):
        fetch_descriptor(nonce)
    os.write(done[1], b"1")
    helper.join(20)
    assert results == [True]
    for end in (*ready, *done):
        os.close(end)


class Answering:
    """A socket under a nonce that answers something of its own."""

    def __init__(self, answer: Callable[[socket.socket, bytes], None]) -> None:
        self.nonce = secrets.token_bytes(descriptors.NONCE_BYTES)
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(address_of(self.nonce))
        self._listening.listen(1)
        self._thread = threading.Thread(target=self._serve, args=(answer,))
        self._thread.start()

    def _serve(self, answer: Callable[[socket.socket, bytes], None]) -> None:
        asking, _ = self._listening.accept()
        with asking:
            answer(asking, self.nonce)
            asking.recv(1)  # Until the other end has gone.

    def close(self) -> None:
        self._thread.join(20)
        self._listening.close()


def _two_files(asking: socket.socket, nonce: bytes) -> None:
    files = [new_file(), new_file()]
    socket.send_fds(asking, [nonce], files)
    for one in files:
        os.close(one)


def _another_nonce(asking: socket.socket, _: bytes) -> None:
    file = new_file()
    socket.send_fds(asking, [b"n" * descriptors.NONCE_BYTES], [file])
    os.close(file)


ANSWERS: dict[str, Callable[[socket.socket, bytes], None]] = {
    "two files": _two_files,
    "another nonce": _another_nonce,
    "no file": lambda asking, nonce: asking.sendall(nonce),
    "nothing": lambda asking, nonce: asking.shutdown(socket.SHUT_WR),
    "silence": lambda asking, nonce: None,
}


@pytest.mark.parametrize("answer", list(ANSWERS))
def test_answers_of_something_else(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused in bounded time, and no descriptor is left."""
    monkeypatch.setattr(descriptors, "WITHIN_S", 0.2)
    answering = Answering(ANSWERS[answer])
    before = num_open()
    with pytest.raises(HandoffFailed):
        fetch_descriptor(answering.nonce)
    answering.close()
    assert num_open() == before
