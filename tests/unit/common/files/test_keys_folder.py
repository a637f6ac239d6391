"""What `--keys` names is read whole, and judged before anything listens."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from common.errors import ConfigError
from common.files import keys_folder
from common.files.keys_folder import load_keys
from common.nodes import Role
from pdserve.keys.certificates import CALLS, Holder
from pdserve.keys.keys_init import HOLDERS
from tests.support.key_folders import authority_of, expired, issue, make_keys, put


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys")


def test_a_router_and_a_node_read_their_own(keys: Path) -> None:
    router = load_keys(keys / "router", Role.ROUTER)
    assert (router.redis_user, router.api_keys_path) == ("router", keys / "router/api_keys.json")
    for role in (Role.PREFILL, Role.DECODE, Role.MIXED):
        node = load_keys(keys / "node", role)
        assert (node.redis_user, node.kv_key_path) == ("node", keys / "node/kv.key")
    assert router.tls.ca == node.tls.ca
    assert router.metrics_token == node.metrics_token == (keys / "client/metrics.token").read_text()
    assert router.redis_password != node.redis_password


def test_secrets_are_not_in_what_is_logged(keys: Path) -> None:
    router = load_keys(keys / "router", Role.ROUTER)
    shown = repr(router)
    assert router.redis_password not in shown
    assert router.metrics_token not in shown
    assert "PRIVATE" not in shown


def test_a_word_may_end_with_a_line(keys: Path) -> None:
    path = keys / "node/redis.password"
    path.write_text("word\n")
    assert load_keys(keys / "node", Role.DECODE).redis_password == "word"


def test_a_renewed_certificate_is_taken_over(keys: Path) -> None:
    node = load_keys(keys / "node", Role.DECODE)
    before = node.tls
    assert not node.reload_if_changed()
    assert node.tls is before
    put(issue(keys, HOLDERS["node"], days=3), keys / "node")
    assert node.reload_if_changed()
    assert node.tls.expires_at_s < before.expires_at_s
    assert node.tls == load_keys(keys / "node", Role.DECODE).tls
    assert not node.reload_if_changed()


def test_a_broken_renewal_changes_nothing_and_is_logged_once(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = load_keys(keys / "node", Role.DECODE)
    before = node.tls
    put(expired(keys, "node"), keys / "node")
    assert not node.reload_if_changed()
    assert not node.reload_if_changed()
    assert node.tls is before
    (said,) = [record.getMessage() for record in caplog.records]
    assert "the earlier certificate stays" in said
    assert "certificate has expired" in said
    (keys / "node/key.pem").unlink()
    assert not node.reload_if_changed()
    put(issue(keys, HOLDERS["node"]), keys / "node")
    (keys / "node/key.pem").chmod(0o600)
    assert node.reload_if_changed()


def test_a_renewal_whose_mode_is_corrected_is_taken_over(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node = load_keys(keys / "node", Role.DECODE)
    put(issue(keys, HOLDERS["node"]), keys / "node")
    (keys / "node/key.pem").chmod(0o644)
    assert not node.reload_if_changed()
    assert not node.reload_if_changed()
    (said,) = caplog.messages
    assert "`chmod 600 " in said
    (keys / "node/key.pem").chmod(0o600)
    assert node.reload_if_changed()
    assert not node.reload_if_changed()


def test_files_that_change_while_they_are_read_are_read_again(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = load_keys(keys / "node", Role.DECODE)
    before, load = node.tls, keys_folder.load_tls

    def load_slowly(folder: Path, kind: str) -> keys_folder.TlsFiles:
        found = load(folder, kind)
        put(issue(keys, HOLDERS["node"], days=2), folder)
        return found

    put(issue(keys, HOLDERS["node"], days=3), keys / "node")
    with monkeypatch.context() as patched:
        patched.setattr(keys_folder, "load_tls", load_slowly)
        assert not node.reload_if_changed()
    assert node.tls is before
    assert node.reload_if_changed()
    assert node.tls == load_keys(keys / "node", Role.DECODE).tls


def without(name: str) -> Callable[[Path], None]:
    return lambda keys: (keys / "node" / name).unlink()


def holding(name: str, content: bytes) -> Callable[[Path], None]:
    def write(keys: Path) -> None:
        (keys / "node" / name).write_bytes(content)

    return write


def with_mode(name: str, mode: int) -> Callable[[Path], None]:
    return lambda keys: (keys / "node" / name).chmod(mode)


def as_a_folder(keys: Path) -> None:
    (keys / "node/redis.password").unlink()
    (keys / "node/redis.password").mkdir(mode=0o700)


def from_another_cluster(keys: Path) -> None:
    other = make_keys(keys.parent / "other")
    for name in ("cert.pem", "key.pem"):
        (keys / "node" / name).write_bytes((other / "node" / name).read_bytes())


def expired_yesterday(keys: Path) -> None:
    put(expired(keys, "node"), keys / "node")


def of_tomorrow(keys: Path) -> None:
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    put(authority_of(keys).issue(HOLDERS["node"], tomorrow, days=7), keys / "node")


def of_a_router(keys: Path) -> None:
    put(issue(keys, HOLDERS["router"]), keys / "node")


def of_nobody_known(keys: Path) -> None:
    put(issue(keys, Holder(names=("node.example",), usages=(CALLS,))), keys / "node")


def on_a_curve_that_tls_lacks(keys: Path) -> None:
    make = ec.generate_private_key
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ec, "generate_private_key", lambda _: make(ec.SECP256K1()))
        put(issue(keys, HOLDERS["node"]), keys / "node")


def with_another_key(keys: Path) -> None:
    (keys / "node/key.pem").write_bytes((keys / "router/key.pem").read_bytes())


WRONG = {
    "ca.pem missing": (without("ca.pem"), "node/ca.pem cannot be read: No such file"),
    "key missing": (without("key.pem"), "node/key.pem cannot be read: No such file"),
    "kv.key missing": (without("kv.key"), "node/kv.key cannot be read: No such file"),
    "password missing": (without("redis.password"), "redis.password cannot be read"),
    "no certificate": (without("cert.pem"), "not a folder of keys: wanted the subfolder node"),
    "key readable": (with_mode("key.pem", 0o640), r"key.pem may be used .* \(mode 640\).*chmod"),
    "token readable": (with_mode("metrics.token", 0o604), "metrics.token may be used by others"),
    "kv.key readable": (with_mode("kv.key", 0o644), "kv.key may be used by others"),
    "password a folder": (as_a_folder, "redis.password is a folder: wanted a file"),
    "password empty": (holding("redis.password", b" \n"), "redis.password is empty"),
    "password of two words": (holding("redis.password", b"a b"), "holds no password"),
    "password of two lines": (holding("redis.password", b"a\nb"), "holds no password"),
    "token not ASCII": (holding("metrics.token", "ü".encode()), "holds no password"),
    "password huge": (holding("redis.password", b"x" * 70_000), "larger than 64 KiB"),
    "ca.pem garbage": (holding("ca.pem", b"\0garbage"), "ca.pem holds no certificate"),
    "certificate garbage": (holding("cert.pem", b"garbage"), "are not a certificate and its key"),
    "key of another": (with_another_key, "are not a certificate and its key"),
    "of another CA": (from_another_cluster, "node/cert.pem is not accepted by .*ca.pem"),
    "of a curve that TLS lacks": (
        on_a_curve_that_tls_lacks,
        "node/cert.pem cannot be used for TLS",
    ),
    "expired": (
        expired_yesterday,
        "certificate has expired, if this machine's clock is right: `pdserve keys renew DIR node`",
    ),
    "of tomorrow": (of_tomorrow, "not yet valid; this machine's clock is behind, or .* made$"),
    "a router's": (
        of_a_router,
        "is the certificate of router.pdserve: wanted the one of node.pdserve",
    ),
    "nobody's": (
        of_nobody_known,
        "is the certificate of node.example: wanted the one of node.pdserve",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str, keys: Path) -> None:
    break_it, said = WRONG[name]
    break_it(keys)
    with pytest.raises(ConfigError, match=said):
        load_keys(keys / "node", Role.DECODE)


def test_the_whole_folder_is_not_a_processs(keys: Path) -> None:
    with pytest.raises(ConfigError, match=f"wanted the subfolder node .*, here {keys}/node"):
        load_keys(keys, Role.DECODE)
    with pytest.raises(ConfigError, match="is not a folder of keys"):
        load_keys(keys / "nowhere", Role.DECODE)


def test_a_nodes_folder_is_no_routers(keys: Path) -> None:
    with pytest.raises(ConfigError, match="the folder of a node: wanted a router's"):
        load_keys(keys / "node", Role.ROUTER)
    with pytest.raises(ConfigError, match="the folder of a router: wanted a node's"):
        load_keys(keys / "router", Role.DECODE)
    (keys / "node" / "kv.key").unlink()
    with pytest.raises(ConfigError, match="kv\\.key cannot be read"):
        load_keys(keys / "node", Role.DECODE)
