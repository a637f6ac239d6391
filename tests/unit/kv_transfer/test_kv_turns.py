"""Which transfer of a link sends next."""

from __future__ import annotations

import pytest

from kv_transfer.core import frames
from kv_transfer.core.sender import Sender
from kv_transfer.core.transfer import Source, Transfer
from kv_transfer.core.turns import Turns
from tests.unit.kv_transfer.test_kv_sender import LAYOUT, LIMITS, ME, PEER, WELCOME, chunks, ticket


def transfer(token: int, deadline_at_s: float = 9.0, priority: int = 0) -> Transfer:
    return Transfer(
        ticket(token),
        Source(num_layers=4, num_blocks=64, max_blocks=1),
        deadline_at_s=deadline_at_s,
        now_s=0.0,
        priority=priority,
    )


def order(*transfers: Transfer) -> list[int]:
    turns = Turns()
    for one in transfers:
        turns.add(one)
    found = []
    while (token := turns.first()) is not None:
        found.append(token)
        turns.discard(token)
    return found


def test_the_earliest_deadline_is_first_and_priority_before_it() -> None:
    assert order(transfer(1, 5.0), transfer(2, 3.0), transfer(3, 4.0)) == [2, 3, 1]
    assert order(transfer(1, 5.0), transfer(2, 3.0, priority=-1), transfer(3, 9.0, 7)) == [3, 1, 2]


def test_equals_take_turns() -> None:
    turns = Turns()
    pair = transfer(1), transfer(2)
    for one in (*pair, pair[0]):
        turns.add(one)
    for wanted in (1, 2, 1, 2):
        assert turns.first() == wanted
        turns.discard(wanted)
        turns.add(pair[wanted - 1])
    turns.clear()
    assert turns.first() is None


@pytest.mark.parametrize(
    ("urgent_deadline_s", "priority", "wanted"),
    [(100.0, 0, [1, 2]), (50.0, 0, [2, 1]), (100.0, 3, [2, 1]), (50.0, -3, [1, 2])],
)
def test_a_link_sends_by_priority_and_deadline(
    urgent_deadline_s: float, priority: int, wanted: list[int]
) -> None:
    sender = Sender(ME, LAYOUT, LIMITS)
    sender.on_open(ticket(1), 99.0, 0.0)
    sender.on_open(ticket(2), urgent_deadline_s, 0.0, priority)
    sender.hello(PEER, {"zmq": b""}, "auto")
    sender.on_push(1, 0, [0, 1], [5, 6])
    sender.on_push(2, 0, [0, 1], [5, 6])
    effects = sender.on_frame(PEER, WELCOME, 0.0)
    first, second = wanted
    assert [token for _, token, _ in chunks(effects)] == [first, first, second, second]
    assert chunks(sender.on_frame(PEER, frames.Ack(4), 0.1)) == []
