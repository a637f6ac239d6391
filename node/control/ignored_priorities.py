"""Says once that requests have priorities which this node does not schedule by."""

from __future__ import annotations

import logging

from common.request import GenerationRequest

log = logging.getLogger("pdserve.node")


class IgnoredPriorities:
    """Sees every request of a node. Belongs to the event loop."""

    def __init__(self, *, are_enabled: bool) -> None:
        self._is_due = not are_enabled

    def see(self, request: GenerationRequest) -> None:
        """Log a warning for the first request whose priority is ignored."""
        if self._is_due and request.priority:
            self._is_due = False
            log.warning(
                "a request has the priority %d, and priorities are ignored: they count with "
                "--enable-priority-scheduling (this is logged once)",
                request.priority,
            )
