"""Log lines about what clients do often, spaced so that no client can fill the log."""

from __future__ import annotations

from starlette.types import Scope

from common.observing.clock import Clock

LINE_EVERY_S = 10.0


class SpacedLines:
    """When a line about something frequent is due: at once, and then every `LINE_EVERY_S`.

    What comes between two lines is counted in the next one.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told_at_s = -LINE_EVERY_S
        self._num_untold = 0

    def num_to_tell(self) -> int:
        """Count one; return how many there were since the last line where the next one is due."""
        self._num_untold += 1
        now_s = self._clock.now_s()
        if now_s - self._told_at_s < LINE_EVERY_S:
            return 0
        num_told, self._num_untold = self._num_untold, 0
        self._told_at_s = now_s
        return num_told


def client_address(scope: Scope) -> str:
    """Return the address of the peer: a client's, or a balancer's."""
    client = scope.get("client")
    return str(client[0]) if client else "an unknown address"
