"""Keys for tests: whole folders, and certificates that something is wrong with."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from common.files.keys_folder import Keys, load_keys
from common.nodes import Role
from pdserve.keys.certificates import CertificateAuthority, Holder, IssuedCertificate
from pdserve.keys.keys_init import HOLDERS, init_keys


def make_keys(folder: Path) -> Path:
    """A new cluster's folder of keys, which is returned."""
    init_keys(folder, datetime.now(UTC), days=7)
    return folder


def authority_of(folder: Path) -> CertificateAuthority:
    """The CA of a folder of keys."""
    ca = folder / "ca"
    return CertificateAuthority.load((ca / "ca.pem").read_bytes(), (ca / "ca.key").read_bytes())


def issue(folder: Path, holder: Holder, *, days: float = 7) -> IssuedCertificate:
    """A certificate of the folder's CA; with negative `days` it ended that long ago."""
    return authority_of(folder).issue(holder, datetime.now(UTC), days=days)


def put(issued: IssuedCertificate, subfolder: Path) -> None:
    """Make it the certificate of a subfolder."""
    (subfolder / "cert.pem").write_bytes(issued.certificate)
    (subfolder / "key.pem").write_bytes(issued.private_key)


def router_keys(folder: Path) -> Keys:
    return load_keys(folder / "router", Role.ROUTER)


def node_keys(folder: Path) -> Keys:
    return load_keys(folder / "node", Role.DECODE)


def with_certificate(keys: Keys, issued: IssuedCertificate) -> Keys:
    """The same keys but for the certificate, unchecked as an attacker's would be."""
    tls = replace(keys.tls, certificate=issued.certificate, private_key=issued.private_key)
    return replace(keys, tls=tls)


def expired(folder: Path, kind: str) -> IssuedCertificate:
    """A certificate for a kind of process that ended yesterday."""
    return issue(folder, HOLDERS[kind], days=-1)
