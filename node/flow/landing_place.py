"""Where KV of other nodes lands on this node, and the tickets that allow it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.ids import AttemptId, Incarnation
from kv_transfer.contract import Ticket

NewLeaseToken = Callable[[], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingPlace:
    """What a node writes into its tickets: where KV lands, and in which layout.

    A tensor-parallel node would attach here: one endpoint and one fingerprint for each rank, in the
    place and in `Ticket`, with the same target blocks on every rank.
    """

    node: Incarnation
    kv_endpoint: str
    fingerprint: str
    kv_description: str
    layer_bytes: tuple[int, ...]
    """Bytes of a block, by layer."""
    lease_s: float


class Tickets:
    """Writes tickets for one landing place. `new_lease_token` draws random tokens."""

    def __init__(self, place: LandingPlace, new_lease_token: NewLeaseToken) -> None:
        self.place = place
        self._new_lease_token = new_lease_token
        self._generation = 0

    def new(
        self,
        attempt: AttemptId,
        target_block_ids: Sequence[int],
        num_cached_tokens: int,
        lease_s: float,
        *,
        may_be_short: bool = False,
    ) -> Ticket:
        """Return a ticket for the tokens from `num_cached_tokens` on; a lease is bounded."""
        self._generation += 1
        return Ticket(
            attempt=attempt,
            decode_node=self.place.node,
            kv_endpoint=self.place.kv_endpoint,
            lease_token=self._new_lease_token(),
            generation=self._generation,
            target_block_ids=tuple(target_block_ids),
            num_cached_tokens=num_cached_tokens,
            fingerprint=self.place.fingerprint,
            kv_description=self.place.kv_description,
            lease_s=min(self.place.lease_s, lease_s),
            may_be_short=may_be_short,
        )
