"""Which threads use a transport: ZMQ's sockets may be used by one thread only."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from kv_transfer.contract import Landed, TransferEnded
from kv_transfer.transport import Transport
from kv_transfer.zmq.transport import ZmqTransport
from tests.support.kv.kv_cluster import WAIT_S, Cluster, Node, send, wait_until

FROM_ANY_THREAD = {"wake", "endpoint"}
THREADS_PER_NODE = 3
HANDOFFS_PER_THREAD = 4


@pytest.fixture
def used_by(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[threading.Thread]]:
    """The threads that called a method of a transport, other than `wake`, by the transport's id."""
    threads: dict[int, set[threading.Thread]] = defaultdict(set)

    def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
        def record(transport: ZmqTransport, *args: Any) -> Any:
            threads[id(transport)].add(threading.current_thread())
            return method(transport, *args)

        return record

    for name in {name for name in vars(Transport) if not name.startswith("_")} - FROM_ANY_THREAD:
        method = vars(ZmqTransport)[name]
        if isinstance(method, property):
            assert method.fget is not None
            monkeypatch.setattr(ZmqTransport, name, property(recorded(method.fget)))
        else:
            monkeypatch.setattr(ZmqTransport, name, recorded(method))
    return threads


@pytest.mark.covers("F22")
def test_only_its_connectors_thread_uses_a_transport(
    zmq_cluster: Cluster, used_by: dict[int, set[threading.Thread]]
) -> None:
    """Two prefill nodes and a decode node, whose connectors are called on three threads each."""
    num_handoffs = 2 * THREADS_PER_NODE * HANDOFFS_PER_THREAD
    prefills = [zmq_cluster.node("p0"), zmq_cluster.node("p1")]
    decode = zmq_cluster.node("d", num_blocks=num_handoffs)
    tickets = iter([zmq_cluster.ticket(decode, [block]) for block in range(num_handoffs)])

    def hand_over(prefill: Node) -> None:
        for _ in range(HANDOFFS_PER_THREAD):
            send(prefill, decode, next(tickets), [0])
            prefill.connector.statistics()

    threads = [
        threading.Thread(target=hand_over, args=(prefill,))
        for prefill in prefills
        for _ in range(THREADS_PER_NODE)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    wait_until(lambda: len(decode.events) == num_handoffs)
    assert {type(event) for event in decode.events} == {Landed}
    ends = [prefill.wait_event() for prefill in prefills for _ in range(num_handoffs // 2)]
    assert all(isinstance(end, TransferEnded) and end.error is None for end in ends)
    zmq_cluster.close()
    for node in (*prefills, decode):
        (thread,) = used_by[id(node.connector.transport)]
        assert thread.name == "pdserve-kv"
