"""Runs programs that tests of `compose/` and of the chart require, each with a time limit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

APT_LIMIT_S = 300.0


class CannotRun(Exception):
    """This machine cannot run the tests; the text names the reason."""


class CommandFailed(Exception):
    """A program failed; the text ends with the end of its output."""


def say(text: str) -> None:
    """Print a progress message, past pytest's capture of `sys.stderr` (`--capture=sys`)."""
    print(f"--- {text}", file=sys.__stderr__, flush=True)


def run(
    command: Sequence[str],
    *,
    limit_s: float,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    stdin: str | None = None,
) -> str:
    """Run `command` and return its standard output. Raises `CommandFailed`.

    `env` is added to this process's own environment.
    """
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(env or {})},
            cwd=folder,
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except FileNotFoundError:
        raise CommandFailed(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise CommandFailed(f"{' '.join(command)}: not done within {limit_s:g} s") from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-3000:]
        raise CommandFailed(f"{' '.join(command)}: exit {done.returncode}\n{said}")
    return done.stdout


def require_tools(packages: Mapping[str, str]) -> None:
    """Install the missing programs of `packages`, a map from program to Debian package.

    Raises `CannotRun` when that is not possible.
    """
    missing = sorted({deb for program, deb in packages.items() if shutil.which(program) is None})
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise CannotRun(f"needs {', '.join(missing)}, and only root with apt-get can install them")
    say(f"installing {', '.join(missing)}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        run(["apt-get", "update", "-qq"], limit_s=APT_LIMIT_S)
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
        run(install, limit_s=APT_LIMIT_S, env=quiet)
    except CommandFailed as error:
        raise CannotRun(f"cannot install {', '.join(missing)}: {error}") from None
