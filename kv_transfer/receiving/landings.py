"""The open landings of a receiver: their blocks, their leases, and how each of them ends.

A landing's hold on its blocks ends when it lands or with `Released`; see `Copies` for what is being
copied then, and `quarantine` for lanes on which the sender writes by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Set

from common.errors import HandoffFailed
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.contract import Landed, LandingFailed, Released, Revoked, Ticket
from kv_transfer.receiving.effects import ReceiverEffect, SendBack, Write
from kv_transfer.receiving.landing import Landing
from kv_transfer.receiving.quarantine import Quarantine
from kv_transfer.receiving.sessions import Session, Sessions
from kv_transfer.shared.deadlines import Deadlines
from kv_transfer.shared.effects import Emit
from kv_transfer.shared.handshake import HandoffStep
from kv_transfer.shared.limits import MAX_REMEMBERED_OUTCOMES
from kv_transfer.wire import frames

Effects = list[ReceiverEffect]
Outcome = frames.Committed | frames.Failed
Lease = tuple[int, int]
"""Token and generation."""


class Copies:
    """Copies into the pool that are under way, by lease, and the blocks that wait for their ends.

    A copy may run on any thread and end at any time. So a landing is not whole, and the blocks of
    one that ended are not released, before the last copy that was begun for it has ended.

    Two copies of one piece may overlap: after a connection broke, its frames are sent again on
    another one. If one copy is damaged, nothing says which of the two wrote last, so the other one,
    although its own sum is right, does not count for the *spoiled* blocks.
    """

    def __init__(self) -> None:
        # With the ordinals of the blocks that are spoiled in each.
        self._under_way: dict[Lease, dict[Write, set[int]]] = {}
        self._held: dict[Lease, tuple[int, ...]] = {}
        self._held_blocks: set[int] = set()

    @property
    def num_held_blocks(self) -> int:
        return len(self._held_blocks)

    def begin(self, write: Write) -> None:
        """Record that this copy may touch the pool from now on."""
        self._under_way.setdefault(_lease_of(write), {})[write] = set()

    def end(self, write: Write) -> bool:
        """Record that it has ended; return whether that released the blocks of `hold`."""
        lease = _lease_of(write)
        writes = self._under_way.get(lease)
        if writes is None:
            return False
        del writes[write]
        if writes:
            return False
        del self._under_way[lease]
        return self._release(lease)

    def spoil(self, damaged: Write, ordinals: Set[int]) -> None:
        """Record that a damaged copy may have overwritten these blocks of the other copies."""
        for write, spoiled in self._under_way.get(_lease_of(damaged), {}).items():
            if write is not damaged and write.data.layer == damaged.data.layer:
                spoiled |= ordinals

    def spoiled(self, write: Write) -> Set[int]:
        """Return the ordinals of the blocks that do not count when this copy ends."""
        return self._under_way.get(_lease_of(write), {}).get(write, set())

    def is_under_way(self, lease: Lease) -> bool:
        return lease in self._under_way

    def hold(self, lease: Lease, blocks: Iterable[int]) -> None:
        """Keep the blocks of a landing that ended until its copies have ended."""
        self._held[lease] = tuple(blocks)
        self._held_blocks.update(self._held[lease])

    def holds(self, block: int) -> bool:
        return block in self._held_blocks

    def release_all(self) -> list[int]:
        """Record that every copy has ended; return the tokens whose blocks that released."""
        self._under_way.clear()
        return [lease[0] for lease in list(self._held) if self._release(lease)]

    def _release(self, lease: Lease) -> bool:
        blocks = self._held.pop(lease, None)
        self._held_blocks.difference_update(blocks or ())
        return blocks is not None


def _lease_of(write: Write) -> Lease:
    return write.data.lease_token, write.data.generation


class Landings:
    """Landings by lease token. Those that end tell `sessions`; their blocks may be quarantined."""

    def __init__(
        self,
        me: Incarnation,
        layout: KVLayout,
        sessions: Sessions,
        quarantine: Quarantine,
        copies: Copies,
        num_blocks: int,
    ) -> None:
        self._me = me
        self._layout = layout
        self._sessions = sessions
        self._quarantine = quarantine
        self._copies = copies
        self._num_blocks = num_blocks
        self._by_token: dict[int, Landing] = {}
        self._token_of_block: dict[int, int] = {}
        # Times at which a landing expires unless its sender was heard since.
        self._leases: Deadlines[int] = Deadlines()
        # Kept so that a commit repeated after a lost answer gets the same answer again.
        self._outcomes: OrderedDict[int, Outcome] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_token)

    def get(self, token: int) -> Landing | None:
        return self._by_token.get(token)

    def of(self, write: Write) -> Landing | None:
        """Return the open landing that `write` was checked against."""
        landing = self._by_token.get(write.data.lease_token)
        if landing is None or landing.ticket.generation != write.data.generation:
            return None
        return landing

    def all(self) -> list[Landing]:
        return list(self._by_token.values())

    def outcome(self, token: int) -> Outcome | None:
        """Return how a landing ended, as reported to its sender; only the latest are kept."""
        return self._outcomes.get(token)

    def expect(self, ticket: Ticket, sender_deadline_s: float, now_s: float) -> None:
        """Open a landing; `ValueError` unless the ticket is this node's, with unused blocks."""
        token, blocks = ticket.lease_token, ticket.target_block_ids
        if token in self._by_token or token in self._outcomes:
            raise ValueError(f"lease {token:#x} is or was open already")
        if ticket.decode_node != self._me or ticket.fingerprint != self._layout.fingerprint:
            raise ValueError(f"lease {token:#x} is for another node or KV layout")
        if not blocks or len(set(blocks)) != len(blocks):
            raise ValueError(f"lease {token:#x} has no target block, or one twice")
        for block in blocks:
            if not 0 <= block < self._num_blocks or block in self._token_of_block:
                raise ValueError(f"target block {block} is outside the pool or lands already")
            if self._quarantine.holds(block) or self._copies.holds(block):
                raise ValueError(f"target block {block} was not released yet")
        self._token_of_block.update(dict.fromkeys(blocks, token))
        landing = Landing(ticket, self._layout, sender_deadline_s=sender_deadline_s, now_s=now_s)
        self._by_token[token] = landing
        self._leases.set_no_later(token, landing.expires_at_s)

    def find(self, session: Session, frame: frames.Begin | frames.CommitFrame) -> Landing | Outcome:
        """Return the open landing that `frame` belongs to, or the reply that there is none."""
        landing = self._by_token.get(frame.lease_token)
        outcome = self._outcomes.get(frame.lease_token)
        if landing is None and outcome is not None and outcome.generation == frame.generation:
            return outcome
        if landing is None:
            problem = f"{self._me} has no such lease"
        elif landing.ticket.generation != frame.generation:
            problem = (
                f"the lease is at generation {landing.ticket.generation}, "
                f"the sender names {frame.generation}"
            )
        elif landing.sender not in (None, session.sender):
            problem = f"{landing.sender} writes here, not {session.sender}"
        else:
            return landing
        return frames.Failed(frame.lease_token, frame.generation, HandoffFailed.code, problem)

    def expire(self, now_s: float) -> Effects:
        """Fail the landings whose senders were silent for too long."""
        effects: Effects = []
        for landing in [self._by_token[token] for token in self._leases.take_due(now_s)]:
            if now_s >= landing.expires_at_s:
                error = HandoffFailed(f"the sender was silent for {landing.sender_deadline_s:g} s")
                effects += self.fail(landing, HandoffStep.EXPIRE, error)
            else:
                self._leases.set_no_later(landing.token, landing.expires_at_s)
        return effects

    def next_deadline_s(self) -> float | None:
        """Return when to call `expire`."""
        return self._leases.next_s()

    def complete(self, landing: Landing) -> Effects:
        """Land the landing if nothing is missing and nothing is being copied, or fail it.

        A piece that came twice may be copied once more when all have arrived.
        """
        if self._copies.is_under_way(_lease(landing)):
            return []
        try:
            commit = landing.complete()
        except HandoffFailed as error:
            return self.fail(landing, HandoffStep.FAIL, error)
        if commit is None:
            return []
        outcome = frames.Committed(landing.token, landing.ticket.generation)
        return [*self._forget(landing, outcome), Emit(Landed(landing.token, commit))]

    def fail(self, landing: Landing, step: HandoffStep, error: HandoffFailed) -> Effects:
        failed = Emit(LandingFailed(landing.token, error))
        return [failed, *self.close(landing, step, error)]

    def fail_all(self, sender: Incarnation, step: HandoffStep, error: HandoffFailed) -> Effects:
        """Fail the landings of a sender, which has no session; some began on earlier ones."""
        landings = [one for one in self._by_token.values() if one.sender == sender]
        return [effect for one in landings for effect in self.fail(one, step, error)]

    def close(self, landing: Landing, step: HandoffStep, error: HandoffFailed) -> Effects:
        """End a landing without KV; its blocks are released when nothing can write them."""
        session, outcome = landing.session, failed_frame(landing, error)
        if landing.may_be_written and session is not None:
            self._quarantine.add(landing, session, landing.lane)
            return self._forget(landing, outcome)
        landing.advance(step)
        ended = self._forget(landing, outcome)
        if self._copies.is_under_way(_lease(landing)):
            self._copies.hold(_lease(landing), landing.ticket.target_block_ids)
            return ended
        return [*ended, Emit(Released(landing.token))]

    def _forget(self, landing: Landing, outcome: Outcome) -> Effects:
        """Close the landing, keep its outcome, notify its sender."""
        del self._by_token[landing.token]
        self._leases.discard(landing.token)
        if landing.sender is not None:
            self._sessions.ended(landing.sender)
        for block in landing.ticket.target_block_ids:
            del self._token_of_block[block]
        self._outcomes[landing.token] = outcome
        if len(self._outcomes) > MAX_REMEMBERED_OUTCOMES:
            self._outcomes.popitem(last=False)
        return [] if landing.session is None else [SendBack(landing.session, outcome)]


def failed_frame(landing: Landing, error: HandoffFailed) -> frames.Failed:
    """Return the frame for the sender of a landing that ended with `error`."""
    code = frames.LEASE_REVOKED if isinstance(error, Revoked) else error.code
    return frames.Failed(landing.token, landing.ticket.generation, code, str(error))


def _lease(landing: Landing) -> Lease:
    return landing.token, landing.ticket.generation
