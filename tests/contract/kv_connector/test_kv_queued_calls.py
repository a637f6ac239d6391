"""What the thread that runs steps does of a transfer: it queues calls, and nothing else."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kv_transfer.connector.sending_end import SendingEnd
from kv_transfer.contract import Landed, TransferEnded
from kv_transfer.sending.effects import SendChunk
from kv_transfer.sending.machine import Sender
from kv_transfer.transport import Arrival
from tests.support.kv.kv_cluster import (
    PAIR_BYTES,
    WAIT_S,
    Cluster,
    Node,
    assert_ended_once,
    begin,
    commit_for,
    error_of,
    send,
    wait_until,
)


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, node: Node) -> Iterator[Callable[[], bool]]:
    """Hold the node's thread at its first chunk; yield what waits until it is there."""
    is_held, goes_on = threading.Event(), threading.Event()
    send_chunk = SendingEnd.send_chunk

    def hold(self: SendingEnd, effect: SendChunk) -> None:
        if self is node.connector.sending:
            is_held.set()
            assert goes_on.wait(WAIT_S)
        send_chunk(self, effect)

    monkeypatch.setattr(SendingEnd, "send_chunk", hold)
    try:
        yield lambda: is_held.wait(WAIT_S)
    finally:
        goes_on.set()


@pytest.mark.parametrize("call", ["on_open", "on_push", "on_commit", "on_abort"])
def test_the_machine_runs_on_the_connectors_thread(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    threads: list[str] = []
    original = getattr(Sender, call)

    def recorded(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return original(*args, **options)

    monkeypatch.setattr(Sender, call, recorded)
    prefill, decode = cluster.node("p"), cluster.node("d")
    send(prefill, decode, ticket := cluster.ticket(decode, [1, 2]), [4, 5])
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    prefill.connector.abort(ticket.lease_token)
    prefill.connector.close()
    assert set(threads) <= {"pdserve-kv"}
    assert threads or call == "on_abort"


def test_what_was_queued_during_a_wait_is_done_before_the_rest_of_the_turn(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode node waits for the last push and the commit; nothing waits for deadlines."""
    prefill, _, ticket = begin(cluster, targets=(1,))
    connector, transport = prefill.connector, prefill.connector.transport
    wait, receive = transport.wait, transport.receive_nowait
    is_queued, num_left = threading.Event(), list[int]()

    def wait_and_queue(timeout_s: float) -> None:
        wait(timeout_s)
        if not is_queued.is_set():
            connector.commit(ticket.lease_token, commit_for(ticket))
            is_queued.set()

    def recorded() -> Arrival | None:
        if is_queued.is_set():
            num_left.append(len(connector.sending.calls))
        return receive()

    monkeypatch.setattr(transport, "receive_nowait", recorded)
    monkeypatch.setattr(transport, "wait", wait_and_queue)
    wait_until(lambda: num_left, prefill.look_at_the_time)
    assert num_left[0] == 0


def test_an_abort_behind_queued_pushes_leaves_nothing_of_them_to_send(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode, first = begin(cluster, targets=(1,))
    second = cluster.ticket(decode, [4, 5, 6])
    with held(monkeypatch, prefill) as is_held:
        prefill.push_all(first, [11])
        assert is_held()
        decode.connector.expect(second, sender_deadline_s=30)
        prefill.connector.open(second, deadline_s=30)
        prefill.push_all(second, [4, 5, 6])
        prefill.connector.abort(second.lease_token)
    prefill.connector.commit(first.lease_token, commit_for(first))
    ends = {event.lease_token: event for event in (prefill.wait_event(), prefill.wait_event())}
    assert ends[first.lease_token] == TransferEnded(first.lease_token, None)
    error_of(ends[second.lease_token])
    assert prefill.connector.statistics().bytes_sent == 3 * PAIR_BYTES
    assert_ended_once(prefill)


def test_what_is_queued_when_the_connector_closes_ends_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode, first = begin(cluster, targets=(1,))
    second = cluster.ticket(decode, [4, 5, 6])
    with held(monkeypatch, prefill) as is_held:
        prefill.push_all(first, [11])
        assert is_held()
        prefill.connector.open(second, deadline_s=30)
        prefill.push_all(second, [4, 5, 6])
        prefill.connector.commit(second.lease_token, commit_for(second))
        closing = threading.Thread(target=prefill.connector.close)
        closing.start()
        wait_until(lambda: prefill.connector.is_closing)
    closing.join(WAIT_S)
    errors = {event.lease_token: error_of(event) for event in prefill.events}
    assert errors.keys() == {first.lease_token, second.lease_token}
    # The decode node may refuse the second one before the connection is closed.
    assert "closed" in str(errors[first.lease_token])
    assert_ended_once(prefill)


def test_nothing_is_queued_behind_a_close(cluster: Cluster) -> None:
    prefill, _, ticket = begin(cluster)
    prefill.connector.close()
    commit = commit_for(ticket)
    num_references = sys.getrefcount(commit)
    prefill.push_all(ticket, [4, 5, 6])
    prefill.connector.commit(ticket.lease_token, commit)
    prefill.connector.abort(ticket.lease_token)
    assert sys.getrefcount(commit) == num_references, "nobody keeps it"
    assert prefill.connector.statistics().bytes_sent == 0
    assert_ended_once(prefill)


def test_calls_that_fail_end_everything_all_the_same(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same call is queued again while the connector ends."""

    def fail(*_: object, **options: object) -> None:
        raise RuntimeError("a bug")

    prefill, _, ticket = begin(cluster)
    monkeypatch.setattr(Sender, "on_push", fail)
    for _ in range(3):
        prefill.push_all(ticket, [4, 5, 6])
    assert "closed" in str(error_of(prefill.wait_event()))
    assert [str(error) for error, _ in prefill.failures] == ["a bug"]


def test_a_token_is_free_again_when_its_end_is_reported(cluster: Cluster) -> None:
    """An owner may open it from within that event."""
    prefill, _, ticket = begin(cluster)
    prefill.connector.abort(ticket.lease_token)
    error_of(prefill.wait_event())
    silent = dataclasses.replace(ticket, kv_endpoint=cluster.silent_endpoint())
    prefill.connector.open(silent, deadline_s=30)
    with pytest.raises(ValueError, match="open already"):
        prefill.connector.open(silent, deadline_s=30)
    prefill.connector.close()
    error_of(prefill.wait_event())
