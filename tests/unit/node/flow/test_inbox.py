"""The bounded door into the step thread."""

from __future__ import annotations

import threading

import pytest

from common.errors import Draining, HandoffFailed, Overloaded
from common.ids import AttemptId, Incarnation
from kv_transfer.contract import LandingFailed
from node.flow.inbox import MAX_BESIDE, Inbox
from node.flow.messages import (
    AbortAttempt,
    FetchBlocks,
    Message,
    PullRefused,
    RouterGone,
    SendBlocks,
    Submit,
    WarmNode,
)
from tests.support.engine.build import make_request
from tests.support.nodes.control_server import TICKET

ROUTER = Incarnation("r", 1)


def submit(reply_to: int = 1) -> Submit:
    return Submit(request=make_request(3), router=ROUTER, reply_to=reply_to, received_at_s=0.0)


ALWAYS_LET_IN: list[Message] = [
    AbortAttempt(ROUTER, (AttemptId("a", 1),)),
    RouterGone(ROUTER),
    LandingFailed(5, HandoffFailed("gone")),
]


BESIDE: list[Message] = [
    AbortAttempt(ROUTER, (AttemptId("a", 1),)),
    SendBlocks(ROUTER, TICKET, (b"x" * 16,)),
    PullRefused(7),
    WarmNode(ROUTER, Incarnation("n", 1)),
    FetchBlocks(ROUTER, Incarnation("n", 1), (b"x" * 16,)),
]


def test_messages_come_out_in_the_order_they_went_in() -> None:
    inbox = Inbox(max_requests=2)
    messages = [submit(), *ALWAYS_LET_IN, submit(2)]
    had_messages = [inbox.has_messages]
    for message in messages:
        inbox.put(message)
    had_messages.append(inbox.has_messages)
    assert inbox.take_all() == messages
    assert inbox.take_all() == []
    assert [*had_messages, inbox.has_messages] == [False, True, False]


def test_requests_are_refused_when_too_many_wait_and_let_in_again_later() -> None:
    inbox = Inbox(max_requests=2)
    inbox.put(submit(1))
    inbox.put(submit(2))
    with pytest.raises(Overloaded, match="2 requests wait"):
        inbox.put(submit(9))
    assert len(inbox.take_all()) == 2
    inbox.put(submit(9))
    assert inbox.take_all() == [submit(9)]


def test_what_ends_things_always_gets_in() -> None:
    inbox = Inbox(max_requests=1)
    inbox.put(submit())
    for message in ALWAYS_LET_IN:
        inbox.put(message)
    inbox.close()
    for message in ALWAYS_LET_IN:
        inbox.put(message)
    assert inbox.take_all() == [submit(), *ALWAYS_LET_IN, *ALWAYS_LET_IN]


@pytest.mark.parametrize("message", BESIDE, ids=lambda message: type(message).__name__)
def test_what_is_no_request_is_refused_when_too_much_waits_and_let_in_again_later(
    message: Message,
) -> None:
    inbox = Inbox(max_requests=1)
    for index in range(MAX_BESIDE):
        inbox.put(BESIDE[index % len(BESIDE)])
    with pytest.raises(Overloaded, match=f"{MAX_BESIDE} aborts and pulls wait"):
        inbox.put(message)
    inbox.put(submit())
    inbox.put(RouterGone(ROUTER))
    assert len(inbox.take_all()) == MAX_BESIDE + 2
    inbox.put(message)
    assert inbox.take_all() == [message]


def test_a_closed_inbox_refuses_requests_and_no_longer_waits() -> None:
    inbox = Inbox(max_requests=5)
    inbox.close()
    assert inbox.is_closed
    with pytest.raises(Draining, match="stopping"):
        inbox.put(submit())
    assert has_ended(waiting(inbox, None))


def waiting(inbox: Inbox, timeout_s: float | None) -> threading.Thread:
    """Return a thread that waits; it does not outlive the test run."""
    thread = threading.Thread(target=inbox.wait, args=(timeout_s,), daemon=True)
    thread.start()
    return thread


def has_ended(thread: threading.Thread) -> bool:
    thread.join(10)
    return not thread.is_alive()


def test_waiting_ends_at_once_when_something_is_there_or_no_time_is_left() -> None:
    inbox = Inbox(max_requests=5)
    assert has_ended(waiting(inbox, 0.0))
    inbox.put(submit())
    assert has_ended(waiting(inbox, None))
    assert len(inbox.take_all()) == 1, "waiting takes nothing"


@pytest.mark.parametrize("wake", ["put", "close"])
def test_a_waiting_thread_is_woken(wake: str) -> None:
    inbox = Inbox(max_requests=5)
    thread = waiting(inbox, None)
    if wake == "put":
        inbox.put(RouterGone(ROUTER))
    else:
        inbox.close()
    assert has_ended(thread)
