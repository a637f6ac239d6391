"""Host names of peers, resolved beside the connector's thread: a slow answer delays no other peer.

Each name and port is looked up in a thread of its own, at most `MAX_LOOK_UPS` at once. The address
of a peer is remembered while the peer answers there: another incarnation of a node is another peer,
so the address cannot change under it, and a link that is opened again after an idle time asks no
name server. A peer that does not answer there is looked up again. An answer that comes after its
connection was given up is remembered too: otherwise a peer behind a slow name server would never be
reached.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from kv_transfer.shared.effects import Peer
from kv_transfer.shared.limits import MAX_PEERS
from kv_transfer.zmq import endpoints

logger = logging.getLogger("pdserve.kv_transfer")

MAX_LOOK_UPS = 32
SLOW_S = 1.0
"""A name server that takes longer is logged."""

HostPort = tuple[str, int]
Found = str | Exception
"""An address, or why there is none."""


class NameLookup:
    """Belongs to the connector's thread; `wake` is called, on any thread, when `take` has more."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._known: OrderedDict[Peer, str] = OrderedDict()
        self._tried: dict[Peer, str] = {}
        self._lock = threading.Lock()
        self._waiting: deque[HostPort] = deque()
        self._peers_of: dict[HostPort, set[Peer]] = {}
        self._num_threads = 0
        self._found: list[tuple[Peer, Found]] = []

    # Addresses of peers.

    def try_known(self, peer: Peer) -> str | None:
        """Return the known address of `peer`, or None.

        It is forgotten unless `remember` follows: the peer has to answer there.
        """
        address = self._known.pop(peer, None)
        if address is not None:
            self._tried[peer] = address
        return address

    def remember(self, peer: Peer, address: str) -> None:
        """Keep an address for the next `try_known`."""
        self._known[peer] = address
        if len(self._known) > MAX_PEERS:
            self._known.popitem(last=False)

    def answered(self, peer: Peer) -> None:
        """Record that `peer` was heard."""
        address = self._tried.pop(peer, None)
        if address is not None:
            self.remember(peer, address)

    def closed(self, peer: Peer) -> None:
        """Record that the connection to `peer` is closed."""
        self._tried.pop(peer, None)

    # Names.

    def ask(self, peer: Peer, host: str, port: int) -> None:
        """Look up the name of `peer`; the result comes by `take`."""
        wanted = host, port
        with self._lock:
            if wanted in self._peers_of:
                self._peers_of[wanted].add(peer)
                return
            self._peers_of[wanted] = {peer}
            self._waiting.append(wanted)
            if self._num_threads == MAX_LOOK_UPS:
                return
            self._num_threads += 1
        thread = threading.Thread(target=self._run, name="pdserve-kv-names", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Take back a thread that does not start; the others, if there are any, do its work."""
        with self._lock:
            self._num_threads -= 1
            while self._waiting and not self._num_threads:
                self._note(self._waiting.popleft(), error)
        self._wake()

    def take(self) -> list[tuple[Peer, Found]]:
        """Return the results that came since the last call."""
        if not self._found:
            return []
        with self._lock:
            found, self._found = self._found, []
            return found

    def _run(self) -> None:
        while (wanted := self._next_name()) is not None:
            began_at_s = time.monotonic()
            found: Found
            try:
                found = endpoints.look_up(*wanted)
            except Exception as error:  # Whatever it is, this thread has other names to look up.
                found = error
            span_s = time.monotonic() - began_at_s
            if span_s > SLOW_S:
                logger.warning("resolving the name %s took %.1f s", wanted[0], span_s)
            with self._lock:
                self._note(wanted, found)
            self._wake()

    def _note(self, wanted: HostPort, found: Found) -> None:
        """Keep a result for `take`; the caller has the lock."""
        self._found += [(peer, found) for peer in self._peers_of.pop(wanted)]

    def _next_name(self) -> HostPort | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._num_threads -= 1
            return None
