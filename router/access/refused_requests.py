"""Requests refused before any endpoint has them: their reasons, in one line per 10 s and code."""

from __future__ import annotations

import logging

from starlette.types import Scope

from common.observing.clock import Clock
from common.observing.logs import log_fields
from router.access.spaced_lines import SpacedLines, client_address
from router.http.errors import ApiError

logger = logging.getLogger("pdserve.router.http")

_MAX_SHOWN_CHARS = 200


class RefusedRequests:
    """Logs refusals that leave no line of a request: a key's limits, foreign hosts, wrong paths."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lines: dict[str, SpacedLines] = {}

    def on_refused(self, error: ApiError, scope: Scope) -> None:
        """Log a refusal, or count it for the next line about errors of this code."""
        lines = self._lines.setdefault(error.code, SpacedLines(self._clock))
        if num := lines.num_to_tell():
            logger.info(
                "%d requests refused with status %d (%s) since the last line; the latest came from "
                "%s: %s",
                *(num, error.status, error.code, client_address(scope)),
                error.message[:_MAX_SHOWN_CHARS],
                extra=log_fields(request_id=scope.get("state", {}).get("request_id")),
            )
