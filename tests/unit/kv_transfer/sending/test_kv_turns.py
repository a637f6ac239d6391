"""Which transfer of a link sends next."""

from __future__ import annotations

import pytest

from kv_transfer.contract import Commit
from kv_transfer.sending.machine import Sender
from kv_transfer.sending.transfer import Source, Transfer, Turns
from kv_transfer.wire import frames
from tests.support.kv.sender_events import (
    LAYOUT,
    LIMITS,
    ME,
    PEER,
    WELCOME,
    chunks,
    ticket,
)


def transfer(token: int, deadline_at_s: float = 9.0, priority: int = 0) -> Transfer:
    """A transfer with a piece to send."""
    one = without_pieces(token, deadline_at_s, priority)
    one.push(0, [0], [0])
    return one


def without_pieces(token: int, deadline_at_s: float = 9.0, priority: int = 0) -> Transfer:
    return Transfer(
        ticket(token),
        Source(num_blocks=64, max_blocks=(1,) * 4),
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


def test_a_commit_goes_before_all_pieces() -> None:
    turns = Turns()
    urgent, committing = transfer(1, 1.0, priority=9), without_pieces(2)
    for one in (urgent, committing):
        turns.add(one)
    assert turns.first() == 2
    committing.push(0, [0], [0])
    turns.add(committing)
    assert turns.first() == 1


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


def test_a_commit_does_not_wait_for_the_bytes_of_a_more_urgent_transfer() -> None:
    sender = Sender(ME, LAYOUT, LIMITS)
    sender.on_open(ticket(1), 100.0, 0.0)
    sender.on_open(ticket(2), 50.0, 0.0, 9)
    sender.hello(PEER, {"zmq": b""}, "auto")
    for layer in range(LAYOUT.num_layers):
        sender.on_push(1, layer, [0, 1], [5, 6])
    num_acknowledged = num_sent = len(chunks(sender.on_frame(PEER, WELCOME, 0.0)))
    sender.on_commit(1, Commit(num_tokens=8, first_token_id=1))
    while sender.link_of[1].transfers[1].num_remaining:
        num_sent += len(chunks(sender.on_frame(PEER, frames.Ack(num_acknowledged), 0.1)))
        num_acknowledged = min(num_acknowledged + 1, num_sent)
        for layer in range(LAYOUT.num_layers):
            num_sent += len(chunks(sender.on_push(2, layer, [0, 1], [5, 6])))
    effects = sender.on_frame(PEER, frames.Ack(num_acknowledged), 0.2)
    assert sender.link_of[1].transfers[1].has_promised, effects


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
