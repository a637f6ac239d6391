"""`pdserve keys`: makes keys, and prints what to do with them."""

from __future__ import annotations

import argparse
import importlib.util
from datetime import UTC, datetime
from pathlib import Path

from common.errors import ConfigError
from common.settings.setting import joined_by_or
from pdserve.configuration.config_file import suggestion

_MOST_DAYS = 3650
_NEEDED = ("cryptography", "zmq")


def run_keys(parsed: argparse.Namespace) -> None:
    """Make a cluster's keys, or renew one certificate. Raises `ConfigError`."""
    if not 1 <= parsed.days <= _MOST_DAYS:
        raise ConfigError(f"--days is {parsed.days}: wanted 1 to {_MOST_DAYS}")
    _require_libraries()
    from pdserve.keys.keys_init import HOLDERS, init_keys, renew_certificate

    folder, now = Path(parsed.folder), datetime.now(UTC)
    if parsed.action == "init":
        init_keys(folder, now, days=parsed.days)
        print(_NEXT_STEPS.format(folder=folder, days=parsed.days), end="")
        return
    if parsed.role not in HOLDERS:
        hint = suggestion(parsed.role, HOLDERS)
        raise ConfigError(f"ROLE is {parsed.role!r}: wanted {joined_by_or([*HOLDERS])}{hint}")
    renew_certificate(folder, parsed.role, now, days=parsed.days)
    print(
        f"{folder / parsed.role}: a new certificate for {parsed.days} days. Copy the folder to "
        "where it is used. Routers and nodes take it over within 10 s; restart Redis for its own."
    )


def _require_libraries() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} cannot be imported: install what makes keys with "
            "`pip install '.[keys]'`"
        )


_NEXT_STEPS = """\
Keys for a cluster are in {folder}; its certificates end in {days} days.

  {folder}/router   copy to machines with routers:  pdserve serve --role router --keys …/router
  {folder}/node     copy to machines with nodes:    pdserve serve --role decode --keys …/node
  {folder}/redis    copy to the machine with Redis
  {folder}/client   an API key, an admin's key, the metrics token, in clear
  {folder}/ca       keep to yourself: it can make certificates

Copies keep their mode: 600, owned by the user that the process runs as.
"""
