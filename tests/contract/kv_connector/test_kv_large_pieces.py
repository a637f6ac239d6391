"""Pieces that are large enough for the kernel that copies and sums in one pass."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from common.kv.blocks import blocks_for
from common.kv.kv_layout import KVLayout
from kv_transfer.contract import Commit, Landed, TransferEnded
from kv_transfer.lanes.pieces import PieceRows, Sums
from kv_transfer.lanes.pool_memory import Bytes
from kv_transfer.shared.limits import MAX_REPEATS_PER_PIECE
from kv_transfer.zmq import transport
from tests.support.kv.kv_cluster import Cluster, Node, cluster_of, error_of

fused_copy = pytest.importorskip("kv_transfer.lanes.fused_copy", reason="wants numba")
PartSender = pytest.importorskip("kv_transfer.zmq.parts").PartSender
LAYOUT = KVLayout(
    model_digest="m", num_layers=2, num_kv_heads=4, head_dim=64, block_size=16, dtype="float32"
)
NUM_BLOCKS = 40
assert fused_copy.can_sum(LAYOUT.piece_bytes)
# Eight blocks in a frame at most.
WINDOW_BYTES = 32 * LAYOUT.piece_bytes


def pair(cluster: Cluster) -> tuple[Node, Node]:
    prefill, decode = (
        cluster.node(name, layout=LAYOUT, window_bytes=WINDOW_BYTES, num_blocks=NUM_BLOCKS)
        for name in ("p", "d")
    )
    return prefill, decode


def send(cluster: Cluster, prefill: Node, decode: Node, there: list[int], here: list[int]) -> None:
    ticket = cluster.ticket(decode, there)
    num_tokens = len(there) * LAYOUT.block_size
    assert blocks_for(num_tokens, LAYOUT.block_size) == len(there)
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=30)
    prefill.push_all(ticket, here)
    prefill.connector.commit(ticket.lease_token, Commit(num_tokens=num_tokens, first_token_id=1))


@pytest.mark.parametrize("pattern", ["adjacent", "scattered"])
def test_every_byte_lands_where_it_belongs_and_no_other_is_touched(
    cluster: Cluster, pattern: str
) -> None:
    prefill, decode = pair(cluster)
    rng = np.random.default_rng(7)
    there, here = (rng.permutation(NUM_BLOCKS)[:19].tolist() for _ in range(2))
    if pattern == "adjacent":
        there, here = list(range(20, 39)), list(range(3, 22))
    wanted = decode.pool.copy()
    wanted[:, :, there] = prefill.pool[:, :, here]
    send(cluster, prefill, decode, there, here)
    assert isinstance(decode.wait_event(), Landed)
    assert prefill.wait_event() == TransferEnded(101, None)
    assert np.array_equal(decode.pool, wanted)


@pytest.mark.parametrize("kind", ["loopback", "zmq", "shm"])
@pytest.mark.parametrize("value_or_key", [0, 1])
def test_a_byte_that_changed_after_it_was_summed_never_lands(
    kind: str, value_or_key: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the copy that is sent or, on a lane that sends none, in the pool."""
    sums_of, gathered = PieceRows.sums, PieceRows.gathered

    def change(self: PieceRows, pool: Any, layer: int, blocks: Any, ordinals: Any) -> Sums:
        sums = sums_of(self, pool, layer, blocks, ordinals)
        if layer == 1 and blocks[-1] == 8:
            pool.planes(layer)[value_or_key][blocks[-1], LAYOUT.piece_bytes - 1] ^= 1
        return sums

    def change_copy(*arguments: Any, is_summed: bool) -> tuple[Bytes, Sums]:
        copy, sums = gathered(*arguments, is_summed=is_summed)
        _, _, layer, blocks, _ = arguments
        if layer == 1 and blocks[-1] == 8:
            copy[value_or_key, -1, -1] ^= 1
        return copy, sums

    monkeypatch.setattr(PieceRows, "sums", change)
    if kind != "shm":
        monkeypatch.setattr(PieceRows, "gathered", change_copy)
    with contextlib.closing(cluster_of(kind)) as cluster:
        prefill, decode = pair(cluster)
        send(cluster, prefill, decode, list(range(9)), list(range(9)))
        assert "bad checksum" in str(decode.wait_failed())
        assert "bad checksum" in str(error_of(prefill.wait_event()))
        # The piece and, on a lane that sends copies, its repetitions.
        num_failures = decode.connector.statistics().checksum_failures[cluster.lane]
        assert num_failures == (1 if kind == "shm" else 1 + MAX_REPEATS_PER_PIECE)


@pytest.mark.parametrize("has_numba", [True, False])
def test_zmq_sends_parts_by_itself_or_through_pyzmq(
    has_numba: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_sent = 0
    send_parts = PartSender.send

    def count(self: Any, header: memoryview, parts: Sequence[memoryview]) -> None:
        nonlocal num_sent
        num_sent += 1
        send_parts(self, header, parts)

    monkeypatch.setattr(PartSender, "send", count)
    if not has_numba:
        monkeypatch.setattr(transport, "_part_sender", lambda dealer: None)
    with contextlib.closing(cluster_of("zmq")) as cluster:
        prefill, decode = pair(cluster)
        here = [0, 1, 2, 3, 4, 5, 6, 8, 10, 12]
        send(cluster, prefill, decode, list(range(10)), here)
        assert isinstance(decode.wait_event(), Landed)
        assert np.array_equal(decode.pool[:, :, :10], prefill.pool[:, :, here])
    assert (num_sent > 0) == has_numba
