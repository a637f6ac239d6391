"""Redis users of a cluster, with the keys and commands that each requires.

They follow from `placement/`: nodes keep leases; routers read them, record placements, and choose
the one that changes roles.
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
_EXPIRY_IN_FILES = "pexpireat"
"""The command by which a server's file says when a key expires."""
_LEASES = ("pdserve:*:node:*", "pdserve:*:nodes", "pdserve:*:epoch:*")
_PLACEMENTS = ("pdserve:*:placement:*", "pdserve:*:placements")
_ROLES = ("pdserve:*:leader", "pdserve:*:move")

_PATTERNS = {"router": (*_LEASES, *_PLACEMENTS, *_ROLES), "node": _LEASES}


def users_acl(passwords: Mapping[str, str]) -> str:
    """Return Redis's `aclfile` for the users router and node, and admin.

    It holds hashes of the passwords. The default user is off, so every client needs a password.
    Without a password of admin there is no such user, and nobody has the rights that only it has.
    """
    # Redis 7 reads its own file of changes with the rights of the default user, on or off, and
    # skips what they do not allow: all that a script wrote with more than one command.
    lines = [f"{_user('default', 'off', 'router')} +{_EXPIRY_IN_FILES}"]
    lines += [_user(user, f"on #{_hash(passwords[user])}", user) for user in _PATTERNS]
    if "admin" in passwords:
        lines.append(f"user admin reset on #{_hash(passwords['admin'])} ~* &* +@all")
    return "\n".join(lines) + "\n"


def keyless_acl() -> str:
    """Return Redis's `aclfile` for processes without keys: everybody has a router's rights."""
    return _user("default", "on nopass", "router") + "\n"


def _user(name: str, access: str, rights: str) -> str:
    patterns = " ".join(f"~{pattern}" for pattern in _PATTERNS[rights])
    commands = " ".join(f"+{command}" for command in COMMANDS)
    return f"user {name} reset {access} resetchannels -@all {patterns} {commands}"


def _hash(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()
