"""Redis users of a cluster: each may touch the keys, and run the commands, that it needs.

Named by what `placement/` does: nodes keep leases, routers read them and record placements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

# Scripts run with their caller's rights, so what they call is listed as well as what calls them.
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
)
_LEASES = ("pdserve:*:node:*", "pdserve:*:nodes", "pdserve:*:epoch:*")
_PLACEMENTS = ("pdserve:*:placement:*", "pdserve:*:placements")

_PATTERNS = {"router": (*_LEASES, *_PLACEMENTS), "node": _LEASES}


def users_acl(passwords: Mapping[str, str]) -> str:
    """The text of Redis's `aclfile` for the users router, node and admin.

    It holds hashes of the passwords. Nobody is anybody without one: the default user is off.
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
