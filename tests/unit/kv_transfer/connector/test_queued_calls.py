"""Queued calls are made in order; pushes of one transfer that wait together cost one answer."""

from __future__ import annotations

from functools import partial

import pytest

from kv_transfer.connector.queued_calls import QueuedCalls
from kv_transfer.contract import Commit
from kv_transfer.sending.effects import SendChunk, SenderEffect
from kv_transfer.sending.machine import Sender
from kv_transfer.shared.limits import Limits
from tests.support.kv.sender_events import LAYOUT, PEER, chunks, ready, ticket, welcome

LIMITS = Limits(window_bytes=1 << 20)


def wide_open(*tokens: int) -> tuple[Sender, QueuedCalls]:
    """Return a machine in whose window all of these transfers have room, and its queue."""
    sender = ready(limits=LIMITS)
    for token in tokens:
        sender.on_open(ticket(token), 100.0, 0.0)
    welcome(sender)
    for link in sender.links.all():
        link.grant(LIMITS.window_bytes)
    return sender, QueuedCalls(sender, wake=lambda: None)


def add_push(calls: QueuedCalls, token: int, layer: int) -> None:
    calls.add_push(token, layer, [0, 1], [5, 6])


def taken(calls: QueuedCalls) -> list[SenderEffect]:
    effects: list[SenderEffect] = []
    while calls:
        effects += calls.take_next()
    return effects


def num_asking(effects: list[SenderEffect]) -> int:
    """Return how many of the frames ask for an acknowledgement at once."""
    return sum(isinstance(effect, SendChunk) and effect.wants_ack for effect in effects)


def layers_of(effects: list[SenderEffect]) -> list[tuple[int, int]]:
    """Return token and layer of each frame."""
    return [(token, layer) for _, token, layer in chunks(effects)]


def test_pushes_that_wait_together_ask_for_one_acknowledgement() -> None:
    _, calls = wide_open(1)
    for layer in range(LAYOUT.num_layers):
        add_push(calls, 1, layer)
    effects = taken(calls)
    assert layers_of(effects) == [(1, layer) for layer in range(LAYOUT.num_layers)]
    assert num_asking(effects) == 1


def test_pushes_that_come_alone_ask_each() -> None:
    _, calls = wide_open(1)
    effects: list[SenderEffect] = []
    for layer in range(LAYOUT.num_layers):
        add_push(calls, 1, layer)
        effects += taken(calls)
    assert num_asking(effects) == LAYOUT.num_layers


def test_a_push_of_another_transfer_ends_those_before_it() -> None:
    _, calls = wide_open(1, 2)
    for token, layer in ((1, 0), (1, 1), (2, 0), (1, 2)):
        add_push(calls, token, layer)
    effects = taken(calls)
    assert layers_of(effects) == [(1, 0), (1, 1), (2, 0), (1, 2)]
    assert num_asking(effects) == 3


def test_what_was_queued_behind_pushes_finds_them_done() -> None:
    sender, calls = wide_open(1)
    add_push(calls, 1, 0)
    add_push(calls, 1, 1)
    calls.add(partial(sender.on_commit, 1, Commit(num_tokens=8, first_token_id=7)))
    add_push(calls, 1, 2)
    assert layers_of(calls.take_next() + calls.take_next()) == [(1, 0), (1, 1)]
    calls.take_next()
    assert calls.take_next() == [], "a push after commit"
    assert sender.links.get(PEER) is not None
    assert sender.link_of[1].transfers[1].misuse is not None


def test_a_push_that_is_wrong_stops_its_transfer_with_those_before_it() -> None:
    sender, calls = wide_open(1, 2)
    add_push(calls, 1, 0)
    add_push(calls, 1, LAYOUT.num_layers)
    add_push(calls, 1, 1)
    add_push(calls, 2, 0)
    assert layers_of(taken(calls)) == [(2, 0)]
    assert sender.link_of[1].transfers[1].misuse is not None


def test_an_error_of_a_call_leaves_the_others() -> None:
    def fail() -> list[SenderEffect]:
        raise RuntimeError("a bug")

    _, calls = wide_open(1)
    calls.add(fail)
    add_push(calls, 1, 0)
    with pytest.raises(RuntimeError, match="a bug"):
        calls.take_next()
    assert layers_of(taken(calls)) == [(1, 0)]


def test_each_call_wakes_the_thread_that_makes_it_and_none_after_a_close() -> None:
    woken: list[int] = []
    calls = QueuedCalls(ready(limits=LIMITS), wake=lambda: woken.append(len(calls)))
    add_push(calls, 1, 0)
    calls.add(list)
    assert woken == [1, 2], "woken when the call is there"
    calls.close()
    add_push(calls, 1, 1)
    calls.add(list)
    assert (woken, len(calls)) == ([1, 2], 2), "those that waited are still taken"
