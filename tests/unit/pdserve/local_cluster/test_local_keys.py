"""The keys of one run, and for how long they are valid."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509

from pdserve.local_cluster.local_keys import make_local_keys


@pytest.mark.parametrize("name", ["node/ca.pem", "node/cert.pem", "router/cert.pem"])
def test_they_are_valid_whatever_the_clock_is_set_to(name: str, tmp_path: Path) -> None:
    """That of a machine without a battery begins in 1970, until it has asked for the time."""
    pem = (make_local_keys(tmp_path) / name).read_bytes()
    certificate = x509.load_pem_x509_certificate(pem)
    assert certificate.not_valid_before_utc < datetime(1970, 1, 2, tzinfo=UTC)
    assert certificate.not_valid_after_utc > datetime(2150, 1, 1, tzinfo=UTC)
