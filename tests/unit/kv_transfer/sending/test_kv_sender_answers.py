"""Answers that a sender does not believe, and what it says once however often it is asked."""

from __future__ import annotations

import dataclasses

import pytest

from common.ids import Incarnation
from kv_transfer.contract import Revoked, TransferEnded
from kv_transfer.sending.effects import SendToPeer
from kv_transfer.sending.machine import Sender
from kv_transfer.wire import frames
from tests.support.kv.sender_events import (
    DECODE,
    LAYOUT,
    LIMITS,
    ME,
    PEER,
    WELCOME,
    ends,
    ready,
    ticket,
)


@pytest.mark.parametrize("other", [Incarnation("d", 2), Incarnation("e", 1)])
def test_another_node_or_life_that_answers_is_not_sent_to(other: Incarnation) -> None:
    sender = Sender(ME, LAYOUT, LIMITS)
    sender.on_open(ticket(), 5.0, 0.0)
    sender.hello(PEER, {"zmq": b""}, "auto")
    answer = dataclasses.replace(WELCOME, receiver=other)
    (ended,) = ends(sender.on_frame(PEER, answer, 0.1))
    assert isinstance(ended, TransferEnded)
    assert f"{DECODE} at there answered as {other}" in str(ended.error)


def test_an_abort_is_told_once() -> None:
    sender = ready(ticket())
    abort = SendToPeer(PEER, frames.Abort(1, 3), is_behind_writes=True)
    assert sender.on_abort(1, 0.0) == [abort]
    assert sender.on_abort(1, 0.0) == []


@pytest.mark.parametrize("channel", [0, 1])
def test_a_receiver_that_closes_has_ended_all_landings_on_whichever_connection_it_says_so(
    channel: int,
) -> None:
    """What it said on the first one of each landing may come later."""
    sender = Sender(ME, LAYOUT, dataclasses.replace(LIMITS, max_channels=2))
    for token in (1, 2):
        sender.on_open(ticket(token), 100.0, 0.0)
    sender.hello(PEER, {"zmq": b""}, "auto")
    sender.on_frame(PEER, dataclasses.replace(WELCOME, num_channels=2, group=b"g"), 0.0)
    said = PEER._replace(channel=channel)
    closed = frames.Rejected(frames.LEASE_REVOKED, "the receiving connector was closed")
    first, second = ends(sender.on_frame(said, closed, 0.1))
    for ended in (first, second):
        assert isinstance(ended, TransferEnded)
        assert isinstance(ended.error, Revoked)
    assert sender.num_transfers == 0
