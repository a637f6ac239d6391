"""Fields of a request that the server does not know: ignored with one warning each, or refused."""

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
    """What becomes of unknown fields in this process."""

    def __init__(self, *, are_refused: bool) -> None:
        self._are_refused = are_refused
        self._known: set[str] = set()

    def take(self, names: Sequence[str]) -> None:
        """Log each field that no request had before.

        Raises `InvalidRequest` for the first one where they are refused.
        """
        if names and self._are_refused:
            raise InvalidRequest(f"{names[0]} is not a field of this request", param=names[0])
        for name in names:
            if name not in self._known and len(self._known) < MAX_NAMES:
                self._known.add(name)
                logger.warning(
                    "the field %r of a request is unknown and ignored; this is logged once "
                    "(--strict-fields refuses such requests)",
                    name,
                )
