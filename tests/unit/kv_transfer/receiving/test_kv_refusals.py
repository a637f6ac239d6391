"""Calls that a receiver refuses without a change, and frames that it answers without one."""

from __future__ import annotations

import dataclasses

import pytest

from kv_transfer.contract import LandingFailed, Released
from kv_transfer.receiving.effects import Dropped, DropReason, SendBack, Write
from kv_transfer.shared.effects import Emit
from kv_transfer.wire import frames
from tests.support.kv.receiver_events import (
    P,
    data,
    events,
    hello,
    land,
    receiver,
    ticket,
)

NUM_BLOCKS = 4


@pytest.mark.parametrize("blocks", [(), (0, 0), (0, NUM_BLOCKS), (-1,), (1, 2)])
def test_target_blocks_that_cannot_land_are_refused(blocks: tuple[int, ...]) -> None:
    """None, one twice, one outside the pool at either end, and one that lands already."""
    machine = receiver(ticket(1, (2,)))
    with pytest.raises(ValueError, match="block"):
        machine.on_expect(ticket(2, blocks), 10.0, 0.0)
    assert machine.num_landings == 1
    machine.on_expect(ticket(2, (0, 1, 3)), 10.0, 0.0)


def test_a_lease_is_expected_once() -> None:
    machine = receiver(ticket(1))
    for _ in range(2):
        with pytest.raises(ValueError, match="is or was open already"):
            machine.on_expect(ticket(1), 10.0, 0.0)
        machine.on_revoke(1)


def test_pieces_that_all_arrived_before_are_not_written_again() -> None:
    machine = receiver(ticket())
    hello(machine, b"a")
    machine.on_frame(b"a", frames.Begin(1, 3), [], 0.0)
    land(machine, b"a", 0, 0)
    again = machine.on_frame(b"a", data(1, 0), [P, P], 0.0)
    assert [effect.reason for effect in again if isinstance(effect, Dropped)] == [
        DropReason.DUPLICATE
    ]
    assert not any(isinstance(effect, Write) for effect in again)


def test_an_outcome_is_told_to_its_own_generation_only() -> None:
    machine = receiver(ticket())
    hello(machine, b"a")
    ended = machine.on_revoke(1)
    assert [type(effect.event) for effect in ended if isinstance(effect, Emit)] == [Released]
    said = {}
    for generation in (3, 4):
        (reply,) = machine.on_frame(b"a", frames.Begin(1, generation), [], 0.0)
        assert isinstance(reply, SendBack)
        assert isinstance(reply.frame, frames.Failed)
        said[generation] = reply.frame.message
    assert "revoked" in said[3]
    assert "no such lease" in said[4]


@pytest.mark.parametrize(
    ("layer", "ordinal", "words"),
    [(1, 0, "layer 1: the cache has 1 layers"), (0, 2, "block 2 of the ticket: it has 2 blocks")],
)
def test_data_of_the_first_layer_or_block_too_many_ends_its_landing(
    layer: int, ordinal: int, words: str
) -> None:
    machine = receiver(ticket())
    hello(machine, b"a")
    machine.on_frame(b"a", frames.Begin(1, 3), [], 0.0)
    frame = dataclasses.replace(data(0, ordinal), layer=layer)
    failed, released = events(machine.on_frame(b"a", frame, [P, P], 0.0))
    assert isinstance(failed, LandingFailed)
    assert words in str(failed.error)
    assert released == Released(1)
