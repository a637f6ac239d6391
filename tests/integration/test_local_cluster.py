"""`pdserve up` starts, watches and stops real processes; a stand-in plays each role."""

from __future__ import annotations

import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.local_cluster.child_process import ending_with_parent
from pdserve.local_cluster.free_ports import free_loopback_port
from tests.integration.fake_cluster import FakeUp
from tests.support.clocks.waiting import wait_until
from tests.support.cluster.processes import SOURCES
from tests.support.observing.process_tasks import children_of

FAKE_CLUSTER = SOURCES / "tests/integration/fake_cluster.py"
NAMES = ("router", "prefill-1", "decode-1")


class Cluster:
    """A running `fake_cluster`, with what it printed so far."""

    def __init__(self, folder: Path, *arguments: str, **environ: str) -> None:
        self.shared = folder / "shared"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.port = free_loopback_port()
        self.printed = ""
        for file in self.shared.glob("*.ready"):  # of an earlier cluster, which has ended
            file.unlink()
        self.process = started_up(
            [str(self.shared), str(self.port), *arguments],
            {**os.environ, "TMPDIR": str(self.temporary), **environ},
        )

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed += line
            if text in line:
                return
        pytest.fail(f"ended without printing {text!r}:\n{self.printed}")

    def wait(self) -> int:
        """The exit code, once everything it printed is read."""
        assert self.process.stdout is not None
        self.printed += self.process.stdout.read()
        return self.process.wait()

    def pid(self, name: str) -> int:
        return int((self.shared / f"{name}.ready").read_text())

    def leftovers(self) -> list[str]:
        return sorted(str(p.relative_to(self.temporary)) for p in self.temporary.rglob("*.*"))


def started_up(arguments: list[str], environ: dict[str, str]) -> subprocess.Popen[str] | FakeUp:
    """Fork a cluster; where Python itself is to read a variable, start one."""
    if "PYTHONIOENCODING" not in environ:
        return FakeUp(arguments, environ)
    return subprocess.Popen(
        ending_with_parent([sys.executable, str(FAKE_CLUSTER), *arguments]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**environ, "PYTHONPATH": str(SOURCES)},
        text=True,
    )


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@pytest.fixture
def started(tmp_path: Path, shared: Path) -> Iterator[list[Cluster]]:
    """Clusters to clean up after a failed test."""
    clusters: list[Cluster] = []
    yield clusters
    for cluster in clusters:
        cluster.process.kill()
        cluster.process.wait()
        assert cluster.process.stdout is not None
        cluster.process.stdout.close()


