"""Prefixes that are kept in host memory when the cache evicts them, and copied back for a hit.

A block is copied out ahead of its eviction (`blocks.leaving_blocks`). Where a plan takes more than
any before, what it evicts is copied in that step itself, before anything else of it. A step that
copies makes what it decodes wait, so few blocks are copied in one: an admission that evicts more
waits while they are copied, some with each step, and so does a prefix that comes from another node.
Computing them would take a hundred times as long, so nothing that is worth keeping is lost, however
long a prompt is. A block is copied back before the sequence that needs it is admitted, and then is
a cached block like any other. So admissions and handoffs know nothing of host memory, and a copy
that fails, or comes too late, means computing.

Where steps compute in host memory, copies are made before the step, and both ends of them can be
found in the plan of that step. On a device the copies are late, as swapped ones are: until one has
ended, its blocks and host blocks are held, and what it writes cannot be found.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from itertools import chain

from common.kv.blocks import BlockHash
from engine.core.blocks.block_pool import BlockUse
from engine.core.blocks.cache_copy import PrefixCopy
from engine.core.blocks.host_pool import HostPool
from engine.core.blocks.leaving_blocks import LeavingBlocks
from engine.core.planner_contract import PLAIN_DECODE, StepPlan
from engine.core.sequences.prefix_index import PrefixIndex
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.statistics import StepCounters
from engine.core.step.step_in_flight import BlockCopy, PlannedStep

MOST_AT_ONCE = 32
"""Most blocks copied out in a step, beside those that running sequences evict."""


_Admitted = tuple[Sequence, tuple[int, ...]]
"""A sequence that a plan admits, and the blocks that it has found in the pool."""


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
        self._pool, self.host_pool, self._prefixes = prefixes.pool, host_pool, prefixes
        self._counters = counters
        self.is_enabled, self.is_late = is_enabled, is_late
        self._leaving = LeavingBlocks(prefixes.pool, host_pool, is_enabled=is_enabled)
        self._planned: list[PrefixCopy] = []
        """Copies of the step that is being planned."""
        self._under_way: list[PrefixCopy] = []
        """Late copies that have not ended, in the order of their begin."""
        self._coming: dict[BlockHash, PrefixCopy] = {}
        """Late copies back that have not ended, by what they copy."""
        self._awaited: dict[int, PrefixCopy] = {}
        """The copy that each waiting sequence waits for, by the id of the sequence."""
        self._held_back: set[int] = set()
        """The sequences that the latest plan would have admitted if they evicted less, by id."""
        self._is_making_room = False
        """Whether blocks are to be taken before the next plan, and what they evict is copied."""

    @property
    def awaiting(self) -> Set[int]:
        """Sequences that are not to be admitted before a copy has ended, by id."""
        return self._awaited.keys() | self._held_back

    @property
    def holds_back(self) -> bool:
        """Whether the next plan may admit what the latest one did not, because of copies."""
        return bool(self._held_back)

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
        if not self.host_pool.num_prefixes:
            return 0
        num_found = 0
        for block_hash in self._prefixes.hashes_behind(sequence, num_cached):
            is_cached = self._pool.prefix_cache.find(block_hash) is not None
            if not is_cached and self.host_pool.find(block_hash) is None:
                break
            num_found += 1
        return num_found

    # --- before a step is planned ---------------------------------------------------------------

    def has_room(self, num_blocks: int, kept_ids: Collection[int]) -> bool:
        """Return whether so many blocks can be taken now, and `kept_ids` held, with nothing lost.

        It is true as well where so many could not be had later either.
        """
        return self._to_wait_for(num_blocks, kept_ids) is None

    def make_room(self, num_blocks: int, kept_ids: Collection[int]) -> bool:
        """Begin to copy out what lacks for `has_room`; return whether the blocks can be taken now.

        A plan must follow. What is taken may be written when its step has made its copies. If not
        all could be copied in one step, the plan admits nothing that evicts, and this is called
        again before the next one.
        """
        evicted = self._to_wait_for(num_blocks, kept_ids)
        if evicted is None:
            return True
        self._is_making_room = not evicted or self._must_copy(evicted)
        return not self._is_making_room

    # --- while a step is planned ----------------------------------------------------------------

    def begin_plan(self) -> None:
        """Plan copies out that the step makes before it computes, before anything else of it."""
        if not self.is_enabled:
            return
        self._held_back.clear()
        if not self.is_late:
            self._begin_out(self._leaving.near(), MOST_AT_ONCE - self._num_planned_out)

    def prepare(self, plan: StepPlan, waiting: Collection[Sequence]) -> bool:
        """Begin the copies that must precede what a plan takes; if so, it must be made again.

        What its admissions lack, and host memory has, is copied back: those blocks are findable
        then, or their sequences wait for late copies (`awaiting`). For each sequence this is tried
        once while it waits. Before that, what the plan evicts is copied out. Where that is too much
        for one step, the largest admission is held back. So a plan is made again a few times.
        """
        if not self.is_enabled:
            return False
        admitted = self._admitted(plan, waiting)
        return self._hold_back(plan, admitted) or self._fetch_all(admitted)

    def end_plan(self, step: PlannedStep) -> None:
        """Plan late copies out of what the step leaves, and give all copies to the step.

        In a step, copies of prefixes are made before swaps in the same direction: a swap may reuse
        a block or a host block of a prefix that was found for nobody.
        """
        if not self.is_enabled:
            return
        self._is_making_room = False
        if self.is_late:
            # What running sequences evict cannot wait.
            self._begin_out(self._leaving.near(len(step.sequences)), MOST_AT_ONCE)
            step.swap_copies += self._planned
        else:
            outs: list[BlockCopy] = []
            ins: list[BlockCopy] = []
            for copy in self._planned:
                (outs if copy.is_out else ins).append(
                    BlockCopy(copy.block_ids, copy.host_block_ids)
                )
                if not copy.is_out:
                    self.host_pool.end_reading(copy.host_block_ids)
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
            self.host_pool.release(copy.host_block_ids)
        self._pool.release(copy.block_ids)
        if copy.is_out:
            # What nobody used since is evicted when it would have been.
            unsaved = self._pool.prefix_cache.unsaved
            self._pool.evict_next(one for one in self._leaving.order if one not in unsaved)

    def check(self) -> None:
        """Raise `AssertionError` if a late copy wrote what can be found, or holds too little."""
        for copy in self._under_way:
            for block_id, block_hash in zip(copy.block_ids, copy.hashes, strict=True):
                if copy.is_out:
                    assert self._pool.prefix_cache.hash_of(block_id) == block_hash, "other KV"
                else:
                    assert not self._pool.prefix_cache.holds(block_id), "found too early"
            copied = zip(copy.host_block_ids, copy.hashes, strict=True)
            is_found = [self.host_pool.find(block_hash) == one for one, block_hash in copied]
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

    def _admitted(self, plan: StepPlan, waiting: Collection[Sequence]) -> list[_Admitted]:
        """Return the sequences that a plan admits, and what it has found of each in the pool."""
        wanted = {one.sequence_id: one.cached_block_ids for one in plan.admissions}
        admitted: list[_Admitted] = []
        for sequence in waiting if wanted else ():
            if sequence.sequence_id in wanted:
                admitted.append((sequence, wanted[sequence.sequence_id]))
                if len(admitted) == len(wanted):
                    break
        return admitted

    def _hold_back(self, plan: StepPlan, admitted: list[_Admitted]) -> bool:
        """Begin to copy out what a plan evicts; hold its largest admission back if that goes on.

        What running sequences evict is copied in the step, or lost where copies are late.
        """
        if not (self._pool.prefix_cache.unsaved or self._is_making_room):
            return False
        grown = [one.num_new_blocks for one in plan.chunks.values() if one is not PLAIN_DECODE]
        num_new = sum(grown) + sum(one.num_new_blocks for one in plan.admissions)
        evicted = self._leaving.evicted_by(num_new, {one for _, found in admitted for one in found})
        is_passing = self._is_making_room and num_new > self._pool.num_free
        if not (evicted or is_passing):
            return False
        if not admitted:
            if not self.is_late:
                self._begin_out(evicted, len(evicted))
            return False
        for sequence, found in admitted:  # what they begin with is not evicted for that
            for block_hash in reversed(list(self._prefixes.hashes_behind(sequence, len(found)))):
                self.host_pool.note_use(block_hash)
        must_wait = is_passing or self._must_copy(evicted)
        if must_wait:
            largest = max(plan.admissions, key=lambda one: one.num_new_blocks)
            self._held_back.add(largest.sequence_id)
        return must_wait

    def _to_wait_for(self, num_blocks: int, kept_ids: Collection[int]) -> list[int] | None:
        """Return what is copied out before so many blocks are taken; None: they can be taken.

        It is empty where blocks lack until late copies have ended.
        """
        if not self.is_enabled:
            return None
        num_wanted = num_blocks + sum(map(self._pool.is_evictable, kept_ids))
        num_lacking = num_wanted - self._pool.num_available
        if num_lacking > 0:
            return None if num_lacking > self.num_coming else []
        return self._leaving.evicted_by(num_blocks, set(kept_ids)) or None

    def _must_copy(self, evicted: list[int]) -> bool:
        """Begin to copy out what is to be evicted; return whether that must wait for copies."""
        num_planned = self._num_planned_out
        has_begun = self._begin_out(evicted, MOST_AT_ONCE - num_planned)
        if self._pool.prefix_cache.unsaved.isdisjoint(evicted):
            return self.is_late and has_begun  # a late copy holds blocks that are counted on
        return bool(num_planned) or has_begun or self._is_copying_out

    @property
    def _is_copying_out(self) -> bool:
        return any(copy.is_out for copy in self._under_way)

    @property
    def _num_planned_out(self) -> int:
        return sum(len(copy.block_ids) for copy in self._planned if copy.is_out)

    def _begin_out(self, ahead: list[int], most: int) -> bool:
        """Begin to copy out at most so many of these blocks; return whether any is.

        Of late copies there is one at a time, which never takes more than half of what others could
        allocate.
        """
        most = min(most, self.host_pool.num_available)
        if self.is_late:
            most = 0 if self._is_copying_out else min(most, self._pool.num_available // 2)
        if not ahead or most <= 0:
            return False
        block_ids = self._leaving.choose(ahead, most)
        if not block_ids:
            return False
        host_block_ids = self._leaving.allocate_for(block_ids)
        hashes = list(map(self._pool.prefix_cache.hash_of, block_ids))
        copy = PrefixCopy(block_ids, host_block_ids, hashes, is_out=True)
        self._planned.append(copy)
        if self.is_late:
            self._pool.acquire_cached(block_ids)
            self._under_way.append(copy)
        else:
            self._keep(copy)
        return True

    def _fetch_all(self, admitted: list[_Admitted]) -> bool:
        """Begin to copy back what these sequences lack; return whether anything is."""
        if not admitted or not self.host_pool.num_prefixes:
            return False
        # Held until all is allocated, because allocating evicts.
        held = [block_id for _, cached in admitted for block_id in cached]
        self._pool.acquire_cached(held)
        is_begun = False
        for sequence, cached in admitted:
            if sequence.fetched is None and not sequence.host_block_ids:
                is_begun |= self._fetch(sequence, len(cached), held)
        self._pool.release(held)
        return is_begun

    def _fetch(self, sequence: Sequence, num_cached: int, held: list[int]) -> bool:
        """Begin to copy back what a sequence lacks, up to the first block that is nowhere."""
        hashes: list[BlockHash] = []
        host_block_ids: list[int] = []
        awaited: PrefixCopy | None = None
        most = self._pool.num_available
        for block_hash in self._prefixes.hashes_behind(sequence, num_cached):
            coming = self._coming.get(block_hash)
            host_block_id = self.host_pool.find(block_hash)
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
            self.host_pool.begin_reading(host_block_ids)
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
        self.host_pool.end_reading(copy.host_block_ids, is_good=is_good)
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
        self.host_pool.keep(copy.host_block_ids[::-1], copy.hashes[::-1], once)
        self._counters.num_prefix_blocks_out += len(copy.block_ids)
