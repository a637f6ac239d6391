"""KV of two nodes on several connections, of which some pass the others and break alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from common.errors import InternalError
from kv_transfer.sending.machine import Sender
from kv_transfer.sending.transfer import Transfer
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.wire import frames
from simulator.faults.history import Fault
from simulator.faults.kinds import FaultKind
from simulator.faults.kv.moving import Parcel
from simulator.faults.kv.wires import KVSocket, KVWires
from tests.unit.simulator.faults.histories import (
    a_history,
    a_shape,
    an_asked_request,
    outcomes,
    run,
)

SHAPE = replace(a_shape(), num_decode=1, local_prefill_threshold=0, num_kv_lanes=3)
ASKED = [an_asked_request(0.1 + 0.05 * i, f"r{i}", num_prompt=30) for i in range(40)]
BREAKS = [
    Fault(at_s=0.2 + 0.1 * i, kind=FaultKind.LOSS, target="prefill-0", other="decode-0")
    for i in range(15)
]


def test_bytes_take_further_connections_which_break_without_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channels: set[int] = set()
    broken: set[tuple[int, ...]] = set()
    send, break_between = KVWires.send, KVWires.break_between

    def sent(wires: KVWires, connection: KVSocket, parcel: Parcel) -> None:
        if isinstance(parcel.frame, frames.Data):
            channels.add(connection.peer.channel)
        send(wires, connection, parcel)

    def breaks(wires: KVWires, first: str, second: str, *, arrives: bool) -> None:
        before = {one: one.session for one in sockets}
        break_between(wires, first, second, arrives=arrives)
        broken.add(tuple(one.peer.channel for one, name in before.items() if one.session != name))

    sockets: list[KVSocket] = []
    connect = KVWires.connect

    def connected(wires: KVWires, *named: object) -> KVSocket:
        sockets.append(connect(wires, *named))  # type: ignore[arg-type]
        return sockets[-1]

    monkeypatch.setattr(KVWires, "send", sent)
    monkeypatch.setattr(KVWires, "break_between", breaks)
    monkeypatch.setattr(KVWires, "connect", connected)
    cluster = run(a_history(SHAPE, ASKED, *BREAKS))
    assert channels == {0, 1, 2}
    assert any(some and 0 not in some for some in broken), "the first one goes on"
    assert outcomes(cluster) <= {"length", "stop"}


def test_a_connector_that_is_woken_for_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    history = a_history(SHAPE, [an_asked_request(0.1, "r1")])
    assert outcomes(run(history)) <= {"length", "stop"}
    monkeypatch.setattr(Sender, "next_deadline_s", lambda sender: 0.0)
    with pytest.raises(InternalError, match="is woken for KV again and again, and does nothing"):
        run(history)


def test_a_piece_that_is_not_sent_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    requeue = Transfer.requeue

    def requeue_all_but_one(transfer: Transfer, lost: Sequence[LayerChunk]) -> None:
        requeue(transfer, lost)
        if transfer.pending:
            transfer.pending.popleft()

    monkeypatch.setattr(Transfer, "requeue", requeue_all_but_one)
    with pytest.raises(InternalError, match="pieces of a transfer to send or under way, and"):
        run(a_history(SHAPE, ASKED, *BREAKS))
