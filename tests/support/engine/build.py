"""Requests, sequences and a small engine for tests of the scheduler core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from copy import copy as copy_of
from itertools import count
from typing import Any, cast

import numpy as np

from common.ids import AttemptId
from common.kv.token_budget import num_speculative_tokens
from common.request import GenerationRequest, SamplingParams
from common.settings.config import SchedulingConfig, SpeculationConfig
from engine.core.blocks.cache_copy import CacheCopy, CopyKind, PrefixCopy
from engine.core.blocks.disk_index import DiskIndex
from engine.core.planner_contract import PoolView, SequenceView, StepLimits
from engine.core.planning.forecast import Forecast
from engine.core.policies.growth import GrowthColumns
from engine.core.scheduler import Scheduler
from engine.core.sequences.seats import Seats
from engine.core.sequences.sequence import Sequence
from engine.core.sequences.status import SequenceStatus
from engine.core.speculation.speculation import Speculation, make_speculation
from engine.core.step.step_in_flight import PlannedStep, SwapCopy
from engine.core.step.step_results import StepOutput, StepOutputs
from tests.support.engine.hash_runner import EOS_TOKEN_ID, HashRunner, LateCopy

BLOCK_SIZE = 4
STRICT: dict[str, Any] = {
    "reservation_policy": "none",
    "skip_ahead_window": 0,
    "retract_decode_steps": 0,
}
"""Blocks decide alone, in strict order, and a preemption frees no more than it must."""

_NONE = np.zeros(0, np.int64)
EMPTY_COLUMNS = GrowthColumns(
    num_known=_NONE, num_output=_NONE, max_new_tokens=_NONE, num_held_blocks=_NONE
)


def make_prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """`length` token ids; prompts of one seed begin alike, those of two seeds differ at once."""
    return tuple((seed * 211 + 7 + 13 * i) % 990 for i in range(length))


def make_request(
    prompt: int | tuple[int, ...], *, name: str = "r", attempt: int = 1, seed: int = 0, **given: Any
) -> GenerationRequest:
    """A request; an integer prompt is a length. `given` are sampling parameters or a deadline."""
    deadline_s = given.pop("deadline_s", 600.0)
    priority = given.pop("priority", 0)
    output_token_ids = given.pop("output_token_ids", ())
    cache_salt = given.pop("cache_salt", "")
    sampling = SamplingParams(**{"max_tokens": 4, "seed": seed, **given})
    tokens = make_prompt(prompt, seed) if isinstance(prompt, int) else prompt
    return GenerationRequest(
        id=AttemptId(name, attempt),
        prompt_token_ids=tokens,
        sampling=sampling,
        deadline_s=deadline_s,
        priority=priority,
        output_token_ids=output_token_ids,
        cache_salt=cache_salt,
    )


def take_seat(sequence: Sequence, block_ids: Items[int], num_computed: int) -> Seats:
    """Give a sequence a seat of its own, with these blocks and so many computed tokens."""
    seats = Seats(2, sequence.num_known + 8, len(block_ids) + 2)
    sequence.take_seat(seats)
    seats.add_blocks(sequence.seat, block_ids)
    sequence.num_computed = num_computed
    return seats


def status_of(sequence: Sequence) -> SequenceStatus:
    """Return the status now; the type checker would keep a plain attribute's narrowed value."""
    return sequence.status


def num_late_copies(scheduler: Scheduler) -> int:
    """Return how many copies beside the steps have not ended."""
    return scheduler.swapping.num_under_way + len(scheduler.kept_prefixes.under_way)


