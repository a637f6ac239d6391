"""Redis users of a cluster, with the keys and commands that each requires.

They follow from `placement/`: nodes keep leases, routers read them and record placements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

# Scripts run with the rights of their caller, so the commands inside them are listed too.
COMMANDS = (
    "evalsha",
    "script|load",
    "time",
    "get",
    "getrange",
    "set",
    "del",
    "pttl",
    "pexpire",
    "zadd",
    "zrem",
    "zrange",
    "zremrangebyscore",
    "ping",
    "select",
    "cluster|slots",
    "info",
)
_LEASES = ("pdserve:*:node:*", "pdserve:*:nodes", "pdserve:*:epoch:*")
_PLACEMENTS = ("pdserve:*:placement:*", "pdserve:*:placements")

_PATTERNS = {"router": (*_LEASES, *_PLACEMENTS), "node": _LEASES}


def users_acl(passwords: Mapping[str, str]) -> str:
    """Return Redis's `aclfile` for the users router, node and admin.

    It holds hashes of the passwords. The default user is off, so every client needs a password.
    """
    lines = ["user default reset off"]
    lines += [
        f"user {user} reset on #{_hash(passwords[user])} resetchannels -@all "
        + " ".join([f"~{pattern}" for pattern in patterns])
        + " "
        + " ".join([f"+{command}" for command in COMMANDS])
        for user, patterns in _PATTERNS.items()
    ]
    lines.append(f"user admin reset on #{_hash(passwords['admin'])} ~* &* +@all")
    return "\n".join(lines) + "\n"


def _hash(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()
