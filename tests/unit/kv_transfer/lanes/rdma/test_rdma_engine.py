"""Devices that a node refuses to use as RDMA. Mooncake itself is tested where it has devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from kv_transfer.lanes.rdma import mooncake_engine
from kv_transfer.lanes.rdma.mooncake_engine import MooncakeEngine, RdmaUnavailable
from kv_transfer.lanes.rdma.rdma_lane import COOL_DOWN_S


class Library:
    """Stands for `mooncake.engine.TransferEngine`; with `opens` it holds a device open."""

    result = 0
    opens: Path | None = None

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        self.arguments = (host, metadata, protocol, devices)
        if self.opens is not None:
            self.device = self.opens.open("rb")
        return self.result

    def get_rpc_port(self) -> int:
        return 4321

    def close(self) -> None:
        if self.opens is not None:
            self.device.close()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Library]:
    """Two devices, and a Mooncake that finds them."""
    device = tmp_path / "uverbs0"
    device.touch()

    class Found(Library):
        opens = device

    module = ModuleType("mooncake.engine")
    module.TransferEngine = Found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    monkeypatch.setattr(mooncake_engine, "DEVICES_FOLDER", tmp_path / "infiniband")
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / "infiniband" / name).mkdir(parents=True)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop("MC_FORCE_TCP", None)
    os.environ["MC_LOG_LEVEL"] = "INFO"
    return Found


def test_an_engine_that_got_rdma(library: type[Library], caplog: pytest.LogCaptureFixture) -> None:
    engine = MooncakeEngine("10.0.0.7", "mlx5_1")
    inner = engine._engine
    assert inner.arguments == ("10.0.0.7", "P2PHANDSHAKE", "rdma", "mlx5_1")
    assert engine.name == "10.0.0.7:4321"
    assert os.environ["MC_TRANSFER_TIMEOUT"] == "10"
    assert float(os.environ["MC_RDMA_RAIL_PAUSE_SECONDS"]) <= COOL_DOWN_S / 2
    assert os.environ["MC_LOG_LEVEL"] == "INFO", "an operator's setting holds"
    assert "every address" in caplog.text
    inner.close()


@pytest.mark.parametrize(
    ("processors", "wanted", "found"),
    [(2, None, "1"), (7, None, "1"), (8, None, None), (2, "4", "4")],
)
def test_workers_where_processors_are_few(
    library: type[Library],
    monkeypatch: pytest.MonkeyPatch,
    processors: int,
    wanted: str | None,
    found: str | None,
) -> None:
    """Each keeps one busy; an operator's setting holds."""
    monkeypatch.setattr(mooncake_engine, "num_cores", lambda: processors)
    os.environ.pop("MC_WORKERS_PER_CTX", None)
    if wanted is not None:
        os.environ["MC_WORKERS_PER_CTX"] = wanted
    engine = MooncakeEngine("10.0.0.7")
    assert os.environ.get("MC_WORKERS_PER_CTX") == found
    engine._engine.close()


def test_a_library_that_took_tcp_instead(library: type[Library]) -> None:
    library.opens = None
    with pytest.raises(RdmaUnavailable, match=r"opened none of the devices \(all\)"):
        MooncakeEngine("10.0.0.7")


def test_a_library_that_does_not_start(library: type[Library]) -> None:
    library.result = -1
    library.opens = None
    with pytest.raises(RdmaUnavailable, match="could not start: -1"):
        MooncakeEngine("10.0.0.7")


def test_devices_that_are_not_there(library: type[Library], tmp_path: Path) -> None:
    with pytest.raises(RdmaUnavailable, match="wanted rxe7; there are: mlx5_0, mlx5_1"):
        MooncakeEngine("10.0.0.7", "mlx5_0,rxe7")
    for device in (tmp_path / "infiniband").iterdir():
        device.rmdir()
    with pytest.raises(RdmaUnavailable, match="wanted any; there are: none"):
        MooncakeEngine("10.0.0.7")


@pytest.mark.covers("V01")
def test_tcp_is_refused(library: type[Library]) -> None:
    """Outside tests: it has no keys, so nothing could be fenced."""
    os.environ["MC_FORCE_TCP"] = "1"
    with pytest.raises(RdmaUnavailable, match="has no fence"):
        MooncakeEngine("10.0.0.7")


def test_a_library_that_is_not_installed(
    library: type[Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(RdmaUnavailable, match=r"pip install '\.\[rdma\]'"):
        MooncakeEngine("10.0.0.7")


def test_answers_of_the_library(library: type[Library]) -> None:
    """The lane interprets the library's numbers; a batch that could not begin is 0."""
    engine = MooncakeEngine("10.0.0.7")
    engine._engine.close()
    calls: list[object] = []

    def answer(result: int) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            calls.append(arguments)
            return result

        return call

    engine._engine = SimpleNamespace(
        register_memory=answer(-7),
        unregister_memory=answer(-3),
        send_probe=answer(-102),
        batch_transfer_async_write=answer(0),
        get_batch_transfer_status=answer(-1),
    )
    with pytest.raises(OSError, match="cannot be registered: -7"):
        engine.register(4096, 10)
    engine.unregister(4096)
    assert not engine.can_reach("x:1")
    assert engine.submit("x:1", np.array([(1, 2, 3), (4, 5, 6)], np.uint64)) == 0
    assert not engine.wait(8)
    assert calls[-2:] == [("x:1", [1, 4], [2, 5], [3, 6]), ([8],)]
    engine._engine = SimpleNamespace(unregister_memory=answer(-1))
    with pytest.raises(OSError, match="stays registered: -1"):
        engine.unregister(4096)
