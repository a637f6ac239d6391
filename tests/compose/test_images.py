"""What the images contain, and what they must not contain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.compose.engine import Engine
from tests.compose.project import Project
from tools.requirements import normal, pins

OURS = ("ROUTER_IMAGE", "NODE_IMAGE", "BALANCER_IMAGE", "STORE_IMAGE")
BUILD_TOOLS = ("cc", "gcc", "g++", "make", "ld", "as", "git", "curl", "wget", "pip", "pip3")
SECRETS = (
    "*.key", "key.pem", "*.password", "*.token", "users.acl", "api_keys.json", ".env", ".git",
    "id_rsa*", "id_ed25519*", ".netrc",
)  # fmt: skip
NOT_FOR_USE = ("tests", "bench", "tools", "compose", "docs")
SITE = "/opt/pdserve/lib/python3.11/site-packages"


@pytest.fixture(params=OURS)
def image(request: pytest.FixtureRequest, project: Project) -> str:
    return project.settings[request.param]


def inspect(engine: Engine, image: str) -> dict[str, Any]:
    return dict(engine.client.images.get(image).attrs)


def inside(engine: Engine, image: str, script: str) -> list[str]:
    """Run a shell script as root in a container of the image; return the words that it prints."""
    said = engine.client.containers.run(
        image, ["-c", script], entrypoint="sh", network_mode="none", user="0", remove=True
    )
    return str(said.decode()).split()


def test_the_router_adds_less_than_400_mb_to_its_base(engine: Engine, project: Project) -> None:
    size, base = (
        inspect(engine, project.settings[name])["Size"] for name in ("ROUTER_IMAGE", "PYTHON_IMAGE")
    )
    assert 0 < size - base < 400e6


def test_nothing_runs_as_root_and_health_is_told(engine: Engine, image: str) -> None:
    config = inspect(engine, image)["Config"]
    assert config["User"] == "10001:10001"
    assert config["Healthcheck"]["Test"]


def test_no_build_tools(engine: Engine, image: str) -> None:
    assert inside(engine, image, f"command -v sh {' '.join(BUILD_TOOLS)}") == ["/bin/sh"] or inside(
        engine, image, f"command -v sh {' '.join(BUILD_TOOLS)}"
    ) == ["/usr/bin/sh"]


def test_no_secrets(engine: Engine, image: str) -> None:
    names = " -o ".join(f"-name '{name}'" for name in SECRETS)
    places = "/opt /home /root /etc/pdserve* /usr/local /var /keys /models /source"
    assert inside(engine, image, f"find {places} \\( {names} \\) -type f 2>/dev/null || true") == []


def test_build_arguments_leave_no_trace(engine: Engine, project: Project, image: str) -> None:
    """The address of an index may contain a password: it stays in a stage that is discarded."""
    commands = [layer["CreatedBy"] for layer in engine.client.images.get(image).history()]
    assert commands
    assert not any("PIP_INDEX_URL" in command for command in commands)


def test_only_what_runs_is_installed(engine: Engine, project: Project) -> None:
    installed = inside(engine, project.settings["ROUTER_IMAGE"], f"ls {SITE}")
    assert "router" in installed
    assert not {*NOT_FOR_USE, "paddle", "numpy", "numba", "zmq"} & set(installed)
    of_node = inside(engine, project.settings["NODE_IMAGE"], f"ls {SITE}")
    assert {"paddle", "engine"} <= set(of_node)
    assert not set(NOT_FOR_USE) & set(of_node)


def test_versions_are_the_pinned_ones(engine: Engine, project: Project) -> None:
    pinned = pins(Path("requirements.txt").read_text(encoding="utf-8"))
    script = (
        "/opt/pdserve/bin/python -c 'import importlib.metadata as m; "
        'print(*(d.name + "==" + d.version for d in m.distributions()))\''
    )
    found = inside(engine, project.settings["NODE_IMAGE"], script)
    assert len(found) > 30
    for line in found:
        name, _, version = line.partition("==")
        if name != "pdserve":
            assert pinned[normal(name)].version == version, line


def test_health_is_told_by_the_answer(engine: Engine, project: Project) -> None:
    """The health check without a listener, with an answer of 200, and with another status."""
    script = """
    export PDSERVE_PORT=8000
    check="python -IS /usr/local/bin/answers.py PDSERVE_PORT"
    $check /; echo exit=$?
    cd /var/cache/pdserve; python -m http.server 8000 2>/dev/null & server=$!
    for attempt in $(seq 100); do $check / >/dev/null && break; done
    $check /; echo exit=$?
    $check /none; echo exit=$?
    kill $server
    """
    words = inside(engine, project.settings["ROUTER_IMAGE"], script)
    codes = [word.removeprefix("exit=") for word in words if word.startswith("exit=")]
    assert codes == ["1", "0", "1"]
