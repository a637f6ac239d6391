"""ZMQ sockets of one connector: a ROUTER that senders connect to, a DEALER per decode node.

All sockets belong to the connector's thread; other threads only wake it. A
DEALER that lost its TCP connection reconnects by itself, without a session there: its first frame
is answered with "no session", and the machine above closes the DEALER and makes a new one, so that
no frame of an earlier connection counts on a later one. (Monitors would notice a little sooner. A
DEALER has one until its first try to connect has ended, and no longer: see `first_tries`.)
"""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import numpy as np
import zmq

from common.addresses import is_loopback
from common.errors import ConfigError, HandoffFailed
from common.kv.kv_layout import KVLayout
from kv_transfer.sending.transfer_errors import PeerUnreachable
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.limits import MAX_HEADER_BYTES, MAX_PEERS, Limits
from kv_transfer.transport import Arrival, FromPeer, FromSession, NobodyListens, NoConnection, Parts
from kv_transfer.zmq.curve_keys import CurveKeys
from kv_transfer.zmq.endpoints import address_to_bind, is_number, parse_tcp, tcp
from kv_transfer.zmq.first_tries import FirstTries
from kv_transfer.zmq.gate import OVERHEAD_BYTES, ZmqGate
from kv_transfer.zmq.name_lookup import NameLookup
from kv_transfer.zmq.open_files import OpenFiles
from kv_transfer.zmq.readiness import Readiness
from kv_transfer.zmq.wake_up import WakeUp

if TYPE_CHECKING:
    from kv_transfer.zmq.parts import PartSender

logger = logging.getLogger("pdserve.kv_transfer")

# Counts of messages; bytes are bounded by the windows. A sender's queue holds its frames in flight
# and a few control frames for each of its transfers. A receiver's is short: waiting frames occupy
# memory, and are no longer in a cache when they are read.
SENDER_HIGH_WATER_MARK = 4096
RECEIVER_HIGH_WATER_MARK = 8
# Kernel buffer of a sender to a node on the same machine; Linux doubles it, and would choose eight
# times as much by itself. With more, both ends used more processor time per byte, probably because
# the data leaves the caches. To other machines it would limit the bytes in flight.
LOCAL_SEND_BUFFER_BYTES = 512 << 10
KERNELS_CHOICE = -1
LINGER_MS = 200
TERMINATE_WITHIN_S = 2.0
KEEPALIVE_S = 10
MAX_SOCKETS = MAX_PEERS
"""One for each decode node; ZMQ's own limit is 1023."""
MAX_UNSENT = 16
"""Messages to a peer whose name is being looked up: one HELLO, and its repetitions."""


