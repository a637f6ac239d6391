"""The parts of a request that are left out: what agents send always and this server does not have.

They are tools and records of other servers. A request without them still asks for something; one
that asks for nothing else is refused where it is translated.
"""

from __future__ import annotations

from router.api.bodies.unknown_fields import MAX_FIELD_CHARS, MAX_IGNORED


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
        """What was left out, each kind once."""
        return tuple(self._kinds)
