"""HTTPS: its port, streams over it, and a certificate that is renewed while it serves."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from prometheus_client import CollectorRegistry

from common.errors import ConfigError
from common.settings.config import ApiConfig
from http_serving.certificate import Certificate, checked_certificate, show_end
from router.http.server import bind_http, serve_http
from tests.support.http.http_edge import make_edge

DAY = timedelta(days=1)


def write_certificate(
    folder: Path,
    *,
    days: float = 30,
    password: bytes | None = None,
    curve: ec.EllipticCurve | None = None,
) -> tuple[Path, Path]:
    """A certificate that signs itself, and its key."""
    key = ec.generate_private_key(curve or ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 60 * DAY)
        .not_valid_after(now + days * DAY)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "tls.crt", folder / "tls.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    lock: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        lock = serialization.BestAvailableEncryption(password)
    form = serialization.PrivateFormat.PKCS8
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, lock))
    paths[1].chmod(0o600)
    return paths


def trusting(path: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(path))
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


@asynccontextmanager
async def serving(certificate: Certificate) -> AsyncIterator[int]:
    listener, stop = bind_http("127.0.0.1", 0), asyncio.Event()
    edge = make_edge()
    task = asyncio.create_task(
        serve_http(edge.app, listener, stop=stop, certificate=certificate, grace_s=1.0)
    )
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        await task


async def shown_serial(port: int) -> str:
    """The serial number of the certificate that a new connection gets."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return hex(x509.load_der_x509_certificate(der).serial_number)
    finally:
        writer.close()


async def test_answers_and_streams_over_https(tmp_path: Path) -> None:
    paths = write_certificate(tmp_path)
    async with serving(Certificate(*paths)) as port:
        url = f"https://localhost:{port}"
        async with httpx.AsyncClient(base_url=url, verify=trusting(paths[0])) as client:
            body = {"model": "tiny", "prompt": "Hi", "max_tokens": 8}
            whole = await client.post("/v1/completions", json=body)
            assert whole.status_code == 200
            stream = await client.post("/v1/completions", json={**body, "stream": True})
            assert stream.text.rstrip().endswith("data: [DONE]")
        # Who speaks plain HTTP gets no answer.
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient() as client:
                await client.get(f"http://localhost:{port}/health")


async def test_a_renewed_certificate_is_served_without_a_restart(tmp_path: Path) -> None:
    paths = write_certificate(tmp_path, days=2)
    certificate = Certificate(*paths)
    async with serving(certificate) as port:
        first = await shown_serial(port)
        assert not certificate.reload_if_changed()
        ends_at_s = certificate.expires_at_s
        write_certificate(tmp_path, days=90)
        assert certificate.reload_if_changed()
        assert await shown_serial(port) != first
        assert certificate.expires_at_s > ends_at_s + 80 * 86400


async def test_a_broken_renewal_keeps_the_earlier_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = write_certificate(tmp_path)
    certificate = Certificate(*paths)
    async with serving(certificate) as port:
        first = await shown_serial(port)
        (tmp_path / "other").mkdir()
        other = write_certificate(tmp_path / "other")
        paths[1].write_bytes(other[1].read_bytes())
        assert not certificate.reload_if_changed()
        assert not certificate.reload_if_changed()
        assert await shown_serial(port) == first
        # The second file arrives: now they belong together.
        paths[0].write_bytes(other[0].read_bytes())
        assert certificate.reload_if_changed()
        assert await shown_serial(port) != first
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "the earlier certificate stays" in errors[0].getMessage()


def test_a_key_whose_mode_is_corrected_is_taken_over(tmp_path: Path) -> None:
    """The mode of a file is in no stamp."""
    certificate, key = write_certificate(tmp_path)
    served = Certificate(certificate, key)
    (tmp_path / "other").mkdir()
    for path, renewed in zip(
        (certificate, key), write_certificate(tmp_path / "other"), strict=True
    ):
        path.write_bytes(renewed.read_bytes())
    key.chmod(0o644)
    assert not served.reload_if_changed()
    key.chmod(0o600)
    assert served.reload_if_changed()
    assert not served.reload_if_changed()


