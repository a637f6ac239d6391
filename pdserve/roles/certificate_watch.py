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


class CertificateWatch:
    """Warns once a day while less than `WARN_DAYS` are left."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._warned_at_s = -math.inf

    def check(self, now_s: float) -> None:
        """Read changed files again, then judge the end; `now_s` counts from 1970."""
        if self._keys.reload_if_changed():
            self._warned_at_s = -math.inf
        num_days = (self._keys.tls.expires_at_s - now_s) / _DAY_S
        if num_days < WARN_DAYS and now_s - self._warned_at_s >= _DAY_S:
            self._warned_at_s = now_s
            log.warning(
                "the certificate in %s ends in %.0f days: `pdserve keys renew DIR %s` makes a new "
                "one, which is taken over without a restart",
                self._keys.folder,
                num_days,
                self._keys.redis_user,
            )

    async def keep_current(self) -> None:
        """Check now and every `CHECK_EVERY_S`, until cancelled."""
        while True:
            self.check(time.time())
            await asyncio.sleep(CHECK_EVERY_S)
