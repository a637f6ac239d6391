"""Transfers over several connections, with everything that may happen to each of them."""

from __future__ import annotations

import dataclasses

import pytest

from kv_transfer.contract import Ticket
from tests.property.kv_transfer.channel_world import ChannelWorld
from tests.property.kv_transfer.machine_world import TICKET

NUM_TRANSFERS = 3


def ticket(token: int) -> Ticket:
    return dataclasses.replace(TICKET, lease_token=token)


def run(world: ChannelWorld, token: int) -> None:
    """Let everything happen that is due, without further faults."""
    for _ in range(5000):
        if token in world.ended and not world.copies and token not in world.holder.values():
            return
        world.step()
    raise AssertionError(f"transfer {token} does not end")


@pytest.mark.parametrize(("wants", "grants"), [(1, 1), (2, 2), (4, 4), (4, 2), (2, 4), (4, 1)])
def test_every_transfer_lands_over_the_connections_that_both_sides_allow(
    wants: int, grants: int
) -> None:
    used = set()
    for seed in range(8):
        world = ChannelWorld((seed, wants, grants), wants, grants)
        for token in range(1, NUM_TRANSFERS + 1):
            world.begin(ticket(token))
            run(world, token)
        assert world.landed == set(range(1, NUM_TRANSFERS + 1))
        used |= world.used_channels
    assert used == set(range(min(wants, grants)))


@pytest.mark.parametrize("wants", [2, 4])
def test_a_further_connection_that_dies_loses_nothing_and_lands_nothing_wrong(wants: int) -> None:
    for seed in range(40):
        world = ChannelWorld(("dies", seed, wants), wants, wants)
        for token in range(1, NUM_TRANSFERS + 1):
            world.begin(ticket(token))
            for _ in range(6):
                for _ in range(world.rng.randrange(12)):
                    world.step()
                further = [peer for peer in world.open if peer.channel]
                if further:
                    fault = world.rng.choice([world.cut, world.silence])
                    fault(world.rng.choice(further))
            run(world, token)
        assert world.landed == set(range(1, NUM_TRANSFERS + 1)), seed


@pytest.mark.parametrize("wants", [1, 4])
def test_whatever_happens_nothing_wrong_lands_and_everything_ends(wants: int) -> None:
    """All connections may break or fall silent, pieces are damaged, landings are revoked."""
    num_landed = 0
    for seed in range(60):
        world = ChannelWorld(("all", seed, wants), wants, wants)
        for token in range(1, NUM_TRANSFERS + 1):
            world.begin(ticket(token))
            for _ in range(5):
                for _ in range(world.rng.randrange(15)):
                    world.step()
                chance = world.rng.random()
                if chance < 0.5 and world.open:
                    fault = world.rng.choice([world.cut, world.silence])
                    fault(world.rng.choice(list(world.open)))
                elif chance < 0.8:
                    world.damage_next = world.rng.randint(1, 3)
                elif chance < 0.85:
                    world.do(world.receiver.on_revoke(token))
            run(world, token)
            assert (world.ended[token] is None) == (token in world.landed)
        num_landed += len(world.landed)
    assert num_landed > 30  # A first connection that falls silent fails what is open.
