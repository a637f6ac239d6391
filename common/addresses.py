"""Network addresses as text."""

from __future__ import annotations

import ipaddress


def host_port(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in the brackets that tell its colons from the last one."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`. A name says so only as localhost:
    what others resolve to can change."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
