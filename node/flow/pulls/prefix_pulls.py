"""Prefixes that a node pulls from another one instead of computing them. Pure.

Another node often holds more of a prompt than the one that is to compute it: the answers of earlier
turns were generated on a decode node, and another prefill node computed the turns themselves. The
router names the node that holds most. What is missing here, in every tier, then comes as any
handoff does: this node opens a landing in its own pool and asks, through the router, for the blocks
by their hashes, and the source sends them, or the first ones (`prefix_sends`). The prompt is queued
when they have landed and are in the prefix cache here, or when the pull failed: then it is
computed. What a source has in files and does not send at once is asked for again, where that pays.
A pull never changes an answer and fails no request. Prompts that lack the same blocks wait for one
pull.

A pull takes its blocks at once, and they are written as soon as the source sends. Where that evicts
what is to be kept in host memory and is not there yet, it waits while that is copied, some blocks
with each step. Pulls begin in the order in which they came, before the step is planned. One that
would end too late is given up, and its prompt is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from common.ids import AttemptId
from common.kv.blocks import BlockHash
from common.kv.prefix_source import PrefixSource
from engine.core.blocks.cache_copy import CacheCopy, CopyKind
from engine.core.prefix_transfers import ComingPrefix
from engine.core.scheduler import Scheduler
from engine.core.statistics import PullOutcome
from kv_transfer.contract import Commit, GivenUp, KVEvent, Landed, LandingFailed
from node.flow.attempts.attempt_table import NodeAttempt
from node.flow.copies_under_way import CopiesUnderWay
from node.flow.landing_place import Tickets
from node.flow.messages import AskBlocks, CloseLanding, Effect, FetchBlocks, OpenLanding
from node.flow.pulls.pull_cost import Pauses, PullCost

LEAST_PATIENCE_S = 5.0
TIMES_EXPECTED = 4.0
"""A pull may take so much longer than expected before the prompt is computed."""
PART_BLOCKS = 256
"""How many blocks of a node that leaves, or that warms this one, are pulled at once."""
FETCH_S = 60.0
"""How long such parts follow each other."""
MOST_ID_LENGTH = 64
MOST_BLOCKS = 8192
"""The most blocks of one pull. What is behind them is computed."""


HasRoom = Callable[[Sequence[int], int], bool]
"""Says whether so many blocks behind others can begin to come."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A pull that was asked for at `since_s`."""

    attempt: NodeAttempt
    source: PrefixSource
    since_s: float


@dataclass(slots=True)
class _Pull:
    source: PrefixSource
    coming: ComingPrefix
    num_tokens: int
    """The tokens that it brings, which are in no tier here."""
    num_read: int
    """How many of them its source reads from disk first."""
    num_kept_tokens: int
    """Tokens of the cached blocks before it; its commit counts them too."""
    num_at_source: int
    """Tokens of other requests that the source's step was expected to compute."""
    began_at_s: float
    waiting: list[NodeAttempt]
    rest: FetchBlocks | None = None
    """Further blocks to fetch after it has landed; no prompt waits for them."""
    is_over: bool = False
    """No attempt waits for it any more, but its blocks may still be written."""


