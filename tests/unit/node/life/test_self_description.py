"""What a node registers: its addresses, and how it drafts."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from common.ids import Incarnation
from common.nodes import Role
from common.settings.config import Config, ServerConfig, SpeculationConfig
from node.life.self_description import (
    advertised_host,
    advertised_kv_host,
    node_records,
    told_uptime_s,
)
from tests.support.engine.hash_runner import HashRunner


@pytest.mark.parametrize(
    ("host", "advertise_host", "wanted"),
    [
        ("127.0.0.1", "", "127.0.0.1"),
        ("10.0.0.7", "", "10.0.0.7"),
        ("0.0.0.0", "", socket.gethostname()),
        ("::", "", socket.gethostname()),
        ("0.0.0.0", "10.1.2.3", "10.1.2.3"),
        ("::", "fd00::7", "fd00::7"),
        ("10.0.0.7", "node-7.example", "node-7.example"),
    ],
)
def test_the_host_that_others_are_told(host: str, advertise_host: str, wanted: str) -> None:
    assert advertised_host(ServerConfig(host=host, advertise_host=advertise_host)) == wanted


@pytest.mark.parametrize(
    ("server", "wanted"),
    [
        (ServerConfig(host="10.0.0.7"), "10.0.0.7"),
        (ServerConfig(host="10.0.0.7", advertise_host="d.example"), "d.example"),
        (ServerConfig(kv_host="192.168.0.7"), "192.168.0.7"),
        (ServerConfig(kv_host="192.168.0.7", advertise_host="d.example"), "192.168.0.7"),
        (ServerConfig(kv_host="::"), socket.gethostname()),
        (ServerConfig(kv_host="::", kv_advertise="d-kv.example"), "d-kv.example"),
        (ServerConfig(kv_advertise="203.0.113.7"), "203.0.113.7"),
    ],
)
def test_the_host_of_the_kv_port(server: ServerConfig, wanted: str) -> None:
    assert advertised_kv_host(server) == wanted


def test_every_address_of_the_record_has_the_advertised_host() -> None:
    config = Config(role=Role.DECODE)
    server = replace(config.server, host="::", advertise_host="fd00::7")
    config = replace(config, server=server, model=replace(config.model, served_model_name="m,n"))
    runner = HashRunner(num_blocks=16, block_size=config.engine.block_size)
    ports, roles = (9000, 9100), (Role.PREFILL, Role.DECODE)
    records = node_records(config, runner, Incarnation("d", 1), ports, roles)
    assert {one.lease_ms for one in records.values()} == {5000}
    record = records[Role.DECODE]
    assert {role: one.role for role, one in records.items()} == {role: role for role in roles}
    assert record.roles == roles
    assert record.model == "m"
    assert record.control_address == "[fd00::7]:9000"
    assert record.metrics_address == "[fd00::7]:9100"


@pytest.mark.parametrize(
    ("role", "method", "wanted"),
    [
        (Role.PREFILL, "ngram", "none"),
        (Role.PREFILL, "mtp", "mtp"),
        (Role.DECODE, "ngram", "ngram"),
    ],
)
def test_a_node_registers_with_how_it_drafts_itself(role: Role, method: str, wanted: str) -> None:
    config = Config(role=role, speculation=SpeculationConfig(speculative_method=method))
    runner = HashRunner(num_blocks=16, block_size=config.engine.block_size)
    records = node_records(config, runner, Incarnation("n", 1), (9000, 9100), (role,))
    record = records[role]
    assert record.speculative_method == wanted
    assert record.device == runner.device


@pytest.mark.parametrize(
    ("uptime_s", "told_s"),
    [
        (0.0, 1),
        (7.6, 8),
        (59.4, 59),
        (61.0, 60),
        (69.4, 60),
        (70.1, 70),
        (3599.4, 3590),
        (3659.4, 3600),
        (3660.0, 3660),
        (86_399.0, 86_340),
    ],
)
def test_the_uptime_of_an_idle_node_is_news_every_ten_seconds_and_later_every_minute(
    uptime_s: float, told_s: int
) -> None:
    assert told_uptime_s(uptime_s) == told_s
