"""`pdserve keys`: what is written where, with which rights, and what is never touched."""

from __future__ import annotations

import errno
import importlib.util
import os
import ssl
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from common.files.keys_folder import load_keys
from common.nodes import Role
from pdserve.cli import main
from pdserve.keys import keys_init
from pdserve.keys.certificates import CertificateAuthority
from router.access.api_keys import hash_api_key, load_api_keys
from tests.support.key_folders import make_keys

SECRETS = {
    "ca": {"ca.key"},
    "router": {"key.pem", "redis.password", "metrics.token", "api_keys.json"},
    "node": {"key.pem", "redis.password", "metrics.token", "kv.key"},
    "redis": {"key.pem", "users.acl"},
    "client": {"api.key", "admin.key", "metrics.token", "redis.password"},
}
PUBLIC = {
    "ca": {"ca.pem"},
    "router": {"ca.pem", "cert.pem"},
    "node": {"ca.pem", "cert.pem"},
    "redis": {"ca.pem", "cert.pem"},
    "client": {"ca.pem"},
}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def certificate(path: Path) -> dict[str, Any]:
    """What Python's own TLS reads in a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(path)
    (found,) = context.get_ca_certs()
    return found


def test_init_writes_every_file_with_no_more_rights_than_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "keys"
    assert main(["keys", "init", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == set(SECRETS)
    assert mode(folder) == 0o700
    for name in SECRETS:
        assert mode(folder / name) == 0o700
        assert {path.name for path in (folder / name).iterdir()} == SECRETS[name] | PUBLIC[name]
        for secret in SECRETS[name]:
            assert mode(folder / name / secret) == 0o600, secret
    said = capsys.readouterr().out
    assert "pdserve serve --role router --keys" in said
    for secret in ("client/api.key", "client/admin.key", "router/redis.password"):
        assert (folder / secret).read_text() not in said


def test_what_init_wrote_can_be_used(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")
    assert load_keys(keys / "router", Role.ROUTER)
    assert load_keys(keys / "node", Role.PREFILL)
    entries = {key.name: key for key in load_api_keys(keys / "router/api_keys.json")}
    for name, file, is_admin in (("client", "api.key", False), ("admin", "admin.key", True)):
        key = (keys / "client" / file).read_bytes()
        assert (entries[name].sha256, entries[name].is_admin) == (hash_api_key(key), is_admin)
    passwords = [(keys / n / "redis.password").read_text() for n in ("router", "node", "client")]
    assert len(set(passwords)) == 3
    for content in contents(keys / "redis").values():
        assert not any(password.encode() in content for password in passwords)


def test_two_inits_share_nothing(tmp_path: Path) -> None:
    first, second = (contents(make_keys(tmp_path / name)) for name in "ab")
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] == second[name]] == []


def test_init_fills_an_empty_folder_and_leaves_what_else_is_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    make_keys(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("there", ["ca", "router", "node", "redis", "client"])
def test_init_overwrites_nothing(
    there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / there).mkdir()
    (tmp_path / there / "file").write_text("kept")
    assert main(["keys", "init", str(tmp_path)]) == 2
    assert f"{tmp_path / there} exists already" in capsys.readouterr().err
    assert contents(tmp_path) == {f"{there}/file": b"kept"}


@pytest.mark.parametrize("is_new", [True, False])
def test_an_init_that_fails_leaves_nothing(
    is_new: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(keys_init, "write_curve_keys", fail)
    assert main(["keys", "init", str(tmp_path / "keys" if is_new else tmp_path)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "names"), [
    ("router", ["router.pdserve"]),
    ("node", ["node.pdserve"]),
    ("redis", ["redis.pdserve", "redis", "localhost", "127.0.0.1"]),
])  # fmt: skip
def test_certificates_name_their_kind_and_end_when_asked(
    kind: str, names: list[str], tmp_path: Path
) -> None:
    assert main(["keys", "init", str(tmp_path), "--days", "30"]) == 0
    from cryptography import x509

    loaded = x509.load_pem_x509_certificate((tmp_path / kind / "cert.pem").read_bytes())
    shown = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in shown] == names
    assert not loaded.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    left = loaded.not_valid_after_utc - datetime.now(UTC)
    assert timedelta(days=29) < left <= timedelta(days=30)


@pytest.mark.covers("M13")
@pytest.mark.parametrize("file", ["ca/ca.pem", "router/cert.pem", "node/cert.pem"])
def test_certificates_are_valid_where_a_clock_is_behind(file: str, tmp_path: Path) -> None:
    from cryptography import x509

    assert main(["keys", "init", str(tmp_path)]) == 0
    if file.startswith("node"):
        assert main(["keys", "renew", str(tmp_path), "node"]) == 0
    loaded = x509.load_pem_x509_certificate((tmp_path / file).read_bytes())
    assert loaded.not_valid_before_utc < datetime.now(UTC) - timedelta(minutes=30)


def test_renew_changes_one_certificate_and_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = make_keys(tmp_path / "keys")
    before = contents(keys)
    assert main(["keys", "renew", str(keys), "node", "--days", "9"]) == 0
    assert "restart" in capsys.readouterr().out
    after = contents(keys)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"node/cert.pem", "node/key.pem"}
    assert after.keys() == before.keys()
    assert mode(keys / "node/key.pem") == 0o600
    left_s = load_keys(keys / "node", Role.DECODE).tls.expires_at_s - datetime.now(UTC).timestamp()
    assert 8.9 < left_s / 86400 <= 9


def test_a_renewal_keeps_the_owner_of_what_it_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders belong to the user of the containers, and root renews."""
    keys = make_keys(tmp_path / "keys")
    uid, gid = (keys / "node/key.pem").stat().st_uid, (keys / "node/key.pem").stat().st_gid
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    monkeypatch.setattr(os, "fchown", lambda _, *owner: given.append(owner))
    assert main(["keys", "renew", str(keys), "node"]) == 0
    assert given == [(uid, gid)] * 2
    assert (mode(keys / "node/key.pem"), mode(keys / "node/cert.pem")) == (0o600, 0o644)


