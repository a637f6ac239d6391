"""One fault on the wire, anywhere: what landed is right, or the error is typed; nothing leaks.

Three handoffs share a connection through a proxy that makes one fault; a fourth sender has its own
connection. The faults are drawn from fixed seeds. A run without a fault counts the bytes to choose
from, and shows that the same checks pass with everything landed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random

import numpy as np
import pytest

from common.errors import HandoffFailed
from kv_transfer.contract import Commit, Landed, LandingFailed, Released, Ticket, TransferEnded
from tests.support.clocks.manual_clock import ManualClock
from tests.support.examples import everyday
from tests.support.kv.fault_proxy import KINDS, Fault, FaultProxy
from tests.support.kv.kv_cluster import (
    TIME_STEP_S,
    Cluster,
    Node,
    cluster_of,
    commit_for,
    endings,
    wait_until,
)

SOURCES = ([0, 1, 2, 3], [7, 5, 6], [11, 9, 2, 1])
TARGETS = ([2, 3, 0, 9], [8, 5, 6], [1, 4, 7, 11])
# What these do is made good: nothing is falsified, and nobody is silent for long.
HARMLESS = ("delay", "cut", "reset", "late")
# The greeting, the handshake and the HELLO of a connection: a part of the stream of its own.
OPENING_BYTES = 400
TYPED = {"handoff_failed", "peer_protocol_error", "stale_epoch", "layout_mismatch", "overloaded"}


class Scene:
    """A sender behind the proxy and one that is not, with the handoffs of each."""

    def __init__(self, cluster: Cluster, fault: Fault | None) -> None:
        is_harmless = fault is None or fault.kind in HARMLESS
        # Where somebody has to be given up, time passes behind the fault, and for nobody else.
        self._clock = None if is_harmless else ManualClock()
        self._deadline_s = 60.0 if is_harmless else 8.0
        node = functools.partial(cluster.node, clock=self._clock)
        self.prefill, self.bystander = node("p"), node("q")
        self.decode = node("d", num_blocks=14)
        self.proxy = FaultProxy(self.decode.connector.endpoint, fault)
        self.before = self.decode.pool.copy()
        self.commits: dict[int, Commit] = {}
        self.handoffs: list[tuple[Ticket, Node, list[int], list[int]]] = []
        self._cluster = cluster

    def begin(self) -> None:
        for sources, targets in zip(SOURCES, TARGETS, strict=True):
            self._open(self.prefill, sources, targets, self.proxy.endpoint)
        self._open(self.bystander, [3, 4], [12, 13], self.decode.connector.endpoint)
        for layer in range(self.decode.layout.num_layers):
            for ticket, node, sources, _ in self.handoffs:
                node.push_all(ticket, sources, layers=[layer])
        for ticket, node, _, _ in self.handoffs:
            node.connector.commit(ticket.lease_token, self.commits[ticket.lease_token])

    def _open(self, node: Node, sources: list[int], targets: list[int], endpoint: str) -> None:
        ticket = self._cluster.ticket(self.decode, targets)
        ticket = dataclasses.replace(ticket, kv_endpoint=endpoint)
        commit = dataclasses.replace(commit_for(ticket), first_token_id=ticket.lease_token)
        self.commits[ticket.lease_token] = commit
        self.handoffs.append((ticket, node, sources, targets))
        self.decode.connector.expect(ticket, sender_deadline_s=self._deadline_s)
        node.connector.open(ticket, deadline_s=self._deadline_s)

    def wait(self) -> None:
        """Wait until every handoff has ended on both sides."""
        wait_until(lambda: self.bystander.events)
        wait_until(self._is_over, self._pass_time)

    def _pass_time(self) -> None:
        if self._clock is not None and self.proxy.num_faults:
            self._clock.advance(TIME_STEP_S)
            self.prefill.look_at_the_time()
            self.decode.look_at_the_time()

    def _is_over(self) -> bool:
        over = [isinstance(event, Landed | Released) for event in list(self.decode.events)]
        num_sent = len(self.prefill.events) + len(self.bystander.events)
        return sum(over) == num_sent == len(self.handoffs)

    def check(self) -> int:
        """Check that what landed is right and what failed is typed; return how many landed."""
        ended = {
            event.lease_token: event.error
            for node in (self.prefill, self.bystander)
            for event in node.events
            if isinstance(event, TransferEnded)
        }
        landed = {e.lease_token: e.commit for e in self.decode.events if isinstance(e, Landed)}
        assert set(endings(self.decode)) == set(ended) == set(self.commits)
        wanted = self.before
        for ticket, node, sources, targets in self.handoffs:
            token = ticket.lease_token
            kinds = endings(self.decode)[token]
            assert kinds in ([Landed], [LandingFailed, Released])
            if token in landed:
                assert landed[token] == self.commits[token]
                wanted[:, :, targets] = node.pool[:, :, sources]
            else:
                assert ended[token] is not None
                # Nobody else has these blocks: what is in them does not matter.
                wanted[:, :, targets] = self.decode.pool[:, :, targets]
            error = ended[token]
            assert error is None or isinstance(error, HandoffFailed)
            assert error is None or error.code in TYPED
        assert np.array_equal(self.decode.pool, wanted)
        assert ended[self.handoffs[-1][0].lease_token] is None
        for node in (self.prefill, self.bystander, self.decode):
            node.assert_books_are_empty()
        return len(landed)


@contextlib.contextmanager
def _scene(kind: str, fault: Fault | None):  # type: ignore[no-untyped-def]
    with contextlib.closing(cluster_of(kind)) as cluster:
        scene = Scene(cluster, fault)
        with contextlib.closing(scene.proxy):
            scene.begin()
            scene.wait()
            yield scene


@functools.cache
def stream_bytes(kind: str) -> tuple[int, int]:
    """Return the bytes of the three handoffs without a fault: to the decode node, and back."""
    with _scene(kind, None) as scene:
        assert scene.check() == 4
        return scene.proxy.forwarded[0], scene.proxy.forwarded[1]


def draw_fault(kind: str, fault_kind: str, seed: int) -> Fault:
    rng = random.Random(f"{kind} {fault_kind} {seed}")
    is_back = fault_kind != "late" and rng.random() < 0.3
    most = stream_bytes(kind)[is_back]
    is_opening = rng.random() < 0.2
    return Fault(
        kind=fault_kind,
        at=rng.randrange(min(OPENING_BYTES, most) if is_opening else most * 9 // 10),
        is_back=is_back,
        mask=1 << rng.randrange(8) if rng.random() < 0.5 else rng.randrange(1, 256),
        length=rng.choice((1, 7, 100, 5000)),
        seed=seed,
    )


@pytest.mark.parametrize("kind", ["zmq", "shm", "ipc", "card-zmq"])
def test_no_fault(kind: str) -> None:
    """The control: the same checks, and everything lands."""
    assert min(stream_bytes(kind)) > OPENING_BYTES


@pytest.mark.covers("F19", "F23", "F24", "F28")
@pytest.mark.parametrize("seed", range(everyday(2, of=4)))
@pytest.mark.parametrize("fault_kind", KINDS)
@pytest.mark.parametrize("kind", ["zmq", "shm", "ipc", "card-zmq"])
def test_one_fault_on_the_wire(kind: str, fault_kind: str, seed: int) -> None:
    fault = draw_fault(kind, fault_kind, seed)
    with _scene(kind, fault) as scene:
        num_landed = scene.check()
        assert scene.proxy.num_faults == 1, fault
        if fault_kind in HARMLESS:
            assert num_landed == 4, fault
