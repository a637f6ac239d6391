"""What a node's configuration makes of shared memory, RDMA and keys."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from common.config import Config, HandoffConfig
from common.errors import ConfigError
from common.nodes import Role
from kv_transfer.curve_keys import new_curve_keys, write_curve_keys
from kv_transfer.rdma.mooncake_engine import RdmaUnavailable
from pdserve import kv_plane
from pdserve.kv_plane import KVPlane

WANTED = 1 << 20


def config(role: Role, transport: str, *, key: str = "") -> Config:
    return Config(role=role, handoff=HandoffConfig(kv_transport=transport, kv_key=key))


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices of every RDMA engine that was asked for; there is none."""
    asked: list[str] = []

    def refuse(host: str, devices: str) -> None:
        asked.append(devices)
        raise RdmaUnavailable("there is no device")

    monkeypatch.setattr(kv_plane, "MooncakeEngine", refuse)
    return asked


@pytest.mark.parametrize(
    ("role", "transport", "is_shared"),
    [
        (Role.PREFILL, "auto", True),
        (Role.PREFILL, "shm", True),
        (Role.PREFILL, "zmq", False),
        (Role.DECODE, "auto", False),
        (Role.DECODE, "shm", False),
        (Role.MIXED, "auto", False),
    ],
)
def test_a_pool_is_shared_where_others_may_read_it(
    role: Role, transport: str, is_shared: bool
) -> None:
    memory = KVPlane(config(role, transport)).host_memory(WANTED, True)
    assert (memory is not None) == is_shared
    if memory is not None:
        assert memory.size == WANTED
        assert memory.flags.writeable


def test_auto_does_without_shared_memory_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(num_bytes: int, *, is_touched: bool) -> None:
        raise OSError("no such memory")

    monkeypatch.setattr(kv_plane, "SharedPool", fail)
    assert KVPlane(config(Role.PREFILL, "auto")).host_memory(WANTED, True) is None
    assert "no such memory" in caplog.text
    with pytest.raises(ConfigError, match=r"kv_transport is shm.*no such memory"):
        KVPlane(config(Role.PREFILL, "shm")).host_memory(WANTED, True)


@pytest.mark.parametrize(
    ("role", "transport", "has_key", "is_asked"),
    [
        (Role.PREFILL, "auto", False, True),
        (Role.DECODE, "auto", False, True),
        (Role.PREFILL, "auto", True, False),
        (Role.MIXED, "auto", False, False),
        (Role.MIXED, "rdma", False, False),
        (Role.PREFILL, "shm", False, False),
        (Role.DECODE, "zmq", False, False),
    ],
)
def test_who_looks_for_rdma(
    role: Role,
    transport: str,
    has_key: bool,
    is_asked: bool,
    engines: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is open to whoever reaches it, so a cluster with a key has to ask for it by name."""
    key = tmp_path / "key"
    write_curve_keys(key, new_curve_keys())
    with caplog.at_level(logging.DEBUG):
        KVPlane(config(role, transport, key=str(key) if has_key else ""))
    assert engines == [""] * is_asked
    assert ("there is no device" in caplog.text) == is_asked


@pytest.mark.parametrize("has_key", [False, True])
def test_rdma_that_was_asked_for_and_is_not_there(has_key: bool, tmp_path: Path) -> None:
    key = tmp_path / "key"
    write_curve_keys(key, new_curve_keys())
    with pytest.raises(ConfigError, match="kv_transport is rdma, but there is no device"):
        KVPlane(config(Role.PREFILL, "rdma", key=str(key) if has_key else ""))


def test_a_key_file_is_read_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_key"):
        KVPlane(config(Role.DECODE, "zmq", key=str(tmp_path / "nowhere")))
