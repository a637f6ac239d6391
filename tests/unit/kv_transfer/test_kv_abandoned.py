"""Handoffs that nobody ends: the machines end them, and remember a bounded number."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.contract import LandingFailed, Released, Ticket, TransferEnded
from kv_transfer.receiving import landings, sessions
from kv_transfer.receiving.effects import OpenLane
from kv_transfer.receiving.machine import Receiver
from kv_transfer.sending import unreachable
from kv_transfer.sending.machine import Sender
from kv_transfer.shared.effects import Emit
from kv_transfer.shared.limits import Limits
from kv_transfer.wire import frames

LAYOUT = KVLayout(
    model_digest="m", num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float16"
)
ME = Incarnation("me", 1)
LEASE_S = 10.0
NUM_OPEN_AT_ONCE = 100
MOST_REMEMBERED = 128
SOME, MANY = 500, 4_000


def ticket(token: int, decode: Incarnation = ME) -> Ticket:
    return Ticket(
        attempt=AttemptId(f"r{token}", 0),
        decode_node=decode,
        kv_endpoint="there",
        lease_token=token,
        generation=1,
        target_block_ids=(token % NUM_OPEN_AT_ONCE,),
        num_cached_tokens=0,
        fingerprint=LAYOUT.fingerprint,
        lease_s=LEASE_S,
    )


class Receiving:
    """A receiver of landings that no sender ever begins."""

    def __init__(self) -> None:
        self.machine = Receiver(ME, LAYOUT, Limits(), num_blocks=NUM_OPEN_AT_ONCE)

    def abandon(self, tokens: range, now_s: float) -> list[object]:
        """Expect these and let their leases end; return the events."""
        for token in tokens:
            self.machine.on_expect(ticket(token), LEASE_S, now_s)
        return self.events_of(tokens, now_s)

    def events_of(self, tokens: range, now_s: float) -> list[object]:
        assert self.machine.num_landings == len(tokens)
        effects = [
            effect
            for second in range(1, int(LEASE_S) + 2)
            for effect in self.machine.on_tick(now_s + second)
        ]
        assert self.machine.num_landings == self.machine.num_quarantined_blocks == 0
        return [effect.event for effect in effects if isinstance(effect, Emit)]


class Begun(Receiving):
    """A receiver of landings that senders begin, each another one, and never end."""

    def abandon(self, tokens: range, now_s: float) -> list[object]:
        for token in tokens:
            self.machine.on_expect(ticket(token), LEASE_S, now_s)
            session = b"%d" % token
            greeting = frames.Hello(Incarnation(f"p{token}", 1), ME, LAYOUT, {"zmq": b""}, "auto")
            (opened,) = self.machine.on_frame(session, greeting, [], now_s)
            assert isinstance(opened, OpenLane)
            self.machine.on_lane(session, "zmq", b"")
            self.machine.on_frame(session, frames.Begin(token, 1), [], now_s)
        return self.events_of(tokens, now_s)


class Sending:
    """A sender to decode nodes that never answer, each another one."""

    def __init__(self) -> None:
        self.machine = Sender(ME, LAYOUT, Limits())

    def abandon(self, tokens: range, now_s: float) -> list[object]:
        """Open these and let their deadlines pass; return the events."""
        effects = [
            effect
            for token in tokens
            for effect in self.machine.on_open(
                ticket(token, Incarnation(f"d{token}", 1)), now_s + LEASE_S, now_s
            )
        ]
        for second in range(1, int(LEASE_S) + 2):
            effects += self.machine.on_tick(now_s + second)
        assert self.machine.num_transfers == 0
        return [effect.event for effect in effects if isinstance(effect, Emit)]


@pytest.mark.covers("F78")
@pytest.mark.parametrize("make", [Receiving, Begun, Sending])
def test_what_is_kept_of_abandoned_handoffs_is_bounded(
    make: Callable[[], Receiving | Sending], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole machine is weighed, because any of its tables could grow."""
    monkeypatch.setattr(landings, "MAX_REMEMBERED_OUTCOMES", MOST_REMEMBERED)
    monkeypatch.setattr(sessions, "MAX_REMEMBERED_EPOCHS", MOST_REMEMBERED)
    monkeypatch.setattr(unreachable, "MAX_REMEMBERED_PEERS", MOST_REMEMBERED)
    end = make()
    sizes, now_s, first = [], 0.0, 1
    for count in (SOME, MANY):
        while first <= count:
            tokens = range(first, first + NUM_OPEN_AT_ONCE)
            events = end.abandon(tokens, now_s)
            ended = [event for event in events if isinstance(event, LandingFailed | TransferEnded)]
            assert sorted(event.lease_token for event in ended) == list(tokens)
            released = [event for event in events if isinstance(event, Released)]
            assert len(released) == (0 if make is Sending else len(tokens))
            now_s, first = now_s + 100.0, tokens.stop
        sizes.append(len(pickle.dumps(end.machine)))
    assert sizes[1] < 1.1 * sizes[0], sizes