class PrefixPulls:
    """The pulls of a node, by lease token.

    `resume` is called with an attempt that need not wait any more. With `copies`, what landed is
    copied to where steps read it before it is used.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tickets: Tickets,
        cost: PullCost,
        *,
        copies: CopiesUnderWay | None,
        resume: Callable[[NodeAttempt], None],
    ) -> None:
        self._scheduler = scheduler
        self._transfers = scheduler.prefix_transfers
        self._tickets = tickets
        self.cost = cost
        self._copies = copies
        self._resume = resume
        self._pauses = Pauses()
        self._fetch_until_s = 0.0
        self._pulls: dict[int, _Pull] = {}
        self._waiting: OrderedDict[AttemptId, _Wanted] = OrderedDict()
        """Pulls for which room is being made, in the order in which they came."""
        self._waiting_part: FetchBlocks | None = None
        """The part to fetch when no prompt waits for room."""

    def __len__(self) -> int:
        """Return how many pulls are under way, and how many may still be written."""
        return len(self._pulls)

    def __contains__(self, lease_token: int) -> bool:
        return lease_token in self._pulls

    @property
    def wait_for_room(self) -> bool:
        """Whether `begin_waiting` has something to do."""
        return bool(self._waiting) or self._waiting_part is not None

    def begin(self, attempt: NodeAttempt, source: PrefixSource, now_s: float) -> list[Effect]:
        """Pull the prefix that `source` has cached, if that pays; the prompt then waits for it."""
        wanted = _Wanted(attempt, source, now_s)
        effects = self._begin(wanted, now_s, self._has_room)
        if effects is None:
            attempt.waits_for_room = True
            self._waiting[attempt.id] = wanted
        return effects or []

    def begin_waiting(self, now_s: float) -> list[Effect]:
        """Begin the pulls that wait for room, or make some. A plan must follow.

        The effects are to be performed when the copies of its step were made.
        """
        effects: list[Effect] = []
        while self._waiting:
            wanted = next(iter(self._waiting.values()))
            begun = self._begin(wanted, now_s, self._transfers.make_room)
            if begun is None:
                return effects
            effects += begun
            del self._waiting[wanted.attempt.id]
            wanted.attempt.waits_for_room = False
            if wanted.attempt.pull_token is None:
                self._resume(wanted.attempt)
        part, self._waiting_part = self._waiting_part, None
        if part is not None:
            effects += self._fetch_part(part, now_s, self._transfers.make_room)
        return effects

    def _has_room(self, kept_ids: Sequence[int], num_blocks: int) -> bool:
        return not self._waiting and self._transfers.has_room(kept_ids, num_blocks)

    def _begin(self, wanted: _Wanted, now_s: float, has_room: HasRoom) -> list[Effect] | None:
        """Begin a pull if something is to be gained; None: it must wait for room."""
        attempt, source = wanted.attempt, wanted.source
        size = self._scheduler.limits.block_size
        kept_ids, block_hashes = self._transfers.missing(attempt.sequence, source.num_tokens)
        del block_hashes[MOST_BLOCKS:]
        num_tokens = len(block_hashes) * size
        if not block_hashes or source.node == self._tickets.place.node:
            return []
        if self._join(attempt, block_hashes):
            return []
        if self._pauses.is_on(source.node, now_s):
            self._transfers.count(PullOutcome.AVOIDED, num_tokens)
            return []
        num_read = min(source.num_disk_tokens, num_tokens)
        num_before = self._scheduler.num_queued_tokens
        most_in_step = self._scheduler.limits.max_num_batched_tokens
        num_at_source = min(source.num_queued_tokens, most_in_step)
        if not self.cost.is_worth(
            num_tokens, num_before, num_read=num_read, num_at_source=num_at_source
        ):
            self._transfers.count(PullOutcome.DECLINED, num_tokens)
            return []
        expected_s = self.cost.expected_s(num_tokens + num_read, num_at_source)
        patience_s = max(LEAST_PATIENCE_S, TIMES_EXPECTED * expected_s)
        patience_s -= now_s - wanted.since_s
        is_late = patience_s < expected_s
        if not is_late and not has_room(kept_ids, len(block_hashes)):
            return None
        coming = None if is_late else self._transfers.begin(kept_ids, block_hashes)
        if coming is None:
            self._transfers.count(PullOutcome.NO_ROOM, num_tokens)
            return []
        num_kept = len(kept_ids) * size
        ticket = self._tickets.new(
            attempt.id, coming.block_ids, num_kept, patience_s, may_be_short=True
        )
        attempt.pull_token = ticket.lease_token
        self._pulls[ticket.lease_token] = _Pull(
            source, coming, num_tokens, num_read, num_kept, num_at_source, now_s, [attempt]
        )
        ask = AskBlocks(attempt.router, source.node, ticket, coming.block_hashes)
        return [OpenLanding(ticket), ask]

    def fetch(self, message: FetchBlocks, now_s: float) -> list[Effect]:
        """Pull what is not cached here, a part at a time, into no more than half of what is free or
        can be evicted. It ends with the first part that does not land, and after `FETCH_S`."""
        is_fetching = any(one.rest and not one.is_over for one in self._pulls.values())
        is_fetching |= self._waiting_part is not None
        is_of_use = self._transfers.are_of_use and message.source != self._tickets.place.node
        if is_fetching or not is_of_use:
            return []
        most = self._scheduler.pool.num_available // 2
        wanted = self._lacking(message.block_hashes)[:most]
        self._fetch_until_s = now_s + FETCH_S
        wish = replace(message, block_hashes=tuple(wanted))
        return self._fetch_part(wish, now_s, self._has_room)

    def end_fetching(self) -> None:
        """Fetch no further parts: this node leaves, and would not use them."""
        self._fetch_until_s = 0.0
        self._waiting_part = None

    def _lacking(self, block_hashes: Sequence[BlockHash]) -> list[BlockHash]:
        return [one for one in block_hashes if not self._transfers.has(one)]

    def _fetch_part(self, message: FetchBlocks, now_s: float, has_room: HasRoom) -> list[Effect]:
        scheduler, source = self._scheduler, message.source
        size, wanted = scheduler.limits.block_size, self._lacking(message.block_hashes)
        part = wanted[: min(PART_BLOCKS, scheduler.pool.num_available // 2)]
        if not part or now_s >= self._fetch_until_s:
            return []
        if not has_room((), len(part)):
            self._waiting_part = message
            return []
        coming = self._transfers.begin([], part)
        if coming is None:
            return []
        rest = replace(message, block_hashes=tuple(wanted[len(part) :]))
        num_tokens = len(part) * size
        attempt = AttemptId(f"fetch-{source.node_id}"[:MOST_ID_LENGTH], 1)
        ticket = self._tickets.new(
            attempt, coming.block_ids, 0, LEAST_PATIENCE_S, may_be_short=True
        )
        self._pulls[ticket.lease_token] = _Pull(
            PrefixSource(source, num_tokens), coming, num_tokens, 0, 0, 0, now_s, [], rest
        )
        ask = AskBlocks(message.router, source, ticket, coming.block_hashes)
        return [OpenLanding(ticket), ask]

    def leave(self, attempt: NodeAttempt) -> list[Effect]:
        """Let an attempt wait no more, which is over; what comes for nobody else is refused."""
        if self._waiting.pop(attempt.id, None) is not None:
            attempt.waits_for_room = False
        token, attempt.pull_token = attempt.pull_token, None
        if token is None:
            return []
        pull = self._pulls[token]
        pull.waiting.remove(attempt)
        if pull.waiting:
            return []
        pull.is_over = True
        return [CloseLanding(token)]

    def on_refused(self, lease_token: int, now_s: float) -> list[Effect]:
        """End the waiting for a pull that was refused."""
        pull = self._pulls.get(lease_token)
        if pull is None or pull.is_over:
            return []
        self._pauses.on_failed(pull.source.node, now_s)
        self._end(pull, PullOutcome.FAILED)
        return [CloseLanding(lease_token)]

    def on_event(self, event: KVEvent, now_s: float) -> list[Effect]:
        """Take an event of a pull."""
        token, pull = event.lease_token, self._pulls[event.lease_token]
        match event:
            case Landed(_, commit) if num_blocks := self._num_landed(pull, commit):
                if self._copies is None:
                    return self._land(token, num_blocks, now_s)
                copy = CacheCopy(CopyKind.STAGE_IN, pull.coming.block_ids[:num_blocks])
                on_end = partial(self._on_staged, token, num_blocks, now_s)
                return [self._copies.begin(copy, on_end)]
            case LandingFailed(_, error):
                self._fail(token, now_s, is_missed=isinstance(error, GivenUp))
            case _:  # it was released; or the commit is for other tokens
                self._free(token, now_s)
        return []

    def _join(self, attempt: NodeAttempt, block_hashes: list[BlockHash]) -> bool:
        """Let an attempt wait for a pull in progress that brings half of these tokens or more."""
        half = len(block_hashes) // 2
        for token, pull in self._pulls.items():
            coming = pull.coming.block_hashes
            # A hash covers all before it: where one is equal, those before it are, or are here.
            is_fit = not pull.is_over and pull.rest is None and half < len(coming)
            if is_fit and coming[half] == block_hashes[half]:
                pull.waiting.append(attempt)
                attempt.pull_token = token
                return True
        return False

    def _num_landed(self, pull: _Pull, commit: Commit) -> int:
        """Return how many whole blocks a commit is for; 0: it is for other tokens."""
        num_tokens = commit.num_tokens - pull.num_kept_tokens
        num_blocks, num_beyond = divmod(num_tokens, self._scheduler.limits.block_size)
        is_fit = 0 < num_tokens <= pull.num_tokens and not num_beyond
        return num_blocks if is_fit else 0

    def _on_staged(
        self, token: int, num_blocks: int, landed_at_s: float, error: Exception | None
    ) -> list[Effect]:
        if error is None:
            return self._land(token, num_blocks, landed_at_s)
        self._free(token, landed_at_s)
        return []

    def _land(self, token: int, num_blocks: int, now_s: float) -> list[Effect]:
        pull = self._pulls.pop(token)
        self._transfers.land(pull.coming, num_blocks)
        num_left = pull.num_tokens - num_blocks * self._scheduler.limits.block_size
        pull.num_tokens -= num_left
        num_read = max(pull.num_read - num_left, 0)  # what is in files alone is behind the rest
        num_moved = pull.num_tokens + num_read
        self.cost.on_pulled(num_moved, pull.began_at_s, now_s, pull.num_at_source)
        self._pauses.on_landed(pull.source.node)
        if num_left and pull.num_read and not pull.is_over:
            return self._go_on(pull, now_s)
        rest = None if pull.is_over else pull.rest
        self._end(pull, PullOutcome.LANDED)
        return [] if rest is None else self._fetch_part(rest, now_s, self._has_room)

    def _go_on(self, pull: _Pull, now_s: float) -> list[Effect]:
        """Ask for the rest of what a source has in files, and could not read at once."""
        effects: list[Effect] = []
        waiting, pull.waiting = pull.waiting, []
        self._end(pull, PullOutcome.LANDED)
        for attempt in waiting:
            attempt.pull_token = None
            attempt.num_pulled_tokens += pull.num_tokens
            effects += self.begin(attempt, pull.source, now_s)
            self._resume(attempt)
        return effects

    def _free(self, token: int, now_s: float) -> None:
        """Fail a pull whose blocks nobody can write any more."""
        self._fail(token, now_s)
        self._transfers.free(self._pulls.pop(token).coming)

    def _fail(self, token: int, now_s: float, *, is_missed: bool = False) -> None:
        pull = self._pulls[token]
        self._transfers.fail(pull.coming)
        if not pull.is_over and not is_missed:
            self._pauses.on_failed(pull.source.node, now_s)
        self._end(pull, PullOutcome.MISSED if is_missed else PullOutcome.FAILED)

    def _end(self, pull: _Pull, outcome: PullOutcome) -> None:
        """Resume the attempts that waited for this pull and are not over, once."""
        if pull.is_over:
            return
        pull.is_over = True
        self._transfers.count(outcome, pull.num_tokens, is_fetched=pull.rest is not None)
        for attempt in pull.waiting:
            attempt.pull_token = None
            if outcome is PullOutcome.LANDED:
                attempt.num_pulled_tokens += pull.num_tokens
            self._resume(attempt)
