"""What the store holds and `/v1/cluster` shows, word for word: other versions read and write it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.ids import Incarnation
from placement.records import (
    MAX_VALUE_BYTES,
    NodeListing,
    decode_node,
    decode_placement,
    encode_node,
    encode_placement,
    known_facts,
)
from placement.store import LiveNode
from router.cluster.view import node_json
from router.core.known.node_view import NodeView
from tests.contract.placement_store.worlds import load, placement, record

RECORD: dict[str, Any] = {
    "epoch": 1,
    "node_id": "decode-0",
    "role": "decode",
    "control_address": "127.0.0.1:7001",
    "model": "tiny",
    "fingerprint": "ab" * 16,
    "block_size": 64,
    "num_blocks": 100,
    "max_num_seqs": 8,
    "max_model_len": 2048,
    "metrics_address": "127.0.0.1:9100",
    "kv_description": "31 layers, with mtp",
    "speculative_method": "mtp",
    "version": "0.9.1",
    "protocol": 3,
    "kv_protocol": 4,
    "has_grammars": False,
    "has_token_rules": False,
    "has_prompt_logprobs": False,
    "sends_blocks": False,
    "kv_cache_bytes": 1 << 33,
    "device": "NVIDIA H100 80GB HBM3, GPU 0",
    "num_host_blocks": 0,
    "num_disk_blocks": 0,
    "roles": [],
    "tokens": "",
    "lease_ms": 0,
}
LOAD: dict[str, Any] = {
    "free_blocks": 90,
    "free_seats": 5,
    "num_running": 3,
    "num_waiting": 2,
    "queued_tokens": 30,
    "is_draining": True,
    "new_token_ratio": 0.5,
    "num_preemptions": 4,
    "num_recomputed_tokens": 300,
    "num_drafted": 20,
    "num_accepted": 15,
    "num_cached_blocks": 40,
    "num_reserved_blocks": 1,
    "num_receiving_blocks": 2,
    "num_quarantined_blocks": 3,
    "num_prefix_host_blocks": 0,
    "num_prefix_disk_blocks": 0,
    "kv_links": [["d1", "shm", True, 1 << 40], ["d2", "zmq", False, 7]],
    "uptime_s": 0,
    "kv_unreachable": [["d3", 2]],
    "num_steps": 0,
    "num_prompt_tokens": 0,
    "prompt_steps_ms": 0,
    "decode_steps_ms": 0,
    "num_found_tokens": 0,
}
PLACEMENT: dict[str, Any] = {
    "router_id": "r1",
    "request_id": "req-1",
    "attempt": 1,
    "decode": {"node_id": "decode-0", "epoch": 1},
    "prefill": None,
    "reason": "least loaded",
}
NODE = LiveNode(record=record(), load=load(3, is_draining=True))


def test_a_node_is_stored_in_these_words() -> None:
    stored = json.loads(encode_node(NODE))
    assert stored.pop("load") == LOAD
    assert stored == RECORD


def test_a_node_of_another_version_is_read() -> None:
    newer = RECORD | {"wattage": 300, "incarnation": ["p", 9], "load": LOAD | {"num_cats": 7}}
    read = decode_node(json.dumps(newer).encode())
    assert read == NODE
    assert read.record.incarnation == Incarnation("decode-0", 1)
    older = RECORD | {"load": {k: v for k, v in LOAD.items() if k != "num_quarantined_blocks"}}
    assert decode_node(json.dumps(older).encode()).load.num_quarantined_blocks == 0


def test_more_links_than_a_reader_takes_are_not_stored() -> None:
    links = NODE.load.kv_links * 20
    many = LiveNode(record=NODE.record, load=load(3, kv_links=links))
    assert decode_node(encode_node(many)).load.kv_links == links[:32]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"role": "king"}, "role: Input should be 'router', 'prefill', 'decode' or 'mixed'"),
        ({"block_size": 0}, "block_size: Input should be greater than or equal to 1"),
        ({"control_address": "x:0"}, "control_address: Value error, 'x:0' is not HOST:PORT"),
        ({"load": LOAD | {"num_drafted": 0.5}}, "load.num_drafted: Input should be a valid int"),
        ({"load": {}}, "load.free_blocks: Field required"),
    ],
)
def test_what_is_wrong_with_a_node_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        decode_node(json.dumps(RECORD | {"load": LOAD} | change).encode())


def test_what_has_not_changed_is_taken_from_the_listing_before() -> None:
    before = NodeListing({})
    first = before.decode(b"n", encode_node(NODE))
    now = NodeListing(before.nodes)
    assert now.decode(b"n", encode_node(NODE)) is first
    later = LiveNode(record=record(), load=load(5))
    found = NodeListing(now.nodes).decode(b"n", encode_node(later))
    assert found == later
    assert found.record is first.record
    other = LiveNode(record=record(epoch=2), load=load(5))
    assert NodeListing(now.nodes).decode(b"n", encode_node(other)) == other


def test_what_has_left_is_forgotten() -> None:
    before = NodeListing({})
    before.decode(b"n", encode_node(NODE))
    now = NodeListing(before.nodes)
    now.decode(b"m", encode_node(NODE))
    assert list(now.nodes) == [b"m"]


_HEAD, _, _TAIL = encode_node(NODE).partition(b',"load":')
_LOAD = _TAIL[:-1]


@pytest.mark.parametrize(
    "tail",
    [
        *(_LOAD, b"}", b"", b"{}}", b"7}", _LOAD + b",}", _LOAD + b"}}", _LOAD + b"]"),
        _LOAD + b',"role":"mixed"}',
        _LOAD + b',"role":"king"}',
        _LOAD + b',"wattage":300}',
        b'{"free_blocks":1},"load":' + _TAIL,
        _LOAD + b',"load":{}}',
        _TAIL + b" ",
        _TAIL + b"\xff",
        _TAIL + b"{}",
        _LOAD + b" " * MAX_VALUE_BYTES + b"}",
    ],
)
def test_what_is_behind_a_known_record_is_read_as_if_it_were_not_known(tail: bytes) -> None:
    before = NodeListing({})
    before.decode(b"n", encode_node(NODE))
    value = _HEAD + b',"load":' + tail
    assert before.nodes[b"n"].head == _HEAD + b',"load":'
    assert _outcome(NodeListing(before.nodes), value) == _outcome(NodeListing({}), value)


def test_a_load_within_another_object_is_not_that_of_the_node() -> None:
    value = _HEAD + b',"pets":{"cats":1,"load":' + _LOAD + b'},"load":' + _TAIL
    before = NodeListing({})
    assert before.decode(b"n", value) == NODE
    assert not before.nodes[b"n"].head
    value = _HEAD + b',"pets":{"cats":1,"load":' + _TAIL
    assert isinstance(_outcome(NodeListing(before.nodes), value), str)


def _outcome(listing: NodeListing, value: bytes) -> LiveNode | str:
    try:
        return listing.decode(b"n", value)
    except ValueError as wrong:
        return str(wrong)


def test_a_placement_is_stored_in_these_words_and_read() -> None:
    assert json.loads(encode_placement(placement())) == PLACEMENT
    assert decode_placement(json.dumps(PLACEMENT | {"mood": "good"}).encode()) == placement()


def test_the_cluster_shows_a_node_in_these_words() -> None:
    links = [
        {"decode": "d1", "transport": "shm", "is_connected": True, "num_bytes": 1 << 40},
        {"decode": "d2", "transport": "zmq", "is_connected": False, "num_bytes": 7},
    ]
    shown = node_json(NodeView(record=NODE.record, load=NODE.load, num_requests=5))
    earlier_names = {"address": "127.0.0.1:7001", "kv_cache": "31 layers, with mtp"}
    of_router = {"num_requests": 5, "is_suspected": False, "is_listed": True}
    silent = [{"node_id": "d3", "epoch": 2}]
    of_kv = {"kv_links": links, "kv_unreachable": silent}
    assert shown == RECORD | LOAD | earlier_names | of_router | of_kv


def test_what_a_router_tells_is_read_field_by_field() -> None:
    shown = node_json(NodeView(record=NODE.record, load=NODE.load, num_requests=5))
    told = known_facts(shown)
    assert told["role"] is NODE.record.role
    assert told["kv_links"] == NODE.load.kv_links
    assert told["kv_unreachable"] == NODE.load.kv_unreachable
    assert told.keys() == RECORD.keys() | LOAD.keys()
    assert known_facts({"num_blocks": True, "num_waiting": 3, "mood": 1}) == {"num_waiting": 3}
