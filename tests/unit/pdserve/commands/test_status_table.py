"""The cluster as a table, and what is not a cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.nodes import MAX_KV_UNREACHABLE
from pdserve.commands import cluster_status
from pdserve.commands.cluster_status import fetch_cluster
from pdserve.commands.http_client import RouterUnreachable
from pdserve.commands.status_table import status_table

NODE = {
    "role": "decode",
    "epoch": 7,
    "address": "10.0.0.2:50051",
    "model": "SmolLM2",
    "num_blocks": 1000,
    "kv_cache_bytes": 3 << 29,
    "free_blocks": 990,
    "max_num_seqs": 32,
    "num_running": 2,
    "num_waiting": 0,
    "is_draining": False,
    "metrics_address": "10.0.0.2:9100",
    "speculative_method": "ngram",
    "new_token_ratio": 0.352,
    "num_preemptions": 3,
    "num_recomputed_tokens": 1200,
    "num_prefix_host_blocks": 77,
    "num_drafted": 400,
    "num_accepted": 300,
    "num_quarantined_blocks": 4,
    "version": "0.9.1",
    "protocol": 3,
}


def fetched(reply: Any, monkeypatch: pytest.MonkeyPatch, *, is_wide: bool = True) -> str:
    monkeypatch.setattr(
        cluster_status, "fetch_json", lambda *_, **__: json.loads(json.dumps(reply))
    )
    return status_table(fetch_cluster("http://h:8000/"), is_wide=is_wide)


SERVING = {
    "uptime_s": 11523.2,
    "in_progress": 7,
    "tokens_per_s": 123.456,
    "ttft_p50_s": 0.4104,
    "tpot_p50_s": None,
}
LINK = {"decode": "decode-10", "transport": "shm", "is_connected": True, "num_bytes": 7}


def test_what_an_operator_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {**NODE, "node_id": "prefill-1", "role": "prefill", "kv_links": [LINK]},
        {**NODE, "node_id": "decode-10", "free_seats": 30, "uptime_s": 11000, "num_waiting": 12},
        {**NODE, "node_id": "decode-9", "free_seats": 0, "uptime_s": 59, "is_draining": True},
    ]
    reply = {"nodes": nodes, "router": {"router_id": "router-a"}, "serving": SERVING}
    assert fetched(reply, monkeypatch, is_wide=False) == (
        "http://h:8000: 3 nodes serving SmolLM2\n"
        "Router router-a, up 3h12m: 7 in progress, 123.5 tokens/s, first token 410 ms\n"
        "\n"
        "NODE       ROLE     STATE       UP  SEATS FREE  BLOCKS FREE  WAITING\n"
        "decode-10  decode   ready     3h3m       30/32     990/1000       12\n"
        "decode-9   decode   draining   59s        0/32     990/1000        0\n"
        "prefill-1  prefill  ready        -        -/32     990/1000        0\n"
        "\n"
        "FROM       TO         LANE  STATE\n"
        "prefill-1  decode-10  shm   connected\n"
        "prefill-1  decode-9   -     not used yet\n"
    )


@pytest.mark.parametrize(
    ("automatic", "leader", "told"),
    [
        (False, None, ""),
        (True, "router-a", " router-a changes roles."),
        (True, None, " No router changes roles now."),
    ],
)
def test_what_the_load_wants_of_the_roles(
    automatic: bool, leader: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = {
        "prefill": {"nodes": 2, "desired": 3, "needed": 2.4},
        "decode": {"nodes": 2, "desired": 1, "needed": 0.4},
        "mixed": {"nodes": 0, "desired": 0, "needed": 0},
    }
    scaling = {"auto_roles": automatic, "leader": leader, "roles": roles}
    shown = fetched({"nodes": [{**NODE, "node_id": "d"}], "scaling": scaling}, monkeypatch)
    first_lines = " ".join(shown.splitlines()[1:3])
    assert f"For this load: prefill 3 (2 there), decode 1 (2 there).{told}" in first_lines
    odd: Any
    for odd in (None, 5, {}, {"roles": 5}, {"roles": {"decode": 5}}, {"roles": {"decode": {}}}):
        reply = {"nodes": [{**NODE, "node_id": "d"}], "scaling": odd}
        assert "For this load" not in fetched(reply, monkeypatch)


def test_it_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {
        "max_num_seqs": 4096,
        "free_seats": 4096,
        "num_blocks": 1000000,
        "free_blocks": 1000000,
        "num_waiting": 1000,
        "uptime_s": 99 * 86400 + 23 * 3600,
        "is_draining": True,
        "is_suspected": True,
    }
    for length in (16, 40):
        names = [f"{role}-{'x' * length}"[:length] for role in ("prefill", "decode")]
        link = {**LINK, "decode": names[1], "transport": "rdma"}
        nodes = [
            {**NODE, **most, "node_id": names[0], "role": "prefill", "kv_links": [link]},
            {**NODE, **most, "node_id": names[1]},
        ]
        reply = {"nodes": nodes, "router": {"router_id": "r" * length}, "serving": SERVING}
        reply["warnings"] = ["the prefill node cannot hand anything off, " * 4]
        shown = fetched(reply, monkeypatch, is_wide=False)
        assert max(map(len, shown.splitlines())) <= 80, shown
        assert all(name in shown for name in names)


def test_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [
        "NVIDIA H100 80GB HBM3, GPU 0",
        "",
        "NVIDIA L40S, GPU 1",
        "NVIDIA H100 80GB HBM3, GPU 0",
    ]
    nodes = [{**NODE, "node_id": f"n-{i}", "device": card} for i, card in enumerate(cards)]
    for is_wide in (False, True):
        assert fetched({"nodes": nodes}, monkeypatch, is_wide=is_wide).splitlines()[1:3] == [
            "2 nodes on NVIDIA H100 80GB HBM3, GPU 0.",
            "1 node on NVIDIA L40S, GPU 1.",
        ]


@pytest.mark.parametrize("told", [None, 5, {}, {"uptime_s": "x", "tokens_per_s": True}])
def test_a_router_that_does_not_tell_how_it_serves(
    told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = {"nodes": [{**NODE, "node_id": "n"}], "serving": told, "router": {"router_id": "r"}}
    assert fetched(reply, monkeypatch, is_wide=False).splitlines()[1] == "Router r"


@pytest.mark.parametrize(
    ("uptime_s", "shown"),
    [(1, "1s"), (60, "1m0s"), (3599, "59m59s"), (86399, "23h59m"), (1e6, "11d13h"), (0, "-")],
)
def test_times_have_two_units(uptime_s: float, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = {"nodes": [{**NODE, "node_id": "n", "uptime_s": int(uptime_s)}]}
    lines = fetched(reply, monkeypatch, is_wide=False).splitlines()
    assert lines[-1].split()[3] == shown


def test_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {**NODE, "node_id": "prefill-1", "role": "prefill", "is_draining": True},
        {**NODE, "node_id": "decode-10", "num_running": 31, "num_waiting": 12},
        {**NODE, "node_id": "decode-9", "num_drafted": 0, "num_accepted": 0},
    ]
    assert fetched({"nodes": nodes, "router": {"router_id": "router-a"}}, monkeypatch) == (
        "http://h:8000: 3 nodes serving SmolLM2\n"
        "Router router-a\n"
        "\n"
        "NODE       ROLE     EPOCH  VERSION  PROTOCOL  STATE      RUNNING  WAITING  FREE BLOCKS"
        "  KV CACHE  QUARANTINED  ADDRESS\n"
        "decode-10  decode       7  0.9.1           3  ready     31 of 32       12  990 of 1000"
        "  1536 MiB            4  10.0.0.2:50051\n"
        "decode-9   decode       7  0.9.1           3  ready      2 of 32        0  990 of 1000"
        "  1536 MiB            4  10.0.0.2:50051\n"
        "prefill-1  prefill      7  0.9.1           3  draining   2 of 32        0  990 of 1000"
        "  1536 MiB            4  10.0.0.2:50051\n"
        "\n"
        "Scheduling, since each node's start:\n"
        "NODE       KEPT BACK  PREEMPTED  RECOMPUTED TOKENS  KEPT BLOCKS  DRAFTER   ACCEPTED DRAFTS"
        "  METRICS\n"
        "decode-10        35%          3               1200           77  ngram    300 of 400 (75%)"
        "  10.0.0.2:9100\n"
        "decode-9         35%          3               1200           77  ngram              0 of 0"
        "  10.0.0.2:9100\n"
        "prefill-1          -          3               1200           77  ngram    300 of 400 (75%)"
        "  10.0.0.2:9100\n"
        "\n"
        "KV transfer:\n"
        "PREFILL    DECODE     TRANSPORT  STATE\n"
        "prefill-1  decode-10  -          not used yet\n"
        "prefill-1  decode-9   -          not used yet\n"
    )


def test_pairs_and_how_kv_travels_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def link(decode: str, transport: str, is_connected: bool) -> dict[str, Any]:
        told = {"decode": decode, "transport": transport, "is_connected": is_connected}
        return told | {"num_bytes": 7}

    links = [link("d1", "shm", True), link("d2", "zmq", False), link("d-gone", "rdma", False)]
    # Of these, one is in an earlier life of its node, and one has left.
    silent = [("d5", 7), ("d3", 6), ("d-gone", 1)]
    unreachable = [{"node_id": name, "epoch": epoch} for name, epoch in silent]
    of_kv = {"kv_links": links, "kv_unreachable": unreachable}
    nodes = [
        {**NODE, "node_id": "p1", "role": "prefill", "fingerprint": "f", **of_kv},
        {**NODE, "node_id": "p2", "role": "prefill", "fingerprint": "other"},
        *({**NODE, "node_id": f"d{n}", "fingerprint": "f"} for n in (1, 2, 3, 5)),
        {**NODE, "node_id": "d4", "fingerprint": "f", "kv_protocol": 5},
        {**NODE, "node_id": "m1", "role": "mixed", "fingerprint": "f"},
    ]
    shown = fetched({"nodes": nodes}, monkeypatch)
    assert shown.partition("KV transfer:\n")[2] == (
        "PREFILL  DECODE  TRANSPORT  STATE\n"
        "p1       d-gone  rdma       away\n"
        "p1       d1      shm        connected\n"
        "p1       d2      zmq        idle\n"
        "p1       d3      -          not used yet\n"
        "p1       d5      -          unreachable\n"
    )


def test_pairs_that_a_router_avoids_may_be_more_than_a_node_can_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"d{number}" for number in range(MAX_KV_UNREACHABLE + 3)]
    silent = [{"node_id": name, "epoch": 7} for name in names]
    unread: list[Any] = [7, {"node_id": "d0"}]
    prefill = {**NODE, "node_id": "p1", "role": "prefill", "kv_unreachable": [*silent, *unread]}
    shown = fetched({"nodes": [prefill, *({**NODE, "node_id": n} for n in names)]}, monkeypatch)
    assert shown.count("unreachable") == len(names)


@pytest.mark.parametrize("links", [None, 5, [7], [{}]])
def test_links_of_another_shape_are_no_news(links: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    node = {**NODE, "node_id": "p1", "role": "prefill", "kv_links": links}
    assert "KV transfer" not in fetched({"nodes": [node]}, monkeypatch)


def test_what_the_router_does_not_tell_is_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    node = {"node_id": "n", "num_blocks": True, "new_token_ratio": True}
    lines = fetched({"nodes": [node]}, monkeypatch).splitlines()
    assert lines[3].split() == ["n", "-", "-", "-", "ready", "-", "-", "-", "-", "-"]
    assert lines[-1].split() == ["n", "-", "-", "-", "-", "-", "-", "-"]


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ({"is_suspected": True}, "suspected"),
        ({"is_suspected": True, "is_draining": True}, "draining, suspected"),
        ({"is_suspected": False}, "ready"),
        ({"is_suspected": "yes"}, "ready"),
    ],
)
def test_a_node_that_the_router_suspects(
    told: dict[str, Any], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = fetched({"nodes": [{**NODE, "node_id": "n", **told}]}, monkeypatch)
    heading, row = shown.splitlines()[2:4]
    column = slice(heading.index("STATE"), heading.index("RUNNING"))
    assert row[column].strip() == state


def test_a_policy_without_a_ratio_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = fetched({"nodes": [{**NODE, "node_id": "n", "new_token_ratio": 0.0}]}, monkeypatch)
    assert lines.splitlines()[-1].split()[:3] == ["n", "-", "3"]


def test_no_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched({"nodes": []}, monkeypatch) == (
        "http://h:8000: 0 nodes\nRequests have nowhere to run.\n"
    )


def test_why_the_router_is_not_ready_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    router = {"router_id": "r", "not_ready": "no decode or mixed node is heard"}
    why = "The router is not ready: no decode or mixed node is heard.\n"
    assert fetched({"nodes": [], "router": router}, monkeypatch) == (
        f"http://h:8000: 0 nodes\nRouter r\n{why}"
    )
    prefill = {**NODE, "node_id": "n", "role": "prefill"}
    assert why in fetched({"nodes": [prefill], "router": router}, monkeypatch)
    ready = {"nodes": [{**NODE, "node_id": "n"}], "router": {**router, "not_ready": ""}}
    assert "not ready" not in fetched(ready, monkeypatch)


def test_a_store_that_is_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for state, is_told in (("away", True), ("ok", False)):
        reply = {"nodes": [{**NODE, "node_id": "n"}], "placement_store": state}
        assert ("The placement store is away:" in fetched(reply, monkeypatch)) is is_told
        reply["placement_store_error"] = "Redis refused the password" if is_told else ""
        told = "The placement store is away (Redis refused the password): no node can"
        assert (told in fetched(reply, monkeypatch)) is is_told


def test_warnings_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    reply = {"nodes": [{**NODE, "node_id": "n"}], "warnings": ["p1 can hand nothing off"]}
    assert "\nWarning: p1 can hand nothing off.\n" in fetched(reply, monkeypatch)
    fetched({"nodes": [], "warnings": 5}, monkeypatch)


@pytest.mark.parametrize("reply", [[], {}, {"nodes": {}}, {"nodes": [1]}, {"nodes": [{}]}])
def test_an_answer_of_another_shape_is_refused(reply: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RouterUnreachable, match="no pdserve router"):
        fetched(reply, monkeypatch)
