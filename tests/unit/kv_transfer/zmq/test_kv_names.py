"""KV endpoints as text, addresses of names, and what is remembered of them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from common.ids import Incarnation
from kv_transfer.shared.effects import Peer
from kv_transfer.zmq import endpoints, name_lookup
from kv_transfer.zmq.endpoints import addresses_of, is_number, look_up, parse_tcp
from kv_transfer.zmq.name_lookup import NameLookup

WAIT_S = 20.0
PEER, OTHER = (Peer(f"tcp://{name}.example:1", Incarnation(name, 1)) for name in "de")


@pytest.mark.parametrize(
    ("endpoint", "wanted"),
    [
        ("tcp://10.0.0.7:41", ("10.0.0.7", 41)),
        ("tcp://[fd00::7]:41", ("fd00::7", 41)),
        ("tcp://decode-3.example:41", ("decode-3.example", 41)),
    ],
)
def test_the_parts_of_an_endpoint(endpoint: str, wanted: tuple[str, int]) -> None:
    assert parse_tcp(endpoint) == wanted
    assert endpoints.tcp(*wanted) == endpoint


@pytest.mark.parametrize(
    "endpoint",
    ["", "d:1", "tcp://", "tcp://d", "tcp://d:0", "tcp://d:65536", "tcp://[d", "ipc://d:1"],
)
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"tcp://host:port|range|IPv6|invalid"):
        parse_tcp(endpoint)


def test_a_number_is_no_name() -> None:
    assert [is_number(host) for host in ("10.0.0.7", "fd00::7", "0.0.0.0", "::")] == [True] * 4
    assert [is_number(host) for host in ("localhost", "10.0.0", "d", "")] == [False] * 4


V4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.7", 0))
OTHER_V4 = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.8", 0))
V6 = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::7", 0, 0, 0))


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ([V4], ["10.0.0.7"]),
        ([V6], ["fd00::7"]),
        ([V6, V4, OTHER_V4, V4], ["10.0.0.7", "10.0.0.8", "fd00::7"]),
    ],
)
def test_ipv4_precedes_and_ipv6_will_do(
    found: list[object], wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert addresses_of("d.example") == wanted


@pytest.mark.covers("F137")
@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        (["127.0.0.1", "127.0.0.2", "127.0.0.3"], "127.0.0.2"),
        (["127.0.0.2", "127.0.0.1"], "127.0.0.2"),
        (["127.0.0.1", "127.0.0.3"], "127.0.0.3"),  # nobody listens: whoever connects is told
        (["127.0.0.1"], "127.0.0.1"),  # and is not tried before
    ],
)
def test_of_several_addresses_one_that_accepts_is_taken(
    known: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "addresses_of", lambda _: known)
    with socket.create_server(("127.0.0.2", 0)) as server:
        assert look_up("d.example", server.getsockname()[1]) == wanted


class Names:
    """A lookup whose name server answers when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, str] = {"d.example": "10.0.0.7", "e.example": "10.0.0.8"}
        self.may_answer = threading.Event()
        self.asked: list[str] = []
        self._woken = threading.Event()
        self.lookup = NameLookup(self._woken.set)
        monkeypatch.setattr(endpoints, "look_up", self._answer)

    def _answer(self, host: str, _port: int) -> str:
        self.asked.append(host)
        assert self.may_answer.wait(WAIT_S)
        if host not in self.answers:
            raise OSError("unknown")
        return self.answers[host]

    def take(self, count: int) -> dict[Peer, object]:
        found: dict[Peer, object] = {}
        while len(found) < count:
            assert self._woken.wait(WAIT_S)
            self._woken.clear()
            found |= dict(self.lookup.take())
        return found


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names(monkeypatch)
    yield names
    names.may_answer.set()


