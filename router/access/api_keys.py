"""The file of API keys, with the limits of each.

    {"keys": [{"name": "alice", "sha256": "9f86…", "is_admin": false,
               "requests_per_minute": 60, "max_concurrent": 4}]}

It holds hashes only: a key is 256 random bits, so its SHA-256 reveals nothing. Writing replaces the
file in one step, so that a router that reads it meanwhile sees the old one or the new one. Writers
wait for one another.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.files.replaced_file import written_beside

KEY_PREFIX = "pds_"
MAX_KEYS = 1000
MAX_LIMIT = 1_000_000
MAX_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key without its secret: `sha256` is its hex digest. A limit of 0 means none."""

    name: str
    sha256: str
    is_admin: bool = False
    requests_per_minute: int = 0
    max_concurrent: int = 0


def hash_api_key(key: bytes) -> str:
    """Return the hash under which the file stores a key."""
    return hashlib.sha256(key).hexdigest()


def add_api_key(
    path: Path,
    name: str,
    *,
    is_admin: bool = False,
    requests_per_minute: int = 0,
    max_concurrent: int = 0,
) -> str:
    """Make a key, add it to the file (made when missing, mode 600), and return it in clear.

    It cannot be shown again later. Raises `ConfigError` for a name that is taken or malformed, a
    limit out of range, and a file that cannot be read or written.
    """
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    entry: dict[str, Any] = {
        "name": name,
        "sha256": hash_api_key(key.encode()),
        "is_admin": is_admin,
        "requests_per_minute": requests_per_minute,
        "max_concurrent": max_concurrent,
    }
    if problem := _problem(entry):
        raise ConfigError(problem)
    with _only_writer(path):
        keys = load_api_keys(path) if path.exists() else ()
        if any(other.name == name for other in keys):
            raise ConfigError(
                f"{path} has a key named {name!r} already: revoke that one, or choose another name"
            )
        if len(keys) >= MAX_KEYS:
            raise ConfigError(f"{path} holds {len(keys)} keys, the most: revoke some first")
        _replace(path, [*keys, ApiKey(**entry)])
    return key


def revoke_api_key(path: Path, name: str) -> None:
    """Remove a key from the file. Raises `ConfigError` when there is none of that name."""
    with _only_writer(path):
        keys = load_api_keys(path)
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            raise ConfigError(f"{path} has no key named {_shown(name)}")
        _replace(path, left)


def load_api_keys(path: Path) -> tuple[ApiKey, ...]:
    """Return the keys in the file, in order. Raises `ConfigError` naming file and entry."""
    try:
        _check_file(path, path.stat())
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or 'it cannot be read'}") from None
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise ConfigError(f"{path} is not JSON: wanted the file of `pdserve api-keys`") from None
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list) or len(entries) > MAX_KEYS:
        raise ConfigError(f"{path}: wanted an object with a list `keys` of at most {MAX_KEYS}")
    keys = tuple(_entry(path, index, entry) for index, entry in enumerate(entries, start=1))
    _check_unique(path, keys)
    return keys


def _check_file(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is not a file of at most {MAX_FILE_BYTES >> 20} MiB")
    if status.st_mode & 0o022:
        raise ConfigError(
            f"{path} may be changed by others than its owner (mode "
            f"{stat.S_IMODE(status.st_mode):03o}): wanted 600, `chmod 600 {path}`"
        )


def _entry(path: Path, index: int, entry: Any) -> ApiKey:
    if not isinstance(entry, dict):
        raise ConfigError(f"{path}: key {index} is not an object")
    where = f"{path}: key {index} ({_shown(entry.get('name'))})"
    known = {field.name for field in fields(ApiKey)}
    for name in entry:
        if name not in known:
            raise ConfigError(f"{where} has a field {_shown(name)}, which is unknown")
    for name in ("name", "sha256"):
        if name not in entry:
            raise ConfigError(f"{where} has no {name}")
    if problem := _problem(entry):
        raise ConfigError(f"{where}: {problem}")
    return ApiKey(**entry)


def _problem(entry: dict[str, Any]) -> str | None:
    """Return the first problem with the values of a key's fields, in words."""
    name, sha256 = entry["name"], entry["sha256"]
    if type(name) is not str or not _NAME.fullmatch(name):
        return (
            f"name is {_shown(name)}: wanted 1 to 64 letters, digits, '.', '_', '@' or '-', the "
            "first a letter or digit"
        )
    if type(sha256) is not str or not _SHA256.fullmatch(sha256):
        return f"sha256 is {_shown(sha256)}: wanted 64 lowercase hex digits"
    if type(entry.get("is_admin", False)) is not bool:
        return f"is_admin is {_shown(entry['is_admin'])}: wanted true or false"
    for limit in ("requests_per_minute", "max_concurrent"):
        value = entry.get(limit, 0)
        if type(value) is not int or not 0 <= value <= MAX_LIMIT:
            return f"{limit} is {_shown(value)}: wanted 0 (no limit) to {MAX_LIMIT}"
    return None


def _check_unique(path: Path, keys: Sequence[ApiKey]) -> None:
    for name in ("name", "sha256"):
        seen: set[str] = set()
        for index, key in enumerate(keys, start=1):
            value = getattr(key, name)
            if value in seen:
                raise ConfigError(f"{path}: key {index} ({key.name!r}) repeats another's {name}")
            seen.add(value)


@contextlib.contextmanager
def _only_writer(path: Path) -> Iterator[None]:
    """Lock the folder, so that two commands at once do not lose one's change."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{path.parent}: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, keys: Sequence[ApiKey]) -> None:
    text = json.dumps({"keys": [asdict(key) for key in keys]}, indent=2) + "\n"
    try:
        with written_beside(path, text.encode()) as new:
            new.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