class ZmqTransport:
    """Binds `tcp://host:port` (port 0: any free one). Raises `ConfigError` when it cannot.

    Others connect to that port of `advertised_host`. ZMQ gets numbers only: see `endpoints`. With
    `keys` every connection, in both directions, is encrypted and requires the same key pair.
    """

    def __init__(
        self,
        host: str,
        port: int,
        advertised_host: str,
        layout: KVLayout,
        limits: Limits,
        keys: CurveKeys | None = None,
    ) -> None:
        _keep_freed_memory()
        self._num_io_threads = limits.max_channels
        wanted = tcp(address_to_bind(host), port)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(self._num_io_threads)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._gate = ZmqGate(self._context, keys) if keys else None
        self._router = self._listening(wanted, layout, limits)
        self._bound = self._router.get_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._endpoint = tcp(advertised_host, int(self._bound.rpartition(":")[2]))
        self._files = OpenFiles()
        self._is_listening = True
        self._was_bind_refused = False
        self._wake_up = WakeUp()
        self._names = NameLookup(self.wake)
        # What is to be sent to peers whose name is being looked up.
        self._unsent: dict[Peer, list[Parts]] = {}
        self._failed: deque[NoConnection | NobodyListens] = deque()
        self._dealers: dict[Peer, zmq.Socket[bytes]] = {}
        self._part_senders: dict[Peer, PartSender] = {}
        # Those whose parts ZMQ has not released yet, also of closed sockets.
        self._holding: dict[PartSender, None] = {}
        # The peer behind each DEALER; None for the ROUTER.
        self._peer_of: dict[zmq.Socket[bytes], Peer | None] = {}
        # Those with something to read, in turn.
        self._ready: OrderedDict[zmq.Socket[bytes], None] = OrderedDict()
        self._readiness = Readiness()
        self._first_tries = FirstTries(self._context, self._readiness)
        self._readiness.watch_file(self._wake_up.fileno())
        if self._gate:
            self._readiness.watch(self._gate.socket)
        self._watch(self._router, None)

    def _listening(self, wanted: str, layout: KVLayout, limits: Limits) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.MAXMSGSIZE, self._on_the_wire(limits.max_part_bytes(layout)))
        router.setsockopt(zmq.RCVHWM, RECEIVER_HIGH_WATER_MARK)
        router.setsockopt(zmq.SNDHWM, SENDER_HIGH_WATER_MARK)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.HANDSHAKE_IVL, _ms(limits.peer_timeout_s))
        # The machine detects silence; this lets the kernel close connections of hosts that
        # vanished.
        router.setsockopt(zmq.TCP_KEEPALIVE, 1)
        router.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
        router.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
        router.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        router.setsockopt(zmq.IPV6, wanted.startswith("tcp://["))
        if self._gate:
            self._gate.guard(router)
        try:
            router.bind(wanted)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"KV endpoint {wanted} cannot be bound: {error}") from None
        return router

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def connect(self, peer: Peer) -> None:
        """Open a fresh DEALER to `peer`, when its address is known.

        Raises `HandoffFailed` for an endpoint that cannot be.
        """
        self.disconnect(peer)
        try:
            host, port = parse_tcp(peer.endpoint)
        except ValueError as error:
            raise HandoffFailed(f"{peer}: {error}") from None
        address = host if is_number(host) else self._names.try_known(peer)
        if address is None:
            self._unsent[peer] = []
            self._names.ask(peer, host, port)
        else:
            self._connect_to(peer, address, port)

    def _connect_to(self, peer: Peer, address: str, port: int) -> None:
        try:
            self._open_dealer(peer, address).connect(tcp(address, port))
        except (zmq.ZMQError, OSError) as error:
            self.disconnect(peer)
            raise HandoffFailed(f"cannot connect to {peer}: {error}") from None

    def _connect_found(self) -> None:
        """Connect to the peers whose names were resolved, and send what waits for that."""
        for peer, found in self._names.take():
            if isinstance(found, str):
                self._names.remember(peer, found)
            unsent = self._unsent.pop(peer, None)
            if unsent is None:
                continue  # The connection was given up meanwhile.
            host, _ = parse_tcp(peer.endpoint)
            try:
                if not isinstance(found, str):
                    raise PeerUnreachable(f"{peer}: {host} cannot be resolved: {found}")
                self.connect(peer)
            except HandoffFailed as error:
                self._failed.append(NoConnection(peer, error))
                continue
            for parts in unsent:
                self.send(peer, parts)

    def _open_dealer(self, peer: Peer, address: str) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.MAXMSGSIZE, self._on_the_wire(MAX_HEADER_BYTES))
        dealer.setsockopt(zmq.RCVHWM, SENDER_HIGH_WATER_MARK)
        dealer.setsockopt(zmq.SNDHWM, SENDER_HIGH_WATER_MARK)
        local = is_loopback(address)
        dealer.setsockopt(zmq.SNDBUF, LOCAL_SEND_BUFFER_BYTES if local else KERNELS_CHOICE)
        dealer.setsockopt(zmq.LINGER, 0)
        # The connections of a pair are moved by different threads.
        dealer.setsockopt(zmq.AFFINITY, 1 << peer.channel % self._num_io_threads)
        dealer.setsockopt(zmq.IPV6, ":" in address)
        if self._gate:
            self._gate.introduce(dealer)
        self._dealers[peer] = dealer
        part_sender = _part_sender(dealer)
        if part_sender is not None:
            self._part_senders[peer] = part_sender
        self._watch(dealer, peer)
        if not peer.channel:  # further connections are opened to peers that have answered
            self._first_tries.watch(peer, dealer)
        return dealer

    def disconnect(self, peer: Peer) -> None:
        self._unsent.pop(peer, None)
        self._names.closed(peer)
        self._failed = deque(one for one in self._failed if one.peer != peer)
        self._close_dealer(peer, linger_ms=0)

    def send(self, peer: Peer, parts: Parts) -> bool:
        dealer = self._dealers.get(peer)
        if dealer is None:
            unsent = self._unsent.get(peer)
            if unsent is None or len(unsent) == MAX_UNSENT:
                return False
            unsent.append(parts)
            return True
        part_sender = self._part_senders.get(peer)
        self._readiness.used(dealer)
        try:
            if part_sender is not None and len(parts) > 1:
                self._holding[part_sender] = None
                part_sender.send(parts[0], parts[1:])
            else:
                dealer.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EAGAIN:
                raise
            return False
        return True

    def reply(self, session: bytes, parts: Parts) -> None:
        self._readiness.used(self._router)
        try:
            self._router.send_multipart([session, *parts], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise

    def wait(self, timeout_s: float) -> None:
        arrived = self._readiness.wait(
            self._wake_up.before_wait(0.0 if self._ready or self._failed else timeout_s)
        )
        self._wake_up.after_wait(is_ready=self._wake_up.fileno() in arrived)
        # Now rather than before: an answer may be sent from memory that this frees.
        self._forget_sent()
        for source in arrived:
            if isinstance(source, int):
                continue
            if self._gate and source == self._gate.socket:
                self._gate.answer()
                self._readiness.used(source)
            elif source in self._first_tries:
                refused = self._first_tries.end(source)
                if refused is not None:
                    self._failed.append(NobodyListens(refused))
            else:
                self._ready[source] = None
        self._connect_found()
        if self._files.look():
            self._listen_while_there_are_files()

    @property
    def is_short_of_files(self) -> bool:
        return self._files.are_few

    def _listen_while_there_are_files(self) -> None:
        """Close the port when nearly no file is left, and open it when there are enough.

        ZMQ ends the port's connections with it, and cannot stop accepting alone.
        """
        if self._is_listening and self._files.are_nearly_none:
            self._router.unbind(self._bound)
            self._readiness.used(self._router)
            self._is_listening = self._was_bind_refused = False
            logger.error(
                "nearly all files that this process may open are open: the KV port is closed, with "
                "its connections, until there are more (ulimit -n)"
            )
        elif not self._is_listening and not self._files.are_few:
            try:
                self._router.bind(self._bound)
            except zmq.ZMQError as error:
                if not self._was_bind_refused:
                    logger.warning("the KV port cannot be opened again yet: %s", error)
                self._was_bind_refused = True
                return
            self._is_listening = True
            self._readiness.used(self._router)
            logger.warning("the KV port is open again")

    def receive_nowait(self) -> Arrival | None:
        if self._failed:
            return self._failed.popleft()
        while self._ready:
            source = next(iter(self._ready))
            try:
                parts = source.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                del self._ready[source]
                continue
            self._ready.move_to_end(source)
            peer = self._peer_of[source]
            if peer is not None:
                self._names.answered(peer)
                return FromPeer(peer, [part.buffer for part in parts])
            return FromSession(parts[0].bytes, [part.buffer for part in parts[1:]])
        return None

    def wake(self) -> None:
        self._wake_up.wake()

    def close(self) -> None:
        for peer in list(self._dealers):
            self._close_dealer(peer, linger_ms=LINGER_MS)
        self._readiness.close()
        self._router.close(LINGER_MS)
        if self._gate:
            self._gate.close()
        self._terminate()
        self._wake_up.close()

    def _forget_sent(self) -> None:
        for part_sender in [one for one in self._holding if one.forget_sent()]:
            del self._holding[part_sender]

    def _terminate(self) -> None:
        """End ZMQ's threads, in bounded time: its own wait is unbounded and was seen to hang."""
        thread = threading.Thread(target=self._end_threads, name="pdserve-kv-end", daemon=True)
        thread.start()
        thread.join(TERMINATE_WITHIN_S)
        if thread.is_alive():
            logger.warning("ZMQ did not end within %g s of closing its sockets", TERMINATE_WITHIN_S)

    def _end_threads(self) -> None:
        self._context.term()
        self._holding.clear()  # Not before: until then ZMQ may read their parts.

    def _close_dealer(self, peer: Peer, *, linger_ms: int) -> None:
        dealer = self._dealers.pop(peer, None)
        if dealer is None:
            return
        self._first_tries.forget(peer)
        self._readiness.forget(dealer)
        del self._peer_of[dealer]
        self._ready.pop(dealer, None)
        self._part_senders.pop(peer, None)
        dealer.close(linger_ms)

    def _on_the_wire(self, part_bytes: int) -> int:
        return part_bytes + (OVERHEAD_BYTES if self._gate else 0)

    def _watch(self, source: zmq.Socket[bytes], peer: Peer | None) -> None:
        self._peer_of[source] = peer
        self._readiness.watch(source)


def _part_sender(dealer: zmq.Socket[bytes]) -> PartSender | None:
    """Return a part sender; None without numba or with an unknown build of pyzmq.

    pyzmq then sends the parts itself.
    """
    try:
        from kv_transfer.zmq.parts import PartSender

        return PartSender(dealer)
    except (ImportError, OSError, AttributeError):
        return None


def _keep_freed_memory() -> None:
    """Make the C library keep the memory of one received frame for the next.

    By default glibc takes blocks as large as a frame from the system and returns them when they are
    freed, so that every page is cleared and mapped again for every frame: a tenth of a frame's
    time. Freeing one large block raises glibc's threshold for that, to 32 MiB at most; it then
    keeps twice as much.
    """
    np.empty((32 << 20) - (64 << 10), np.uint8)  # Not touched, so it takes no memory.


def _ms(span_s: float) -> int:
    return math.ceil(span_s * 1000)
