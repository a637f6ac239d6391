"""Network addresses as text."""

from __future__ import annotations

import ipaddress


def host_port(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address, which contains colons itself."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach what listens on `host`.

    Of all names only localhost counts: the address of any other name can change.
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
