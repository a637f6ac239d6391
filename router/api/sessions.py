"""The name of a request's session: which header has it, and whose it is.

A name is whatever the requests of one conversation, or of one agent, have in common. It is neither
kept nor logged: nodes are remembered under a digest of it and of its owner.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable

from router.core.known.sessions import SessionId

log = logging.getLogger("pdserve.router.http")

SESSION_HEADERS = (
    b"x-dynamo-session-id",
    b"x-session-id",
    b"x-session-affinity",
    b"x-claude-code-agent-id",
    b"x-claude-code-session-id",
    b"session-id",
    b"session_id",
)
"""The headers that name a session; the first of those that a request has does."""

MAX_SESSION_BYTES = 256
_RANKS = {name: rank for rank, name in enumerate(SESSION_HEADERS)}
_USABLE = re.compile(rb"[\x21-\x7e]{1,%d}" % MAX_SESSION_BYTES)
_DIGEST_BYTES = 16


class SessionHeaders:
    """Finds the name that a header gives a session, and warns once of each that has none."""

    def __init__(self) -> None:
        self._warned: set[bytes] = set()

    def name(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """Return the name; empty where no header has one that can be used."""
        found, best = b"", len(_RANKS)
        for header, value in headers:
            rank = _RANKS.get(header)
            if rank is None or rank >= best or not value:
                continue
            if _USABLE.fullmatch(value):
                found, best = value, rank
            elif header not in self._warned:
                self._warned.add(header)
                log.warning(
                    "a header %s of %d bytes names no session and is ignored: wanted 1 to %d "
                    "visible ASCII characters",
                    header.decode(),
                    len(value),
                    MAX_SESSION_BYTES,
                )
        return found


def session_id(owner: str, in_header: bytes, in_body: str) -> SessionId:
    """Return under what the nodes of a session are remembered; empty: the request names none.

    The `owner` of a name is an API key: two keys with one name have two sessions. A header is more
    exact than the body, whose fields may stand for a user with many conversations.
    """
    name = in_header or in_body.encode("utf-8", "surrogatepass")
    if not name:
        return b""
    owned = b"%d:%s%s" % (len(owner), owner.encode("utf-8", "surrogatepass"), name)
    return hashlib.blake2b(owned, digest_size=_DIGEST_BYTES).digest()
