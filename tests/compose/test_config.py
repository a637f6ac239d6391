"""Both generations of Compose accept every compose file, in each combination that is documented."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.compose.compose_cli import V1, compose_v2
from tests.compose.engine import COMMANDS
from tests.compose.project import COMPOSE
from tests.support.commands import CannotRun, CommandFailed, require_tools, run

COMBINATIONS = [
    ("compose.yaml",),
    ("compose.yaml", "compose.gpu.yaml"),
    ("compose.yaml", "compose.https.yaml"),
    ("compose.yaml", "compose.observability.yaml"),
    ("compose.host-redis.yaml",),
    ("compose.host-router.yaml",),
    ("compose.host-balancer.yaml",),
    ("compose.host-prefill.yaml",),
    ("compose.host-decode.yaml",),
    ("compose.host-redis.yaml", "compose.host-router.yaml", "compose.host-balancer.yaml"),
]


@pytest.fixture(scope="module", params=["docker-compose 1.29", "Compose v2"])
def compose(request: pytest.FixtureRequest) -> Sequence[str]:
    try:
        require_tools(COMMANDS)
        return V1 if request.param.startswith("docker-compose") else compose_v2()
    except CannotRun as reason:
        pytest.skip(str(reason))


def test_every_file_of_the_folder_is_in_a_combination() -> None:
    assert {path.name for path in COMPOSE.glob("*.yaml")} == {
        name for names in COMBINATIONS for name in names
    }


@pytest.mark.parametrize("files", COMBINATIONS, ids="+".join)
def test_a_combination_passes_with_the_example_of_settings_and_without(
    compose: Sequence[str], files: Sequence[str], tmp_path: Path
) -> None:
    """Both give the same result: the example holds the defaults."""
    empty = tmp_path / "empty"
    empty.write_text("")
    assert config(compose, files, COMPOSE / ".env.example") == config(compose, files, empty)


@pytest.mark.parametrize(
    ("file", "variable"),
    [
        ("compose.observability.yaml", "GRAFANA_PASSWORD"),
    ],
)
def test_what_has_no_default_is_asked_for(compose: Sequence[str], file: str, variable: str) -> None:
    command = [*compose, "--project-directory", str(COMPOSE)]
    command += ["--file", str(COMPOSE / "compose.yaml"), "--file", str(COMPOSE / file), "config"]
    with pytest.raises(CommandFailed, match=f"set {variable}"):
        run(command, limit_s=60.0, env={variable: ""})


def test_a_wrong_file_does_not_pass(compose: Sequence[str], tmp_path: Path) -> None:
    wrong = tmp_path / "compose.yaml"
    wrong.write_text("services: {router: {image: x, restrat: always}}\n")
    with pytest.raises(CommandFailed, match="restrat"):
        run([*compose, "--file", str(wrong), "config", "--quiet"], limit_s=60.0)


def config(compose: Sequence[str], files: Sequence[str], env_file: Path) -> object:
    """Return the merged configuration; as text from Compose v1, which has no JSON."""
    required = {"GRAFANA_PASSWORD": "chosen"}
    command = [*compose, "--project-directory", str(COMPOSE), "--env-file", str(env_file)]
    for name in files:
        command += ["--file", str(COMPOSE / name)]
    if compose == V1:
        return run([*command, "config"], limit_s=60.0, env=required)
    return json.loads(run([*command, "config", "--format", "json"], limit_s=60.0, env=required))
