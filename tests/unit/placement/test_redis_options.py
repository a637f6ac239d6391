"""Options in the address of Redis: what cannot be used is said at the start, not at a call."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from placement.redis_store import RedisStore
from tests.support.key_folders import make_keys, node_keys


@pytest.mark.parametrize(
    "url",
    [
        "redis://h?db=3&client_name=me",
        "redis://h?socket_keepalive=yes&health_check_interval=30&socket_timeout=2",
        "rediss://h?ssl_check_hostname=no&ssl_cert_reqs=none",
        "rediss://h?ssl_ca_certs={folder}/node/ca.pem",
        "rediss://h?ssl_certfile={folder}/node/cert.pem&ssl_keyfile={folder}/node/key.pem",
        "unix:///run/redis.sock?db=3",
    ],
)
def test_what_can_be_used(url: str, tmp_path: Path) -> None:
    make_keys(tmp_path)
    RedisStore(url.format(folder=tmp_path), "named")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h?colour=red", "'colour': wanted none but db, client_name"),
        ("redis://h?colour=", "'colour': wanted none but"),
        ("redis://h?decode_responses=True", "'decode_responses': wanted none but"),
        ("redis://h?max_connections=3", "'max_connections': wanted none but"),
        ("redis://h?ssl_ca_certs=/ca.pem", "those of TLS with rediss:// and without --keys"),
        ("redis://h?db=main", "Invalid value for 'db'"),
        ("redis://h?socket_timeout=soon", "Invalid value for 'socket_timeout'"),
        ("rediss://h?ssl_ca_cert=/ca.pem", "'ssl_ca_cert': wanted none but .*ssl_ca_certs"),
        ("rediss://h?ssl_ca_certs=/nowhere/ca.pem", "for TLS: No such file or directory"),
        ("rediss://h?ssl_ca_certs={folder}/node/key.pem", "cannot be used for TLS"),
        ("rediss://h?ssl_certfile={folder}/node/ca.pem", "cannot be used for TLS"),
        ("rediss://h?ssl_cert_reqs=CERT_NONE", "for TLS: .*CERT_NONE"),
    ],
)
def test_what_cannot_is_named(url: str, words: str, tmp_path: Path) -> None:
    make_keys(tmp_path)
    with pytest.raises(ConfigError, match=words):
        RedisStore(url.format(folder=tmp_path), "named")


def test_with_the_keys_of_the_cluster_tls_has_no_options(tmp_path: Path) -> None:
    keys = node_keys(make_keys(tmp_path))
    RedisStore("rediss://h?db=3", "named", keys=keys)
    with pytest.raises(ConfigError, match="without --keys"):
        RedisStore("rediss://h?ssl_ca_certs=/ca.pem", "named", keys=keys)
