"""The commands of both generations of Compose, of which v2 is fetched where it is missing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.compose.engine import cache_folder
from tests.support.commands import CannotRun, CommandFailed, run, say

V1 = ("docker-compose",)
DEBIAN = "trixie"
"""The Debian release that has Compose v2. The program also runs on the release before it."""
_PLUGIN = "usr/libexec/docker/cli-plugins/docker-compose"
_LIMIT_S = 120.0


def compose_v2() -> Sequence[str]:
    """Return the command of Compose v2. Raises `CannotRun` where it cannot be fetched."""
    try:
        run(["docker", "compose", "version"], limit_s=20.0)
    except CommandFailed:
        return (str(_unpacked()),)
    return ("docker", "compose")


def _unpacked() -> Path:
    """Return the path of the program, extracted from Debian's package without installing that."""
    program = cache_folder() / "docker-compose-v2"
    if program.exists():
        return program
    if shutil.which("apt-get") is None:
        raise CannotRun("Compose v2 is not installed, and there is no apt-get to fetch it with")
    say("fetching Compose v2 (once)")
    try:
        with tempfile.TemporaryDirectory(prefix="pdserve-compose-v2-") as work:
            found = _downloaded(Path(work)) / _PLUGIN
            program.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, program.with_suffix(".new"))
            program.with_suffix(".new").rename(program)
    except CommandFailed as error:
        raise CannotRun(f"Compose v2 cannot be fetched: {error}") from None
    return program


def _downloaded(work: Path) -> Path:
    """Download and unpack the package. The machine's own sources and lists stay unchanged."""
    lists, cache = work / "lists", work / "cache"
    for folder in (lists / "partial", cache / "archives/partial"):
        folder.mkdir(parents=True)
    shown = ["$(REPO_URI)", "Identifier: Packages", "Codename: bookworm", "Component: main"]
    mirrors = run(["apt-get", "indextargets", "--format", *shown], limit_s=_LIMIT_S).split()
    if not mirrors:
        raise CannotRun("Compose v2 is not installed, and apt-get has no package lists")
    signed = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    (work / "sources.list").write_text(f"deb {signed} {mirrors[0]} {DEBIAN} main\n")
    options = {
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": lists,
        "Dir::Cache": cache,
        "APT::Sandbox::User": "root",
    }
    apt = ["apt-get", "-qq", *(f"-o{key}={value}" for key, value in options.items())]
    run([*apt, "update"], limit_s=_LIMIT_S)
    run([*apt, "download", "docker-compose"], limit_s=_LIMIT_S, folder=work)
    (package,) = work.glob("docker-compose_*.deb")
    run(["dpkg-deb", "-x", str(package), str(work / "root")], limit_s=_LIMIT_S)
    return work / "root"
