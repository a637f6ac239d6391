"""`pdserve up`: a whole cluster on one machine, each part a process of its own.

1. Check the port and resolve the model, so that errors are reported before anything runs.
2. Start Redis, then the router and all nodes at once, because loading takes long.
3. Wait until the router lists every node; a child that dies meanwhile ends the start.
4. Stream one sample answer, and print the command for another one. The cluster serves on without.
5. Serve until a stop signal. A node that dies is reported and the rest serve on; where that is
   wanted, it is started again. When the router dies, the cluster ends.
6. Stop the router first, so that no request finds half a cluster, then the nodes, then Redis.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from common.child_process import module_command, module_environment
from common.control_group import num_cores
from common.errors import PdserveError
from common.ids import Incarnation
from common.observing.clock import Clock, MonotonicClock
from common.settings.config import Config
from engine.runner.memory_meter import HostMeter
from pdserve.checkpoints.resolve import names_of, resolve_checkpoint
from pdserve.commands.answer_stream import printable
from pdserve.commands.cluster_status import fetch_cluster
from pdserve.commands.http_client import RouterRefused, RouterUnreachable, fetch_json
from pdserve.configuration.config_sources import OTHER_VARIABLES
from pdserve.configuration.shown_config import config_file_text
from pdserve.local_cluster.child_process import (
    ChildProcess,
    start_child,
    stop_children,
)
from pdserve.local_cluster.cluster_plan import ClusterSize, plan_cluster
from pdserve.local_cluster.embedded_redis import start_embedded_redis
from pdserve.local_cluster.free_ports import connectable_host, require_free_port
from pdserve.local_cluster.local_keys import make_local_keys, redis_users
from pdserve.local_cluster.messages import (
    command_name,
    compiled_kernels,
    first_lines,
    last_words,
    obituary,
    what_now,
)
from pdserve.local_cluster.private_files import write_private
from pdserve.local_cluster.restarts import Restarts
from pdserve.local_cluster.run_folder import RunFolder, earlier_runs, make_log_folder
from pdserve.local_cluster.sample_answer import show_sample_answer
from pdserve.local_cluster.signals import Signals, StopRequested
from pdserve.roles.usable import check_usable

DEFAULT_PORT = 8000
_START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 10.0
"""Longer than a router takes to end: the grace of its requests, then the aborts to the nodes."""
_PROBE_INTERVAL_S = 0.1
_RETURN_PROBE_INTERVAL_S = 0.5
_SLOW_AFTER_S = 5.0
_KERNELS_INTERVAL_S = 5.0
_TAIL_LINES = 50

CommandFor = Callable[[Path], Sequence[str]]
"""Returns the command that runs the role of a configuration file."""


class LocalClusterError(PdserveError):
    """A part of the local cluster did not start, or the router died."""

    code = "local_cluster_error"


def serve_command(config_path: Path) -> Sequence[str]:
    """Return `pdserve serve` under this interpreter."""
    return module_command("pdserve", "serve", "--config", str(config_path))


def run_local_cluster(
    config: Config,
    size: ClusterSize,
    *,
    has_to_exit_after_sample: bool,
    log_folder: Path | None,
    restarts_nodes: bool,
    command_for: CommandFor = serve_command,
    resolve_model: Callable[[str], Path] | None = None,
) -> int:
    """Run the cluster until a stop signal or the end of the sample; return the exit code.

    Logs are kept in `log_folder`; without one they are removed with the run, unless it fails.
    `restarts_nodes`: a node that dies is started again.

    Raises `ConfigError` or `CheckpointError` before anything runs.
    """
    clock = MonotonicClock()
    started_at_s = clock.now_s()
    if lacking := check_usable(config, size.num_nodes, HostMeter().memory()):
        _say(lacking, file=sys.stderr)
    port = config.server.port or DEFAULT_PORT
    require_free_port(config.server.host, port)
    if log_folder:
        make_log_folder(log_folder)
    config = replace(config, server=replace(config.server, port=port))
    logging.basicConfig(format="pdserve: %(message)s", level=config.server.log_level.upper())
    model_path = (resolve_model or resolve_checkpoint)(config.model.model)
    names = config.model.served_model_name or names_of(config.model.model, model_path)
    model = replace(config.model, model=str(model_path), served_model_name=names)
    config = replace(config, model=model)
    _say(f"model {model_path}")
    exit_code = 0
    with Signals() as signals, RunFolder(log_folder) as run:
        restarts = Restarts() if restarts_nodes else None
        cluster = LocalCluster(config, size, run, signals, clock, command_for, restarts)
        try:
            cluster.start()
            cluster.wait_until_ready()
            with signals.raising():
                is_answered = cluster.show_sample_answer(started_at_s)
            if has_to_exit_after_sample:
                exit_code = int(not is_answered)
            else:
                cluster.serve()
        except StopRequested:
            pass
        except PdserveError as error:
            run.keep_logs()
            exit_code = 1
            _say(f"error: {error}", file=sys.stderr)
        finally:
            cluster.stop()
            if run.keeps_logs:
                _say(f"the logs are kept in {run.logs}", file=sys.stderr)
            elif not has_to_exit_after_sample:
                _say("the logs are removed; with --log-folder DIR they are kept there")
    return exit_code


class LocalCluster:
    """The running processes, and the messages about them on the terminal."""

    def __init__(
        self,
        config: Config,
        size: ClusterSize,
        run: RunFolder,
        signals: Signals,
        clock: Clock,
        command_for: CommandFor,
        restarts: Restarts | None,
    ) -> None:
        host = connectable_host(config.server.host)
        self.url = f"http://{host}:{config.server.port}"
        self._config = config
        self._api_key = config.api.api_key
        self._size = size
        self._run = run
        self._signals = signals
        self._clock = clock
        self._command_for = command_for
        self._restarts = restarts
        self._redis: ChildProcess | None = None
        self._children: dict[str, ChildProcess] = {}
        self._config_paths: dict[str, Path] = {}
        self._epochs: dict[str, int] = {}
        self._returning: dict[str, float] = {}

    def start(self) -> None:
        """Start Redis, then all other processes at once."""
        if earlier := earlier_runs():
            _say(f"logs of {len(earlier)} earlier run(s) are kept, the oldest in {earlier[0]}")
        others = "" if self._run.logs == self._run.path else f", keys in {self._run.path}"
        _say(f"logs in {self._run.logs}{others}")
        began_at_s = self._clock.now_s()
        log_path = self._run.log_path("redis")
        keys = make_local_keys(self._run.private)
        redis = start_embedded_redis(
            self._run.sockets, log_path, self._signals, self._clock, acl=redis_users(keys)
        )
        self._redis = redis.child
        _say_of("redis", f"ready after {self._clock.now_s() - began_at_s:.1f} s")
        plan = plan_cluster(self._config, self._size, redis.url, keys, num_cores=num_cores())
        for process in plan:
            path = self._run.private / f"{process.name}.toml"
            write_private(path, config_file_text(process.config))
            self._config_paths[process.name] = path
            self._start(process.name)
        _say_of("starting", ", ".join(self._children))

    def wait_until_ready(self) -> None:
        """Return when the router answers and lists every node.

        Raises `LocalClusterError` when a child dies or time runs out, `StopRequested` on a signal.
        """
        began_at_s = self._clock.now_s()
        ready: set[str] = set()
        next_report_s, next_kernels_s, kernels = _SLOW_AFTER_S, _KERNELS_INTERVAL_S, ""
        while ready != set(self._children) or not self._is_router_ready():
            self._require_all_alive()
            if self._signals.num_stops:
                raise StopRequested
            took_s = self._clock.now_s() - began_at_s
            listed = self._listed()
            self._epochs.update(listed)
            for name in sorted(listed.keys() - ready):
                ready.add(name)
                _say_of(name, f"ready after {took_s:.1f} s")
            if took_s > _START_TIMEOUT_S:
                missing = ", ".join(sorted(set(self._children) - ready)) or "the router"
                raise LocalClusterError(f"{missing} not ready after {_START_TIMEOUT_S:.0f} s")
            if took_s > next_kernels_s:
                next_kernels_s = took_s + _KERNELS_INTERVAL_S
                before, kernels = kernels, self._kernels()
                if kernels != before:
                    _say_of("kernels", kernels)
                    next_report_s = max(next_report_s, took_s + _SLOW_AFTER_S)
            if took_s > next_report_s:
                next_report_s = 2 * took_s
                self._say_who_is_slow(ready, took_s)
            self._signals.wait(_PROBE_INTERVAL_S)

    def show_sample_answer(self, started_at_s: float) -> bool:
        """Show an answer to one request on the terminal. Return whether one came."""
        return show_sample_answer(
            self.url,
            api_key=self._api_key,
            clock=self._clock,
            started_at_s=started_at_s,
            write=_show,
        )

    def serve(self) -> None:
        """Watch the children until a stop signal. Raises `LocalClusterError` without a router."""
        _print(f"\n{first_lines(self.url, command_name())}\n")
        reported: set[ChildProcess] = set()
        while not self._signals.num_stops:
            for child in self._all_children():
                code = child.exit_code()
                if code is not None and child not in reported:
                    reported.add(child)
                    self._say_who_ended(child, code)
            self._start_again()
            self._say_who_returned()
            self._signals.wait(self._next_look_s())

    def stop(self) -> None:
        """Stop the router, then the nodes, then Redis; kill processes that do not stop."""
        num_stops = self._signals.num_stops
        if any(child.exit_code() is None for child in self._all_children()):
            _say("stopping")
        router = self._children.pop("router", None)
        nodes = list(self._children.values())
        redis = [self._redis] if self._redis else []
        # SIGINT ends a role at once; after Ctrl-C no answer is waited for.
        for number, group in (
            (signal.SIGINT, [router] if router else []),
            (signal.SIGINT, nodes),
            (signal.SIGTERM, redis),
        ):
            for name in stop_children(
                group,
                self._signals,
                self._clock,
                num_patient_stops=num_stops,
                timeout_s=STOP_TIMEOUT_S,
                number=number,
            ):
                _say_of(name, "did not stop and was killed")

    def _start(self, name: str) -> None:
        command = self._command_for(self._config_paths[name])
        environ = _child_environment()
        self._children[name] = start_child(name, command, self._run.log_path(name), environ)

    def _start_again(self) -> None:
        now_s = self._clock.now_s()
        for name in self._restarts.take_due(now_s) if self._restarts else ():
            try:
                self._start(name)
            except PdserveError as error:  # its log cannot be written, or there is no room for it
                self._say_what_is_left(name, str(error), self._restart(name))
            else:
                self._returning[name] = now_s

    def _restart(self, name: str) -> str:
        return self._restarts.after_death(name, self._clock.now_s()) if self._restarts else ""

    def _say_who_returned(self) -> None:
        """Report nodes that the router lists in a new life, which has a higher epoch."""
        for name in [one for one in self._returning if self._children[one].exit_code() is not None]:
            del self._returning[name]
        if not self._returning:
            return
        for name, epoch in self._listed().items():
            if name in self._returning and epoch > self._epochs.get(name, 0):
                took_s = self._clock.now_s() - self._returning.pop(name)
                self._epochs[name] = epoch
                _say(f"{name} is back after {took_s:.1f} s, as {Incarnation(name, epoch)}")

    def _next_look_s(self) -> float:
        due_s = self._restarts.next_at_s() if self._restarts else None
        waits = [] if due_s is None else [max(0.0, due_s - self._clock.now_s())]
        return min([60.0, *waits, *([_RETURN_PROBE_INTERVAL_S] if self._returning else [])])

    def _all_children(self) -> list[ChildProcess]:
        redis = [self._redis] if self._redis else []
        return [*redis, *self._children.values()]

    def _require_all_alive(self) -> None:
        for child in self._all_children():
            code = child.exit_code()
            if code is not None:
                raise LocalClusterError(obituary(child, code))

    def _listed(self) -> dict[str, int]:
        """Return the epochs of the nodes that the router lists, and 0 of the router: it answers."""
        try:
            nodes = fetch_cluster(self.url, api_key=self._api_key).nodes
        except (RouterUnreachable, RouterRefused):
            return {}
        listed = {"router": 0} | {node["node_id"]: node.get("epoch", 0) for node in nodes}
        return {name: epoch for name, epoch in listed.items() if name in self._children}

    def _kernels(self) -> str:
        return compiled_kernels(child.log_tail(_TAIL_LINES) for child in self._children.values())

    def _is_router_ready(self) -> bool:
        try:
            fetch_json(self.url, "/ready", api_key=self._api_key)
        except (RouterUnreachable, RouterRefused):
            return False
        return True

    def _say_who_is_slow(self, ready: set[str], took_s: float) -> None:
        for name, child in self._children.items():
            if name not in ready:
                doing = last_words(child.log_tail(1))
                _say_of(name, f"starting for {took_s:.0f} s{f': {doing}' if doing else ''}")

    def _say_who_ended(self, child: ChildProcess, code: int) -> None:
        restart = ""
        if code == 0 and child.name not in ("router", "redis"):
            ended = f"{child.name} has left, as it was told (exit code 0)."  # it was drained
        else:
            self._run.keep_logs()
            ended = obituary(child, code)
            restart = "" if child.name == "redis" else self._restart(child.name)
        if child.name == "router":
            raise LocalClusterError(ended)
        self._say_what_is_left(child.name, ended, restart)

    def _say_what_is_left(self, name: str, why: str, restart: str) -> None:
        alive = [c.name for c in self._children.values() if c.exit_code() is None]
        nodes = [node for node in alive if node != "router"]
        _say(f"{why}\n{what_now(name, nodes, restart)}", file=sys.stderr)


def _child_environment() -> dict[str, str]:
    """Return this environment without settings, which would override the child's own file."""
    environ = {
        name: value
        for name, value in module_environment().items()
        if not name.startswith("PDSERVE_") or name in OTHER_VARIABLES
    }
    environ.pop("PDSERVE_CONFIG", None)
    environ["PYTHONUNBUFFERED"] = "1"
    return environ


def _say(text: str, *, file: TextIO | None = None) -> None:
    _print(f"pdserve: {text}\n", file=file)


def _say_of(name: str, text: str) -> None:
    _print(f"  {name:<10} {text}\n")


def _show(text: str) -> None:
    """Print text of a model, whatever the terminal can show of it."""
    _print(printable(text))


def _print(text: str, *, file: TextIO | None = None) -> None:
    """Print at once. What nobody can read is lost, and the cluster serves on.

    That is so on a full disk, on a terminal that is gone, and in a pipe without a reader.
    """
    with suppress(OSError):
        print(text, end="", file=file or sys.stdout, flush=True)
