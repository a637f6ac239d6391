"""Keys and their absence: what a process that others can reach must have before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from common.addresses import is_loopback
from common.nodes import Role
from common.setting import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig:
    """What this process shows to others, and what it asks of them."""

    keys: str = setting("", "this process's folder of `pdserve keys init`: DIR/router or DIR/node")
    insecure: bool = setting(
        False, "let others reach this process without keys, on a network where all are trusted"
    )

    def problems(self) -> list[str]:
        """Any text may name a folder; what is in it is judged where it is read."""
        return []


def serve_exposure_problems(
    security: SecurityConfig, *, role: Role, host: str, redis_url: str, kv_key: str
) -> list[str]:
    """Rules of `serve`: nobody on the network without keys, and no password in clear."""
    wrong = []
    if security.keys and kv_key:
        wrong.append(f"kv_key is {kv_key!r}: wanted none, because the keys folder has one")
    if security.insecure:
        return wrong
    if not security.keys and not is_loopback(host):
        folder = "router" if role is Role.ROUTER else "node"
        wrong.append(
            f"host is {host!r}, where other machines reach it: wanted --keys DIR/{folder} "
            "(`pdserve keys init DIR` makes it), or --insecure if everybody who reaches it may "
            "use the cluster and read what it computes"
        )
    if security.keys and _is_in_clear(redis_url):
        wrong.append(
            f"redis_url is {redis_url!r}: wanted rediss://… (TLS), because the password in the "
            "keys folder must not travel in clear, or --insecure"
        )
    return wrong


def up_exposure_problems(security: SecurityConfig, *, host: str, api_key: str) -> list[str]:
    """The rule of `up`: only its router listens on `host`, all else on loopback."""
    if is_loopback(host) or api_key or security.insecure:
        return []
    return [
        f"host is {host!r}, where other machines reach the router: wanted --api-key TEXT, "
        "or --insecure if everybody who reaches it may use the cluster"
    ]


def _is_in_clear(redis_url: str) -> bool:
    try:
        parts = urlsplit(redis_url)
        # redis-py takes a URL without a host for localhost.
        return parts.scheme == "redis" and not is_loopback(parts.hostname or "localhost")
    except ValueError:
        return False  # said already: it is no URL
