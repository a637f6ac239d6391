"""Answers that a sender does not believe, and what it says once however often it is asked."""

from __future__ import annotations

import dataclasses

import pytest

from common.ids import Incarnation
from kv_transfer.contract import TransferEnded
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