def test_a_renewal_that_was_cut_off_hinders_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = make_keys(tmp_path / "keys")
    before = contents(keys)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert main(["keys", "renew", str(keys), "node"]) == 2
    assert "No space left" in capsys.readouterr().err
    assert contents(keys) == before
    (keys / "node/.key.pem.new").write_text("of a process that was killed")
    assert main(["keys", "renew", str(keys), "node"]) == 0


def break_ca(keys: Path) -> None:
    (keys / "ca/ca.key").write_text("garbage")


def swap_ca(keys: Path) -> None:
    other = make_keys(keys.parent / "other")
    (keys / "ca/ca.key").write_bytes((other / "ca/ca.key").read_bytes())


def remove_ca(keys: Path) -> None:
    (keys / "ca/ca.key").unlink()


def old_ca(keys: Path) -> None:
    authority = CertificateAuthority.new(datetime.now(UTC), days=2).pem
    (keys / "ca/ca.pem").write_bytes(authority.certificate)
    (keys / "ca/ca.key").write_bytes(authority.private_key)


def as_it_is(keys: Path) -> None:
    pass


REFUSED_RENEWALS = {
    "unknown role": (as_it_is, ["decode"], "ROLE is 'decode': wanted router, node or redis"),
    "no days": (as_it_is, ["node", "--days", "0"], "--days is 0: wanted 1 to 3650"),
    "too many": (as_it_is, ["node", "--days", "4000"], "--days is 4000: wanted 1 to 3650"),
    "no CA": (remove_ca, ["node"], "ca/ca.key is missing: wanted the folder that"),
    "garbage": (break_ca, ["node"], "the CA cannot be read"),
    "another CA's key": (swap_ca, ["node"], "the CA's certificate and key are not of one pair"),
    "a CA that ends": (old_ca, ["node"], "--days is 365, but the CA itself ends in"),
}


@pytest.mark.parametrize("name", REFUSED_RENEWALS)
def test_a_renewal_that_cannot_be_changes_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    break_it: Callable[[Path], None]
    break_it, arguments, said = REFUSED_RENEWALS[name]
    keys = make_keys(tmp_path / "keys")
    break_it(keys)
    before = contents(keys)
    assert main(["keys", "renew", str(keys), *arguments]) == 2
    assert said in capsys.readouterr().err
    assert contents(keys) == before


def test_without_its_libraries_it_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec

    def find_other(name: str, package: str | None = None) -> object:
        return None if name == "cryptography" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_other)
    assert main(["keys", "init", str(tmp_path / "keys")]) == 2
    assert "cryptography cannot be imported" in (said := capsys.readouterr().err)
    assert "pip install '.[keys]'" in said
    assert list(tmp_path.iterdir()) == []


def test_the_ca_is_one_that_issues_and_nothing_else(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")
    assert certificate(keys / "ca/ca.pem")["subject"] == certificate(keys / "node/ca.pem")["issuer"]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(keys / "node/cert.pem")
    assert context.get_ca_certs() == []
