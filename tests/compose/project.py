"""One compose project of `compose/` on an engine.

Compose itself has no SDK: `up`, `build` and `down` are commands, and so is a command inside a
container. All else is asked of the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from docker.errors import DockerException
from docker.models.containers import Container

from tests.compose.engine import CALL_LIMIT_S, Engine
from tests.support.commands import run

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"
UP_LIMIT_S = 240.0
BUILD_LIMIT_S = 900.0
_POLL_S = 0.25
_NUM_LINES = 12
_LABEL = "com.docker.compose"


class Project:
    """A project: its name, its files, and `settings`, which take the place of `.env`."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        files: Sequence[Path],
        settings: Mapping[str, str],
    ) -> None:
        self.engine = engine
        self.name = name
        self.files = files
        self._command = ["docker-compose", "--project-name", name]
        # Compose's own default depends on the working folder.
        self._command += ["--project-directory", str(files[0].parent)]
        for file in files:
            self._command += ["--file", str(file)]
        self.settings = {**engine.environment, **settings}

    def run(self, *arguments: str, limit_s: float = UP_LIMIT_S) -> str:
        """Run one command of Compose, such as `up -d`. Raises `CommandFailed`."""
        command = [*self._command, *arguments]
        return run(command, limit_s=limit_s, env=self.settings)

    def containers(self, service: str = "") -> list[Container]:
        """Return all of a service, or of the project: running and ended ones, oldest first."""
        found = self.engine.client.containers.list(
            all=True, filters={"label": self._labels(service)}, ignore_removed=True
        )
        return sorted(found, key=lambda one: str(one.attrs["Created"]))

    def running(self, service: str) -> list[Container]:
        """Return the service's running containers."""
        return [one for one in self.containers(service) if one.status == "running"]

    def exit_codes(self, service: str, since_s: float) -> list[int]:
        """Return those of the service's containers that ended since `since_s`, seconds since 1970.

        Containers that were removed are included.
        """
        events = self.engine.client.events(
            since=f"{since_s:.3f}",
            until=f"{time.time():.3f}",
            filters={"event": "die", "label": self._labels(service)},
            decode=True,
        )
        return [int(event["Actor"]["Attributes"]["exitCode"]) for event in events]

    def wait_until(
        self, what: str, is_so: Callable[[], bool], *, limit_s: float = UP_LIMIT_S
    ) -> None:
        """Wait until `is_so` returns true. Raises `AssertionError` with the end of all logs."""
        give_up_at_s = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > give_up_at_s:
                raise AssertionError(f"not within {limit_s:g} s: {what}\n{self.ends_of_logs()}")
            time.sleep(_POLL_S)

    def wait_until_healthy(self, service: str, count: int) -> list[Container]:
        """Wait for `count` healthy containers of the service, and return them."""

        def healthy() -> list[Container]:
            return [one for one in self.running(service) if one.health == "healthy"]

        self.wait_until(f"{count} healthy {service}", lambda: len(healthy()) == count)
        return healthy()

    def execute(self, container: Container, *command: str) -> str:
        """Return the output of a command inside a container. Raises `CommandFailed`.

        The engine's SDK loses the beginning of an output that comes together with the header of
        the reply: it reads the header through a buffer, and the output past it.
        """
        inside = ["docker", "exec", str(container.id), *command]
        return run(inside, limit_s=CALL_LIMIT_S, env=self.settings)

    def ends_of_logs(self) -> str:
        """Return the state and the last log lines of each container."""
        words = []
        for one in self.containers():
            state = f"{one.labels[f'{_LABEL}.service']} {one.short_id} {one.status} {one.health}"
            try:
                logs = one.logs(tail=_NUM_LINES).decode(errors="replace")
            except DockerException as error:
                logs = str(error)
            words.append(f"--- {state} {one.attrs['State']['ExitCode']}\n{logs}")
        return "\n".join(words)

    def remove(self) -> None:
        """Remove the project's containers, networks and volumes."""
        self.run("down", "--volumes", "--timeout", "1", "--remove-orphans")

    def _labels(self, service: str) -> list[str]:
        project = [f"{_LABEL}.project={self.name}"]
        return [*project, f"{_LABEL}.service={service}"] if service else project
