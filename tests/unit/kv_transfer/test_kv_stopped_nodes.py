"""Both machines, joined: how long a node may stand still, and how soon a dead one is noticed."""

from __future__ import annotations

from collections import deque

import pytest

from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.contract import KVEvent, LandingFailed, Released, Ticket
from kv_transfer.receiving.effects import Fence, MoveSlab, OpenLane, ReceiverEffect, SendBack
from kv_transfer.receiving.machine import Receiver
from kv_transfer.sending.effects import SayHello, SenderEffect, SendToPeer
from kv_transfer.sending.machine import Sender
from kv_transfer.shared.effects import Emit, Peer
from kv_transfer.shared.limits import DEFAULT_PEER_TIMEOUT_S, Limits
from kv_transfer.wire import frames

LAYOUT = KVLayout(
    model_digest="m", num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float16"
)
SENDER, DECODE = Incarnation("p", 1), Incarnation("d", 1)
PEER = Peer("there", DECODE)
LIMITS = Limits()
STEP_S = 0.05
STOPPED_S = 2.0
PHASES = [step * STEP_S for step in range(1, 30)]


class Pair:
    """A prefill node and a decode node with one open transfer. Frames arrive in the next turn."""

    def __init__(self, lane: str) -> None:
        self.lane, self.session = lane, b"first"
        self.sender = Sender(SENDER, LAYOUT, LIMITS)
        self.receiver = Receiver(DECODE, LAYOUT, LIMITS, num_blocks=1)
        self.to_sender: deque[frames.Frame] = deque()
        self.to_receiver: deque[frames.Frame] = deque()
        self.events: list[KVEvent] = []
        self.now_s = 0.0
        ticket = Ticket(
            attempt=AttemptId("r", 0),
            decode_node=DECODE,
            kv_endpoint=PEER.endpoint,
            lease_token=1,
            generation=3,
            target_block_ids=(0,),
            num_cached_tokens=0,
            fingerprint=LAYOUT.fingerprint,
            lease_s=600.0,
        )
        self.receiver.on_expect(ticket, 600.0, 0.0)
        self.send(self.sender.on_open(ticket, 600.0, 0.0))

    def send(self, effects: list[SenderEffect]) -> None:
        for effect in effects:
            match effect:
                case SayHello(peer):
                    hello = self.sender.hello(peer, {self.lane: b""}, "auto")
                    self.to_receiver.append(hello)
                case SendToPeer(_, frame):
                    self.to_receiver.append(frame)
                case Emit(event):
                    self.events.append(event)

    def answer(self, effects: list[ReceiverEffect]) -> None:
        for effect in effects:
            match effect:
                case OpenLane(session):
                    self.answer(self.receiver.on_lane(session, self.lane, b""))
                case SendBack(_, frame):
                    self.to_sender.append(frame)
                case MoveSlab(lane):
                    self.answer(self.receiver.on_moved(lane, b"", self.now_s))
                case Fence():
                    self.answer(self.receiver.on_fenced(self.now_s))
                case Emit(event):
                    self.events.append(event)

    def turn_sender(self) -> None:
        while self.to_sender:
            self.send(self.sender.on_frame(PEER, self.to_sender.popleft(), self.now_s))
        self.send(self.sender.on_tick(self.now_s))

    def turn_receiver(self) -> None:
        while self.to_receiver:
            frame = self.to_receiver.popleft()
            self.answer(self.receiver.on_frame(self.session, frame, [], self.now_s))
        self.answer(self.receiver.on_tick(self.now_s))

    def run(self, span_s: float, *, stopped: str = "") -> None:
        """Let time pass in small steps; one of the nodes may stand still meanwhile."""
        for _ in range(round(span_s / STEP_S)):
            self.now_s += STEP_S
            if stopped != "sender":
                self.turn_sender()
            if stopped != "receiver":
                self.turn_receiver()


@pytest.mark.covers("F81")
@pytest.mark.parametrize("stopped", ["sender", "receiver"])
@pytest.mark.parametrize("lane", ["rdma", "zmq"])
def test_a_node_that_stands_still_for_two_seconds_loses_no_transfer(
    lane: str, stopped: str
) -> None:
    """Whenever that is, between two pings."""
    for phase_s in PHASES:
        pair = Pair(lane)
        pair.run(phase_s)
        pair.run(STOPPED_S, stopped=stopped)
        pair.run(2 * DEFAULT_PEER_TIMEOUT_S)
        assert pair.events == [], f"stopped after {phase_s:g} s"
        assert (pair.sender.num_transfers, pair.receiver.num_landings) == (1, 1)


def test_a_dead_writer_is_noticed_sooner_than_one_whose_blocks_need_no_fence() -> None:
    spans_s = {}
    for lane in ("rdma", "zmq"):
        pair = Pair(lane)
        pair.run(1.0)
        died_at_s = pair.now_s
        while not pair.events:
            pair.run(STEP_S, stopped="sender")
        failed = pair.events[0]
        assert isinstance(failed, LandingFailed)
        assert f"was silent for {LIMITS.patience_s(lane):g} s" in str(failed.error)
        spans_s[lane] = pair.now_s - died_at_s
    assert spans_s["rdma"] <= LIMITS.patience_s("rdma") + STEP_S
    assert LIMITS.patience_s("rdma") < LIMITS.patience_s("zmq") == DEFAULT_PEER_TIMEOUT_S
    assert spans_s["zmq"] > spans_s["rdma"]


def test_blocks_that_a_revoked_landing_left_come_back_as_soon() -> None:
    """Their sender, which has no landing any more, dies before it reports that it stopped."""
    pair = Pair("rdma")
    pair.run(1.0)
    died_at_s = pair.now_s
    pair.answer(pair.receiver.on_revoke(1))
    while pair.receiver.num_quarantined_blocks:
        pair.run(STEP_S, stopped="sender")
    assert pair.events == [Released(1)]
    assert pair.now_s - died_at_s <= LIMITS.patience_s("rdma") + STEP_S


def test_a_sender_that_comes_back_on_another_lane_has_the_patience_of_that_one() -> None:
    """Its landing was begun where no fence is needed, and is written by its sender now."""
    pair = Pair("zmq")
    pair.run(1.0)
    pair.lane = "rdma"
    pair.send(pair.sender.on_link_lost(PEER, pair.now_s))
    pair.session = b"again"
    pair.run(1.0)
    assert pair.events == []
    died_at_s = pair.now_s
    while not pair.events:
        pair.run(STEP_S, stopped="sender")
    assert pair.now_s - died_at_s <= LIMITS.patience_s("rdma") + STEP_S
