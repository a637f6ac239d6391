"""Prefixes that a prefill node pulls from a decode node instead of computing them. Pure.

The decode node of an attempt often holds more of the prompt than the prefill node: the answers of
earlier turns were generated there. Its ticket says how much. What is missing here then comes as any
handoff does, the other way: the prefill node opens a landing in its own pool and says so with its
acceptance, the router passes the ticket on, and the decode node sends the blocks that its sequence
holds. The prompt is queued when they have landed and are in the prefix cache, or when the pull
failed: then it is computed. A pull never changes an answer and fails no request.

A pull is tried where it should be quicker than computing:

    pulled    fixed time + tokens × time of a token's KV on the wire, both × what pulls took lately
    computed  what a step of so many tokens takes, by the costs measured at the start

The rule is that of llm-d's router: pull if α + β·Δ < Δ / rate. Its constants are guesses here until
the first pull has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from common.ids import Incarnation
from engine.core.blocks.cache_copy import CacheCopy, CopyKind
from engine.core.prefix_transfers import ComingPrefix
from engine.core.scheduler import Scheduler
from engine.core.sequences.sequence import Sequence
from engine.core.statistics import PullOutcome
from kv_transfer.contract import Commit, KVEvent, Landed, LandingFailed, Ticket
from node.flow.attempt_table import NodeAttempt
from node.flow.copies_under_way import CopiesUnderWay
from node.flow.landing_place import Tickets
from node.flow.messages import AbortTransfer, CommitTransfer, Effect, OpenTransfer, PushBlocks

FIXED_S = 0.02
BYTES_PER_S = 0.5e9
"""Less than any lane carries."""
_NEWEST = 0.25
"""Weight of the latest pull."""
_LEAST, _MOST = 1 / 64, 64.0
_FORGIVEN = 0.95
"""A pull that is not tried shows nothing: after some of them one is tried again."""
LEAST_PATIENCE_S = 5.0
TIMES_EXPECTED = 4.0
"""A pull may take so much longer than expected before the prompt is computed."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 3600.0
"""After a failed pull nothing is pulled from its node; twice as long after each further one."""
MOST_PAUSES = 1024


class PullCost:
    """The rule, corrected by what pulls take."""

    def __init__(self, token_bytes: float, compute_s: Callable[[int], float]) -> None:
        """Take the bytes of a token's KV, and the seconds of a step of so many tokens."""
        self._token_bytes = token_bytes
        self.compute_s = compute_s
        self._slowness = 1.0

    def expected_s(self, num_tokens: int) -> float:
        """Return the seconds that a pull of so many tokens is expected to take."""
        return self._slowness * self._planned_s(num_tokens)

    def is_worth(self, num_tokens: int) -> bool:
        """Return whether a pull is expected to be quicker than computing."""
        if self.expected_s(num_tokens) < self.compute_s(num_tokens):
            return True
        self._set(self._slowness * _FORGIVEN)
        return False

    def on_pulled(self, num_tokens: int, took_s: float) -> None:
        """Take how long a pull took, from its request to its landing."""
        found = took_s / self._planned_s(num_tokens)
        self._set(self._slowness + _NEWEST * (found - self._slowness))

    def _planned_s(self, num_tokens: int) -> float:
        return FIXED_S + num_tokens * self._token_bytes / BYTES_PER_S

    def _set(self, slowness: float) -> None:
        self._slowness = min(max(slowness, _LEAST), _MOST)


