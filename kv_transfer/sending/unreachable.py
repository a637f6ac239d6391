"""Decode nodes that did not answer: refused at once, and tried again after growing pauses.

A transfer to a node whose KV port is dead would wait for the whole peer timeout, and so would the
next one. After the first failure transfers to that node are refused without waiting. The sender
connects again by itself, without a transfer, after `FIRST_PAUSE_S`, then twice that, and so on: a
node that answers is used again, and no transfer waits to find that out. After `MAX_OWN_TRIES` it is
tried only when a transfer to it was refused since.

Those that are being tried again are told to routers, which place nothing on such a pair meanwhile.
The others are not told, because a router has to place a transfer on them before they are tried.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

from common.ids import Incarnation
from common.nodes import MAX_KV_UNREACHABLE
from kv_transfer.sending.transfer_errors import PeerUnreachable
from kv_transfer.shared.deadlines import Deadlines
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.limits import MAX_REMEMBERED_PEERS

FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 60.0
MAX_OWN_TRIES = 8


@dataclass(slots=True)
class _Silence:
    num_failures: int
    retry_at_s: float
    is_wanted: bool = False

    @property
    def is_retried(self) -> bool:
        """Whether the sender connects again at `retry_at_s`."""
        return self.is_wanted or self.num_failures <= MAX_OWN_TRIES


class UnreachablePeers:
    """The peers that failed to answer and have not answered since, at most a fixed number.

    `tried_again` are those that the sender will try again by itself, the latest first and at most
    `MAX_KV_UNREACHABLE`. It is replaced and never changed, so any thread may read it.
    """

    def __init__(self) -> None:
        self.tried_again: tuple[Incarnation, ...] = ()
        self._peers: OrderedDict[Peer, _Silence] = OrderedDict()
        self._retries: Deadlines[Peer] = Deadlines()

    def failed(self, peer: Peer, now_s: float) -> tuple[int, float]:
        """Record that `peer` did not answer; return how often in a row, and the pause in s."""
        known = self._peers.pop(peer, None)
        num_failures = known.num_failures + 1 if known else 1
        pause_s = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(num_failures - 1, 10))
        self._peers[peer] = _Silence(num_failures, now_s + pause_s)
        self._plan(peer)
        if len(self._peers) > MAX_REMEMBERED_PEERS:
            forgotten, _ = self._peers.popitem(last=False)
            self._retries.discard(forgotten)
        self._tell()
        return num_failures, pause_s

    def answered(self, peer: Peer) -> bool:
        """Record that `peer` answered; return whether it had not before."""
        self._retries.discard(peer)
        was_silent = self._peers.pop(peer, None) is not None
        if was_silent:
            self._tell()
        return was_silent

    def refusal(self, peer: Peer) -> PeerUnreachable | None:
        """Return the error of a transfer to `peer`; None if it may begin."""
        silence = self._peers.get(peer)
        if silence is None:
            return None
        if not silence.is_wanted:
            silence.is_wanted = True
            self._plan(peer)
            self._tell()
        times = "once" if silence.num_failures == 1 else f"{silence.num_failures} times in a row"
        return PeerUnreachable(f"{peer} did not answer {times}; it is being tried again")

    def take_due(self, now_s: float) -> list[Peer]:
        """Return the peers to connect to now, each once per pause."""
        due = self._retries.take_due(now_s)
        for peer in due:
            self._peers[peer].retry_at_s = now_s + MOST_PAUSE_S
            self._peers[peer].is_wanted = False
            self._plan(peer)
        return due

    def next_deadline_s(self) -> float | None:
        """Return when `take_due` has a peer; None: nothing is to be tried."""
        return self._retries.next_s()

    def _tell(self) -> None:
        latest = (
            peer.incarnation
            for peer, silence in reversed(self._peers.items())
            if silence.is_retried
        )
        self.tried_again = tuple(islice(latest, MAX_KV_UNREACHABLE))

    def _plan(self, peer: Peer) -> None:
        self._retries.discard(peer)
        if self._peers[peer].is_retried:
            self._retries.set_no_later(peer, self._peers[peer].retry_at_s)
