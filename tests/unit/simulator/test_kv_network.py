"""The connectors' contract over a modelled network: what lands when, and how each transfer ends."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.contract import (
    Commit,
    ConnectorEvent,
    GivenUp,
    KVConnector,
    Landed,
    LandingFailed,
    Released,
    Ticket,
    TransferEnded,
)
from simulator.kv_network import ModelledNetwork
from simulator.timeline import Timeline

LAYOUT = KVLayout(
    model_digest="m", num_layers=2, num_kv_heads=1, head_dim=1, block_size=5, dtype="bfloat16"
)
P, D = Incarnation("p", 1), Incarnation("d", 1)
COMMIT = Commit(num_tokens=10, first_token_id=7)
BLOCK_BYTES = 40.0
"""2 layers of 2 planes of 5 slots of 2 bytes."""


def ticket(token: int = 1, num_blocks: int = 2) -> Ticket:
    return Ticket(
        attempt=AttemptId("r", 1),
        decode_node=D,
        kv_endpoint="d",
        lease_token=token,
        generation=1,
        target_block_ids=tuple(range(num_blocks)),
        num_cached_tokens=0,
        fingerprint=LAYOUT.fingerprint,
        lease_s=10.0,
    )


class Pair:
    """A sender and a receiver, and their events with the times."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.network = ModelledNetwork(self.timeline, LAYOUT, bytes_per_s=40.0, latency_s=0.25)
        self.events: list[tuple[str, float, ConnectorEvent]] = []
        self.p: KVConnector = self.network.join(P, partial(self._note, "p"))
        self.d: KVConnector = self.network.join(D, partial(self._note, "d"))

    def _note(self, node: str, event: ConnectorEvent) -> None:
        self.events.append((node, self.timeline.now_s(), event))

    def begin(self) -> None:
        self.d.expect(ticket(), sender_deadline_s=10.0)
        self.p.open(ticket(), deadline_s=10.0)

    def push(self, *layers: int) -> None:
        for layer in layers:
            self.p.push(1, layer=layer, ordinals=(0, 1), source_blocks=(3, 4))


def test_kv_lands_when_its_last_byte_and_the_commit_have_arrived() -> None:
    pair = Pair()
    pair.begin()
    pair.push(0)  # 40 bytes in a second
    pair.timeline.at(0.5, partial(pair.push, 1))
    pair.timeline.at(0.6, partial(pair.p.commit, 1, COMMIT))
    pair.timeline.run()
    assert pair.events == [("d", 2.25, Landed(1, COMMIT)), ("p", 2.5, TransferEnded(1, None))]
    assert (pair.network.is_idle, pair.network.num_bytes) == (True, 2 * BLOCK_BYTES)
    ended = pair.events[-1][2]
    assert isinstance(ended, TransferEnded)
    assert ended.timing is not None
    assert (ended.timing.num_bytes, ended.timing.sending_s) == (2 * BLOCK_BYTES, 2.25)


def test_a_commit_after_the_last_byte_lands_one_message_later() -> None:
    pair = Pair()
    pair.begin()
    pair.push(0, 1)
    pair.timeline.at(5.0, partial(pair.p.commit, 1, COMMIT))
    pair.timeline.run()
    assert [(node, at_s) for node, at_s, _ in pair.events] == [("d", 5.25), ("p", 5.5)]
    assert pair.timeline.num_handled == 3, "the bytes had ended"


def test_transfers_that_share_a_port_land_one_after_the_other() -> None:
    pair = Pair()
    for token, num_blocks in ((1, 1), (2, 3)):
        pair.d.expect(ticket(token, num_blocks), sender_deadline_s=10.0)
        pair.p.open(ticket(token, num_blocks), deadline_s=10.0)
        for layer in (0, 1):
            every = tuple(range(num_blocks))
            pair.p.push(token, layer=layer, ordinals=every, source_blocks=every)
        pair.p.commit(token, COMMIT)
    pair.timeline.run()
    landed = [(at_s, event) for node, at_s, event in pair.events if node == "d"]
    assert landed == [(2.25, Landed(1, COMMIT)), (4.25, Landed(2, COMMIT))]


def test_a_piece_that_ends_unseen_makes_room_when_it_ends() -> None:
    pair = Pair()
    for token in (1, 2):
        pair.d.expect(ticket(token), sender_deadline_s=10.0)
        pair.p.open(ticket(token), deadline_s=10.0)
    pair.p.push(1, layer=0, ordinals=(0,), source_blocks=(3,))  # 20 bytes, in 1 s of half a port
    for layer in (0, 1):
        pair.p.push(2, layer=layer, ordinals=(0, 1), source_blocks=(3, 4))  # 80: 20 of them by then
    pair.timeline.at(2.0, partial(pair.p.commit, 2, COMMIT))
    pair.timeline.at(9.0, partial(pair.p.abort, 1))
    pair.timeline.run()
    assert pair.events[:2] == [("d", 2.75, Landed(2, COMMIT)), ("p", 3.0, TransferEnded(2, None))]
    assert pair.network.is_idle


