"""The keys of one run of `pdserve up`: other users of this machine can connect to its ports."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from common.errors import PdserveError
from pdserve.keys.redis_acl import users_acl

_USERS = ("router", "node")
_FOLDER = "keys"
_VALID_FROM = datetime(1970, 1, 2, tzinfo=UTC)
_VALID_DAYS = 200 * 365
"""Whatever the clock says: that of a machine which has just started is often set later."""


class LocalKeysError(PdserveError):
    """The package that makes keys is not installed."""

    code = "local_keys_error"


def make_local_keys(private: Path) -> Path:
    """Make the keys of a new cluster in a folder inside `private`, and return the folder.

    They are made anew for each run, and are valid whatever the clock says meanwhile.

    Raises `LocalKeysError` where a package is missing, `ConfigError` when nothing can be written.
    """
    try:  # imported late: errors that need no keys are reported before
        from pdserve.keys.keys_init import init_keys
    except ModuleNotFoundError as error:
        raise LocalKeysError(
            f"no package {error.name}, which makes the keys of the cluster: "
            "install the extra with `pip install '.[local]'`"
        ) from None
    folder = private / _FOLDER
    init_keys(folder, _VALID_FROM, days=_VALID_DAYS)
    return folder


def local_admin_key(private: Path) -> str:
    """Return the administrator's API key of the cluster whose keys are inside `private`."""
    return (private / _FOLDER / "client" / "admin.key").read_text()


def redis_users(keys: Path) -> str:
    """Return the users of the cluster's Redis, as an `aclfile`. Nobody is its administrator."""
    return users_acl({user: (keys / user / "redis.password").read_text() for user in _USERS})
