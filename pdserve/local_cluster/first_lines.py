"""What `pdserve up` says when it serves: where everything is, and how to ask for it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path


def first_lines(url: str, command: str) -> str:
    """Return the addresses of a cluster and the commands about it; `command` runs pdserve."""
    return (
        f"Serving on {url} until Ctrl-C.\n"
        f"  live page  {url}/\n"
        f"  API        {url}/docs\n"
        f"  metrics    {url}/metrics\n"
        f"  status     {command} status --url {url}\n"
        f"  chat       {command} chat --url {url}"
    )


def command_name() -> str:
    """Return how this shell runs pdserve: by its name, or by the path of its environment."""
    if shutil.which("pdserve"):
        return "pdserve"
    script = Path(sys.executable).with_name("pdserve")
    if not script.is_file():
        return f"{shlex.quote(sys.executable)} -m pdserve"
    shown = script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script
    return shlex.quote(os.fspath(shown))
