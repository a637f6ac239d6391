"""The cluster's own certificate authority, and the certificates that it issues.

A certificate names a kind of process by a DNS name that exists nowhere else. Its key usage limits
it to one side of a connection: a router's never serves, Redis's never calls.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from common.errors import ConfigError

CA_DAYS = 3650
# A machine whose clock is behind would reject a new certificate as not valid yet.
_BACKDATED = timedelta(hours=1)

CALLS, SERVES = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """A certificate and its private key, both PEM."""

    certificate: bytes
    private_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Holder:
    """The subject of a certificate: DNS names or IP addresses; peers check the first."""

    names: tuple[str, ...]
    usages: tuple[x509.ObjectIdentifier, ...]


class CertificateAuthority:
    """Issues certificates that the processes of one cluster accept."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate = certificate
        self._key = key

    @classmethod
    def new(cls, now: datetime, *, days: int = CA_DAYS) -> CertificateAuthority:
        """Return a new authority, valid for `days`."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pdserve cluster CA")])
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        certificate = (
            _builder(name, name, key, now, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(is_ca=True), critical=True)
            .add_extension(identifier, critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, certificate: bytes, private_key: bytes) -> CertificateAuthority:
        """Return the authority of two PEM files. Raises `ConfigError` unless they are a pair."""
        try:
            key = load_pem_private_key(private_key, password=None)
            loaded = x509.load_pem_x509_certificate(certificate)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the CA cannot be read: {error}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or (
            key.public_key() != loaded.public_key()
        ):
            raise ConfigError("the CA's certificate and key are not of one pair")
        return cls(loaded, key)

    @property
    def pem(self) -> IssuedCertificate:
        """The authority's own certificate and key."""
        return IssuedCertificate(self._certificate.public_bytes(Encoding.PEM), _key_pem(self._key))

    @property
    def ends_at(self) -> datetime:
        """The time after which no certificate of this authority is accepted."""
        return self._certificate.not_valid_after_utc

    def issue(self, holder: Holder, now: datetime, *, days: float) -> IssuedCertificate:
        """Return a new key and its certificate, valid for `days` from now on.

        A negative number makes a certificate that has expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, holder.names[0])])
        authority = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        of_authority = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(authority)
        certificate = (
            _builder(subject, self._certificate.subject, key, now, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(is_ca=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(holder.usages), critical=False)
            .add_extension(_names(holder.names), critical=False)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(of_authority, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return IssuedCertificate(certificate.public_bytes(Encoding.PEM), _key_pem(key))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    days: float,
) -> x509.CertificateBuilder:
    ends_at = now.astimezone(UTC) + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now.astimezone(UTC), ends_at) - _BACKDATED)
        .not_valid_after(ends_at)
    )


def _key_usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _names(names: Sequence[str]) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([_name(name) for name in names])


def _name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