def check_books(scheduler: Scheduler) -> None:
    """Check every invariant of a scheduler between two calls; count owners by sequence."""
    scheduler.check()
    seated = [*scheduler.running, *scheduler.receiving.values()]
    one_by_one = scheduler.reservation.reserve(EMPTY_COLUMNS)
    for sequence in seated:
        one_by_one = one_by_one.plus(sequence)
    at_once = scheduler.reservation.reserve(scheduler.seats.growth())
    assert at_once.blocks == one_by_one.blocks, "a row of the seats says something else"
    pool, size = scheduler.pool, scheduler.limits.block_size
    holders = [*scheduler.running, *scheduler.receiving.values(), *scheduler.exporting.values()]
    owners = Counter(block for sequence in holders for block in sequence.block_table)
    kept_out = [copy for copy in scheduler.kept_prefixes.under_way if copy.is_out]
    swapped = {block for copy in scheduler.swapping.copies_out for block in copy.block_ids}
    copied = swapped | {block for copy in kept_out for block in copy.block_ids}
    coming = [
        block
        for copy in scheduler.kept_prefixes.under_way
        for block in (() if copy.is_out else copy.block_ids)
    ]
    kept = {block for block_ids in scheduler.quarantined.values() for block in block_ids}
    assert not kept & set(owners), "a block in quarantine has an owner"
    assert not kept & copied, "a block in quarantine is copied out"
    moved = scheduler.prefix_transfers.held_block_ids
    assert not kept & moved, "a block in quarantine is held for a prefix"
    assert len(set(coming)) == len(coming), "a block is copied back twice"
    in_use = copied | kept | moved | set(owners)
    assert not set(coming) & in_use, "a block is copied back and in use"
    num_known = pool.num_available + len(copied | moved | set(owners)) + len(kept) + len(coming)
    assert num_known == pool.num_blocks, "held by nobody, yet not available"
    for sequence in holders:
        assert len(set(sequence.block_table)) == len(sequence.block_table)
        for block in sequence.block_table[sequence.num_computed // size :]:
            assert owners[block] == 1, "a block that is still written has two owners"
            assert block not in copied, "a block is written while it is copied out"
    for sequence in scheduler.waiting:
        assert not sequence.block_table
        assert sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
    assert [s.queue_key for s in scheduler.waiting] == sorted(
        s.queue_key for s in scheduler.waiting
    )
    assert [s.arrival for s in scheduler.running] == sorted(s.arrival for s in scheduler.running)


def check_idle(scheduler: Scheduler) -> None:
    """Check that nothing is held: every block is free or cached."""
    check_books(scheduler)
    assert not scheduler.running
    assert not scheduler.waiting
    assert not scheduler.receiving
    assert not scheduler.exporting
    assert not scheduler.quarantined
    assert not num_late_copies(scheduler)
    assert not scheduler.prefix_transfers, "a prefix is on its way"
    assert scheduler.pool.counts().available == scheduler.pool.num_blocks
    assert scheduler.host_pool.num_used == 0
    assert scheduler.host_pool.num_read == 0


def state_of(scheduler: Scheduler) -> tuple[object, ...]:
    """Return all that a scheduler has taken and decided so far, to be compared: copies and text."""
    pool, seats = scheduler.pool, scheduler.seats
    sequences = [
        *scheduler.running,
        *scheduler.waiting,
        *scheduler.receiving.values(),
        *scheduler.exporting.values(),
    ]
    # Hashes are a memory of what was looked up.
    unseen = ("block_hashes", "prompt_blocks", "_seats")
    fields = [name for name in Sequence.__slots__ if name not in unseen]
    fields += ["num_known", "num_computed", "output_token_ids", "block_table"]
    blocks = range(pool.num_blocks)
    growth = seats.growth()
    return (
        pool.next_evicted(pool.num_blocks + pool.num_free),
        [(pool.use_of(block), pool.is_unshared(block)) for block in blocks],
        (pool.num_allocated, pool.num_taken),
        pool.counts(),
        {name: copy_of(value) for name, value in vars(pool.prefix_cache).items()},
        seats.token_ids.tobytes(),
        seats.block_tables.tobytes(),
        [getattr(growth, name).tolist() for name in GrowthColumns.__slots__],
        seats.num_prompt.tolist(),
        repr([[getattr(one, name) for name in fields] for one in sequences]),
        repr((scheduler.quarantined, scheduler.reservation)),
        repr((vars(scheduler.host_pool), scheduler.statistics())),
    )


def num_cached_tokens_and_blocks(scheduler: Scheduler, sequence: Sequence) -> tuple[int, int]:
    """Return how many tokens are cached or kept, and how many blocks of them are in the pool."""
    num_tokens = scheduler.num_cached_tokens(sequence)
    hashes = sequence.block_hashes[: num_tokens // scheduler.limits.block_size]
    return num_tokens, len(scheduler.pool.prefix_cache.match(hashes))


def _outlook(scheduler: Scheduler, running: Items[SequenceView], pool: PoolView) -> object:
    """Return what a plan depends on, of a state or of a forecast.

    The prefixes are those of the state: `PlanAhead` compares those of admitted prompts only.
    """
    return (
        [(s.sequence_id, s.status, s.num_known, s.num_computed, list(s.block_table))
         for s in running],
        pool.num_available,
        [(s.sequence_id, num_cached_tokens_and_blocks(scheduler, s)) for s in scheduler.waiting],
        list(scheduler.receiving),
        scheduler.reservation,
    )  # fmt: skip


class _Drafting:
    """A `Speculation` that another one can take the place of."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)


class Engine:
    """A scheduler and a hash runner over one pool; remote KV is written by a runner of its own.

    With `is_ahead`, the next step is planned before the results of a step are recorded. With
    `num_copy_polls`, blocks are swapped beside the steps, and a copy lasts so many steps. With
    `goes_on`, the runner begins steps by itself (`HashRunner.goes_on`), and leaves one in so many
    tokens behind (`leaves_one_in`).
    """

    def __init__(
        self,
        *,
        num_blocks: int = 16,
        seats: int = 4,
        budget: int = 64,
        block_size: int = BLOCK_SIZE,
        max_model_len: int | None = None,
        caching: bool = True,
        method: str = "none",
        num_drafts: int = 0,
        num_host_blocks: int = 0,
        keeps_prefixes: bool = False,
        disk_index: DiskIndex | None = None,
        chunk_granularity: int = 1,
        pairs_per_token: int = 0,
        is_ahead: bool = False,
        num_copy_polls: int | None = None,
        goes_on: str = "",
        leaves_one_in: int = 0,
        **scheduling: Any,
    ) -> None:
        self.is_ahead = is_ahead
        self.was_ahead = False
        """Whether the latest plan was made ahead."""
        self.were_decoding: set[int] = set()
        """What decoded when the latest plan was made, by id."""
        self.num_as_foreseen = 0
        """Plans that were made ahead and were the same as a plan made later."""
        self._foreseen: object = None
        self.runner = HashRunner(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            num_host_blocks=num_host_blocks,
        )
        self.runner.num_copy_polls = num_copy_polls or 0
        self.runner.goes_on, self.runner.leaves_one_in = goes_on, leaves_one_in
        self._copies: list[tuple[SwapCopy | PrefixCopy, LateCopy]] = []
        speculation = SpeculationConfig(
            speculative_method=method, num_speculative_tokens=num_drafts
        )
        made = make_speculation(speculation, self.runner.step_costs)
        self._speculation = None if made is None else _Drafting(made)
        self.config = SchedulingConfig(**scheduling)
        self.scheduler = Scheduler(
            limits=StepLimits(
                max_num_seqs=seats,
                max_num_batched_tokens=budget,
                block_size=block_size,
                max_model_len=self.runner.max_model_len,
                num_speculative_tokens=num_speculative_tokens(method, num_drafts),
                chunk_granularity=chunk_granularity,
                pairs_per_token=pairs_per_token,
            ),
            config=self.config,
            speculation=cast(Speculation | None, self._speculation),
            num_host_blocks=num_host_blocks,
            keeps_prefixes=keeps_prefixes,
            disk_index=disk_index,
            num_blocks=num_blocks,
            fingerprint=self.runner.layout.fingerprint,
            eos_token_ids=frozenset({EOS_TOKEN_ID}),
            enable_prefix_caching=caching,
            swaps_late=num_copy_polls is not None,
            can_go_on=bool(goes_on),
        )
        self.outputs: dict[int, list[int]] = {}
        self._ids = count(1)

    def add(self, request: GenerationRequest, **kind: bool) -> Sequence:
        """Queue a new sequence for `request`."""
        sequence = self.make(request, **kind)
        self.scheduler.add(sequence)
        return sequence

    def make(self, request: GenerationRequest, **kind: bool) -> Sequence:
        """Return a new sequence for `request`, which arrives now and is queued later."""
        return Sequence(next(self._ids), request, **kind)

    def draft_with(self, speculation: Any) -> None:
        """Let a fake of `Speculation` draft from now on."""
        assert self._speculation is not None, "this engine does not draft"
        self._speculation.drafter = speculation

    def plan(self) -> PlannedStep:
        """Begin a step, with its invariants checked."""
        scheduler = self.scheduler
        self._take_copies()
        self.were_decoding = {s.sequence_id for s in scheduler.running if s.is_decoding}
        ahead, num_ahead = scheduler._ahead, self._num_ahead()
        as_foreseen = self._foreseen == _outlook(scheduler, scheduler.running, scheduler.pool)
        plan_now = None
        if ahead is not None and as_foreseen:
            scheduler._draft()
            plan_now = scheduler._decide()
        step = scheduler.plan()
        for swap in step.swap_copies:
            kind = CopyKind.SWAP_OUT if swap.is_out else CopyKind.SWAP_IN
            copy = CacheCopy(kind, swap.block_ids, swap.host_block_ids)
            self._copies.append((swap, self.runner.begin_copy(copy)))
        check_books(scheduler)
        self.was_ahead = self._num_ahead() > num_ahead
        if self.was_ahead and plan_now is not None:
            assert ahead is not None
            assert ahead._plan == plan_now, "another plan, though nothing unforeseen happened"
            self.num_as_foreseen += 1
        return step

    def _num_ahead(self) -> int:
        counted = self.plans_ahead
        return counted.get("taken", 0) + counted.get("begun", 0)

    def _take_copies(self) -> None:
        """Let the scheduler take the copies that have ended."""
        for swap, copy in list(self._copies):
            try:
                if not copy.is_done():
                    continue
                is_good = True
            except RuntimeError:
                is_good = False
            self._copies.remove((swap, copy))
            self.scheduler.end_copy(swap, is_good=is_good)
            check_books(self.scheduler)

    @property
    def swaps_under_way(self) -> list[SwapCopy]:
        """Swaps beside the steps that the scheduler has not been told the end of."""
        return [copy for copy, _ in self._copies if isinstance(copy, SwapCopy)]

    def step(self) -> StepOutputs:
        """Run a whole step, with its invariants checked."""
        step = self.plan()
        return self.apply(step)

    def apply(self, step: PlannedStep) -> StepOutputs:
        """Run and record a planned step."""
        for copy in step.swap_outs:
            self.runner.swap_out(copy.block_ids, copy.host_block_ids)
        for copy in step.swap_ins:
            self.runner.swap_in(copy.host_block_ids, copy.block_ids)
        results = self.runner.execute(step.batch)
        if self.is_ahead and step.batch:
            self.plan_ahead(step)
        outputs = self.scheduler.apply(step, results)
        check_books(self.scheduler)
        for output in outputs:
            tokens = self.outputs.setdefault(output.sequence.sequence_id, [])
            assert output.first_index == len(tokens), "an output index is missing or twice there"
            tokens += output.token_ids
        return outputs

    def plan_ahead(self, step: PlannedStep) -> None:
        """Plan what follows `step`, which must change nothing."""
        before = state_of(self.scheduler)
        self.scheduler.plan_ahead(step)
        assert state_of(self.scheduler) == before, "planning ahead has taken something"
        scheduler = self.scheduler
        size = scheduler.limits.block_size
        after = Forecast(step, scheduler.running, scheduler.seats, scheduler.pool, size)
        self._foreseen = _outlook(scheduler, after.running, after.pool)

    @property
    def plans_ahead(self) -> dict[str, int]:
        """How often a plan was made ahead, and what prevented it how often."""
        counted = self.scheduler.counters.plans_ahead
        return {rule: count for rule, count in counted.items() if count}

    def run(self, most_steps: int = 200) -> None:
        """Step until nothing is left to do."""
        self.run_until(
            lambda: not (self.scheduler.waiting or self.scheduler.running or self._copies),
            most_steps,
        )

    def run_until(self, is_reached: Callable[[], bool], most_steps: int = 200) -> None:
        """Step until the condition holds."""
        for _ in range(most_steps):
            if is_reached():
                return
            self.step()
        raise AssertionError(f"not there after {most_steps} steps")

    @property
    def num_preemptions(self) -> int:
        """Preemptions so far."""
        return self.scheduler.statistics().counters.num_preemptions

    def land(self, sequence: Sequence) -> StepOutput:
        """Write the prompt's KV into a receiving sequence's blocks as another node would."""
        size = self.scheduler.limits.block_size
        length = sequence.num_prompt
        elsewhere = Engine(
            num_blocks=length + 1, budget=max(length, 4), block_size=size, caching=False
        )
        source = elsewhere.add(sequence.request, is_exported=True)
        elsewhere.run()
        assert source.status is SequenceStatus.EXPORTING
        elsewhere.runner.copy_now(CacheCopy(CopyKind.STAGE_OUT, source.block_table))
        for index in range(sequence.num_cached_tokens // size, len(source.block_table)):
            ours, theirs = sequence.block_table[index], source.block_table[index]
            self.runner.kv_bytes[:, :, ours] = elsewhere.runner.kv_bytes[:, :, theirs]
            self.runner.copy_now(CacheCopy(CopyKind.STAGE_IN, [ours]))
        (first,) = elsewhere.outputs[source.sequence_id]
        output = self.scheduler.land(sequence, first, source.proposed_token_ids)
        check_books(self.scheduler)
        self.outputs[sequence.sequence_id] = [first]
        return output