async def test_a_torn_renewal_leaves_no_certificate_without_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files change again just after they were checked."""
    paths = write_certificate(tmp_path)
    certificate = Certificate(*paths)
    (tmp_path / "other").mkdir()
    other = write_certificate(tmp_path / "other")

    def check_and_change(one: Path, key: Path) -> tuple[ssl.SSLContext, float]:
        checked = checked_certificate(one, key)
        paths[1].write_bytes(other[1].read_bytes())
        return checked

    async with serving(certificate) as port:
        serials = [await shown_serial(port)]
        write_certificate(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr("http_serving.certificate.checked_certificate", check_and_change)
            assert not certificate.reload_if_changed()
        assert not certificate.reload_if_changed()
        assert await shown_serial(port) == serials[-1]
        paths[0].write_bytes(other[0].read_bytes())
        assert certificate.reload_if_changed()
        serials.append(await shown_serial(port))
    assert len(set(serials)) == 2


async def test_a_renewed_certificate_is_served_with_and_without_a_host_name(
    tmp_path: Path,
) -> None:
    certificate = Certificate(*write_certificate(tmp_path))
    async with serving(certificate) as port:
        paths = write_certificate(tmp_path)
        assert certificate.reload_if_changed()
        trusts_renewed = trusting(paths[0])
        trusts_renewed.set_alpn_protocols(["h2", "http/1.1"])
        for name in ("localhost", ""):
            trusts_renewed.check_hostname = bool(name)
            _, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=trusts_renewed, server_hostname=name
            )
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "http/1.1"
            writer.close()


def test_its_end_is_announced_until_it_is_renewed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate = Certificate(*write_certificate(tmp_path, days=40))
    end_s = certificate.expires_at_s

    def told_before_the_end(days: float) -> str:
        caplog.clear()
        certificate.check(end_s - days * 86400)
        return "".join(one.getMessage() for one in caplog.records if one.levelname == "WARNING")

    assert told_before_the_end(31) == ""
    assert "tls.crt ends in 29.0 days: replace it" in told_before_the_end(29)
    assert told_before_the_end(28.5) == ""
    assert "ended 1.0 days ago" in told_before_the_end(-1)
    write_certificate(tmp_path, days=90)
    assert told_before_the_end(-2) == ""


def test_its_end_is_a_metric(tmp_path: Path) -> None:
    certificate = Certificate(*write_certificate(tmp_path, days=30))
    registry = CollectorRegistry()
    show_end(registry, certificate)
    value = registry.get_sample_value("pdserve_http_certificate_end_timestamp_seconds")
    assert value == certificate.expires_at_s
    left = value - datetime.now(UTC).timestamp()
    assert 29.9 * 86400 < left < 30.1 * 86400


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda cert, key: key.chmod(0o640), "may be used by others than its owner"),
        (lambda cert, key: cert.unlink(), "cannot be read"),
        (lambda cert, key: key.write_text("x"), "not a certificate and its key"),
        (lambda cert, key: cert.write_text("x"), "not a certificate and its key"),
        (lambda cert, key: write_certificate(cert.parent, days=-1), "expired"),
        (lambda cert, key: write_certificate(cert.parent, password=b"secret"), "has a password"),
        (
            lambda cert, key: write_certificate(cert.parent, curve=ec.SECP256K1()),
            "cannot be used for TLS",
        ),
    ],
)
def test_what_is_wrong_is_told_at_the_start(tmp_path: Path, change: object, words: str) -> None:
    paths = write_certificate(tmp_path)
    assert callable(change)
    change(*paths)
    with pytest.raises(ConfigError, match=words):
        Certificate(*paths)


def test_both_files_are_required() -> None:
    (problem,) = ApiConfig(tls_cert="a.pem").problems()
    assert "wanted tls_key too" in problem.text
    (problem,) = ApiConfig(tls_key="a.pem").problems()
    assert "wanted tls_cert too" in problem.text
    assert ApiConfig(tls_cert="a.pem", tls_key="b.pem").problems() == []
