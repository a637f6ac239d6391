"""The command with nothing replaced: the demo model on real nodes, as a user starts it."""

from __future__ import annotations

import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from pdserve.commands.http_client import fetch_json
from pdserve.local_cluster.free_ports import free_loopback_port
from tests.integration.running_up import PDSERVE, running_up

ANSWER = "The answer to this question is Paris."


def status_of_a_drain(url: str, headers: dict[str, str]) -> int:
    """The status with which the router answers one who wants a node to leave."""
    sent = urllib.request.Request(
        f"{url}/v1/cluster/drain",
        b'{"node_id": "decode-1"}',
        {"Content-Type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(sent) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_cluster_serves_until_ctrl_c(tmp_path: Path) -> None:
    port = free_loopback_port()
    url = f"http://127.0.0.1:{port}"
    with running_up(tmp_path, "--port", str(port)) as process:
        assert process.stdout is not None
        printed = ""
        while f" chat --url {url}" not in printed:
            line = process.stdout.readline()
            assert line, printed
            printed += line
        assert f"SmolLM2-135M-Instruct: {ANSWER}" in printed
        placement = fetch_json(url, "/v1/cluster", api_key="")["recent_placements"][-1]
        assert placement["decode"].startswith("decode-1#")
        assert placement["prefill"].startswith("prefill-1#")
        status = subprocess.run(
            [*PDSERVE, "status", "--url", url], capture_output=True, text=True, check=True
        )
        _, nodes, pairs = status.stdout.split("\n\n")
        assert max(map(len, status.stdout.splitlines())) <= 80
        uptime = nodes.splitlines()[0].split().index("UP")
        assert nodes.splitlines()[1].split()[uptime].endswith("s")
        heads, *lines = (line.split() for line in nodes.splitlines())
        role, state = heads.index("ROLE"), heads.index("STATE")
        rows = {line[0]: [line[role], line[state]] for line in lines}
        assert rows == {"decode-1": ["decode", "ready"], "prefill-1": ["prefill", "ready"]}
        assert pairs.splitlines()[1].split()[:2] == ["prefill-1", "decode-1"]
        other_site = f"evil.example:{port}"
        for foreign in ({"Host": other_site}, {"Origin": f"http://{other_site}"}):
            assert status_of_a_drain(url, foreign) == 403
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait() == 0, rest
    assert rest.splitlines() == [
        "pdserve: stopping",
        "pdserve: the logs are removed; with --log-folder DIR they are kept there",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.endurance
def test_the_demo_on_one_mixed_node(tmp_path: Path) -> None:
    port = free_loopback_port()
    arguments = ("--mixed", "1", "--port", str(port), "--exit-after-sample")
    with running_up(tmp_path, *arguments) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        assert process.wait() == 0, printed
    assert "  mixed-1    ready after" in printed
    assert "prefill-1" not in printed
    assert ANSWER in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("role", ["router", "decode", "mixed"])
def test_a_role_that_cannot_start_says_why_in_one_line(role: str) -> None:
    arguments = ("--role", role, "--model", "/nowhere")
    done = subprocess.run(
        [
            *(*PDSERVE, "serve", *arguments, "--port", str(free_loopback_port())),
            *("--redis-url", "redis://:hush@127.0.0.1:1/0"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("pdserve: ")
    assert "/nowhere does not exist: wanted" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "hush" not in done.stderr
