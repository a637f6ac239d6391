"""A writer that ignores every end cannot change a block after it was given to another request."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kv_transfer.connector import Landed, LandingFailed, Released, Ticket, TransferEnded
from kv_transfer.core import frames
from kv_transfer.core.effects import DropReason
from tests.contract.kv_connector.cluster import (
    LAYOUT,
    Cluster,
    Node,
    assert_ended_once,
    begin,
    cluster_of,
    commit_for,
    error_of,
    send,
)
from tests.contract.kv_connector.kinds import FakeRdmaKind
from tests.contract.kv_connector.raw_sender import ROGUE, RawSender

BLOCKS = (1, 2, 3)


@pytest.fixture(params=["loopback", "zmq", "shm"])
def two_sided(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Where the receiver is the only writer of its pool."""
    with contextlib.closing(cluster_of(request.param)) as cluster:
        yield cluster


@pytest.mark.parametrize("ending", ["revoked", "aborted by another frame", "bad data"])
def test_frames_of_a_landing_that_ended_change_nothing(two_sided: Cluster, ending: str) -> None:
    """F14: pieces go on coming while the blocks are expected, filled and used by somebody else."""
    cluster = two_sided
    prefill, decode = cluster.node("p"), cluster.node("d")
    with contextlib.closing(RawSender(cluster, decode)) as rogue:
        old = cluster.ticket(decode, BLOCKS)
        decode.connector.expect(old, sender_deadline_s=30)
        rogue.send(frames.Begin(old.lease_token, old.generation))
        rogue.data(old, generation=old.generation, layer=0, ordinal=0)
        rogue.settle()
        # The piece landed: the rogue's frames are good as long as the landing is open.
        assert np.array_equal(decode.pool[0, :, BLOCKS[0]], rogue.pool[0, :, 0])
        if ending == "revoked":
            decode.connector.revoke(old.lease_token)
        elif ending == "bad data":
            rogue.data(old, generation=old.generation, layer=LAYOUT.num_layers - 1, ordinal=9)
        else:
            rogue.send(frames.Abort(old.lease_token, old.generation))
        while decode.wait_event() != Released(old.lease_token):
            pass

        new = dataclasses.replace(cluster.ticket(decode, BLOCKS), generation=old.generation + 1)
        decode.connector.expect(new, sender_deadline_s=30)
        _write_everywhere(rogue, old, new)
        send_opened(prefill, new)
        assert isinstance(decode.wait_event(), Landed)
        assert prefill.wait_event() == TransferEnded(new.lease_token, None)
        _write_everywhere(rogue, old, new)
        wanted = prefill.pool[:, :, [4, 5, 6]]
        assert np.array_equal(decode.pool[:, :, list(BLOCKS)], wanted)
        dropped = decode.connector.statistics().frames_dropped
        per_round = LAYOUT.num_layers * len(BLOCKS)
        # Round one: the old lease is closed; the new one at the old generation; not by this sender.
        assert dropped[DropReason.STALE_GENERATION.value] == per_round
        assert dropped[DropReason.WRONG_SENDER.value] == per_round
        # And round two, when both are closed.
        assert dropped[DropReason.LATE.value] == 4 * per_round
    assert_ended_once(decode)


def send_opened(prefill: Node, ticket: Ticket) -> None:
    prefill.connector.open(ticket, deadline_s=30)
    prefill.push_all(ticket, [4, 5, 6])
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))


def _write_everywhere(rogue: RawSender, old: Ticket, new: Ticket) -> None:
    """Every piece, as of the old lease, of the new one at the old generation, and of the new."""
    for layer in range(LAYOUT.num_layers):
        for ordinal in range(len(BLOCKS)):
            rogue.data(old, generation=old.generation, layer=layer, ordinal=ordinal)
            rogue.data(new, generation=old.generation, layer=layer, ordinal=ordinal)
            rogue.data(new, generation=new.generation, layer=layer, ordinal=ordinal)
    rogue.settle()


def test_the_same_sender_on_another_connection_is_not_the_writer(two_sided: Cluster) -> None:
    """DATA counts on the connection that began the landing, and there alone."""
    cluster = two_sided
    decode = cluster.node("d")
    ticket = cluster.ticket(decode, BLOCKS)
    with (
        contextlib.closing(RawSender(cluster, decode)) as first,
        contextlib.closing(RawSender(cluster, decode)) as second,
    ):
        decode.connector.expect(ticket, sender_deadline_s=30)
        first.send(frames.Begin(ticket.lease_token, ticket.generation))
        first.settle()
        untouched = decode.pool.copy()
        second.data(ticket, generation=ticket.generation, layer=0, ordinal=0)
        commit = frames.CommitFrame(ticket.lease_token, ticket.generation, 9, 0, 12, 0, ())
        second.settle()
        assert np.array_equal(decode.pool, untouched)
        assert decode.connector.statistics().frames_dropped["wrong_sender"] == 1
        second.send(commit)
        assert isinstance(second.answer(), frames.Refused)
        assert decode.events == []
        # It takes over by beginning again; then the first is the stranger.
    with contextlib.closing(RawSender(cluster, decode)) as third:
        third.send(frames.Begin(ticket.lease_token, ticket.generation))
        third.data(ticket, generation=ticket.generation, layer=0, ordinal=0)
        third.settle()
        assert np.array_equal(decode.pool[0, :, BLOCKS[0]], third.pool[0, :, 0])


@pytest.fixture
def kind() -> FakeRdmaKind:
    return FakeRdmaKind()


@pytest.fixture
def one_sided(kind: FakeRdmaKind) -> Iterator[Cluster]:
    with contextlib.closing(Cluster(kind)) as cluster:
        yield cluster


def held_in_the_network(cluster: Cluster, kind: FakeRdmaKind) -> tuple[Node, Node, Ticket]:
    """A handoff whose writes are under way, every one, and stay so."""
    prefill, decode, ticket = begin(cluster)
    kind.fabric.hold()
    prefill.push_all(ticket, [4, 5, 6], layers=[0])
    wait_until(decode, prefill, lambda: kind.fabric.num_under_way == 3)
    return prefill, decode, ticket


def wait_until(decode: Node, prefill: Node, condition: Callable[[], bool]) -> None:
    """Each look costs a round of another landing's deadline: the connectors' own time."""
    for _ in range(400):
        if condition():
            return
        decode.connector.expect(ticket := _probe(decode), sender_deadline_s=0.01)
        held = [decode.wait_event(), decode.wait_event()]
        assert {event.lease_token for event in held} == {ticket.lease_token}
    raise AssertionError("it did not come about")


_probes = iter(range(10_000, 100_000))


def _probe(decode: Node) -> Ticket:
    cluster_ticket = begin_ticket(decode)
    return dataclasses.replace(cluster_ticket, lease_token=next(_probes))


def begin_ticket(decode: Node) -> Ticket:
    return Ticket(
        attempt=begin_attempt,
        decode_node=decode.incarnation,
        kv_endpoint=decode.connector.endpoint,
        lease_token=0,
        generation=1,
        target_block_ids=(11,),
        num_cached_tokens=0,
        fingerprint=decode.layout.fingerprint,
        lease_s=30.0,
    )
