"""What a node's configuration makes of shared memory, RDMA and keys."""

from __future__ import annotations

import contextlib
import logging
import queue
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

import numpy as np
import pytest

from common.errors import ConfigError, HandoffFailed
from common.ids import AttemptId, Incarnation
from common.kv.kv_layout import KVLayout
from common.nodes import Role
from common.settings.config import Config, EngineConfig, HandoffConfig, ServerConfig
from kv_transfer.contract import (
    Commit,
    ConnectorEvent,
    Landed,
    LandingFailed,
    Released,
    Ticket,
    TransferEnded,
)
from kv_transfer.lanes.pool_memory import Bytes
from kv_transfer.lanes.rdma.mooncake_engine import RdmaUnavailable
from kv_transfer.lanes.shm import shm_lane
from kv_transfer.lanes.shm.shared_pool import NotShared, SharedPool
from kv_transfer.zmq.connector import ZmqConnector
from kv_transfer.zmq.curve_keys import new_curve_keys, write_curve_keys
from node.life.node_parts import LoadedModel
from pdserve.roles import kv_plane
from pdserve.roles.kv_plane import KVPlane
from tests.support.engine.fake_card import FakeCard
from tests.support.kv.fake_engine import FakeEngine
from tests.support.kv.fake_one_sided_lane import Fabric, FakeOneSidedLane

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
        (Role.DECODE, "auto", True),
        (Role.DECODE, "shm", True),
        (Role.DECODE, "zmq", False),
        (Role.MIXED, "auto", True),
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
    ("role", "transport", "has_key", "has_card", "is_asked"),
    [
        (Role.PREFILL, "auto", False, False, True),
        (Role.DECODE, "auto", False, False, True),
        (Role.PREFILL, "auto", True, False, False),
        (Role.MIXED, "auto", False, False, True),
        (Role.MIXED, "zmq", False, False, False),
        (Role.PREFILL, "shm", False, False, False),
        (Role.DECODE, "zmq", False, False, False),
        (Role.PREFILL, "auto", False, True, True),
        (Role.DECODE, "auto", False, True, True),
        (Role.DECODE, "auto", True, True, False),
        (Role.DECODE, "ipc", False, True, False),
    ],
)
def test_which_nodes_look_for_rdma(
    role: Role,
    transport: str,
    has_key: bool,
    has_card: bool,
    is_asked: bool,
    engines: list[str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is open to whoever reaches it, so a cluster with a key has to ask for it by name."""
    key = tmp_path / "key"
    write_curve_keys(key, new_curve_keys())
    used = str(key) if has_key else ""
    with (
        caplog.at_level(logging.DEBUG),
        contextlib.closing(Node(role, transport=transport, key=used, has_card=has_card)),
    ):
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


LAYOUT = KVLayout(
    model_digest="m", num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32"
)


class Node:
    """A node's end of the KV plane, with a pool and no model; with `has_card` it is on a card.

    It keeps prefixes in `num_host_blocks` of host memory.
    """

    def __init__(
        self,
        role: Role,
        server: ServerConfig | None = None,
        *,
        transport: str = "auto",
        key: str = "",
        has_card: bool = False,
        error: HandoffFailed | None = None,
        num_host_blocks: int = 0,
    ) -> None:
        self.events: queue.Queue[ConnectorEvent] = queue.Queue()
        self.incarnation = Incarnation(role.value, 1)
        host_bytes = num_host_blocks * LAYOUT.block_bytes
        plane = KVPlane(
            replace(
                config(role, transport, key=key),
                server=server or ServerConfig(),
                engine=EngineConfig(prefix_host_memory=host_bytes),
            )
        )
        self.exit = contextlib.ExitStack()
        self.card = FakeCard(LAYOUT, 8) if has_card else None
        if self.card is not None:
            self.card.fails = error
            self.exit.callback(self.card.close)
            memory: Bytes | None = self.card.content
        else:
            memory = plane.host_memory(8 * LAYOUT.block_bytes, True)
        if memory is None:
            memory = np.zeros(8 * LAYOUT.block_bytes, np.uint8)
        self.pool = memory.reshape(LAYOUT.pool_shape(8))
        kv_bytes = None if has_card else self.pool
        host = plane.host_space_memory(host_bytes, False) if num_host_blocks else None
        if host is None:
            host = np.zeros(host_bytes, np.uint8)
        self.host = host.reshape(LAYOUT.pool_shape(num_host_blocks))
        runner = SimpleNamespace(
            kv_bytes=kv_bytes,
            layout=LAYOUT,
            card_pool=self.card,
            num_host_blocks=num_host_blocks,
            host_kv=self.host,
        )
        model = cast(LoadedModel, runner)
        with self.exit.pop_all() as at_error:
            made = plane.connect(model, self.incarnation, self.events.put)
            self.exit = at_error.pop_all()
        if self.card is not None:
            self.card.fails = None
        self.connector = cast(ZmqConnector, made)
        self.exit.callback(self.connector.close)

    def close(self) -> None:
        self.exit.close()


def send(prefill: Node, decode: Node, source_block: int, *, lease_token: int = 1) -> ConnectorEvent:
    """Send one block to block 3; what the receiver says of it."""
    ticket = Ticket(
        attempt=AttemptId("a", 0),
        decode_node=decode.incarnation,
        kv_endpoint=decode.connector.endpoint,
        lease_token=lease_token,
        generation=1,
        target_block_ids=(3,),
        num_cached_tokens=0,
        fingerprint=LAYOUT.fingerprint,
        lease_s=30.0,
    )
    decode.connector.expect(ticket, sender_deadline_s=20.0)
    prefill.connector.open(ticket, deadline_s=20.0)
    for layer in range(LAYOUT.num_layers):
        prefill.connector.push(lease_token, layer=layer, ordinals=[0], source_blocks=[source_block])
    prefill.connector.commit(lease_token, Commit(num_tokens=4, first_token_id=0))
    return decode.events.get(timeout=20)


def lane_taken(prefill: Node, decode: Node, *, lease_token: int = 1) -> str:
    """By a handoff of one block, which is where it belongs then."""
    prefill.pool[:, :, 5] = 77
    assert isinstance(send(prefill, decode, 5, lease_token=lease_token), Landed)
    assert np.all(decode.pool[:, :, 3] == 77)
    return prefill.connector.statistics().lanes[decode.incarnation.node_id]


@pytest.mark.parametrize(
    ("shm", "rdma", "lane"),
    [
        ("both", "both", "shm"),
        ("both", "neither", "shm"),
        ("not the same host", "both", "rdma"),
        ("no memory", "both", "rdma"),
        ("not the same host", "decode", "zmq"),
        ("not the same host", "prefill", "zmq"),
        ("no memory", "neither", "zmq"),
    ],
)
def test_auto_takes_the_fastest_lane_that_the_pair_has(
    shm: str, rdma: str, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabric, role = Fabric(), Role.PREFILL

    def start_engine(host: str, devices: str) -> object:
        if rdma in ("both", role.value):
            return object()
        raise RdmaUnavailable("there is no device")

    def refuse(*args: object, **options: object) -> NoReturn:
        raise NotShared("process 1 is on another host") if shm != "no memory" else OSError("none")

    monkeypatch.setattr(kv_plane, "MooncakeEngine", start_engine)
    monkeypatch.setattr(
        kv_plane, "RdmaLane", lambda pool, engine, window_bytes: FakeOneSidedLane(fabric, pool)
    )
    if shm == "not the same host":
        monkeypatch.setattr(shm_lane, "map_pool", refuse)
    elif shm == "no memory":
        monkeypatch.setattr(kv_plane, "SharedPool", refuse)
    with contextlib.closing(Node(role)) as prefill:
        role = Role.DECODE
        with contextlib.closing(Node(role)) as decode:
            assert lane_taken(prefill, decode) == lane


@pytest.mark.parametrize("is_shared", [True, False])
def test_host_memory_that_is_not_shared_is_not_sent_and_disturbs_nothing(
    is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[SharedPool] = []

    def share(num_bytes: int, *, is_touched: bool) -> SharedPool:
        if pools and not is_shared:
            raise OSError("no such memory")
        pools.append(SharedPool(num_bytes, is_touched=is_touched))
        return pools[-1]

    with contextlib.closing(Node(Role.DECODE)) as decode:
        monkeypatch.setattr(kv_plane, "SharedPool", share)
        with contextlib.closing(Node(Role.PREFILL, num_host_blocks=4)) as prefill:
            assert lane_taken(prefill, decode) == "shm"
            assert prefill.events.get(timeout=20) == TransferEnded(1, None)
            prefill.host[:, :, 1] = 55
            told = send(prefill, decode, 8 + 1, lease_token=2)
            ended = prefill.events.get(timeout=20)
            assert isinstance(ended, TransferEnded)
            if is_shared:
                assert isinstance(told, Landed)
                assert np.all(decode.pool[:, :, 3] == 55)
            else:
                assert isinstance(told, LandingFailed)
                assert decode.events.get(timeout=20) == Released(2)
                assert "source block 9: wanted 0 to 7" in str(ended.error)
            assert lane_taken(prefill, decode, lease_token=3) == "shm"


NO_SHARING = HandoffFailed("this card's memory cannot be shared")


@pytest.mark.parametrize(
    ("cards", "lane"),
    [("both", "ipc"), ("one that shares nothing", "shm"), ("none", "shm")],
)
def test_nodes_on_cards_take_the_lane_between_cards(cards: str, lane: str) -> None:
    """Where that one is impossible, KV gets to the card through the rings."""
    error = NO_SHARING if cards == "one that shares nothing" else None
    with (
        contextlib.closing(Node(Role.PREFILL, has_card=cards != "none", error=error)) as prefill,
        contextlib.closing(Node(Role.DECODE, has_card=cards != "none")) as decode,
    ):
        assert lane_taken(prefill, decode) == lane
        for node in (prefill, decode):
            assert node.card is None or (node.card.ring is None) == (lane == "ipc")


def test_a_ring_takes_no_memory_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[bool] = []

    def share(num_bytes: int, *, is_touched: bool) -> SharedPool:
        touched.append(is_touched)
        return SharedPool(num_bytes, is_touched=is_touched)

    monkeypatch.setattr(kv_plane, "SharedPool", share)
    with contextlib.closing(Node(Role.PREFILL, has_card=True)):
        assert touched == [False]


def test_a_lane_between_cards_that_was_asked_for() -> None:
    with (
        contextlib.closing(Node(Role.PREFILL, transport="ipc", has_card=True)) as prefill,
        contextlib.closing(Node(Role.DECODE, transport="ipc", has_card=True)) as decode,
    ):
        assert lane_taken(prefill, decode) == "ipc"
        assert list(prefill.connector.statistics().measured.lanes) == ["ipc"]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_lane_between_cards_that_was_asked_for_without_a_card(role: Role) -> None:
    with pytest.raises(ConfigError, match="kv_transport is ipc, but the KV cache is not on a GPU"):
        Node(role, transport="ipc")


def test_a_lane_between_cards_that_was_asked_for_and_cannot_share() -> None:
    with pytest.raises(ConfigError, match="kv_transport is ipc, but this card's memory"):
        Node(Role.PREFILL, transport="ipc", has_card=True, error=NO_SHARING)


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_node_on_a_card_has_a_ring_and_no_second_cache(transport: str) -> None:
    """It is as large as its windows, whatever the cache is, and reaches the card both ways."""
    with (
        contextlib.closing(Node(Role.PREFILL, transport=transport, has_card=True)) as prefill,
        contextlib.closing(Node(Role.DECODE, transport=transport, has_card=True)) as decode,
    ):
        assert lane_taken(prefill, decode) == transport
        for node in (prefill, decode):
            assert node.card is not None
            assert node.card.ring is not None
            num_bytes = 8 * config(Role.PREFILL, transport).handoff.kv_window
            assert node.card.ring.memory.num_bytes == num_bytes
        assert prefill.connector.ring is not None
        assert prefill.connector.ring.sending.num_lent == 0


@pytest.mark.parametrize("rdma", ["both", "decode", "prefill"])
@pytest.mark.parametrize("shm", ["one host", "two hosts"])
def test_rdma_between_nodes_on_cards(shm: str, rdma: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `auto` it is taken where the faster lanes of one host are not there, and both have it."""
    engine, role = FakeEngine(), Role.PREFILL

    def start_engine(host: str, devices: str) -> FakeEngine:
        if rdma in ("both", role.value):
            return engine
        raise RdmaUnavailable("there is no device")

    def refuse(*args: object) -> NoReturn:
        raise NotShared("process 1 is on another host")

    monkeypatch.setattr(kv_plane, "MooncakeEngine", start_engine)
    if shm == "two hosts":
        monkeypatch.setattr(shm_lane, "map_pool", refuse)
    with contextlib.closing(Node(role, has_card=True, error=NO_SHARING)) as prefill:
        role = Role.DECODE
        with contextlib.closing(Node(role, has_card=True, error=NO_SHARING)) as decode:
            by_rdma = "rdma_read" if rdma == "both" else "zmq"
            assert lane_taken(prefill, decode) == (by_rdma if shm == "two hosts" else "shm")
    assert engine.regions == {}


def test_rdma_that_was_asked_for_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine has the ring, of which each part is registered, and nothing of the cache."""
    engine = FakeEngine()
    monkeypatch.setattr(kv_plane, "MooncakeEngine", lambda host, devices: engine)
    with (
        contextlib.closing(Node(Role.PREFILL, transport="rdma", has_card=True)) as prefill,
        contextlib.closing(Node(Role.DECODE, transport="rdma", has_card=True)) as decode,
    ):
        ring_bytes = 8 * config(Role.PREFILL, "rdma").handoff.kv_window
        assert sum(engine.regions.values()) == 2 * ring_bytes
        assert lane_taken(prefill, decode) == "rdma_read"
        assert list(prefill.connector.statistics().measured.lanes) == ["rdma_read", "zmq"]
    assert engine.regions == {}


def test_a_ring_that_cannot_be_registered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    engine.fails_after = 0
    monkeypatch.setattr(kv_plane, "MooncakeEngine", lambda host, devices: engine)
    with pytest.raises(ConfigError, match="kv_transport is rdma, but cannot be registered"):
        Node(Role.DECODE, transport="rdma", has_card=True)
    with (
        caplog.at_level(logging.DEBUG),
        contextlib.closing(Node(Role.PREFILL, has_card=True)) as prefill,
        contextlib.closing(Node(Role.DECODE, has_card=True)) as decode,
    ):
        assert lane_taken(prefill, decode) == "ipc"
    assert "KV does not travel by RDMA: cannot be registered" in caplog.text


def test_the_kv_port_has_a_network_of_its_own() -> None:
    server = ServerConfig(host="192.0.2.1", kv_host="127.0.0.1", kv_advertise="localhost")
    with (
        contextlib.closing(Node(Role.PREFILL)) as prefill,
        contextlib.closing(Node(Role.DECODE, server)) as decode,
    ):
        assert decode.connector.endpoint.startswith("tcp://localhost:")
        assert lane_taken(prefill, decode) == "shm"


def test_the_secret_of_the_kv_key_is_there_for_files(tmp_path: Path) -> None:
    keys = new_curve_keys()
    write_curve_keys(tmp_path / "key", keys)
    assert KVPlane(config(Role.DECODE, "zmq")).secret == b""
    assert KVPlane(config(Role.DECODE, "zmq", key=str(tmp_path / "key"))).secret == keys.secret
