"""`pdserve api-keys`: edits the file of API keys, which routers reload while they run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from router.access.api_keys import ApiKey, add_api_key, load_api_keys, revoke_api_key

_HEADINGS = ("NAME", "ADMIN", "REQUESTS/MINUTE", "AT ONCE", "SHA-256")


def run_api_keys(parsed: argparse.Namespace) -> None:
    """Run the command. Raises `ConfigError`, and then the file is unchanged."""
    path = Path(parsed.file)
    match parsed.action:
        case "add":
            _add(path, parsed)
        case "revoke":
            revoke_api_key(path, parsed.name)
            print(f"{parsed.name}: revoked; routers that use {path} notice within a second")
        case "list":
            print(_table(load_api_keys(path)), end="")


def _add(path: Path, parsed: argparse.Namespace) -> None:
    """Add a key. Only the key goes to stdout, so that a script can read it."""
    key = add_api_key(
        path,
        parsed.name,
        is_admin=parsed.admin,
        requests_per_minute=parsed.requests_per_minute,
        max_concurrent=parsed.max_concurrent,
    )
    print(key)
    print(
        f"The key of {parsed.name}, shown this once: {path} holds only its hash. Routers that use "
        "the file take it within a second.",
        file=sys.stderr,
    )


def _table(keys: tuple[ApiKey, ...]) -> str:
    rows = [_HEADINGS, *(_row(key) for key in keys)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "".join(f"{line}\n" for line in lines)


def _row(key: ApiKey) -> tuple[str, ...]:
    return (
        key.name,
        "yes" if key.is_admin else "no",
        str(key.requests_per_minute or "no limit"),
        str(key.max_concurrent or "no limit"),
        key.sha256[:12],
    )
