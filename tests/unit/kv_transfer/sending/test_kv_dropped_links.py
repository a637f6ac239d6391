"""A link that ends leaves nothing behind: neither bytes in the shared window nor a place in it."""

from __future__ import annotations

import pytest

from common.errors import HandoffFailed
from kv_transfer.sending.links import Links
from kv_transfer.shared.limits import WINDOWS_PER_NODE
from kv_transfer.wire import frames
from tests.support.kv.many_peers import (
    LIMITS,
    PAIR_BYTES,
    connected,
    frames_in_flight,
    peer,
    push,
)


def test_what_a_lost_peer_had_in_flight_is_room_for_the_others() -> None:
    sender = connected(WINDOWS_PER_NODE + 1)
    last = WINDOWS_PER_NODE
    for number in range(WINDOWS_PER_NODE):
        push(sender, number)
    push(sender, last)
    assert frames_in_flight(sender) == [4, 4, 4, 2, 2]
    sender.on_peer_failed(peer(0), HandoffFailed("gone"), 0.1)
    sender.on_frame(peer(last), frames.Ack(1), 0.2)
    assert frames_in_flight(sender) == [4, 4, 3, 3]


def test_a_lost_peer_that_waited_for_the_shared_window_is_not_waited_for() -> None:
    sender = connected(WINDOWS_PER_NODE + 1)
    for number in range(WINDOWS_PER_NODE + 1):
        push(sender, number)
    sender.on_peer_failed(peer(WINDOWS_PER_NODE), HandoffFailed("gone"), 0.1)
    sender.on_frame(peer(0), frames.Ack(4), 0.2)
    assert frames_in_flight(sender) == [3, 4, 4, 3]


def test_a_link_is_compared_with_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(LIMITS, [PAIR_BYTES])
    for number in range(3):
        link = links.open(peer(number), 0.0)
        monkeypatch.setattr(link.rate, "latest", lambda _, number=number: float(number))
    one = links.get(peer(1))
    assert one is not None
    assert links.rate_beside(one, 0.0) == 1.0
