"""The end of a certificate is announced once a day, until a renewed one is there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pdserve.keys.keys_init import HOLDERS
from pdserve.roles.certificate_watch import CertificateWatch
from tests.support.key_folders import issue, make_keys, node_keys, put

DAY_S = 86_400.0


def test_a_warning_a_day_until_the_renewal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = make_keys(tmp_path / "keys")
    put(issue(folder, HOLDERS["node"], days=40), folder / "node")
    keys = node_keys(folder)
    watch = CertificateWatch(keys)

    def warnings_at(day: float) -> int:
        caplog.clear()
        watch.check(keys.tls.expires_at_s - (40 - day) * DAY_S)
        return sum(record.levelno == logging.WARNING for record in caplog.records)

    assert [warnings_at(day) for day in (0, 9.9, 10.1, 10.5, 11.0, 11.2)] == [0, 0, 1, 0, 0, 1]
    assert "pdserve keys renew DIR node" in caplog.text
    put(issue(folder, HOLDERS["node"], days=400), folder / "node")
    caplog.clear()
    watch.check(keys.tls.expires_at_s)
    assert "read again, without a restart" in caplog.text
    assert not any(record.levelno == logging.WARNING for record in caplog.records)


def test_what_the_clock_says_of_the_dates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A clock that is set, and a certificate that has ended, are told at once."""
    keys = node_keys(make_keys(tmp_path / "keys"))
    begins_s, ends_s = keys.tls.begins_at_s, keys.tls.expires_at_s
    watch = CertificateWatch(keys)

    def told_at(now_s: float) -> str:
        caplog.clear()
        watch.check(now_s)
        return "".join(caplog.messages)

    assert "ends in 2.0 days" in told_at(ends_s - 2 * DAY_S)
    assert "begins 3.0 hours after what this machine's clock says" in told_at(begins_s - 3 * 3600)
    assert told_at(begins_s - 2 * 3600) == ""
    assert "ended 2.0 days ago, if this machine's clock is right" in told_at(ends_s + 2 * DAY_S)
    assert told_at(ends_s + 2.5 * DAY_S) == ""
    assert "ended 1.0 days ago" in told_at(ends_s + DAY_S), "the clock was set back"
    assert "ends in 3.0 days" in told_at(ends_s - 3 * DAY_S)


def test_the_end_of_the_certificate_of_redis_is_announced_as_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = node_keys(make_keys(tmp_path / "keys"))
    put(issue(tmp_path / "keys", HOLDERS["node"], days=400), keys.folder)
    assert keys.reload_if_changed()
    watch, now_s = CertificateWatch(keys), keys.tls.begins_at_s + DAY_S

    def told_in(days: float) -> str:
        caplog.clear()
        watch.check(now_s + days * DAY_S)
        return "".join(caplog.messages)

    assert told_in(0) == "", "Redis is not connected yet"
    keys.redis_expires_at_s = now_s + 40 * DAY_S
    assert told_in(9) == ""
    assert told_in(11) == (
        "the certificate that Redis shows ends in 29.0 days: `pdserve keys renew DIR redis` makes "
        "a new one, which is taken over when Redis is restarted"
    )
    assert told_in(11.5) == ""
    assert "Redis shows ended 1.0 days ago" in told_in(41)
    keys.redis_expires_at_s = now_s + 400 * DAY_S
    assert told_in(41.1) == ""
