"""Run the tests of the live page, with Chromium installed for them where that is possible.

    python -m tests.page [pytest's flags]

Where there is no Chromium and none can be had, that is said with its reason ("skipped: …"), and
the exit status is 0.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tests.support.browser import find_chromium

INSTALL_LIMIT_S = 420
_COMMANDS = (
    ("apt-get", "update", "-qq"),
    ("apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"),
)


class CannotInstall(Exception):
    """This machine cannot have a Chromium; the text says why."""


def main() -> int:
    try:
        if find_chromium() is None:
            install()
    except CannotInstall as error:
        print(f"skipped: no Chromium here: {error}", flush=True)
        return 0
    command = [sys.executable, "-m", "pytest", "tests/page", "--page", *sys.argv[1:]]
    return subprocess.run(command, check=False).returncode


def install() -> None:
    """Debian's own Chromium. Raises `CannotInstall`."""
    if os.geteuid() != 0:
        raise CannotInstall("not root, and `apt-get install chromium` must be run")
    if shutil.which("apt-get") is None:
        raise CannotInstall("no apt-get to install it with")
    print("installing chromium", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in _COMMANDS:
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=INSTALL_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CannotInstall(f"{command[1]} took over {INSTALL_LIMIT_S} s") from None
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
            raise CannotInstall(f"{' '.join(command)} ended with {done.returncode}: {said[-1]}")
    if find_chromium() is None:
        raise CannotInstall("it was installed, and is not on the path")


if __name__ == "__main__":
    sys.exit(main())