def test_only_the_end_of_what_is_committed_is_an_event() -> None:
    pair = Pair()
    pair.begin()
    for at_s in (0.0, 5.0):  # each piece has ended before the next one
        pair.timeline.at(at_s, partial(pair.push, 0 if at_s == 0.0 else 1))
    pair.timeline.run()
    assert pair.timeline.num_handled == 2
    pair.p.commit(1, COMMIT)
    pair.timeline.run()
    assert [(node, at_s) for node, at_s, _ in pair.events] == [("d", 6.25), ("p", 6.5)]


def test_an_aborted_transfer_fails_its_landing_and_frees_both_sides() -> None:
    pair = Pair()
    pair.begin()
    pair.push(0)
    pair.timeline.at(0.5, partial(pair.p.abort, 1))
    pair.timeline.run()
    kinds = sorted((node, at_s, type(event).__name__) for node, at_s, event in pair.events)
    assert kinds == [
        ("d", 0.75, LandingFailed.__name__),
        ("d", 0.75, Released.__name__),
        ("p", 0.75, TransferEnded.__name__),
    ]
    (failed,) = (event for _, _, event in pair.events if isinstance(event, LandingFailed))
    assert isinstance(failed.error, GivenUp), "its sender can be reached"
    assert pair.network.is_idle


def test_a_revoked_landing_is_released_at_once_and_its_sender_told() -> None:
    pair = Pair()
    pair.begin()
    pair.push(0)
    pair.timeline.at(0.5, partial(pair.d.revoke, 1))
    pair.timeline.at(0.6, partial(pair.push, 1))
    pair.timeline.at(0.6, partial(pair.p.commit, 1, COMMIT))
    pair.timeline.run()
    (who, at_s, released), (sender, told_s, ended) = pair.events
    assert (who, at_s, released) == ("d", 0.5, Released(1))
    assert isinstance(ended, TransferEnded)
    assert (sender, told_s, ended.error is None) == ("p", 0.75, False)
    assert pair.network.is_idle


def test_what_an_ended_transfer_had_left_to_send_makes_room() -> None:
    pair = Pair()
    for token in (1, 2):
        pair.d.expect(ticket(token), sender_deadline_s=10.0)
        pair.p.open(ticket(token), deadline_s=10.0)
        for layer in (0, 1):
            pair.p.push(token, layer=layer, ordinals=(0, 1), source_blocks=(3, 4))
        pair.p.commit(token, COMMIT)
    pair.timeline.at(1.0, partial(pair.d.revoke, 1))  # 60 of the other's 80 bytes are left
    pair.timeline.run()
    landed = [(at_s, event) for node, at_s, event in pair.events if isinstance(event, Landed)]
    assert landed == [(1.0 + 1.5 + 0.25, Landed(2, COMMIT))]
    assert pair.network.is_idle


def test_nobody_looks_at_the_ends_of_flows_after_the_committed_one_was_revoked() -> None:
    pair = Pair()
    pair.begin()
    pair.push(0, 1)
    pair.p.commit(1, COMMIT)
    pair.d.revoke(1)
    pair.timeline.run()
    num_handled = pair.timeline.num_handled
    pair.d.expect(ticket(2), sender_deadline_s=10.0)
    pair.p.open(ticket(2), deadline_s=10.0)
    pair.p.push(2, layer=0, ordinals=(0, 1), source_blocks=(3, 4))
    pair.timeline.run()
    assert pair.timeline.num_handled == num_handled


def test_a_short_transfer_tells_the_bytes_that_it_sent() -> None:
    pair = Pair()
    short = replace(ticket(), may_be_short=True)
    pair.d.expect(short, sender_deadline_s=10.0)
    pair.p.open(short, deadline_s=10.0)
    for layer in (0, 1):
        pair.p.push(1, layer=layer, ordinals=(0,), source_blocks=(3,))
    pair.p.commit(1, COMMIT)
    pair.timeline.run()
    ended = pair.events[-1][2]
    assert isinstance(ended, TransferEnded)
    assert ended.timing is not None
    assert ended.timing.num_bytes == BLOCK_BYTES


def test_a_transfer_into_a_closed_landing_ends() -> None:
    pair = Pair()
    pair.p.open(ticket(), deadline_s=10.0)
    pair.timeline.run()
    ((_, _, ended),) = pair.events
    assert isinstance(ended, TransferEnded)
    assert "closed" in str(ended.error)
    assert pair.network.is_idle


def test_misuse_is_named() -> None:
    pair = Pair()
    pair.begin()
    with pytest.raises(ValueError, match="lease 1 is open"):
        pair.d.expect(ticket(), sender_deadline_s=10.0)
    with pytest.raises(ValueError, match="lease 1 is open"):
        pair.p.open(ticket(), deadline_s=10.0)
    with pytest.raises(ValueError, match="4 pieces were not pushed"):
        pair.p.commit(1, COMMIT)
    pair.push(0, 1)
    with pytest.raises(ValueError, match="more blocks were pushed"):
        pair.p.push(1, layer=0, ordinals=(0,), source_blocks=(3,))
