"""A cluster in containers, built and started once for all tests of this folder.

They take minutes and require a Docker engine, so only `make test-compose` runs them.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from pdserve.local_cluster.free_ports import free_loopback_port
from tests.compose.base_images import base_images
from tests.compose.cluster import Cluster
from tests.compose.engine import Engine, running_engine
from tests.compose.project import BUILD_LIMIT_S, COMPOSE, Project
from tests.support.commands import CannotRun, run, say
from tests.support.models.tiny_model import make_tiny_model

CONTAINER_UID = 10001
KERNELS = "pdserve-test-kernels"
"""A volume that is kept after the tests: compiling the kernels takes a minute."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compose", action="store_true", help="build images and run compose files")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder more time; in a run of several folders all are passed.

    Fixtures have limits of their own: an engine's start, a build, a cluster's start.
    """
    for item in items:
        if item.nodeid.startswith("tests/compose/"):
            item.add_marker(pytest.mark.timeout(1200, func_only=True))


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """Provide a Docker engine. Without one every test is skipped, with the reason."""
    try:
        with running_engine() as engine:
            yield engine
    except CannotRun as reason:
        pytest.skip(f"no Docker engine here: {reason}")


@pytest.fixture(scope="session")
def images(engine: Engine) -> dict[str, str]:
    """Return the variables of `.env` that name the base images of the builds."""
    try:
        return base_images(engine)
    except CannotRun as reason:
        pytest.skip(f"no base images here: {reason}")


@pytest.fixture(scope="session")
def work() -> Iterator[Path]:
    """Provide a folder for mounts, apart from pytest's own, of which it removes old ones."""
    with tempfile.TemporaryDirectory(prefix="pdserve-compose-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def keys(work: Path) -> Path:
    """Return a keys folder of `pdserve keys init`, owned by the user of the containers."""
    folder = work / "keys"
    command = [sys.executable, "-m", "pdserve", "keys", "init", str(folder)]
    run(command, limit_s=60.0, folder=COMPOSE.parent)
    for kind in ("router", "node", "redis"):
        for path in (folder / kind, *(folder / kind).iterdir()):
            os.chown(path, CONTAINER_UID, CONTAINER_UID)
    return folder


@pytest.fixture(scope="session")
def models(work: Path) -> Path:
    """Return a folder with one model, `tiny`, that every user may read."""
    folder = work / "models"
    make_tiny_model(folder / "tiny")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture(scope="session")
def project(engine: Engine, images: dict[str, str], keys: Path, models: Path) -> Iterator[Project]:
    """Provide compose.yaml with built images. What runs at the end is removed."""
    settings = {
        **images,
        "KEYS_FOLDER": str(keys),
        "MODELS_FOLDER": str(models),
        "MODEL": "tiny",
        "LISTEN": f"127.0.0.1:{free_loopback_port()}",
        "KV_CACHE_MEMORY": "64MiB",
        "NUM_THREADS": "1",
    }
    for name in ("ROUTER", "NODE", "BALANCER", "STORE"):
        settings[f"{name}_IMAGE"] = f"pdserve-test-{name.lower()}"
    files = [COMPOSE / "compose.yaml", Path(__file__).parent / "compose.test.yaml"]
    project = Project(engine, "pdserve-test", files, settings)
    engine.client.volumes.create(KERNELS)
    project.remove()
    say("building images (about two minutes the first time)")
    project.run("build", limit_s=BUILD_LIMIT_S)
    try:
        yield project
    finally:
        project.remove()
        # Remove layers of earlier sources, and keep what the next run can use.
        if engine.host:
            engine.client.images.prune(filters={"until": "48h"})


@pytest.fixture(scope="session")
def cluster(project: Project, keys: Path) -> Cluster:
    """Start Redis, two routers, two prefill and two decode nodes, all of them healthy."""
    cluster = Cluster(project, keys)
    say("starting Redis, 2 routers, 2 prefill and 2 decode nodes")
    cluster.launch()
    return cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[OpenAI]:
    """Provide OpenAI's client at the balancer, with an API key and without retries."""
    with cluster.client() as client:
        yield client


@pytest.fixture(autouse=True)
def _books(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after each test of the cluster that every block of every node is free or cached."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").wait_until_nothing_is_held()


@pytest.fixture(scope="session", autouse=True)
def _has_room() -> None:
    """Skip the tests on a small disk: the images are large, and a full disk causes odd errors."""
    free = shutil.disk_usage(Path.home()).free
    if free < 12 << 30:
        pytest.skip(f"{free >> 30} GiB of disk are free: wanted 12")
