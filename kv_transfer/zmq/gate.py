"""Authentication of connections when the cluster has a key.

ZMQ's sockets use the protocol ZAP (RFC 27): one request with the client's public key, and one
answer. CURVE has then verified that the client owns the secret key, and encrypts everything that
follows, in both directions.
"""

from __future__ import annotations

import logging

import zmq
from zmq.utils import z85

from kv_transfer.zmq.curve_keys import CurveKeys

logger = logging.getLogger("pdserve.kv_transfer")

_DOMAIN = "pdserve-kv"
_VERSION = b"1.0"
_MOST_ANSWERS = 64

# Bytes that CURVE adds to a message part: command name, nonce, authenticator and flags.
OVERHEAD_BYTES = 64


class ZmqGate:
    """Admits the holders of one key pair. Used on the thread of its context's sockets."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> None:
        """Bind the ZAP socket; must happen before any other socket of `context` is bound."""
        self._keys = keys
        self._public = z85.decode(keys.public)
        self._num_refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")

    def guard(self, router: zmq.Socket[bytes]) -> None:
        """Admit only holders of the key to this socket, which is not bound yet."""
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        router.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        # Without it a closed gate would admit everyone.
        router.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def introduce(self, dealer: zmq.Socket[bytes]) -> None:
        """Restrict this socket, which is not connected yet, to holders of the key."""
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, self._keys.public)

    def answer(self) -> None:
        """Answer pending requests; what is left over is signalled at the next poll."""
        for _ in range(_MOST_ANSWERS):
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            request = question[1] if len(question) > 1 else b""
            status, text = (b"200", b"OK") if self._admits(question) else (b"400", b"unknown key")
            self.socket.send_multipart([_VERSION, request, status, text, b"", b""])

    def close(self) -> None:
        self.socket.close(0)

    def _admits(self, question: list[bytes]) -> bool:
        """Check version, request, domain, address, routing id, mechanism and credentials."""
        is_ours = len(question) == 7 and question[5] == b"CURVE" and question[6] == self._public
        if not is_ours:
            self._num_refused += 1
            if self._num_refused.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …: there may be many
                address = question[3][:64].decode("ascii", "replace") if len(question) > 3 else "?"
                logger.warning(
                    "refused %d KV connections, the last from %s: it has another kv_key",
                    self._num_refused,
                    address,
                )
        return is_ours
