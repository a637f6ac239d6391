"""Which nodes each request of a router gets, by all that the router knows of them. Pure.

`Placer` chooses by the nodes and one request. What earlier requests taught comes here: the nodes of
its session, and the pairs whose handoffs fail.
"""

from __future__ import annotations

from common.ids import Incarnation
from router.core.effects import Choose
from router.core.known.block_reports import BlockReport
from router.core.known.pair_health import Pair, PairHealth
from router.core.known.roster import Roster
from router.core.known.sessions import KnownSessions, Placed, SessionNodes
from router.core.placement import ChosenNodes, Placer
from router.core.policies.query import Query


class Chooser:
    """A `Placer`, the pairs that it avoids, and where the requests of sessions were placed."""

    def __init__(self, policy: str, session_ttl_s: float, seed: int) -> None:
        """Look the policy up. Raises `KeyError` for a policy that does not exist.

        A session is known for `session_ttl_s` after its last request was placed. From `seed`
        follows which nodes of a wide cluster are looked at.
        """
        self._placer = Placer(policy, seed)
        self._pairs = PairHealth()
        self._sessions = KnownSessions(session_ttl_s)

    @property
    def num_sessions(self) -> int:
        """Sessions that are known."""
        return len(self._sessions)

    @property
    def num_known_blocks(self) -> int:
        """Blocks that nodes have reported."""
        return self._placer.num_known_blocks

    @property
    def has_failed_pairs(self) -> bool:
        """Whether a pair failed that has not worked since."""
        return bool(self._pairs)

    def choose(
        self, nodes: Roster, query: Query, wanted: Choose, now_s: float
    ) -> tuple[ChosenNodes, Placed | None]:
        """Choose nodes, or a prefill node for a reservation; for a session, say how it is placed.

        Raises `InvalidRequest` and `Overloaded` as `Placer` does.
        """
        avoided = self._pairs.avoided(now_s) | nodes.unreachable
        if query.session:
            query.last = self._sessions.last(query.session, now_s)
        if wanted.decode is None:
            chosen = self._placer.choose(nodes, query, wanted.excluded, avoided)
        else:
            chosen = self._placer.choose_prefill(
                nodes, query, wanted.decode, wanted.excluded, avoided
            )
        if chosen.prefill is not None and chosen.decode is not None:
            self._pairs.on_placed((chosen.prefill, chosen.decode), now_s)
        if not query.session:
            return chosen, None
        at = SessionNodes(chosen.decode, chosen.prefill, len(query.prompt_token_ids))
        return chosen, self._sessions.on_placed(query.session, at, now_s)

    def on_blocks(self, node: Incarnation, report: BlockReport) -> int:
        """Take what a node says of its prefix cache; return how many blocks had no room."""
        return self._placer.on_blocks(node, report)

    def on_lost(self, node: Incarnation) -> None:
        """Forget what a node holds: it will say it again, if it comes back."""
        self._placer.on_lost(node)

    def on_worked(self, pair: Pair) -> bool:
        """Take that a handoff worked; return whether the pair had failed before."""
        return self._pairs.on_worked(pair)

    def on_failed(self, pair: Pair, now_s: float) -> tuple[int, float] | None:
        """Take that a handoff failed; return what `PairHealth.on_failed` does."""
        return self._pairs.on_failed(pair, now_s)
