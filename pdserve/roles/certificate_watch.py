"""Follows the certificate of `--keys`: takes over a renewed one, and warns before it ends, and
before that of Redis does."""

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

_ENDS = "%s ends in %.1f days: `pdserve keys renew DIR %s` makes a new one, which is taken over %s"
_ENDED = (
    "%s ended %.1f days ago, if this machine's clock is right, and no new connection is accepted "
    "with it: `pdserve keys renew DIR %s` makes a new one, which is taken over %s"
)
_TOO_EARLY = (
    "%s begins %.1f hours after what this machine's clock says: set the clock, as this process "
    "refuses certificates that are in order"
)


class CertificateWatch:
    """Warns once a day while less than `WARN_DAYS` are left, after the end, and where the clock was
    set to a time before the certificate."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._told: dict[str, tuple[str, float]] = {}
        """What was last said of each certificate, without its numbers, and when."""

    def check(self, now_s: float) -> None:
        """Read changed files again, then judge the dates; `now_s` counts from 1970."""
        keys = self._keys
        if keys.reload_if_changed():
            self._told.clear()
        own = f"the certificate in {keys.folder}"
        if now_s < keys.tls.begins_at_s:
            self._tell(now_s, _TOO_EARLY, own, (keys.tls.begins_at_s - now_s) / 3600)
        else:
            self._judge_end(now_s, own, keys.tls.expires_at_s, keys.redis_user, "without a restart")
        if keys.redis_expires_at_s is not None:
            self._judge_end(
                now_s,
                "the certificate that Redis shows",
                keys.redis_expires_at_s,
                "redis",
                "when Redis is restarted",
            )

    def _judge_end(self, now_s: float, what: str, end_s: float, kind: str, how: str) -> None:
        num_days = (end_s - now_s) / _DAY_S
        if num_days < 0:
            self._tell(now_s, _ENDED, what, -num_days, kind, how)
        elif num_days < WARN_DAYS:
            self._tell(now_s, _ENDS, what, num_days, kind, how)

    def _tell(self, now_s: float, text: str, what: str, *values: object) -> None:
        told, told_at_s = self._told.get(what, ("", -math.inf))
        # What was said at a later time was so before the clock was set back.
        if told != text or not 0 <= now_s - told_at_s < _DAY_S:
            self._told[what] = text, now_s
            log.warning(text, what, *values)

    async def keep_current(self) -> None:
        """Check now and every `CHECK_EVERY_S`, until cancelled."""
        while True:
            self.check(time.time())
            await asyncio.sleep(CHECK_EVERY_S)
