"""Caches of other layouts than two equal planes in every layer, over every lane, byte for byte."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.kv_layout import KVLayout, LayerShape
from kv_transfer.contract import Landed, TransferEnded
from kv_transfer.lanes.lane import Lane
from kv_transfer.lanes.pool_memory import Bytes, host_pool
from kv_transfer.lanes.rdma.rdma_lane import RdmaLane
from tests.support.examples import everyday
from tests.support.kv.fake_engine import FakeEngine
from tests.support.kv.kinds import ZmqKind, shape_of_bytes
from tests.support.kv.kv_cluster import Cluster, commit_for, error_of, send

NUM_BLOCKS = 12
BLOCK_SIZE = 4
NUM_MOVES = everyday(3, of=8)


def of_layers(*shapes: LayerShape, dtype: str = "float32") -> KVLayout:
    return KVLayout.of_layers(shapes, model_digest="m", block_size=BLOCK_SIZE, dtype=dtype)


LAYOUTS = {
    "latents": of_layers(*(LayerShape(1, 1, 24),) * 3),
    # Sizes for the kernel and for numpy side by side, and 36 times between the largest and the
    # least: of some layers many blocks are one frame, of others one block.
    "layers differ": of_layers(
        LayerShape(2, 4, 16), LayerShape(1, 1, 9), LayerShape(2, 1, 8), LayerShape(1, 36, 16)
    ),
    "scales": of_layers(*(LayerShape(2, 2, 28),) * 2, dtype="int8"),
    "latents with scales": of_layers(LayerShape(1, 1, 576), LayerShape(1, 1, 128), dtype="int8"),
}


def moved(layout: KVLayout, source: Bytes, target: Bytes, pairs: list[tuple[int, int]]) -> Bytes:
    """Return the target's bytes with blocks of the source in it, counted here once more."""
    here, there, start = source.reshape(-1), target.reshape(-1).copy(), 0
    shapes = layout.shapes or (LayerShape(2, layout.num_kv_heads, layout.head_dim),) * (
        layout.num_layers
    )
    value_bytes, scale_bytes = {"float32": (4, 0), "int8": (1, 4)}[layout.dtype]
    for shape in shapes:
        per_token = shape.head_dim * value_bytes + scale_bytes
        size = shape.num_kv_heads * BLOCK_SIZE * per_token
        for _ in range(shape.num_planes):
            for block, to in pairs:
                piece = here[start + block * size : start + (block + 1) * size]
                there[start + to * size : start + (to + 1) * size] = piece
            start += NUM_BLOCKS * size
    assert start == here.size == there.size
    return there


@st.composite
def moves(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(source block, target block) of each block of a ticket."""
    count = draw(st.integers(1, 9))
    blocks = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=count, max_size=count, unique=True)
    return list(zip(draw(blocks), draw(blocks), strict=True))


class FakeEngineKind(ZmqKind):
    """Frames over TCP, bytes by the RDMA lane itself, whose engine copies in this process."""

    lane = "rdma"
    is_one_sided = True

    def __init__(self) -> None:
        super().__init__()
        self._engine = FakeEngine()

    def pool(self, layout: KVLayout, num_blocks: int) -> Bytes:
        memory = np.frombuffer(mmap.mmap(-1, num_blocks * layout.block_bytes), np.uint8)
        return memory.reshape(shape_of_bytes(layout, num_blocks))

    def lanes(self, pool: Bytes, layout: KVLayout) -> Sequence[Lane]:
        return [RdmaLane(host_pool(pool, layout), self._engine, max_slabs=3)]

    def close(self) -> None:
        super().close()
        assert self._engine.regions == {}


@pytest.mark.parametrize("verify", ["block", "commit", "off"])
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_bytes_arrive_equal_and_nothing_else_changes(
    cluster: Cluster, name: str, verify: str
) -> None:
    check_all(cluster, LAYOUTS[name], verify)


@pytest.mark.parametrize("verify", ["block", "commit", "off"])
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_bytes_arrive_equal_by_the_rdma_lane(name: str, verify: str) -> None:
    cluster = Cluster(FakeEngineKind())
    try:
        check_all(cluster, LAYOUTS[name], verify)
    finally:
        cluster.close()


def check_all(cluster: Cluster, layout: KVLayout, verify: str) -> None:
    """Hand off some blocks a few times, to any blocks, and look at every byte."""
    # The largest block and not much more: frames differ in their number of blocks.
    window_bytes = 2 * max(layer.num_bytes for layer in layout.layers)
    prefill, decode = (
        cluster.node(
            node, layout=layout, window_bytes=window_bytes, num_blocks=NUM_BLOCKS, verify=verify
        )
        for node in ("p", "d")
    )

    @settings(max_examples=NUM_MOVES, deadline=None)
    @given(moves())
    def check(pairs: list[tuple[int, int]]) -> None:
        sources, targets = [one for one, _ in pairs], [one for _, one in pairs]
        ticket = cluster.ticket(decode, targets)
        wanted = moved(layout, prefill.pool, decode.pool, pairs)
        send(prefill, decode, ticket, sources)
        assert decode.wait_event() == Landed(ticket.lease_token, commit_for(ticket, layout))
        assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
        assert np.array_equal(decode.pool.reshape(-1), wanted)

    check()
    for node in (prefill, decode):
        statistics = node.connector.statistics()
        assert not any(statistics.frames_dropped.values())
        assert not any(statistics.checksum_failures.values())
        assert set(prefill.connector.statistics().lanes.values()) == {cluster.lane}
    num_bytes = prefill.connector.statistics().bytes_sent
    assert num_bytes == decode.connector.statistics().bytes_received
    assert num_bytes % layout.block_bytes == 0


def test_another_layout_and_another_model_are_refused_in_other_words(cluster: Cluster) -> None:
    prefill = cluster.node("p", layout=LAYOUTS["latents"])
    for number, (layout, error) in enumerate(
        (
            (of_layers(*(LayerShape(1, 1, 20),) * 3), "KV layouts differ: shapes: here"),
            (
                KVLayout.of_layers(
                    LAYOUTS["latents"].shapes, model_digest="n", block_size=4, dtype="float32"
                ),
                "models differ: model_digest: here 'n', peer 'm'",
            ),
        )
    ):
        decode = cluster.node(f"d{number}", layout=layout)
        ticket = cluster.ticket(decode, [1])
        decode.connector.expect(ticket, sender_deadline_s=30)
        # The ticket says nothing yet: the nodes find out when they connect.
        ticket = dataclasses.replace(ticket, fingerprint=prefill.layout.fingerprint)
        prefill.connector.open(ticket, deadline_s=30)
        assert error in str(error_of(prefill.wait_event()))
