"""Processes of a cluster: their CPU time counts, and a node is replaced by one of its settings."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from bench.agents.processes import Replacements, cpu_s
from bench.running_cluster import RunningCluster
from tests.support.clocks.waiting import wait_until

NODE = """
import pathlib, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
name = sys.argv[sys.argv.index("--node-id") + 1] if "--node-id" in sys.argv else "prefill-1"
here = pathlib.Path(sys.argv[2]).parent / name
here.touch()
try:
    while True:
        signal.pause()
finally:
    here.unlink()
"""
UP = """
import subprocess, sys
subprocess.Popen([sys.executable, *sys.argv[1:]]).wait()
sys.stdin.read()
"""


class FakeCluster:
    """Nodes whose files are in a folder."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._folder, self.pid = folder, pid

    async def nodes(self) -> dict[str, object]:
        return {path.name: {} for path in self._folder.iterdir() if path.suffix == ""}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    program = tmp_path / "node.py"
    program.write_text(NODE)
    command = [sys.executable, "-c", UP, str(program), "--config", str(tmp_path / "prefill-1.toml")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as up:
        yield FakeCluster(tmp_path, up.pid)
        up.communicate()


async def test_a_node_is_replaced_by_another_one_of_its_settings(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    wait_until((tmp_path / "prefill-1").exists, "the node runs")
    replacements = Replacements(cast(RunningCluster, cluster))
    with pytest.raises(RuntimeError, match="no process of the cluster is decode-1"):
        await replacements.replace(["decode-1"])
    await replacements.replace(["prefill-1"])
    assert set(await cluster.nodes()) == {"prefill-1-again"}
    await replacements.stop()
    assert not await cluster.nodes()


def test_cpu_time_is_that_of_all_processes_below() -> None:
    spin = "import os\nwhile sum(os.times()[:4]) < 0.3: pass"
    burn = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}]); input()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE) as process:
        wait_until(lambda: cpu_s(process.pid) >= 0.3, "the process below counts")
        process.communicate(b"\n")
    assert cpu_s(process.pid) == 0.0
    assert cpu_s(os.getpid()) > 0.3
