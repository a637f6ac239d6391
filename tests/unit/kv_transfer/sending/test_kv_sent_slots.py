"""How long the slots of a frame that was sent are kept, and for what."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.ids import Incarnation
from kv_transfer.sending.sent_slots import SentSlots
from kv_transfer.shared.block_arrays import Blocks, as_blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.ring_slots import Slots

D, E = (Peer(f"tcp://{name}:1", Incarnation(name, 1)) for name in "de")


def chunk_of(layer: int, ordinals: Sequence[int]) -> LayerChunk:
    return LayerChunk(layer, as_blocks(ordinals), as_blocks([50 + one for one in ordinals]))


class Ring:
    """Ten slots, and what a connector does with them for a frame."""

    def __init__(self, *, is_pulled: bool = False) -> None:
        self.slots = Slots(0, 10)
        self.sent = SentSlots(self.slots)
        self._is_pulled = is_pulled

    def send(
        self, peer: Peer, seq: int, token: int, ordinals: Sequence[int], layer: int = 0
    ) -> list[int]:
        """Send a frame; return its slots."""
        chunk = chunk_of(layer, ordinals)
        kept = self.sent.kept(token, chunk)
        found: list[int] = []

        def on_slots(lent: Blocks) -> None:
            fresh = iter(lent.tolist())
            found.extend(kept.get(index, -1) for index in range(len(chunk)))
            found[:] = [next(fresh) if slot < 0 else slot for slot in found]
            self.sent.add(peer, seq, token, chunk, as_blocks(found), is_pulled=self._is_pulled)

        self.slots.ask(len(chunk) - len(kept), on_slots)
        return found


@pytest.fixture(params=[False, True], ids=["sent", "pulled"])
def ring(request: pytest.FixtureRequest) -> Ring:
    ring = Ring(is_pulled=request.param)
    assert ring.send(D, 0, 7, [0]) == [0]
    assert ring.send(D, 1, 8, [0]) == [1]
    assert ring.send(D, 2, 7, [2, 1]) == [2, 3]
    assert ring.send(E, 0, 9, [0]) == [4]
    return ring


@pytest.mark.parametrize(("consumed", "num_left"), [(0, 5), (1, 4), (2, 3), (3, 1), (9, 1)])
def test_what_was_acknowledged_is_free(ring: Ring, consumed: int, num_left: int) -> None:
    ring.sent.acknowledge(D, consumed)
    assert ring.slots.num_lent == num_left
    ring.sent.acknowledge(D, consumed)  # It is said again with each ping.
    assert ring.slots.num_lent == num_left


def test_pieces_of_a_broken_connection_are_sent_again_out_of_their_slots(ring: Ring) -> None:
    """However they are cut into frames now."""
    ring.sent.acknowledge(D, 1)
    ring.sent.break_off(D, {7, 9})
    assert ring.slots.num_lent == 3  # of 8, which is over, none
    ring.sent.acknowledge(D, 3)  # of the next connection, whose frames count anew
    assert ring.slots.num_lent == 3
    assert ring.send(D, 0, 7, [1, 5]) == [3, 0]
    assert ring.send(D, 1, 7, [2]) == [2]
    assert ring.send(D, 2, 7, [2], layer=1) == [1]
    assert ring.send(D, 3, 9, [2]) == [5]
    assert ring.slots.num_lent == 6


def test_a_network_sends_what_is_kept_until_it_was_acknowledged() -> None:
    ring = Ring()
    ring.send(D, 0, 7, [0, 1])
    for _ in range(3):
        ring.sent.break_off(D, {7})
        assert ring.send(D, 0, 7, [1]) == [1]
    ring.sent.acknowledge(D, 1)
    assert ring.slots.num_lent == 1
    assert ring.send(D, 1, 7, [1]) == [1]  # It was damaged: a slot like any other.
    ring.sent.end(7)
    assert ring.slots.num_lent == 1
    ring.sent.acknowledge(D, 2)
    assert ring.slots.num_lent == 0


def test_what_a_receiver_may_read_is_kept_to_the_end_of_its_transfer() -> None:
    ring = Ring(is_pulled=True)
    ring.send(D, 0, 7, [0, 1])
    for _ in range(3):
        ring.sent.break_off(D, {7})
        assert ring.send(D, 0, 7, [1, 2]) == [1, 2]
        ring.sent.acknowledge(D, 1)
        assert ring.slots.num_lent == 2
    assert ring.send(D, 1, 7, [1]) == [1]
    ring.sent.end(7)
    assert ring.slots.num_lent == 0


def test_a_piece_that_was_on_its_way_twice(ring: Ring) -> None:
    """One of its slots is sent again, and the other one is not forgotten."""
    assert ring.send(E, 1, 9, [0]) == [5]
    ring.sent.break_off(E, {9})
    assert ring.slots.num_lent == 6
    assert ring.send(E, 0, 9, [0]) == [4]
    ring.sent.acknowledge(E, 1)
    ring.sent.end(9)
    assert ring.slots.num_lent == 4


def test_the_end_of_a_transfer_frees_nothing_that_is_still_to_be_acknowledged(ring: Ring) -> None:
    """An aborted transfer's frames are on their way: the network sends these bytes."""
    ring.sent.end(7)
    assert ring.slots.num_lent == 5
    ring.sent.acknowledge(D, 3)
    assert ring.slots.num_lent == 1


def test_a_transfer_that_is_over_keeps_nothing(ring: Ring) -> None:
    ring.sent.break_off(D, {7})
    ring.sent.end(7)
    ring.sent.end(7)
    assert ring.slots.num_lent == 1
    assert ring.send(D, 0, 7, [0]) == [0]
