"""The rules of the commands that start processes: nothing is exposed to others without keys."""

from __future__ import annotations

from common.addresses import is_loopback
from common.nodes import Role
from common.settings.config import Config
from common.settings.redis_url import parse_redis_url
from common.settings.setting import Problem


def serve_problems(config: Config) -> list[Problem]:
    """Return every rule that `config` breaks under `serve`.

    A process that others can reach needs keys, and no password may be sent unencrypted.
    """
    wrong = config.problems()
    keys, host, kv_key = config.security.keys, config.server.host, config.handoff.kv_key
    redis_url = config.placement.redis_url
    if keys and kv_key:
        text = f"kv_key is {kv_key!r}: wanted none, because the keys folder has one"
        wrong.append(Problem(("kv_key", "keys"), text))
    if config.engine.prefix_disk_encryption and not (keys or kv_key):
        text = "prefix_disk_encryption is True: wanted kv_key or keys too, which have the key"
        wrong.append(Problem(("prefix_disk_encryption", "kv_key", "keys"), text))
    if config.security.insecure:
        return wrong
    if config.security.open_api and not is_loopback(host):
        text = (
            f"open_api is on, and host is {host!r}, where other machines reach it: wanted "
            "--no-open-api, or --insecure if everybody who reaches it may use the cluster"
        )
        wrong.append(Problem(("open_api", "host"), text))
    if not keys and not is_loopback(host):
        folder = "router" if config.role is Role.ROUTER else "node"
        text = (
            f"host is {host!r}, where other machines reach it: wanted --keys DIR/{folder} "
            "(`pdserve keys init DIR` makes it), or --insecure if everybody who reaches it may "
            "use the cluster and read what it computes"
        )
        wrong.append(Problem(("host",), text))
    kv_host = config.server.kv_host
    if not keys and is_loopback(host) and kv_host and not is_loopback(kv_host):
        text = (
            f"kv_host is {kv_host!r}, where other machines reach it: wanted --keys DIR/node, or "
            "--insecure if everybody who reaches it may read and write the KV of this node"
        )
        wrong.append(Problem(("kv_host",), text))
    if keys and _is_unencrypted(redis_url):
        text = (
            f"redis_url is {redis_url!r}: wanted rediss://… (TLS), because the password in the "
            "keys folder must not be sent unencrypted, or --insecure"
        )
        wrong.append(Problem(("redis_url", "keys"), text))
    return wrong


def up_problems(config: Config) -> list[Problem]:
    """Return every rule that `config` breaks under `up`, whose nodes listen on loopback alone."""
    host, wrong = config.server.host, config.problems()
    if config.api.tls_cert:
        text = "tls_cert is set: wanted none under `up`; `pdserve serve --role router` speaks HTTPS"
        wrong.append(Problem(("tls_cert",), text))
    if is_loopback(host) or config.api.api_key or config.security.insecure:
        return wrong
    text = (
        f"host is {host!r}, where other machines reach the router: wanted --api-key KEY, "
        "or --insecure if everybody who reaches it may use the cluster"
    )
    return [*wrong, Problem(("host",), text)]


def _is_unencrypted(redis_url: str) -> bool:
    try:
        address = parse_redis_url(redis_url)
    except ValueError:
        return False  # it is no URL, which the rule of redis_url reports
    return not address.has_tls and not all(is_loopback(host) for host, _ in address.hosts)
