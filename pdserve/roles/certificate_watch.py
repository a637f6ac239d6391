"""Follows the certificate of `--keys`: takes over a renewed one, and warns before it ends, and
before that of Redis does."""

from __future__ import annotations

import asyncio
import time

from common.files.certificate_dates import CertificateDates
from common.files.keys_folder import Keys

CHECK_EVERY_S = 10.0


class CertificateWatch:
    """Judges the dates of the process's certificate and of that of Redis at each check."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._dates = CertificateDates()

    def check(self, now_s: float) -> None:
        """Read changed files again, then judge the dates; `now_s` counts from 1970."""
        keys = self._keys
        if keys.reload_if_changed():
            self._dates.forget()
        self._dates.judge(
            now_s,
            f"the certificate in {keys.folder}",
            keys.tls.expires_at_s,
            f"`pdserve keys renew DIR {keys.redis_user}` makes a new one, which is taken over "
            "without a restart",
            begins_at_s=keys.tls.begins_at_s,
        )
        if keys.redis_expires_at_s is not None:
            self._dates.judge(
                now_s,
                "the certificate that Redis shows",
                keys.redis_expires_at_s,
                "`pdserve keys renew DIR redis` makes a new one, which is taken over when Redis is "
                "restarted",
            )

    async def keep_current(self) -> None:
        """Check now and every `CHECK_EVERY_S`, until cancelled."""
        while True:
            self.check(time.time())
            await asyncio.sleep(CHECK_EVERY_S)
