"""The images of others that are used: the official ones, or stand-ins where no registry answers.

A stand-in is Debian 12 with what the official image has at the places where it has it. It carries
another name, so that nobody takes it for the official one; compose files and Dockerfiles get the
names as build arguments and variables, as they do from whoever has a mirror of their own.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from tests.compose.commands import CannotRun, CommandFailed, require_tools, run, say
from tests.compose.engine import Engine

OFFICIAL = {
    "DEBIAN_IMAGE": "debian:bookworm-slim",
    "PYTHON_IMAGE": "python:3.11-slim-bookworm",
    "REDIS_IMAGE": "redis:7.2-bookworm",
    "PROMETHEUS_IMAGE": "prom/prometheus:v2.53.2",
}
"""Of each variable of `.env` that names an image of others: its default."""

HERE = Path(__file__).parent
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
PULL_LIMIT_S = 120.0
BUILD_LIMIT_S = 300.0
SUITE = "bookworm"
_SLIM = ("doc", "man", "info", "locale")


def base_images(engine: Engine) -> dict[str, str]:
    """Variable to image, for `.env`. Raises `CannotRun` where an image cannot be had."""
    if all(engine.has_image(name) for name in OFFICIAL.values()) or _can_pull(engine):
        return dict(OFFICIAL)
    standins = {
        variable: f"pdserve-standin/{_kind(variable)}:{_recipe(_kind(variable))}"
        for variable in OFFICIAL
    }
    try:
        _make(engine, standins)
    except CommandFailed as error:
        raise CannotRun(f"no registry answers, and a stand-in cannot be made: {error}") from None
    return standins


def _can_pull(engine: Engine) -> bool:
    try:
        for name in OFFICIAL.values():
            engine.docker("pull", "--quiet", name, limit_s=PULL_LIMIT_S)
    except CommandFailed:
        return False
    return True


def _make(engine: Engine, standins: dict[str, str]) -> None:
    debian = standins["DEBIAN_IMAGE"]
    if not engine.has_image(debian):
        say("no registry answers: making a stand-in of Debian (once, about a minute)")
        _import_debian(engine, debian)
    for variable, name in standins.items():
        if engine.has_image(name):
            continue
        folder = HERE / "standins" / _kind(variable)
        say(f"making a stand-in of {OFFICIAL[variable]}")
        arguments = ["--quiet", "--build-arg", f"DEBIAN_IMAGE={debian}", "--tag", name]
        engine.docker("build", *arguments, str(folder), limit_s=BUILD_LIMIT_S)


def _import_debian(engine: Engine, name: str) -> None:
    """A minimal Debian that trusts whom this machine trusts."""
    require_tools({"mmdebstrap": "mmdebstrap"})
    with tempfile.TemporaryDirectory(prefix="pdserve-debian-") as work:
        archive = Path(work) / "root.tar"
        command = ["mmdebstrap", "--quiet", "--variant=apt", "--include=ca-certificates"]
        command += [f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in _SLIM]
        if CERTIFICATES.exists():
            copy = f"cp {CERTIFICATES} $1{CERTIFICATES}"
            command.append(f"--customize-hook={copy}")
        run([*command, SUITE, str(archive), *_mirrors()], limit_s=BUILD_LIMIT_S)
        engine.docker(
            "import", "--change", 'CMD ["bash"]', str(archive), name, limit_s=BUILD_LIMIT_S
        )


def _mirrors() -> list[str]:
    """Where apt gets this suite from, if it does; else mmdebstrap's own choice."""
    if shutil.which("apt-get") is None:
        return []
    shown = ["$(REPO_URI)", "Identifier: Packages", f"Codename: {SUITE}", "Component: main"]
    found = run(["apt-get", "indextargets", "--format", *shown], limit_s=60.0).split()
    return sorted(set(found))[:1]


def _kind(variable: str) -> str:
    return OFFICIAL[variable].partition(":")[0].rpartition("/")[2]


def _recipe(kind: str) -> str:
    """Changes with everything that decides what the stand-in holds."""
    parts = [Path(__file__), CERTIFICATES, HERE / "standins" / kind / "Dockerfile"]
    digest = hashlib.sha256()
    for path in parts:
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()[:12]
