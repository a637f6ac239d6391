"""Warnings of certificates that are about to end, have ended, or begin after the present time."""

from __future__ import annotations

import logging
import math

log = logging.getLogger("pdserve")

WARN_DAYS = 30
_DAY_S = 86_400.0

_ENDS = "%s ends in %.1f days: %s"
_ENDED = (
    "%s ended %.1f days ago, if this machine's clock is right, and no new connection is accepted "
    "with it: %s"
)
_TOO_EARLY = (
    "%s begins %.1f hours after what this machine's clock says: set the clock, as this process "
    "refuses certificates that are in order"
)


class CertificateDates:
    """Warns once a day while less than `WARN_DAYS` are left, after the end, and where the clock was
    set to a time before the certificate."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[str, float]] = {}
        """What was last said of each certificate, without its numbers, and when."""

    def forget(self) -> None:
        """Warn at the next call whatever was said before."""
        self._told.clear()

    def judge(
        self, now_s: float, what: str, ends_at_s: float, how: str, *, begins_at_s: float = -math.inf
    ) -> None:
        """Log what is wrong with the dates of `what`; `how` says how to renew it.

        All times are seconds since 1970.
        """
        num_days = (ends_at_s - now_s) / _DAY_S
        if now_s < begins_at_s:
            self._tell(now_s, _TOO_EARLY, what, (begins_at_s - now_s) / 3600)
        elif num_days < 0:
            self._tell(now_s, _ENDED, what, -num_days, how)
        elif num_days < WARN_DAYS:
            self._tell(now_s, _ENDS, what, num_days, how)

    def _tell(self, now_s: float, text: str, what: str, *values: object) -> None:
        told, told_at_s = self._told.get(what, ("", -math.inf))
        # What was said at a later time was so before the clock was set back.
        if told != text or not 0 <= now_s - told_at_s < _DAY_S:
            self._told[what] = text, now_s
            log.warning(text, what, *values)