class Pauses:
    """The nodes that failed to send lately: at most `MOST_PAUSES`, the latest ones.

    A node may be out of reach for good, behind a firewall that lets KV through one way only; each
    pull from it would keep a prompt waiting in vain.
    """

    def __init__(self) -> None:
        self._pauses: dict[Incarnation, tuple[float, float]] = {}
        """The end of each pause, and its length."""

    def is_on(self, node: Incarnation, now_s: float) -> bool:
        """Return whether nothing is to be pulled from this node now."""
        return now_s < self._pauses.get(node, (now_s, 0.0))[0]

    def on_landed(self, node: Incarnation) -> None:
        """Take that the node sends."""
        self._pauses.pop(node, None)

    def on_failed(self, node: Incarnation, now_s: float) -> None:
        """Take that it did not send."""
        _, before_s = self._pauses.pop(node, (0.0, 0.0))
        pause_s = min(max(2 * before_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self._pauses[node] = now_s + pause_s, pause_s
        if len(self._pauses) > MOST_PAUSES:
            del self._pauses[next(iter(self._pauses))]


@dataclass(slots=True)
class _Pull:
    source: Incarnation
    attempt: NodeAttempt
    coming: ComingPrefix
    num_tokens: int
    end: int
    """The number of the prompt's first tokens that are cached when it has landed."""
    began_at_s: float


class PrefixPulls:
    """The pulls of a prefill node, by lease token.

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
        self._cost = cost
        self._copies = copies
        self._resume = resume
        self._pauses = Pauses()
        self._pulls: dict[int, _Pull] = {}

    def __contains__(self, lease_token: int) -> bool:
        return lease_token in self._pulls

    def begin(self, attempt: NodeAttempt, ticket: Ticket, now_s: float) -> Ticket | None:
        """Begin a pull of what `ticket` says that its decode node has cached.

        Returns the ticket for that node, or None where nothing is to be gained.
        """
        end = ticket.num_cached_tokens
        num_tokens = end - self._scheduler.num_cached_tokens(attempt.sequence)
        if num_tokens <= 0:
            return None
        source = ticket.decode_node
        if self._pauses.is_on(source, now_s) or not self._cost.is_worth(num_tokens):
            self._transfers.count(PullOutcome.DECLINED, num_tokens)
            return None
        coming = self._transfers.begin(attempt.sequence, end)
        if coming is None:
            self._transfers.count(PullOutcome.NO_ROOM, num_tokens)
            return None
        patience_s = max(LEAST_PATIENCE_S, TIMES_EXPECTED * self._cost.expected_s(num_tokens))
        num_kept = len(coming.kept_ids) * self._scheduler.limits.block_size
        pull = self._tickets.new(attempt.id, coming.block_ids, num_kept, patience_s)
        self._pulls[pull.lease_token] = _Pull(source, attempt, coming, num_tokens, end, now_s)
        attempt.pull_token = pull.lease_token
        return pull

    def on_event(self, event: KVEvent, now_s: float) -> list[Effect]:
        """Take an event of a pull."""
        token, pull = event.lease_token, self._pulls[event.lease_token]
        match event:
            case Landed(_, commit) if commit.num_tokens == pull.end:
                if self._copies is None:
                    self._land(token, now_s)
                    return []
                copy = CacheCopy(CopyKind.STAGE_IN, pull.coming.block_ids)
                return [self._copies.begin(copy, partial(self._on_staged, token, now_s))]
            case LandingFailed():
                self._fail(token, now_s)
            case _:  # it was released; or the commit is for other tokens
                self._free(token, now_s)
        return []

    def _on_staged(self, token: int, landed_at_s: float, error: Exception | None) -> list[Effect]:
        if error is None:
            self._land(token, landed_at_s)
        else:
            self._free(token, landed_at_s)
        return []

    def _land(self, token: int, now_s: float) -> None:
        pull = self._pulls.pop(token)
        self._transfers.land(pull.coming)
        self._cost.on_pulled(pull.num_tokens, now_s - pull.began_at_s)
        self._pauses.on_landed(pull.source)
        self._go_on(pull, PullOutcome.LANDED)

    def _free(self, token: int, now_s: float) -> None:
        """Fail a pull whose blocks nobody can write any more."""
        self._fail(token, now_s)
        self._transfers.free(self._pulls.pop(token).coming)

    def _fail(self, token: int, now_s: float) -> None:
        pull = self._pulls[token]
        self._transfers.fail(pull.coming)
        if pull.attempt.pull_token is not None:
            self._pauses.on_failed(pull.source, now_s)
        self._go_on(pull, PullOutcome.FAILED)

    def _go_on(self, pull: _Pull, outcome: PullOutcome) -> None:
        """Let the prompt be computed, once, unless its attempt is over."""
        if pull.attempt.pull_token is not None:
            pull.attempt.pull_token = None
            self._transfers.count(outcome, pull.num_tokens)
            self._resume(pull.attempt)


@dataclass(slots=True)
class _Send:
    block_ids: tuple[int, ...]
    commit: Commit
    is_copied: bool
    """What is sent can be read; before, its copy uses the blocks."""
    has_ended: bool = False


class PrefixSends:
    """What prefill nodes pull from a decode node, by lease token.

    With `copies`, cached blocks are copied to where transfers read them before they are pushed.
    """

    def __init__(self, scheduler: Scheduler, copies: CopiesUnderWay | None) -> None:
        self._transfers = scheduler.prefix_transfers
        self._block_size = scheduler.limits.block_size
        self._copies = copies
        self._sends: dict[int, _Send] = {}

    def __contains__(self, lease_token: int) -> bool:
        return lease_token in self._sends

    def begin(self, ticket: Ticket, sequence: Sequence) -> list[Effect]:
        """Send cached blocks of a seated sequence; nothing if the ticket does not fit it."""
        size, token = self._block_size, ticket.lease_token
        first, count = ticket.num_cached_tokens // size, len(ticket.target_block_ids)
        if ticket.num_cached_tokens % size or token in self._sends:
            return []
        block_ids = self._transfers.pin(sequence, first, count)
        if not block_ids:
            return []
        # Nothing is drawn: the prefill node reads no token from it.
        commit = Commit(num_tokens=(first + count) * size, first_token_id=0)
        self._sends[token] = _Send(block_ids, commit, is_copied=self._copies is None)
        push = PushBlocks(token, None, tuple(range(count)), block_ids)
        opened = OpenTransfer(ticket, ticket.lease_s)
        if self._copies is None:
            return [opened, push, CommitTransfer(token, commit)]
        copy = CacheCopy(CopyKind.STAGE_OUT, block_ids)
        return [opened, self._copies.begin(copy, partial(self._on_copied, token), push)]

    def on_ended(self, lease_token: int) -> None:
        """Release the blocks of a transfer that is over, when no copy uses them."""
        send = self._sends[lease_token]
        send.has_ended = True
        self._release(lease_token, send)

    def _on_copied(self, token: int, error: Exception | None) -> list[Effect]:
        send = self._sends[token]
        send.is_copied = True
        if send.has_ended:
            self._release(token, send)
            return []
        return [CommitTransfer(token, send.commit) if error is None else AbortTransfer(token)]

    def _release(self, token: int, send: _Send) -> None:
        if send.is_copied and send.has_ended:
            del self._sends[token]
            self._transfers.unpin(send.block_ids)
