"""Traces in both formats, and what is said about broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.replay.load import default_pools, speed_up_for
from common.errors import ConfigError
from simulator.step_cost import StepCost
from simulator.trace_file import AZURE_HEADER, TraceRequest, read_trace

EXCERPTS = Path(__file__).parents[3] / "bench" / "traces"
AZURE = (
    f"{AZURE_HEADER}\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n"
    "2023-11-16 18:17:04.0319600,3180,8\r\n"
)
MOONCAKE = (
    '{"timestamp": 27000, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}\n'
    '{"timestamp": 30500, "input_length": 512, "output_length": 1, "hash_ids": [46]}\n'
)


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_bytes(text.encode())
    return path


def test_azure_lines_have_carriage_returns_and_seven_digits(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, AZURE))
    assert first == TraceRequest(0.0, 4808, 10)
    assert second.arrival_s == pytest.approx(0.052, abs=1e-6)
    assert (second.num_prompt, second.num_output, second.hash_ids) == (3180, 8, ())


def test_mooncake_times_are_milliseconds_after_the_first(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, MOONCAKE)) == [
        TraceRequest(0.0, 600, 52, (46, 47)),
        TraceRequest(3.5, 512, 1, (46,)),
    ]


def test_only_so_many_are_read_and_empty_lines_are_none(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE.replace("\r\n", "\r\n\r\n") + "not reached")
    assert len(read_trace(path, 1)) == 1


def test_requests_are_put_in_order_of_arrival(tmp_path: Path) -> None:
    late_first = "\n".join(reversed(MOONCAKE.splitlines()))
    assert [r.num_prompt for r in read_trace(written(tmp_path, late_first))] == [600, 512]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "begins with ''.*TIMESTAMP.*Azure.*Mooncake"),
        ("a,b,c\n1,2,3\n", "begins with 'a,b,c'"),
        (f"{AZURE_HEADER}\n", "no requests"),
        (f"{AZURE_HEADER}\n2023-11-16 18:17:03,5\n", "line 2: 2 fields: wanted 3"),
        (
            f"{AZURE_HEADER}\n2023-11-16 18:17:03,5,x\n",
            "line 2: GeneratedTokens is 'x': wanted 1 to",
        ),
        (f"{AZURE_HEADER}\n2023-11-16 18:17:03,0,7\n", "line 2: ContextTokens is 0"),
        (f"{AZURE_HEADER}\nyesterday,5,7\n", "line 2: TIMESTAMP is 'yesterday': wanted a time"),
        ("{}\n", "line 1: there is no timestamp"),
        (MOONCAKE + "[1]\n", r"line 3: '\[1\]': wanted a JSON object"),
        (MOONCAKE + "{broken\n", "line 3: "),
        (MOONCAKE.replace("[46, 47]", "[46]"), "line 1: 1 hash_ids for input_length 600: wanted 2"),
        (MOONCAKE.replace("[46, 47]", "[46, -1]"), "line 1: hash_ids: wanted"),
        (MOONCAKE.replace("52", "0"), "line 1: output_length is 0"),
        (MOONCAKE.replace("52", "true"), "line 1: output_length is True"),
        (MOONCAKE.replace("27000", "-1"), "line 1: timestamp is -1"),
    ],
)
def test_a_broken_file_is_named_with_the_line_at_fault(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        read_trace(written(tmp_path, text))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing cannot be read: No such file or directory"):
        read_trace(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary is not UTF-8 text"):
        read_trace(tmp_path / "binary")


@pytest.mark.parametrize(
    ("name", "total_prompt", "total_output", "num_shared"),
    [
        ("azure_code.csv", 627_529, 7_126, 0),
        ("azure_conv.csv", 270_000, 76_870, 0),
        ("mooncake_conversation.jsonl", 4_269_971, 113_079, 676),
    ],
)
def test_the_excerpts_are_whole(
    name: str, total_prompt: int, total_output: int, num_shared: int
) -> None:
    requests = read_trace(EXCERPTS / name)
    hash_ids = [hash_id for request in requests for hash_id in request.hash_ids]
    assert len(requests) == 300
    assert sum(r.num_prompt for r in requests) == total_prompt
    assert sum(r.num_output for r in requests) == total_output
    assert len(hash_ids) - len(set(hash_ids)) == num_shared


def test_pools_hold_so_many_mean_requests_and_at_least_the_longest() -> None:
    requests = [TraceRequest(0.0, 600, 40), TraceRequest(9.0, 200, 56)]  # 10 and 4 blocks
    assert default_pools(requests, 64) == (56, 168, 504)
    long = [*requests, *requests, TraceRequest(10.0, 6400, 64)]  # 101 blocks, mean 25.8
    assert default_pools(long, 64) == (206, 619, 1858)
    alone = [TraceRequest(0.0, 64, 1)] * 99 + [TraceRequest(1.0, 64_000, 64)]
    assert default_pools(alone, 64)[0] == 1002


def test_arrivals_are_moved_until_the_load_is_what_is_wanted() -> None:
    cost = StepCost(
        overhead_s=0.0, weights_s=0.32, token_s=0.001, context_s=0.0, pair_s=0.0
    )  # 1 ms per prompt token, 10 ms per output token
    requests = [TraceRequest(0.0, 1000, 100), TraceRequest(40.0, 1000, 100)]  # 4 s in 40 s
    assert speed_up_for(0.9, requests, cost) == 9.0
    assert speed_up_for(0.9, requests[:1], cost) == 1.0
