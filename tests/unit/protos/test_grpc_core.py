"""What the core of gRPC is told before it is loaded, and that the installed one knows it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from common.nodes import Role
from protos.grpc_core import ROUTER_EXPERIMENTS, set_up_grpc

_OPEN_A_CHANNEL = """
import asyncio
from common.nodes import Role
from protos.grpc_core import set_up_grpc

set_up_grpc(Role.ROUTER, "text")
import grpc.aio

async def open_a_channel() -> None:
    await grpc.aio.insecure_channel("127.0.0.1:1").close()

asyncio.run(open_a_channel())
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    return environment


def test_a_router_reads_on_the_thread_that_waits(environment: dict[str, str]) -> None:
    set_up_grpc(Role.ROUTER, "text")

    assert environment["GRPC_EXPERIMENTS"] == ROUTER_EXPERIMENTS


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.MIXED])
def test_nodes_have_the_threads_of_the_core(environment: dict[str, str], role: Role) -> None:
    set_up_grpc(role, "text")

    assert "GRPC_EXPERIMENTS" not in environment


def test_what_the_environment_says_is_kept(environment: dict[str, str]) -> None:
    environment |= {"GRPC_EXPERIMENTS": "", "GRPC_VERBOSITY": "DEBUG"}

    set_up_grpc(Role.ROUTER, "json")

    assert (environment["GRPC_EXPERIMENTS"], environment["GRPC_VERBOSITY"]) == ("", "DEBUG")


@pytest.mark.parametrize(("log_format", "verbosity"), [("json", "NONE"), ("text", "ERROR")])
def test_lines_of_the_core_are_no_json(
    environment: dict[str, str], log_format: str, verbosity: str
) -> None:
    set_up_grpc(Role.ROUTER, log_format)

    assert environment["GRPC_VERBOSITY"] == verbosity


def test_the_installed_core_knows_the_experiment() -> None:
    """One that it does not know is an error on stderr, and the router would cost more again."""
    child = subprocess.run(
        [sys.executable, "-c", _OPEN_A_CHANNEL], capture_output=True, text=True, timeout=60
    )

    assert (child.returncode, child.stderr) == (0, "")
