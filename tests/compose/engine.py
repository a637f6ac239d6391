"""A running Docker engine: the machine's own, or one that is started for the tests alone.

An engine of the tests keeps its images in the user's cache folder, so the next run does not build
them again. It listens on a socket in a temporary folder and shares no file with another engine. It
is stopped by its process id.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.errors import DockerException

from tests.support.commands import CannotRun, require_tools, run, say

COMMANDS = {"docker-compose": "docker-compose", "docker": "docker.io"}
ENGINE = {"dockerd": "docker.io", "iptables": "iptables"}
START_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0
CALL_LIMIT_S = 120
_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine: its client, and its address. An empty `host` is the machine's own engine."""

    host: str
    client: docker.DockerClient

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which Compose uses this engine, and builds without BuildKit's plugin."""
        found = {"DOCKER_HOST": self.host} if self.host else {}
        return found | {"DOCKER_BUILDKIT": "0", "COMPOSE_DOCKER_CLI_BUILD": "0"}

    def has_image(self, name: str) -> bool:
        return bool(self.client.images.list(name=name))


@contextlib.contextmanager
def running_engine() -> Iterator[Engine]:
    """Provide an engine. Raises `CannotRun` where none runs and none can be started."""
    require_tools(COMMANDS)
    try:
        own = _connected("")
    except CannotRun as error:
        if os.geteuid() != 0:
            raise CannotRun(f"{error}; only root can start one") from None
    else:
        with contextlib.closing(own.client):
            yield own
        return
    require_tools(ENGINE)
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock, tempfile.TemporaryDirectory(prefix="pdserve-") as run_:
        # Two engines must not use one folder of images.
        fcntl.flock(lock, fcntl.LOCK_EX)
        with _started(cache / "engine", Path(run_)) as engine:
            yield engine


def cache_folder() -> Path:
    """Return the folder that keeps images and their layers from run to run."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "pdserve" / "compose"


@contextlib.contextmanager
def _started(data: Path, work: Path) -> Iterator[Engine]:
    host, log = f"unix://{work}/engine.sock", work / "log"
    command = ["dockerd", "--host", host, "--data-root", str(data)]
    command += ["--exec-root", str(work / "exec"), "--pidfile", str(work / "engine.pid")]
    say("starting a Docker engine")
    with log.open("w") as output:
        # In a process group of its own: Ctrl-C must not stop the engine before the clean-up.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            engine = _wait_until_it_answers(host, process, log)
            with contextlib.closing(engine.client):
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
    """Unmount the network namespaces that an engine leaves; else `folder` cannot be removed."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in reversed(mounts):
        if point.startswith(f"{folder}/"):
            run(["umount", "--lazy", point], limit_s=10.0)


def _wait_until_it_answers(host: str, process: subprocess.Popen[bytes], log: Path) -> Engine:
    give_up_at_s = time.monotonic() + START_LIMIT_S
    while True:
        try:
            return _connected(host)
        except CannotRun:
            if process.poll() is not None or time.monotonic() > give_up_at_s:
                raise CannotRun(f"the Docker engine does not start: {_end_of(log)}") from None
        time.sleep(_POLL_S)


def _connected(host: str) -> Engine:
    """Return the engine at `host`. Raises `CannotRun` when it is not reachable."""
    environment = {**os.environ, "DOCKER_HOST": host} if host else dict(os.environ)
    with warnings.catch_warnings():
        # A client that cannot connect leaves its socket to the garbage collector.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            return Engine(host, docker.from_env(timeout=CALL_LIMIT_S, environment=environment))
        except DockerException as error:
            reason = str(error)
        gc.collect()
    raise CannotRun(f"no Docker engine is reachable: {reason}")


def _end_of(log: Path) -> str:
    return " / ".join(log.read_text(errors="replace").strip().splitlines()[-3:])[-600:]
