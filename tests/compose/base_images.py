"""The base images: the official ones, or stand-ins where no registry is reachable.

A stand-in is Debian 12 with the official image's programs at the official image's paths. It has a
name of its own, so it is not mistaken for the official image. Compose files and Dockerfiles take
the names as variables and build arguments, as they do for users of a registry mirror.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

from docker.errors import DockerException

from tests.compose.engine import Engine
from tests.support.commands import CannotRun, CommandFailed, require_tools, run, say

OFFICIAL = {
    "DEBIAN_IMAGE": "debian:bookworm-slim",
    "PYTHON_IMAGE": "python:3.11-slim-bookworm",
    "REDIS_IMAGE": "redis:7.2-bookworm",
    "PROMETHEUS_IMAGE": "prom/prometheus:v2.53.2",
}
"""Each variable of `.env` that names a base image, with its default."""

HERE = Path(__file__).parent
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
BUILD_LIMIT_S = 300.0
SUITE = "bookworm"
_SLIM = ("doc", "man", "info", "locale")


def base_images(engine: Engine) -> dict[str, str]:
    """Return the image of each variable of `.env`. Raises `CannotRun` when one cannot be made."""
    if all(engine.has_image(name) for name in OFFICIAL.values()) or _can_pull(engine):
        return dict(OFFICIAL)
    standins = {
        variable: f"pdserve-standin/{_kind(variable)}:{_recipe(_kind(variable))}"
        for variable in OFFICIAL
    }
    try:
        _make(engine, standins)
    except (CommandFailed, DockerException) as error:
        raise CannotRun(f"no registry is reachable, and no stand-in can be made: {error}") from None
    return standins


def _can_pull(engine: Engine) -> bool:
    try:
        for name in OFFICIAL.values():
            engine.client.images.pull(name)
    except DockerException:
        return False
    return True


def _make(engine: Engine, standins: dict[str, str]) -> None:
    debian = standins["DEBIAN_IMAGE"]
    if not engine.has_image(debian):
        say("no registry is reachable: making a stand-in for Debian (once, about a minute)")
        _import_debian(engine, debian)
    for variable, name in standins.items():
        if engine.has_image(name):
            continue
        folder = HERE / "standins" / _kind(variable)
        say(f"making a stand-in for {OFFICIAL[variable]}")
        engine.client.images.build(
            path=str(folder), buildargs={"DEBIAN_IMAGE": debian}, tag=name, rm=True
        )


def _import_debian(engine: Engine, name: str) -> None:
    """Make a minimal Debian with the CA certificates of this machine."""
    require_tools({"mmdebstrap": "mmdebstrap"})
    with tempfile.TemporaryDirectory(prefix="pdserve-debian-") as work:
        archive = Path(work) / "root.tar"
        command = ["mmdebstrap", "--quiet", "--variant=apt", "--include=ca-certificates"]
        command += [f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in _SLIM]
        if CERTIFICATES.exists():
            copy = f"cp {CERTIFICATES} $1{CERTIFICATES}"
            command.append(f"--customize-hook={copy}")
        run([*command, SUITE, str(archive), *_mirrors()], limit_s=BUILD_LIMIT_S)
        repository, _, tag = name.partition(":")
        engine.client.api.import_image_from_file(
            str(archive), repository, tag, changes=['CMD ["bash"]']
        )
        engine.client.images.get(name)  # the engine reports a failed import with status 200


def _mirrors() -> list[str]:
    """Return the mirror of this suite that apt uses, or none: then mmdebstrap chooses."""
    if shutil.which("apt-get") is None:
        return []
    shown = ["$(REPO_URI)", "Identifier: Packages", f"Codename: {SUITE}", "Component: main"]
    found = run(["apt-get", "indextargets", "--format", *shown], limit_s=60.0).split()
    return sorted(set(found))[:1]


def _kind(variable: str) -> str:
    return OFFICIAL[variable].partition(":")[0].rpartition("/")[2]


def _recipe(kind: str) -> str:
    """Return a checksum of everything that determines the content of the stand-in."""
    parts = [Path(__file__), CERTIFICATES, HERE / "standins" / kind / "Dockerfile"]
    digest = hashlib.sha256()
    for path in parts:
        digest.update(path.read_bytes() if path.exists() else b"")
    return digest.hexdigest()[:12]
