"""One compose project of `compose/` on an engine, driven by the command that people type."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.compose.commands import CommandFailed, run
from tests.compose.engine import Engine

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"
UP_LIMIT_S = 240.0
BUILD_LIMIT_S = 900.0
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Container:
    """What the engine says of one container."""

    id: str
    service: str
    status: str
    health: str
    exit_code: int
    num_restarts: int
    hostname: str
    raw: dict[str, Any]


class Project:
    """A project by its name, its files and what its `.env` would hold."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        files: Sequence[Path],
        settings: Mapping[str, str],
        command: Sequence[str] = ("docker-compose",),
    ) -> None:
        self.engine = engine
        self.name = name
        self.files = files
        self._command = [*command, "--project-name", name]
        # The folder of the first file, as it is for who stands in it.
        self._command += ["--project-directory", str(files[0].parent)]
        for file in files:
            self._command += ["--file", str(file)]
        self.settings = {**engine.environment, **settings}

    def run(self, *arguments: str, limit_s: float = UP_LIMIT_S) -> str:
        """One command of compose, such as `up -d`; its output. Raises `CommandFailed`."""
        command = [*self._command, *arguments]
        return run(command, limit_s=limit_s, env=self.settings)

    def containers(self, service: str = "") -> list[Container]:
        """All of a service, or of the project: running, ended and dead ones, oldest first."""
        wanted = [f"label=com.docker.compose.project={self.name}"]
        if service:
            wanted.append(f"label=com.docker.compose.service={service}")
        filters = [part for label in wanted for part in ("--filter", label)]
        ids = self.engine.docker("ps", "--all", "--quiet", "--no-trunc", *filters).split()
        if not ids:
            return []
        found = json.loads(self.engine.docker("inspect", *ids))
        return [_container(raw) for raw in sorted(found, key=lambda raw: str(raw["Created"]))]

    def find(self, container_id: str) -> Container:
        """One container as it is now."""
        return _container(json.loads(self.engine.docker("inspect", container_id))[0])

    def running(self, service: str) -> list[Container]:
        """The service's containers that run."""
        return [one for one in self.containers(service) if one.status == "running"]

    def exit_codes(self, service: str, since_s: float) -> list[int]:
        """Of the service's containers that ended since a moment of the epoch, removed ones too."""
        labels = [f"project={self.name}", f"service={service}"]
        filters = ["--filter=event=die"]
        filters += [f"--filter=label=com.docker.compose.{label}" for label in labels]
        span = [f"--since={since_s:.3f}", f"--until={time.time():.3f}"]
        shown = "--format={{.Actor.Attributes.exitCode}}"
        return [int(code) for code in self.engine.docker("events", *span, *filters, shown).split()]

    def wait_until(
        self, what: str, is_so: Callable[[], bool], *, limit_s: float = UP_LIMIT_S
    ) -> None:
        """Return when `is_so` holds. Fails with the containers' last words when it never does."""
        give_up_at_s = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > give_up_at_s:
                raise AssertionError(f"not so within {limit_s:g} s: {what}\n{self.last_words()}")
            time.sleep(_POLL_S)

    def wait_until_healthy(self, service: str, count: int) -> list[Container]:
        """The service's `count` running containers, all of them healthy."""

        def healthy() -> list[Container]:
            return [one for one in self.running(service) if one.health == "healthy"]

        self.wait_until(f"{count} healthy {service}", lambda: len(healthy()) == count)
        return healthy()

    def execute(self, container: Container, *command: str) -> str:
        """The output of a command inside a container. Raises `CommandFailed`."""
        return self.engine.docker("exec", container.id, *command)

    def last_words(self, num_lines: int = 12) -> str:
        """The end of what each container said, for a failed test's report."""
        words = []
        for one in self.containers():
            state = f"{one.service} {one.id[:12]} {one.status} {one.health} {one.exit_code}"
            try:
                tail = ["--tail", str(num_lines), one.id]
                logs = run(
                    ["sh", "-c", 'docker logs "$@" 2>&1', "logs", *tail],
                    limit_s=30.0,
                    env=self.engine.environment,
                )
            except CommandFailed as error:
                logs = str(error)
            words.append(f"--- {state}\n{logs}")
        return "\n".join(words)

    def remove(self) -> None:
        """Containers, networks and the project's own volumes."""
        self.run("down", "--volumes", "--timeout", "1", "--remove-orphans")


def _container(raw: dict[str, Any]) -> Container:
    state = raw["State"]
    return Container(
        id=raw["Id"],
        service=raw["Config"]["Labels"]["com.docker.compose.service"],
        status=state["Status"],
        health=state.get("Health", {}).get("Status", ""),
        exit_code=state["ExitCode"],
        num_restarts=raw["RestartCount"],
        hostname=raw["Config"]["Hostname"],
        raw=raw,
    )
