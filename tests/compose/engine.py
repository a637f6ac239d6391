"""A Docker engine that answers: the machine's own, or one that is started for the tests alone.

An engine of ours keeps its images in the user's cache folder, so that the next run need not build
them again, and listens on a socket in a temporary folder: it can neither meet nor disturb another
engine's files. It is ended by its process id.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.compose.commands import CannotRun, CommandFailed, require_tools, run, say

CLIENTS = {"docker": "docker.io", "docker-compose": "docker-compose"}
ENGINE = {"dockerd": "docker.io", "iptables": "iptables"}
START_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Engine:
    """Where an engine listens; empty: where the clients look by themselves."""

    host: str

    @property
    def environment(self) -> dict[str, str]:
        """What clients need in order to find it, and to build without BuildKit's plugin."""
        found = {"DOCKER_HOST": self.host} if self.host else {}
        return found | {"DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0"}

    def docker(self, *arguments: str, limit_s: float = 60.0, stdin: str | None = None) -> str:
        """The standard output of one `docker` command. Raises `CommandFailed`."""
        command = ["docker", *arguments]
        return run(command, limit_s=limit_s, env=self.environment, stdin=stdin)

    def has_image(self, name: str) -> bool:
        return bool(self.docker("images", "--quiet", name).strip())


@contextlib.contextmanager
def running_engine() -> Iterator[Engine]:
    """An engine for as long as the context lasts. Raises `CannotRun` where there can be none."""
    require_tools(CLIENTS)
    engine = Engine(host="")
    if _answers(engine):
        yield engine
        return
    if os.geteuid() != 0:
        raise CannotRun("no Docker engine answers, and only root can start one")
    require_tools(ENGINE)
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock, tempfile.TemporaryDirectory(prefix="pdserve-") as run_:
        # Two engines must not share one folder of images.
        fcntl.flock(lock, fcntl.LOCK_EX)
        with _started(cache / "engine", Path(run_)) as engine:
            yield engine


def cache_folder() -> Path:
    """Where images and their layers survive from run to run."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "pdserve" / "compose"


@contextlib.contextmanager
def _started(data: Path, work: Path) -> Iterator[Engine]:
    engine = Engine(host=f"unix://{work}/engine.sock")
    log = work / "log"
    command = ["dockerd", "--host", engine.host, "--data-root", str(data)]
    command += ["--exec-root", str(work / "exec"), "--pidfile", str(work / "engine.pid")]
    say("starting a Docker engine")
    with log.open("w") as output:
        # A group of its own, so that Ctrl-C reaches the tests and not what they clean up with.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            _wait_until_it_answers(engine, process, log)
            yield engine
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _unmount_below(work)


def _unmount_below(folder: Path) -> None:
    """An engine leaves namespaces of networks mounted, and their folder could not be removed."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in reversed(mounts):
        if point.startswith(f"{folder}/"):
            run(["umount", "--lazy", point], limit_s=10.0)


def _wait_until_it_answers(engine: Engine, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_at_s = time.monotonic() + START_LIMIT_S
    while not _answers(engine):
        if process.poll() is not None or time.monotonic() > give_up_at_s:
            raise CannotRun(f"the Docker engine does not start: {_last_words(log)}")
        time.sleep(_POLL_S)


def _answers(engine: Engine) -> bool:
    try:
        engine.docker("info", limit_s=10.0)
    except CommandFailed:
        return False
    return True


def _last_words(log: Path) -> str:
    return " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])[-600:]
