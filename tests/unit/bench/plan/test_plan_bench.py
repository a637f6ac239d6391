"""The planning benchmark: its keys, one small run, and what it refuses."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.plan.__main__ import REPORT_BYTES, parser, run
from bench.plan.many import serve_many
from common.errors import ConfigError
from common.kv.blocks import KEY_BYTES
from node.control.block_reports import MAX_REPORTED
from protos import pdserve_node_pb2 as pb
from simulator.profile import FOLDER
from simulator.trace_file import read_trace

TRACE = Path(__file__).parents[4] / "bench" / "traces" / "mooncake_conversation.jsonl"


def parsed(*flags: str) -> argparse.Namespace:
    return parser().parse_args(flags)


def test_an_excerpt_is_served_and_all_figures_are_there() -> None:
    found = run(
        parsed("--trace", str(TRACE), "--requests", "12", "--prefill", "2", "--decode", "2")
    )
    assert (found["requests"], found["answered"], found["failed"]) == (12, 12, 0)
    assert found["nodes"] == {"prefill": 2, "decode": 2, "mixed": 0}
    for key in ("conversation_s", "simulated_s_per_s", "ttft_s_p50", "ttft_s_p99", "tpot_s_p50"):
        assert found[key] > 0  # type: ignore[operator]
    assert 0 < found["hit_rate"] <= found["pool_hit_rate"]  # type: ignore[operator]
    assert 0 < found["prefill_pool_hit_rate"] <= found["pool_hit_rate"]  # type: ignore[operator]
    assert found["all_hit_rate"] == found["pool_hit_rate"]
    assert found["runs"] < found["steps"]  # type: ignore[operator]
    # Each block of a prompt enters the pools of both nodes, but for those that were found.
    num_blocks = sum(one.num_prompt // 64 for one in read_trace(TRACE, 12))
    assert num_blocks < found["reported_blocks"] < 3 * num_blocks  # type: ignore[operator]
    assert found["report_bytes_per_s"] > 8 * num_blocks / found["simulated_s"]  # type: ignore[operator]


def test_the_bytes_of_a_report_are_those_of_a_message() -> None:
    for num_blocks in (1, 200, MAX_REPORTED):
        report = pb.BlockReport(number=5000, added=bytes(KEY_BYTES * num_blocks), tier=1)
        num_bytes = pb.NodeMessage(blocks=report).ByteSize()
        assert abs(num_bytes - KEY_BYTES * num_blocks - REPORT_BYTES) <= 2


def test_nodes_can_have_host_memory() -> None:
    found = run(parsed("--requests", "10", "--host-memory", "4", "--decode", "1", "--prefill", "1"))
    assert (found["requests"], found["failed"]) == (10, 0)
    assert found["hit_rate"] <= found["pool_hit_rate"] <= found["all_hit_rate"]  # type: ignore[operator]
    with pytest.raises(ConfigError, match="--host-memory is -1: wanted 0 or more"):
        run(parsed("--host-memory", "-1"))


def test_nodes_find_what_one_pool_would_find() -> None:
    """Prompts of 12,000 tokens, which evict many blocks at once, on nodes that pull."""
    flags = ("--requests", "120", "--rate", "0.9", "--host-memory", "32", "--seed", "1")
    found = run(parsed(*flags, "--prefill", "2", "--decode", "2"))
    assert found["sim.hit_share_of_pool"] > 0.97  # type: ignore[operator]


def test_without_a_trace_conversations_are_made_up() -> None:
    found = run(parsed("--requests", "10", "--prefill", "0", "--decode", "0", "--mixed", "1"))
    assert (found["requests"], found["failed"]) == (10, 0)


def test_many_requests_are_served_and_what_a_million_costs_follows() -> None:
    found = serve_many(FOLDER / "8b_h100.json", number=20, num_nodes=4, seed=0)
    assert found["many_requests"] == 20
    further_s = found["many_request_ms"] * 1e-3 * 999_980
    assert 0 < further_s < found["million_s"] * 1.01 + 1
    assert 0.9 < found["memory_growth"] < 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--requests", "0"), "--requests is 0: wanted at least 1"),
        (("--rate", "0"), "--rate is 0: wanted above 0"),
        (("--prefill", "-1"), "--prefill is -1: wanted 0 or more"),
        (("--decode", "0"), "no node that decodes"),
        (("--trace", "nowhere.csv"), r"trace nowhere\.csv cannot be read"),
        (("--profile", "nowhere.json", "--requests", "1"), r"profile nowhere\.json: No such file"),
    ],
)
def test_what_it_refuses(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(parsed(*flags))
