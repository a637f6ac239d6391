"""The TLS contexts of connections to Redis."""

from __future__ import annotations

from pathlib import Path

from placement.redis_tls import RedisTls
from tests.support.key_folders import make_keys, node_keys


def test_a_ca_file_may_have_comments_in_any_language(tmp_path: Path) -> None:
    folder = make_keys(tmp_path / "keys")
    ca = folder / "node/ca.pem"
    ca.write_bytes("# Prüfstelle\n".encode() + ca.read_bytes())
    (trusted,) = RedisTls(node_keys(folder)).context().get_ca_certs()
    assert "pdserve cluster CA" in str(trusted["subject"])
