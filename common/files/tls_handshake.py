"""A TLS handshake within this process: it shows what a peer would say of a certificate."""

from __future__ import annotations

import ssl


def handshake_in_memory(
    client: ssl.SSLContext, server: ssl.SSLContext
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Return both ends of a connection, the client's first.

    Raises `ssl.SSLCertVerificationError` where one end refuses the other's certificate, and another
    `ssl.SSLError` where the two agree on no cipher or signature.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    # In TLS 1.3 the client is done before the server has checked its certificate.
    for _ in range(3):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends


_NOT_YET_VALID, _HAS_EXPIRED = 9, 10
"""OpenSSL's numbers of the two reasons that are a matter of the clock."""


def is_too_early(error: ssl.SSLCertVerificationError) -> bool:
    """Return whether a certificate is refused because it is not valid yet."""
    return error.verify_code == _NOT_YET_VALID


def why_refused(error: ssl.SSLCertVerificationError) -> str:
    """Return why a certificate is refused, and for its dates that a clock may be wrong.

    The text has no time: it is the same at the next try.
    """
    hints = {
        _NOT_YET_VALID: "; this machine's clock is behind, or was ahead where it was made",
        _HAS_EXPIRED: ", if this machine's clock is right",
    }
    return f"{error.verify_message}{hints.get(error.verify_code, '')}"


def no_password() -> str:
    """Refuse a key with a password. Raises `ValueError`.

    Without this function OpenSSL would ask on the terminal, and a service would hang.
    """
    raise ValueError("the key has a password: wanted a key without one")
