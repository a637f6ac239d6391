"""A receiving machine, and the events of one sender."""

from __future__ import annotations

from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.contract import Ticket
from kv_transfer.receiving.effects import (
    OpenLane,
    ReceiverEffect,
    SendBack,
    Write,
)
from kv_transfer.receiving.machine import Receiver
from kv_transfer.shared.effects import Emit
from kv_transfer.shared.limits import (
    Limits,
)
from kv_transfer.wire import frames

LAYOUT = KVLayout(
    model_digest="m", num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float16"
)
P = LAYOUT.piece_bytes
LIMITS = Limits(window_bytes=32 * P, max_frame_bytes=4 * P, max_sessions=3, peer_timeout_s=2.0)
SENDER, OTHER, ME = Incarnation("p", 5), Incarnation("other", 1), Incarnation("d", 1)
BEGIN = frames.Begin(1, 3)
COMMIT = frames.CommitFrame(1, 3, 2, 0, 8, 7, ())


def ticket(token: int = 1, blocks: tuple[int, ...] = (0, 1)) -> Ticket:
    return Ticket(
        attempt=AttemptId("r", 0),
        decode_node=ME,
        kv_endpoint="here",
        lease_token=token,
        generation=3,
        target_block_ids=blocks,
        num_cached_tokens=0,
        fingerprint=LAYOUT.fingerprint,
        lease_s=30.0,
    )


def receiver(*tickets: Ticket, sender_deadline_s: float = 10.0) -> Receiver:
    """Return a machine that expects these tickets at time 0."""
    machine = Receiver(ME, LAYOUT, LIMITS, num_blocks=4)
    for one in tickets:
        machine.on_expect(one, sender_deadline_s, 0.0)
    return machine


def hello(
    machine: Receiver,
    session: bytes,
    sender: Incarnation = SENDER,
    now_s: float = 0.0,
    lane: str = "zmq",
) -> frames.Frame:
    """Return the answer to a HELLO that offers this lane."""
    greeting = frames.Hello(sender, ME, LAYOUT, {lane: b""}, "auto")
    *_, effect = machine.on_frame(session, greeting, [], now_s)
    if isinstance(effect, OpenLane):
        (effect,) = machine.on_lane(session, lane, b"")
    assert isinstance(effect, SendBack)
    return effect.frame


def data(seq: int, ordinal: int, *, wants_ack: bool = False) -> frames.Data:
    return frames.Data(seq, 1, 3, 0, (ordinal,), (1,), (), bytes(16), wants_ack)


def begin_copy(
    machine: Receiver, session: bytes, seq: int, ordinal: int, *, wants_ack: bool = False
) -> Write:
    """Return the write that a DATA frame asks for, and nothing beside it."""
    (write,) = machine.on_frame(session, data(seq, ordinal, wants_ack=wants_ack), [P, P], 0.0)
    assert isinstance(write, Write)
    return write


def land(machine: Receiver, session: bytes, seq: int, ordinal: int) -> list[ReceiverEffect]:
    return copied(machine, machine.on_frame(session, data(seq, ordinal), [P, P], 0.0))


def copied(machine: Receiver, effects: list[ReceiverEffect]) -> list[ReceiverEffect]:
    """Return what follows the copies among these effects."""
    writes = [effect for effect in effects if isinstance(effect, Write)]
    return [effect for write in writes for effect in machine.on_written(write)]


def events(effects: list[ReceiverEffect]) -> list[object]:
    return [effect.event for effect in effects if isinstance(effect, Emit)]


def replies(effects: list[ReceiverEffect]) -> list[frames.Frame]:
    return [effect.frame for effect in effects if isinstance(effect, SendBack)]
