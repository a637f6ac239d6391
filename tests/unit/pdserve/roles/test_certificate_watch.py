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
