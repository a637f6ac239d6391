"""A prefill node that nobody can take KV from is named, with both sides' values (S57)."""

from __future__ import annotations

from dataclasses import replace

from common.nodes import Role
from router.cluster.troubles import MAX_WARNINGS, unpaired_prefill_nodes
from tests.support.nodes.node_records import record

DECODE = record("d0", Role.DECODE, kv_description="30 layers, without mtp")


def test_a_pair_that_fits_is_nothing_to_say() -> None:
    assert unpaired_prefill_nodes([DECODE, record("p0", Role.PREFILL)]) == []


def test_nothing_is_compared_without_a_decode_node() -> None:
    lonely = [record("p0", Role.PREFILL), record("m0", Role.MIXED, fingerprint="other")]
    assert unpaired_prefill_nodes(lonely) == []


def test_both_sides_values_are_named() -> None:
    prefill = record("p0", Role.PREFILL, fingerprint="g", kv_description="31 layers, with mtp")
    assert unpaired_prefill_nodes([DECODE, record("d1", Role.DECODE), prefill]) == [
        "p0 can hand nothing off: its KV cache (31 layers, with mtp, KV protocol 4) is not that of "
        "d0 (30 layers, without mtp, KV protocol 4)"
    ]


def test_a_node_that_describes_nothing_is_named_by_its_fingerprint() -> None:
    (warning,) = unpaired_prefill_nodes([DECODE, record("p0", Role.PREFILL, fingerprint="0123")])
    assert "(fingerprint 0123, KV protocol 4)" in warning


def test_nodes_that_carry_kv_in_another_way_are_no_pair() -> None:
    newer = replace(record("p0", Role.PREFILL), kv_protocol=5)
    (warning,) = unpaired_prefill_nodes([DECODE, newer])
    assert "KV protocol 5) is not that of d0 (30 layers, without mtp, KV protocol 4)" in warning
    assert unpaired_prefill_nodes([DECODE, replace(DECODE, kv_protocol=5), newer]) == []


def test_warnings_are_bounded() -> None:
    many = [record(f"p{i}", Role.PREFILL, fingerprint="g") for i in range(50)]
    assert len(unpaired_prefill_nodes([DECODE, *many])) == MAX_WARNINGS
