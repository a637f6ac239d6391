"""Fields that a request has and the server does not know: ignored with one warning each, or
refused.

These are fields that it does not know, and kinds of parts that it leaves out: tools and records of
other servers, which agents send always. A request without them still asks for something; one that
asks for nothing else is refused where it is translated.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from common.errors import InvalidRequest

logger = logging.getLogger("pdserve.router.http")

MAX_NAMES = 1000
"""Most fields that get a warning: clients choose their names."""
MAX_IGNORED = 32
"""Most fields of one request that are named as ignored, each with its first characters."""
MAX_FIELD_CHARS = 64


def named_fields(names: Sequence[str]) -> tuple[str, ...]:
    """Return the first of a request's unknown fields, in alphabetical order."""
    return tuple(name[:MAX_FIELD_CHARS] for name in sorted(names)[:MAX_IGNORED])


class UnknownFields:
    """Ignores or refuses the unknown fields of this process."""

    def __init__(self, *, are_refused: bool) -> None:
        self._are_refused = are_refused
        self._known: set[str] = set()

    def take(self, names: Sequence[str], left_out: Sequence[str] = ()) -> None:
        """Log each field, and each kind of part, that no request had before.

        Raises `InvalidRequest` for the first one where they are refused.
        """
        if names and self._are_refused:
            raise InvalidRequest(f"{names[0]} is not a field of this request", param=names[0])
        if left_out and self._are_refused:
            raise InvalidRequest(f"not supported by this server: {left_out[0]}")
        for name in filter(self._is_new, names):
            logger.warning(
                "the field %r of a request is unknown and ignored; this is logged once "
                "(--strict-fields refuses such requests)",
                name,
            )
        for part in filter(self._is_new, left_out):
            logger.warning(
                "left out of a request, because this server does not have it: %s; this is logged "
                "once (--strict-fields refuses such requests)",
                part,
            )

    def _is_new(self, name: str) -> bool:
        if name in self._known or len(self._known) >= MAX_NAMES:
            return False
        self._known.add(name)
        return True


class LeftOut:
    """The kinds of parts that were left out of one request."""

    def __init__(self) -> None:
        self._kinds: dict[str, None] = {}

    def add(self, what: str) -> None:
        """Note a kind of part, in words for the log."""
        if len(self._kinds) < MAX_IGNORED:
            self._kinds[what] = None

    def add_type(self, parts: str, kind: str) -> None:
        """Note `parts` of a type that a client named."""
        self.add(f"{parts} of the type {kind[:MAX_FIELD_CHARS]!r}")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of parts that were left out, each once."""
        return tuple(self._kinds)
