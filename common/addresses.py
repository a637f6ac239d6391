"""Network addresses as text."""

from __future__ import annotations


def host_port(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in the brackets that tell its colons from the last one."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
