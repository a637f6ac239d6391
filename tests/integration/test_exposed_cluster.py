"""`pdserve up` where other machines reach it: refused without a key, and served with one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.cluster.processes import role_environment
from tests.support.cluster.serving_up import serving_up

EXPOSED = ("--host", "0.0.0.0", "--mixed", "1")
ELSEWHERE = "127.0.0.2"
"""An address of this machine at which nothing answers that listens on 127.0.0.1 alone."""


@contextmanager
def serving(folder: Path, model: Path, *arguments: str) -> Iterator[str]:
    """A cluster that has shown its sample answer; the block gets its address for others."""
    with serving_up(folder, model, *EXPOSED, *arguments) as up:
        yield f"http://{ELSEWHERE}:{up.port}/v1/models"
    assert list(folder.iterdir()) == []


def test_without_a_key_it_is_refused_with_what_to_do_and_nothing_starts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pdserve", "up", *EXPOSED, "--model", "/nowhere"],
        capture_output=True,
        text=True,
        env=role_environment() | {"TMPDIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "host is '0.0.0.0', where other machines reach the router" in done.stderr
    assert "wanted --api-key KEY, or --insecure" in done.stderr
    assert "/nowhere" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_insecure_lets_everybody_in(tmp_path: Path, tiny_model: Path) -> None:
    with serving(tmp_path, tiny_model, "--insecure") as url:
        assert httpx.get(url, timeout=60).status_code == 200


def test_a_client_with_the_key_gets_in(tmp_path: Path, tiny_model: Path) -> None:
    with serving(tmp_path, tiny_model, "--api-key", "hush") as url:
        assert httpx.get(url, timeout=60).status_code == 401
        shown = httpx.get(url, timeout=60, headers={"authorization": "Bearer hush"})
        assert shown.status_code == 200
