"""What holds between the sequences, seats and blocks of a scheduler whenever no call of it runs."""

from __future__ import annotations

from itertools import chain
from typing import Protocol

from engine.core.blocks.block_pool import BlockPool
from engine.core.blocks.host_pool import HostPool
from engine.core.disk_prefixes import DiskPrefixes
from engine.core.kept_prefixes import KeptPrefixes
from engine.core.planner_contract import StepLimits
from engine.core.prefix_transfers import PrefixTransfers
from engine.core.sequences.running import Running
from engine.core.sequences.seats import Seats
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.waiting_queue import WaitingQueue
from engine.core.swapping import Swapping


class SchedulerState(Protocol):
    """The state of a scheduler."""

    limits: StepLimits
    pool: BlockPool
    prefix_transfers: PrefixTransfers
    host_pool: HostPool
    swapping: Swapping
    kept_prefixes: KeptPrefixes
    disk_prefixes: DiskPrefixes
    waiting: WaitingQueue
    seats: Seats
    running: Running
    receiving: dict[int, Sequence]
    quarantined: dict[int, list[int]]


def check_state(state: SchedulerState) -> None:
    """Raise `AssertionError` unless blocks, seats and statuses agree."""
    state.pool.check()
    num_kept = sum(map(len, state.quarantined.values())) + state.prefix_transfers.num_quarantined
    assert state.pool.counts().quarantined == num_kept, "quarantined blocks miscounted"
    seated = [*state.running, *state.receiving.values()]
    assert len(seated) <= state.limits.max_num_seqs, "more sequences than seats"
    state.seats.check([sequence.seat for sequence in seated])
    for sequence in state.running:
        num_slots = sequence.num_held_blocks * state.limits.block_size
        assert sequence.num_computed <= num_slots, "computed tokens without a block"
        if sequence.is_decoding:
            assert sequence.num_uncomputed == 1, "decoding, yet not caught up"
    waiting_tokens = found_tokens = 0
    for sequence in state.waiting:
        num_known, num_found = sequence.num_known, sequence.num_found_tokens
        assert 0 <= num_found < num_known, "all of one is cached"
        waiting_tokens, found_tokens = waiting_tokens + num_known, found_tokens + num_found
    assert state.waiting.num_tokens == waiting_tokens, "queued tokens miscounted"
    assert state.waiting.num_found_tokens == found_tokens, "cached ones of them miscounted"
    if state.host_pool.num_blocks:  # else nothing that is said of it can have an entry
        _check_host_memory(state)


def _check_host_memory(state: SchedulerState) -> None:
    """Raise `AssertionError` unless host blocks are held for what copies, reads and sends them."""
    state.host_pool.check()
    state.kept_prefixes.check()
    state.disk_prefixes.check()
    sent = state.prefix_transfers.host_block_ids_read
    read = state.kept_prefixes.host_block_ids_read | sent
    assert state.host_pool.num_read == len(read), "a prefix is kept for no copy and no transfer"
    assert all(map(state.host_pool.holds, sent)), "evicted from host memory while it is sent"
    num_written_from = state.disk_prefixes.num_written_from
    assert state.host_pool.num_pinned == num_written_from, "a prefix is pinned for no write"
    swapped = chain(state.waiting, state.receiving.values())
    num_held = sum(len(sequence.host_block_ids) for sequence in swapped)
    num_held += state.swapping.num_held + state.kept_prefixes.num_written
    num_held += state.disk_prefixes.num_read_into
    assert state.host_pool.num_used == num_held, "host blocks without an owner"
