"""What nodes say to each other through this router: pulls, refusals of pulls, offers of blocks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from common.ids import Incarnation
from common.observing.clock import Clock
from protos import pdserve_node_pb2 as pb
from router.core.membership import Membership
from router.core.prefix_sources import WarmWishes, heir_of
from router.dispatch.client.node_clients import NodeClient

log = logging.getLogger("pdserve.router.nodes")

MOST_PER_SOURCE = 64
"""As many as a node answers at once; one passed on before these has ended, or is refused."""


class PassedPulls:
    """The latest pulls of each source: who asked, and with which lease token.

    Whether one of them has ended is not known here: a node ignores what it does not wait for.
    """

    def __init__(self) -> None:
        self._pulls: dict[Incarnation, deque[tuple[Incarnation, int]]] = {}

    def add(self, source: Incarnation, node: Incarnation, lease_token: int) -> None:
        """Record that a pull of `node` was passed on to `source`."""
        latest = self._pulls.setdefault(source, deque(maxlen=MOST_PER_SOURCE))
        latest.append((node, lease_token))

    def take(self, source: Incarnation) -> list[tuple[Incarnation, int]]:
        """Return and forget the pulls of a source that is lost."""
        return list(self._pulls.pop(source, ()))


class BetweenNodes:
    """Passes on what nodes have for each other. `client` returns that of a member."""

    def __init__(
        self,
        client: Callable[[Incarnation], NodeClient | None],
        membership: Membership,
        clock: Clock,
    ) -> None:
        self._client = client
        self._membership = membership
        self._clock = clock
        self._passed = PassedPulls()
        self._wishes = WarmWishes()

    def take(self, node: Incarnation, message: pb.NodeMessage) -> None:
        """Take a message of a node for what it has for others."""
        for pull in message.pulls:
            self._pull(node, pull)
        for refused in message.refused_pulls:
            self._refuse(Incarnation(refused.node_id, refused.epoch), refused.lease_token)
        if message.offered_hashes:
            to = message.offered_to
            new = Incarnation(to.node_id, to.epoch) if message.HasField("offered_to") else None
            self._offer(node, message.offered_hashes, new)
        if message.warm_from:
            self._wishes.add(node, message.warm_from, self._clock.now_s())
            self.warm()

    def on_lost(self, lost: Incarnation) -> None:
        """Report the loss of a node to the nodes that pull from it."""
        self._wishes.forget(lost)
        for node, lease_token in self._passed.take(lost):
            self._refuse(node, lease_token)

    def warm(self) -> None:
        """Ask other nodes what new ones may pull of them, as far as they are heard by now."""
        if not self._wishes:
            return
        members = self._membership
        settled = self._wishes.settle(members.nodes(), members.records(), self._clock.now_s())
        for new, wanted, source in settled:
            client = None if source is None else self._client(source)
            if client is not None:
                client.calls.offer_nowait(new)
                continue
            log.info("%s starts cold: warm_from is %r, and no such node can send it", new, wanted)

    def _pull(self, node: Incarnation, pull: pb.Pull) -> None:
        """Pass a pull on to its source, unread; say at once if nobody answers."""
        source, token = Incarnation(pull.source_id, pull.source_epoch), pull.ticket.lease_token
        client = self._client(source)
        if client is not None and client.calls.pull_nowait(pull):
            self._passed.add(source, node, token)
        else:
            self._refuse(node, token)

    def _refuse(self, node: Incarnation, lease_token: int) -> None:
        client = self._client(node)
        if client is not None:
            client.calls.refuse_pull_nowait(lease_token)

    def _offer(self, node: Incarnation, block_hashes: bytes, new: Incarnation | None) -> None:
        """Let a new node, or one that stays, pull what this one has."""
        heir = new or heir_of(node, self._membership.nodes())
        client = None if heir is None else self._client(heir)
        if client is not None:
            log.info("cached blocks of %s, which %s, go to %s", node, _why(new), heir)
            fetch = pb.Fetch(source_id=node.node_id, source_epoch=node.epoch)
            fetch.block_hashes = block_hashes
            client.calls.fetch_nowait(fetch)


def _why(new: Incarnation | None) -> str:
    return "leaves" if new is None else "warms it"