def wait_until_gone(pid: int, timeout_s: float = 30.0) -> None:
    """Return when the process has ended; it need not be a child of this one."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        readable, _, _ = select.select([handle], [], [], timeout_s)
        assert readable, f"process {pid} still runs"
    finally:
        os.close(handle)


def serving(cluster: Cluster, started: list[Cluster]) -> Cluster:
    started.append(cluster)
    cluster.read_until("  chat ")
    return cluster


def test_the_demo_shows_an_answer_and_leaves_nothing(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    cluster = Cluster(tmp_path, "--exit-after-sample")
    started.append(cluster)
    assert cluster.wait() == 0, cluster.printed
    assert "fake-model: Paris is the capital of France.\n" in cluster.printed
    assert "3 tokens in" in cluster.printed
    assert f"curl -N http://127.0.0.1:{cluster.port}/v1/chat/completions" in cluster.printed
    for name in NAMES:
        assert f"  {name:<10} ready after" in cluster.printed
        wait_until_gone(cluster.pid(name))
    assert cluster.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_everything_cleanly(
    tmp_path: Path, shared: Path, started: list[Cluster], number: signal.Signals
) -> None:
    cluster = serving(Cluster(tmp_path), started)
    cluster.process.send_signal(number)
    assert cluster.wait() == 0, cluster.printed
    for name in NAMES:
        wait_until_gone(cluster.pid(name))
    assert cluster.leftovers() == []


def test_a_child_that_fails_to_start_ends_the_start_with_its_last_words(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    (shared / "decode-1.fails").write_text("no room for the KV cache")
    cluster = Cluster(tmp_path)
    started.append(cluster)
    assert cluster.wait() == 1
    assert "decode-1 died (exit code 1)" in cluster.printed
    assert "| no room for the KV cache" in cluster.printed
    assert "the logs are kept in" in cluster.printed
    assert [Path(path).name for path in cluster.leftovers()] == sorted(
        f"{name}.log" for name in (*NAMES, "redis")
    )


def test_a_cluster_serves_on_whatever_its_sample_answers(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    (shared / "answer.fails").touch()
    cluster = serving(Cluster(tmp_path), started)
    assert "the decode node is gone" in cluster.printed
    with urllib.request.urlopen(f"http://127.0.0.1:{cluster.port}/ready") as response:
        assert response.status == 200
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.wait() == 0


def test_where_nothing_but_the_sample_is_wanted_its_failure_is_one(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    (shared / "answer.fails").touch()
    cluster = Cluster(tmp_path, "--exit-after-sample")
    started.append(cluster)
    assert cluster.wait() == 1
    assert "the decode node is gone" in cluster.printed


def test_text_that_the_terminal_cannot_show_ends_nothing(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    (shared / "answer.says").write_text("caf\\u00e9 \\ud83d")
    cluster = serving(Cluster(tmp_path, PYTHONIOENCODING="ascii"), started)
    assert "caf? ?" in cluster.printed
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.wait() == 0


def test_a_cluster_serves_on_and_ends_in_order_when_nobody_reads_what_it_prints(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    cluster = serving(Cluster(tmp_path, "--restart-nodes"), started)
    assert cluster.process.stdout is not None
    cluster.process.stdout.close()
    first = cluster.pid("decode-1")
    (shared / "decode-1.ready").unlink()
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: (shared / "decode-1.ready").exists(), "decode-1 is started again")
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.process.wait() == 0
    for name in NAMES:
        wait_until_gone(cluster.pid(name))


def test_the_rest_serves_on_when_a_node_dies(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    cluster = serving(Cluster(tmp_path), started)
    os.kill(cluster.pid("prefill-1"), signal.SIGKILL)
    cluster.read_until("To get prefill-1 back")
    assert "prefill-1 died (killed by SIGKILL)" in cluster.printed
    assert "| prefill-1 runs" in cluster.printed
    assert "If nobody killed it, memory ran out" in cluster.printed
    assert "Left: decode-1, which serves on." in cluster.printed
    url = f"http://127.0.0.1:{cluster.port}/ready"
    with urllib.request.urlopen(url) as response:
        assert response.status == 200
    os.kill(cluster.pid("decode-1"), signal.SIGKILL)
    cluster.read_until("To get decode-1 back")
    assert "No node is left: requests are not answered." in cluster.printed
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.wait() == 0


def test_a_node_that_was_drained_has_not_died(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    cluster = serving(Cluster(tmp_path), started)
    os.kill(cluster.pid("prefill-1"), signal.SIGINT)  # it ends with 0, as after a drain
    cluster.read_until("To get prefill-1 back")
    assert "prefill-1 has left, as it was told (exit code 0).\nLeft: decode-1" in cluster.printed
    assert "died" not in cluster.printed
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.wait() == 0
    assert cluster.leftovers() == []


def test_the_cluster_ends_with_its_router(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    cluster = serving(Cluster(tmp_path), started)
    os.kill(cluster.pid("router"), signal.SIGKILL)
    assert cluster.wait() == 1
    assert "router died (killed by SIGKILL)" in cluster.printed
    wait_until_gone(cluster.pid("decode-1"))


def test_children_die_with_a_parent_that_was_killed(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    cluster = serving(Cluster(tmp_path), started)
    (redis,) = [pid for pid in children_of(cluster.process.pid) if "redis-server" in command(pid)]
    cluster.process.kill()
    cluster.process.wait()
    for pid in (*map(cluster.pid, NAMES), redis):
        wait_until_gone(pid)


def test_a_second_ctrl_c_kills_what_does_not_stop(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    (shared / "router.stubborn").touch()
    cluster = serving(Cluster(tmp_path), started)
    cluster.process.send_signal(signal.SIGINT)
    cluster.read_until("stopping")
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.wait() == 0
    assert "router     did not stop and was killed" in cluster.printed
    wait_until_gone(cluster.pid("router"))


def test_children_get_their_settings_by_private_files_alone(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    cluster = serving(Cluster(tmp_path, PDSERVE_API_KEY="a-secret"), started)
    for name in NAMES:
        assert 'api_key = "a-secret"' in (shared / f"{name}.toml").read_text()
        assert "a-secret" not in command(cluster.pid(name))
        # A terminal's Ctrl-C goes to a whole process group, and must reach the parent alone.
        assert os.getpgid(cluster.pid(name)) != os.getpgid(cluster.process.pid)
        environ = Path(f"/proc/{cluster.pid(name)}/environ").read_bytes()
        assert b"PDSERVE_API_KEY" not in environ
    (private,) = cluster.temporary.glob("*/private")
    assert private.stat().st_mode & 0o077 == 0
    assert private.parent.stat().st_mode & 0o077 == 0
    assert "a-secret" not in cluster.printed
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.wait() == 0


def test_the_first_lines_say_where_everything_is(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    cluster = serving(Cluster(tmp_path), started)
    url = f"http://127.0.0.1:{cluster.port}"
    lines = cluster.printed.partition("Serving on ")[2].splitlines()
    assert lines[0] == f"{url} until Ctrl-C."
    told = {line[:13].strip(): line[13:] for line in lines[1:]}
    assert told["live page"] == f"{url}/"
    assert told["API"] == f"{url}/docs"
    assert told["metrics"] == f"{url}/metrics"
    command = told["status"].removesuffix(f" status --url {url}")
    said = subprocess.run([*shlex.split(command), "--version"], capture_output=True, check=False)
    assert said.stdout.startswith(b"pdserve "), command
    assert told["chat"] == f"{command} chat --url {url}"
    # The name that was typed is one of the model's.
    assert 'served_model_name = "fake,demo"' in (shared / "decode-1.toml").read_text()
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.wait() == 0


def test_logs_are_kept_where_a_folder_is_named(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    cluster = serving(Cluster(tmp_path), started)
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.wait() == 0
    assert "the logs are removed; with --log-folder DIR they are kept there" in cluster.printed
    logs = tmp_path / "a" / "logs"
    for number in (1, 2):
        (tmp_path / "tmp").rmdir()
        cluster = serving(Cluster(tmp_path, "--log-folder", str(logs)), started)
        assert (
            f"pdserve: logs in {logs}, keys in {tmp_path / 'tmp' / 'pdserve-'}" in cluster.printed
        )
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.wait() == 0
        assert f"the logs are kept in {logs}" in cluster.printed
        assert cluster.leftovers() == []
        assert (logs / "decode-1.log").read_text() == "decode-1 runs\n" * number
    assert sorted(path.stem for path in logs.iterdir()) == sorted((*NAMES, "redis"))
    assert (logs / "decode-1.log").stat().st_mode & 0o077 == 0


def test_a_log_folder_that_cannot_be_made_is_refused(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    (tmp_path / "file").touch()
    for flags, words in (
        (["--log-folder", str(tmp_path / "file" / "x")], "cannot be made: Not a directory"),
        (["--log-folder"], "--log-folder has no value"),
        (["--log-folder="], "--log-folder has no value"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "pdserve", "up", "--port", str(free_loopback_port()), *flags],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert words in done.stderr


def test_a_node_that_dies_is_started_again_where_that_is_wanted(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    cluster = serving(Cluster(tmp_path, "--restart-nodes"), started)
    first = cluster.pid("decode-1")
    os.kill(first, signal.SIGKILL)
    cluster.read_until("started again in 1 s, try 1 of 5.")
    assert "Left: prefill-1, which cannot answer." in cluster.printed
    cluster.read_until("decode-1 is back after")
    assert cluster.printed.splitlines()[-1].endswith(", as decode-1#2")
    second = cluster.pid("decode-1")
    assert second != first
    os.kill(second, signal.SIGKILL)
    cluster.read_until("started again in 2 s, try 2 of 5.")
    cluster.read_until("decode-1 is back after")
    assert cluster.printed.splitlines()[-1].endswith(", as decode-1#3")
    os.kill(cluster.pid("prefill-1"), signal.SIGINT)  # as after a drain
    cluster.read_until("To get prefill-1 back")
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.wait() == 0
    for name in NAMES:
        wait_until_gone(cluster.pid(name))


def test_a_log_that_is_gone_or_cannot_be_written_ends_nothing(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    logs = tmp_path / "logs"
    cluster = serving(Cluster(tmp_path, "--restart-nodes", "--log-folder", str(logs)), started)
    log = logs / "decode-1.log"
    log.unlink()
    log.mkdir()
    os.kill(cluster.pid("decode-1"), signal.SIGKILL)
    cluster.read_until("started again in 1 s, try 1 of 5.")
    cluster.read_until("decode-1.log cannot be written: Is a directory")
    cluster.read_until("started again in 2 s, try 2 of 5.")
    log.rmdir()
    cluster.read_until("decode-1 is back after")
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.wait() == 0


def test_a_stop_signal_ends_a_cluster_that_waits_to_start_a_node_again(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    cluster = serving(Cluster(tmp_path, "--restart-nodes"), started)
    (shared / "decode-1.fails").write_text("it fails again")
    os.kill(cluster.pid("decode-1"), signal.SIGKILL)
    cluster.read_until("try 1 of 5")
    cluster.read_until("| it fails again")
    cluster.read_until("started again in 2 s, try 2 of 5.")
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.wait() == 0
    assert "is back" not in cluster.printed


def test_the_kernels_that_all_nodes_compile_are_counted(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    said = "12:00:00 INFO pdserve.engine: compiled {} of about 98 CPU kernels\n"
    (shared / "prefill-1.compiles").write_text(said.format(7) + said.format(20))
    (shared / "decode-1.compiles").write_text(said.format(22) + "packing the weights\n")
    cluster = Cluster(tmp_path)
    started.append(cluster)
    cluster.read_until("kernels    42 of about 98 compiled, once on this machine")
    cluster.read_until("decode-1   starting for")
    assert cluster.printed.splitlines()[-1].endswith(": packing the weights")
    for name in ("prefill-1", "decode-1"):
        (shared / f"{name}.compiles").unlink()
    serving(cluster, started)
    assert cluster.printed.count("  kernels ") == 1
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.wait() == 0


def test_a_port_in_use_is_refused_before_anything_runs(
    tmp_path: Path, shared: Path, started: list[Cluster]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "pdserve", "up", "--port", str(port), "--model", "/nowhere"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert "--port" in done.stderr
    assert "/nowhere" not in done.stderr


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
