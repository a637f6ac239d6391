"""The sending machine and its COMMIT: when it leaves, and when it leaves again."""

from __future__ import annotations

import pytest

from kv_transfer.contract import Commit, TransferEnded
from kv_transfer.sending.effects import SendToPeer
from kv_transfer.wire import frames
from tests.support.kv.sender_events import (
    PEER,
    ends,
    one_sided,
    push,
    ready,
    sent,
    ticket,
    welcome,
)


def test_the_commit_leaves_when_the_last_chunk_was_acknowledged() -> None:
    """Completion before commit: a source block that is reused early can never be landed."""
    sender = ready(ticket())
    for layer in range(4):
        push(sender, 1, layer)
    assert sent(sender.on_commit(1, Commit(num_tokens=8, first_token_id=7))) == []
    for consumed in range(1, 8):
        assert sent(sender.on_frame(PEER, frames.Ack(consumed), 0.1)) == []
    effects = sender.on_frame(PEER, frames.Ack(8), 0.1)
    assert effects == [SendToPeer(PEER, frames.CommitFrame(1, 3, 8, 0, 8, 7, ()))]


def test_a_commit_waits_for_its_own_chunks_only() -> None:
    sender = ready(ticket(1), ticket(2))
    push(sender, 1, 0)
    push(sender, 2, 0)
    sender.on_commit(1, Commit(num_tokens=8, first_token_id=7))
    sender.on_commit(2, Commit(num_tokens=8, first_token_id=7))
    assert sent(sender.on_frame(PEER, frames.Ack(1), 0.1)) == []
    (commit,) = sent(sender.on_frame(PEER, frames.Ack(2), 0.1))
    assert isinstance(commit, frames.CommitFrame)
    assert commit.lease_token == 1


def test_a_commit_that_was_not_sent_cannot_be_acknowledged() -> None:
    sender = ready(ticket())
    (ended,) = ends(sender.on_frame(PEER, frames.Committed(1, 3), 0.1))
    assert isinstance(ended, TransferEnded)
    assert ended.error is not None


@pytest.mark.covers("F37")
def test_a_commit_that_a_broken_link_may_have_lost_leaves_again() -> None:
    """Otherwise the transfer could not end well."""
    sender = ready(ticket())
    for layer in range(4):
        push(sender, 1, layer)
        sender.on_frame(PEER, frames.Ack(2 * layer + 2), 0.1)
    commit = frames.CommitFrame(1, 3, 8, 0, 8, 7, ())
    assert sent(sender.on_commit(1, Commit(num_tokens=8, first_token_id=7))) == [commit]
    sender.on_link_lost(PEER, 1.0)
    sender.on_tick(1.05)
    assert sent(welcome(sender, 1.1)) == [frames.Begin(1, 3), commit]


def test_a_commit_leaves_once_however_often_begin_is_answered() -> None:
    sender = one_sided(ticket(1))
    begun = frames.Begun(1, 3)
    sender.on_frame(PEER, begun, 0.1)
    for layer in range(4):
        push(sender, 1, layer)
        sender.on_frame(PEER, frames.Ack(2 * layer + 2), 0.1)
    assert len(sent(sender.on_commit(1, Commit(num_tokens=8, first_token_id=7)))) == 1
    assert sender.on_frame(PEER, begun, 0.2) == []