def test_a_name_is_looked_up_once_for_all_peers_that_need_it(names: Names) -> None:
    again = Peer(PEER.endpoint, Incarnation("d", 2))
    for peer in (PEER, again, PEER):
        names.lookup.ask(peer, "d.example", 1)
    names.may_answer.set()
    assert names.take(2) == {PEER: "10.0.0.7", again: "10.0.0.7"}
    assert names.asked == ["d.example"]
    assert names.lookup.take() == []


def test_of_two_nodes_of_one_name_each_is_looked_up_at_its_port(names: Names) -> None:
    beside = Peer("tcp://d.example:2", Incarnation("d2", 1))
    names.lookup.ask(PEER, "d.example", 1)
    names.lookup.ask(beside, "d.example", 2)
    names.may_answer.set()
    assert names.take(2) == {PEER: "10.0.0.7", beside: "10.0.0.7"}
    assert names.asked == ["d.example", "d.example"]


def test_a_name_that_is_unknown(names: Names) -> None:
    names.lookup.ask(PEER, "nowhere.example", 1)
    names.may_answer.set()
    (error,) = names.take(1).values()
    assert isinstance(error, OSError)
    assert str(error) == "unknown"
    assert names.asked == ["nowhere.example"]


def test_a_lookup_that_fails_in_an_unknown_way_keeps_no_place(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(host: str, _port: int) -> str:
        raise KeyError(host)

    monkeypatch.setattr(name_lookup, "MAX_LOOK_UPS", 1)
    with monkeypatch.context() as patch:
        patch.setattr(endpoints, "look_up", broken)
        names.lookup.ask(PEER, "d.example", 1)
        error = names.take(1)[PEER]
    assert (type(error), str(error)) == (KeyError, "'d.example'")
    names.may_answer.set()
    names.lookup.ask(PEER, "d.example", 1)
    assert names.take(1) == {PEER: "10.0.0.7"}


def test_without_a_thread_no_name_is_found_and_the_next_may_be(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot_start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(name_lookup, "MAX_LOOK_UPS", 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", cannot_start)
        names.lookup.ask(PEER, "d.example", 1)
        error = names.take(1)[PEER]
    assert (type(error), str(error)) == (RuntimeError, "can't start new thread")
    names.may_answer.set()
    names.lookup.ask(PEER, "d.example", 1)
    assert names.take(1) == {PEER: "10.0.0.7"}


def test_a_thread_that_does_not_start_leaves_its_name_to_one_that_runs(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot_start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    names.lookup.ask(PEER, "d.example", 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", cannot_start)
        names.lookup.ask(OTHER, "e.example", 1)
    names.may_answer.set()
    assert names.take(2) == {PEER: "10.0.0.7", OTHER: "10.0.0.8"}


def test_lookups_at_once_are_bounded(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_lookup, "MAX_LOOK_UPS", 1)
    names.lookup.ask(PEER, "d.example", 1)
    names.lookup.ask(OTHER, "e.example", 1)
    assert len(names.asked) <= 1
    names.may_answer.set()
    assert names.take(2) == {PEER: "10.0.0.7", OTHER: "10.0.0.8"}
    assert names.asked == ["d.example", "e.example"]


def test_an_address_stays_known_as_long_as_its_peer_answers_there(names: Names) -> None:
    lookup = names.lookup
    assert lookup.try_known(PEER) is None
    lookup.remember(PEER, "10.0.0.7")
    for _ in range(2):
        assert lookup.try_known(PEER) == "10.0.0.7"
        lookup.answered(PEER)
        lookup.answered(PEER)
        lookup.closed(PEER)
    assert lookup.try_known(PEER) == "10.0.0.7"
    lookup.closed(PEER)
    assert lookup.try_known(PEER) is None


def test_addresses_are_remembered_within_bounds(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name_lookup, "MAX_PEERS", 1)
    names.lookup.remember(PEER, "10.0.0.7")
    names.lookup.remember(OTHER, "10.0.0.8")
    assert names.lookup.try_known(PEER) is None
    assert names.lookup.try_known(OTHER) == "10.0.0.8"
