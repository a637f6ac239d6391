"""How long the slots of a frame that was sent are kept."""

from __future__ import annotations

import pytest

from common.ids import Incarnation
from kv_transfer.sending.sent_slots import SentSlots
from kv_transfer.shared.block_arrays import as_blocks
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.slots import Slots

D, E = (Peer(f"tcp://{name}:1", Incarnation(name, 1)) for name in "de")


class Ring:
    """Slots, of which those of a few frames are in flight."""

    def __init__(self) -> None:
        self.slots = Slots(0, 10)
        self.sent = SentSlots(self.slots)

    def send(self, peer: Peer, seq: int, token: int) -> None:
        """Send a frame that has one slot."""
        self.slots.ask(1, lambda lent: self.sent.add(peer, seq, token, lent))


@pytest.fixture
def ring() -> Ring:
    ring = Ring()
    for seq, token in enumerate([7, 8, 7]):
        ring.send(D, seq, token)
    ring.send(E, 0, 9)
    return ring


@pytest.mark.parametrize(("consumed", "num_left"), [(0, 4), (1, 3), (2, 2), (3, 1), (9, 1)])
def test_what_was_acknowledged_is_free(ring: Ring, consumed: int, num_left: int) -> None:
    ring.sent.acknowledge(D, consumed)
    assert ring.slots.num_lent == num_left
    ring.sent.acknowledge(D, consumed)  # It is said again with each ping.
    assert ring.slots.num_lent == num_left


def test_frames_of_a_broken_connection_keep_their_slots_until_their_transfer_is_over(
    ring: Ring,
) -> None:
    ring.sent.acknowledge(D, 1)
    ring.sent.break_off(D, {7, 9})
    assert ring.slots.num_lent == 2  # of 8, which is over, none
    ring.sent.acknowledge(D, 3)  # of the next connection, whose frames count anew
    assert ring.slots.num_lent == 2
    ring.send(D, 0, 7)
    ring.sent.acknowledge(D, 1)
    assert ring.slots.num_lent == 2
    ring.sent.end(7)
    assert ring.slots.num_lent == 1
    ring.sent.end(7)
    ring.sent.acknowledge(E, 1)
    assert ring.slots.num_lent == 0


def test_the_end_of_a_transfer_frees_nothing_that_is_still_to_be_acknowledged(ring: Ring) -> None:
    """An aborted transfer's frames are on their way: the network sends these bytes."""
    ring.sent.end(7)
    assert ring.slots.num_lent == 4
    ring.sent.acknowledge(D, 3)
    assert ring.slots.num_lent == 1


def test_slots_come_back_in_any_form() -> None:
    slots = Slots(0, 4)
    sent = SentSlots(slots)
    slots.ask(3, lambda lent: sent.add(D, 0, 1, lent))
    sent.break_off(D, ())
    assert slots.num_lent == 0
    with pytest.raises(ValueError, match="were not lent"):
        slots.give_back(as_blocks([0]))
