"""Follows the certificate of `--keys`: takes over a renewed one, and warns before it ends."""

from __future__ import annotations

import asyncio
import logging
import math
import time

from common.files.keys_folder import Keys

log = logging.getLogger("pdserve")

CHECK_EVERY_S = 10.0
WARN_DAYS = 30
_DAY_S = 86_400.0
_ENDS = (
    "the certificate in %s ends in %.1f days: `pdserve keys renew DIR %s` makes a new one, which "
    "is taken over without a restart"
)
_ENDED = (
    "the certificate in %s ended %.1f days ago, if this machine's clock is right, and no new "
    "connection is accepted with it: `pdserve keys renew DIR %s` makes a new one, which is taken "
    "over without a restart"
)
_TOO_EARLY = (
    "the certificate in %s begins %.1f hours after what this machine's clock says: set the clock, "
    "as this %s refuses certificates that are in order"
)


class CertificateWatch:
    """Warns once a day while less than `WARN_DAYS` are left, after the end, and where the clock was
    set to a time before the certificate."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._warned = ""
        self._warned_at_s = -math.inf

    def check(self, now_s: float) -> None:
        """Read changed files again, then judge the dates; `now_s` counts from 1970."""
        if self._keys.reload_if_changed():
            self._warned = ""
        trouble, numbers = self._trouble(now_s)
        # A clock that was set back shows a warning of later, which says nothing of the next one.
        is_told = trouble == self._warned and 0 <= now_s - self._warned_at_s < _DAY_S
        if trouble and not is_told:
            self._warned_at_s = now_s
            log.warning(trouble, self._keys.folder, numbers, self._keys.redis_user)
        self._warned = trouble

    def _trouble(self, now_s: float) -> tuple[str, float]:
        """Return what to log of folder, a number and the role; '' where the dates are in order."""
        tls = self._keys.tls
        if now_s < tls.begins_at_s:
            return _TOO_EARLY, (tls.begins_at_s - now_s) / 3600
        num_days = (tls.expires_at_s - now_s) / _DAY_S
        if num_days < 0:
            return _ENDED, -num_days
        return (_ENDS, num_days) if num_days < WARN_DAYS else ("", num_days)

    async def keep_current(self) -> None:
        """Check now and every `CHECK_EVERY_S`, until cancelled."""
        while True:
            self.check(time.time())
            await asyncio.sleep(CHECK_EVERY_S)
