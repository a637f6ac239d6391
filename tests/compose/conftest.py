"""A cluster in containers, built and launched once for all tests of this folder.

They take minutes and an engine of Docker, so they run only when asked for, by `make test-compose`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from pdserve.local_cluster.free_ports import free_loopback_port
from tests.cluster.tiny_model import make_tiny_model
from tests.compose.base_images import base_images
from tests.compose.cluster import Cluster
from tests.compose.commands import CannotRun, run, say
from tests.compose.engine import Engine, running_engine
from tests.compose.project import BUILD_LIMIT_S, COMPOSE, Project

CONTAINER_UID = 10001
KERNELS = "pdserve-test-kernels"
"""A volume that outlives the tests: kernels are compiled for a minute, once."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--compose", action="store_true", help="build images and run compose files")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without the option there is nothing here to run; None leaves the choice to pytest."""
    is_wanted = config.getoption("--compose", default=False)
    return None if is_wanted or collection_path.suffix != ".py" else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A Docker engine; without one every test is skipped, with the reason."""
    try:
        with running_engine() as engine:
            yield engine
    except CannotRun as reason:
        pytest.skip(f"no Docker engine here: {reason}")


@pytest.fixture(scope="session")
def images(engine: Engine) -> dict[str, str]:
    """Variables of `.env` that name the base images that builds start from."""
    try:
        return base_images(engine)
    except CannotRun as reason:
        pytest.skip(f"no base images here: {reason}")


@pytest.fixture(scope="session")
def work() -> Iterator[Path]:
    """What containers mount: not among pytest's folders, of which it removes old ones."""
    with tempfile.TemporaryDirectory(prefix="pdserve-compose-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def keys(work: Path) -> Path:
    """What `pdserve keys init` makes, owned by the user of the containers as the docs say."""
    folder = work / "keys"
    run([".venv/bin/pdserve", "keys", "init", str(folder)], limit_s=60.0, folder=COMPOSE.parent)
    for kind in ("router", "node", "redis"):
        for path in (folder / kind, *(folder / kind).iterdir()):
            os.chown(path, CONTAINER_UID, CONTAINER_UID)
    return folder


@pytest.fixture(scope="session")
def models(work: Path) -> Path:
    """A folder with one model, `tiny`, that everybody may read."""
    folder = work / "models"
    make_tiny_model(folder / "tiny")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture(scope="session")
def project(engine: Engine, images: dict[str, str], keys: Path, models: Path) -> Iterator[Project]:
    """compose.yaml with built images; nothing runs yet. Whatever runs at the end is removed."""
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
    engine.docker("volume", "create", KERNELS)
    project.remove()
    say("building images (about two minutes the first time)")
    project.run("build", limit_s=BUILD_LIMIT_S)
    try:
        yield project
    finally:
        project.remove()
        # Layers of earlier sources; what the next run can use stays.
        if engine.host:
            engine.docker("image", "prune", "--force", "--filter", "until=48h", limit_s=120.0)


@pytest.fixture(scope="session")
def cluster(project: Project, keys: Path) -> Cluster:
    """Redis, two routers, two prefill and two decode nodes, all of them healthy."""
    cluster = Cluster(project, keys)
    say("launching Redis, 2 routers, 2 prefill and 2 decode nodes")
    cluster.launch()
    return cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[OpenAI]:
    """OpenAI's own client, with the first client's key, at the balancer; it never tries twice."""
    with cluster.client() as client:
        yield client


@pytest.fixture(autouse=True)
def _books(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test of the cluster, every block of every node is free or cached."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").wait_until_nothing_is_held()


@pytest.fixture(scope="session", autouse=True)
def _has_room() -> None:
    """Images of Paddle are large, and a full disk breaks in odd places."""
    free = shutil.disk_usage(Path.home()).free
    if free < 12 << 30:
        pytest.skip(f"{free >> 30} GiB of disk are free: wanted 12")
