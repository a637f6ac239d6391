"""Prefixes that are kept in host memory when the cache evicts them, and copied back for a hit.

A block is copied out ahead of its eviction, so that no allocation waits for a copy: when a step is
planned, those that the next steps are about to evict. How far ahead that is follows from what steps
took lately, of free blocks too, so it is known before the first eviction. A long prompt evicts many
at once: what is copied too early takes room there while it is here, and a prefix that has lost its
beginning is worth nothing. What was used once is
copied as far as uses of other blocks pay for it: where nothing is asked for again, nothing is
copied. A block is copied back before the sequence that needs it is admitted, and then is a cached
block like any other. So admissions, handoffs and transfers know nothing of host memory, and a copy
that fails, or comes too late, means computing.

Where steps compute in host memory, copies are made before the step, and both ends of them can be
found in the plan of that step. On a device the copies are late, as swapped ones are: until one has
ended, its blocks and host blocks are held, and what it writes cannot be found.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Set
from itertools import chain, islice, takewhile

from common.kv.blocks import BlockHash
from engine.core.blocks.block_pool import BlockUse
from engine.core.blocks.cache_copy import PrefixCopy
from engine.core.blocks.host_pool import HostPool
from engine.core.planner_contract import StepPlan
from engine.core.sequences.prefix_index import PrefixIndex
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.statistics import StepCounters
from engine.core.step.step_in_flight import BlockCopy, PlannedStep

LEAST_AHEAD = 16
"""How many allocations ahead of its eviction a block is copied out, at least."""
MOST_AT_ONCE = 32
"""So many blocks are copied out in a step, at most: other steps follow before they are evicted."""
STEPS_AHEAD = 3
"""So many steps ahead, of those that have taken most blocks lately."""
_FORGOTTEN = 0.999
"""What was taken in a step counts so much less with each one that follows."""

USE_PAYS = 16
"""A use of a block that was used before pays for copying so many that were used once. Computing a
block takes a hundred times as long as copying it, and one use shows that there will be others."""
REMEMBERED = 4
"""So many times the blocks of both pools are remembered by their hashes when they are evicted: what
is computed again was used again. Turns of a conversation are further apart than a pool holds."""


class KeptPrefixes:
    """The copies of prefixes between the pool of `prefixes` and `host_pool`."""

    def __init__(
        self,
        host_pool: HostPool,
        prefixes: PrefixIndex,
        counters: StepCounters,
        *,
        is_enabled: bool,
        is_late: bool,
    ) -> None:
        self._pool, self._host_pool, self._prefixes = prefixes.pool, host_pool, prefixes
        self._counters = counters
        self.is_enabled, self.is_late = is_enabled, is_late
        self._num_blocks = prefixes.pool.num_blocks + host_pool.num_blocks
        if is_enabled:
            prefixes.pool.prefix_cache.remember(REMEMBERED * self._num_blocks)
        self._most_taken = 0.0
        """Blocks that a step has taken, the most of late."""
        self._num_allocated = self._num_used_again = 0
        self._num_paid = 0
        """So many blocks that were used once may be copied: no more than both pools have."""
        self._saved_until = 0
        """The count of taken blocks until which those that are evicted are saved."""
        self._ahead: list[int] = []
        """What was to be evicted next when blocks were last copied out, in this order."""
        self._planned: list[PrefixCopy] = []
        """Copies of the step that is being planned."""
        self._under_way: list[PrefixCopy] = []
        """Late copies that have not ended, in the order of their begin."""
        self._coming: dict[BlockHash, PrefixCopy] = {}
        """Late copies back that have not ended, by what they copy."""
        self._awaited: dict[int, PrefixCopy] = {}
        """The copy that each waiting sequence waits for, by the id of the sequence."""

    @property
    def awaiting(self) -> Set[int]:
        """Sequences that are not to be admitted before a copy has ended, by id."""
        return self._awaited.keys()

    @property
    def under_way(self) -> Collection[PrefixCopy]:
        """Late copies that have not ended."""
        return self._under_way

    @property
    def num_coming(self) -> int:
        """How many blocks will be available when all late copies have ended."""
        return sum(sum(map(self._pool.is_unshared, copy.block_ids)) for copy in self._under_way)

    def num_found(self, sequence: Sequence, num_cached: int) -> int:
        """Return how many blocks behind `num_cached` are cached too, or could be copied back."""
        if not self._host_pool.num_prefixes:
            return 0
        num_found = 0
        for block_hash in self._prefixes.hashes_behind(sequence, num_cached):
            is_cached = self._pool.prefix_cache.find(block_hash) is not None
            if not is_cached and self._host_pool.find(block_hash) is None:
                break
            num_found += 1
        return num_found

    # --- while a step is planned ----------------------------------------------------------------

    def begin_plan(self) -> None:
        """Plan copies out that the step makes before it computes, before anything else of it."""
        if self.is_late or not self.is_enabled:
            return
        copy = self._copy_out()
        if copy is not None:
            self._planned.append(copy)
            self._keep(copy)

    def fetch(self, plan: StepPlan, waiting: Collection[Sequence]) -> bool:
        """Begin to copy back what the plan's admissions lack; if so, it must be made again.

        Those blocks are findable then, or their sequences wait for late copies (`awaiting`). For
        each sequence this is tried once while it waits, so a plan is made again a few times at
        most.
        """
        wanted = {one.sequence_id: one.cached_block_ids for one in plan.admissions}
        if not wanted or not self._host_pool.num_prefixes:
            return False
        admitted = []
        for sequence in waiting:
            if sequence.sequence_id in wanted:
                admitted.append((sequence, wanted[sequence.sequence_id]))
                if len(admitted) == len(wanted):
                    break
        # Held until all is allocated, because allocating evicts.
        held = [block_id for _, cached in admitted for block_id in cached]
        self._pool.acquire_cached(held)
        is_begun = False
        for sequence, cached in admitted:
            if sequence.fetched is None and not sequence.host_block_ids:
                is_begun |= self._fetch(sequence, len(cached), held)
        self._pool.release(held)
        return is_begun

    def end_plan(self, step: PlannedStep) -> None:
        """Plan late copies out of what the step leaves, and give all copies to the step.

        In a step, copies of prefixes are made before swaps in the same direction: a swap may reuse
        a block or a host block of a prefix that was found for nobody.
        """
        if not self.is_enabled:
            return
        if self.is_late:
            copy = self._copy_out()
            if copy is not None:
                self._pool.acquire_cached(copy.block_ids)
                self._planned.append(copy)
                self._under_way.append(copy)
            step.swap_copies += self._planned
        else:
            outs: list[BlockCopy] = []
            ins: list[BlockCopy] = []
            for copy in self._planned:
                (outs if copy.is_out else ins).append(
                    BlockCopy(copy.block_ids, copy.host_block_ids)
                )
                if not copy.is_out:
                    self._host_pool.end_reading(copy.host_block_ids)
            step.swap_outs[:0], step.swap_ins[:0] = outs, ins
        self._planned = []

    def on_admitted(self, sequence: Sequence, cached_block_ids: Collection[int]) -> None:
        """Note which blocks a sequence found, and where; it may fetch again if it is preempted."""
        if sequence.status is SequenceStatus.WAITING:
            fetched = (sequence.fetched or frozenset()).intersection(cached_block_ids)
            hashes = map(self._pool.prefix_cache.hash_of, fetched)
            num_read = len(sequence.sought_on_disk.intersection(hashes))
            num_host, block_size = len(fetched) - num_read, self._prefixes.block_size
            self._counters.on_prefix_found(
                pool=len(cached_block_ids) - len(fetched), host=num_host, disk=num_read
            )
            sequence.num_host_tokens = num_host * block_size
            sequence.num_disk_tokens = num_read * block_size
        sequence.fetched = None
        self._pool.prefix_cache.note_use(cached_block_ids)

    # --- when a late copy has ended -------------------------------------------------------------

    def end(self, copy: PrefixCopy, *, is_good: bool) -> None:
        """Release what a late copy held; what it wrote is findable from now on if it is good."""
        self._under_way.remove(copy)
        if not copy.is_out:
            self._end_in(copy, is_good=is_good)
        elif is_good:
            self._keep(copy)
        else:
            self._host_pool.release(copy.host_block_ids)
        self._pool.release(copy.block_ids)
        if copy.is_out:
            # What nobody used since is evicted when it would have been.
            unsaved = self._pool.prefix_cache.unsaved
            self._pool.evict_next(one for one in self._ahead if one not in unsaved)

    def check(self) -> None:
        """Raise `AssertionError` if a late copy wrote what can be found, or holds too little."""
        for copy in self._under_way:
            for block_id, block_hash in zip(copy.block_ids, copy.hashes, strict=True):
                if copy.is_out:
                    assert self._pool.prefix_cache.hash_of(block_id) == block_hash, "other KV"
                else:
                    assert not self._pool.prefix_cache.holds(block_id), "found too early"
            copied = zip(copy.host_block_ids, copy.hashes, strict=True)
            is_found = [self._host_pool.find(block_hash) == one for one, block_hash in copied]
            assert not (copy.is_out and any(is_found)), "found in host memory too early"
            assert copy.is_out or all(is_found), "evicted from host memory while it is read"
        assert not self._planned, "a copy that no step makes"

    @property
    def host_block_ids_read(self) -> set[int]:
        """Host blocks that late copies read."""
        copies = (copy.host_block_ids for copy in self._under_way if not copy.is_out)
        return set(chain.from_iterable(copies))

    @property
    def num_written(self) -> int:
        """Host blocks that late copies write."""
        return sum(len(copy.host_block_ids) for copy in self._under_way if copy.is_out)

    # --- inside -----------------------------------------------------------------------------------

    def _copy_out(self) -> PrefixCopy | None:
        """Choose blocks to be copied out and allocate host blocks for them."""
        cache, host_pool = self._pool.prefix_cache, self._host_pool
        ahead = self._near_eviction()
        if not ahead:
            return None
        most = host_pool.num_available
        if self.is_late:
            # One copy at a time, and never more than half of what others could allocate.
            if any(copy.is_out for copy in self._under_way):
                return None
            most = min(most, self._pool.num_available // 2)
        chosen = list(islice(filter(cache.unsaved.__contains__, ahead), most))
        wanted = [one for one in chosen if host_pool.find(cache.hash_of(one)) is None]
        once = [one for one in wanted if one not in cache.reused]
        # They would make room for each other: the last ones stay.
        most_once = min(host_pool.num_room_once, self._earn())
        dropped = set(once[: max(len(once) - most_once, 0)])
        block_ids = [one for one in wanted if one not in dropped]
        if len(block_ids) > MOST_AT_ONCE:  # the others are chosen again with the next step
            del block_ids[MOST_AT_ONCE:]
            del chosen[chosen.index(block_ids[-1]) + 1 :]
        if chosen:
            self._ahead = ahead[: ahead.index(chosen[-1]) + 1]
        for one in chosen:
            host_pool.note_use(cache.hash_of(one))
        cache.unsaved.difference_update(chosen)  # once for each use
        if not block_ids:
            return None
        # What is evicted last comes first, as in a sequence: both pools release in that order.
        block_ids.reverse()
        num_once = sum(one not in cache.reused for one in block_ids)
        self._num_paid -= num_once
        host_block_ids = host_pool.allocate(len(block_ids), num_once=num_once)
        hashes = list(map(cache.hash_of, block_ids))
        return PrefixCopy(block_ids, host_block_ids, hashes, is_out=True)

    def _near_eviction(self) -> list[int]:
        """Return the blocks to be evicted next, if one of the first half of them is unsaved.

        What is saved is not looked at again before so many have left the order of eviction.
        """
        unsaved, pool = self._pool.prefix_cache.unsaved, self._pool
        num_ahead = self._look_ahead()
        num_near = num_ahead // 2 - pool.num_free
        if not unsaved or self._saved_until - pool.num_taken >= num_near:
            return []
        ahead = pool.next_evicted(num_ahead)
        num_saved = sum(1 for _ in takewhile(lambda one: one not in unsaved, ahead))
        self._saved_until = pool.num_taken + num_saved
        return ahead if num_saved < num_near else []

    def _earn(self) -> int:
        """Return how many blocks that were used once may be copied now."""
        num_uses = self._pool.prefix_cache.num_used_again - self._num_used_again
        self._num_used_again += num_uses
        self._num_paid = min(self._num_paid + USE_PAYS * num_uses, self._num_blocks)
        return self._num_paid

    def _look_ahead(self) -> int:
        """Return how many allocations ahead of its eviction a block is to be copied out."""
        num_taken = self._pool.num_allocated - self._num_allocated
        self._num_allocated += num_taken
        self._most_taken = max(_FORGOTTEN * self._most_taken, num_taken)
        wanted = math.ceil(STEPS_AHEAD * self._most_taken)
        return max(min(wanted, self._pool.num_blocks), LEAST_AHEAD)

    def _fetch(self, sequence: Sequence, num_cached: int, held: list[int]) -> bool:
        """Begin to copy back what a sequence lacks, up to the first block that is nowhere."""
        hashes: list[BlockHash] = []
        host_block_ids: list[int] = []
        awaited: PrefixCopy | None = None
        most = self._pool.num_available
        for block_hash in self._prefixes.hashes_behind(sequence, num_cached):
            coming = self._coming.get(block_hash)
            host_block_id = self._host_pool.find(block_hash)
            if coming is not None:
                awaited = coming
            elif self._pool.prefix_cache.find(block_hash) is not None:
                continue
            elif host_block_id is None or len(hashes) == most:
                break
            else:
                hashes.append(block_hash)
                host_block_ids.append(host_block_id)
        fetched = set() if awaited is None else set(awaited.block_ids)
        if hashes:
            use = BlockUse.RECEIVING if self.is_late else BlockUse.RUNNING
            block_ids = self._pool.allocate(len(hashes), use)
            fetched.update(block_ids)
            copy = PrefixCopy(block_ids, host_block_ids, hashes, is_out=False)
            self._host_pool.begin_reading(host_block_ids)
            self._planned.append(copy)
            if self.is_late:
                awaited = copy
                self._under_way.append(copy)
                self._coming.update(dict.fromkeys(hashes, copy))
            else:
                self._publish(copy)
                held += block_ids
        if awaited is not None:
            self._awaited[sequence.sequence_id] = awaited
        if fetched:
            sequence.fetched = frozenset(fetched)
        return bool(fetched)

    def _end_in(self, copy: PrefixCopy, *, is_good: bool) -> None:
        for block_hash in copy.hashes:
            del self._coming[block_hash]
        for sequence_id in [one for one, awaited in self._awaited.items() if awaited is copy]:
            del self._awaited[sequence_id]
        self._host_pool.end_reading(copy.host_block_ids, is_good=is_good)
        self._pool.start_running(copy.block_ids)
        if is_good:
            self._publish(copy)

    def _publish(self, copy: PrefixCopy) -> None:
        for block_id, block_hash in zip(copy.block_ids, copy.hashes, strict=True):
            self._pool.publish(block_id, block_hash)
        self._counters.num_prefix_blocks_in += len(copy.block_ids)

    def _keep(self, copy: PrefixCopy) -> None:
        reused = self._pool.prefix_cache.reused
        blocks = zip(copy.block_ids, copy.hashes, strict=True)
        once = {block_hash for block_id, block_hash in blocks if block_id not in reused}
        self._host_pool.keep(copy.host_block_ids[::-1], copy.hashes[::-1], once)
        self._counters.num_prefix_blocks_out += len(copy.block_ids)
