"""What is served in trials: lengths, logs of routers, windows of traces."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.observing.logs import HumanLines, JsonLines
from pdserve.planning.lengths import lengths_of
from pdserve.planning.workload import (
    LEAST_REQUESTS,
    busiest,
    drawn,
    drawn_workload,
    faster,
    trace_workload,
)
from router.text.output.usage import Usage
from router.watch.request_watch import RequestWatch
from simulator.trace_file import TraceRequest
from tests.unit.pdserve.planning.router_logs import log_line, written

TRACES = Path(__file__).parents[4] / "bench" / "traces"


# Lengths.


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("1000:200", (1000, 200), (1000, 200)),
        ("5-7:1-2", (5, 1), (7, 2)),
        ("9:3-4", (9, 3), (9, 4)),
    ],
)
def test_lengths_are_drawn_within_their_bounds(
    text: str, low: tuple[int, int], high: tuple[int, int]
) -> None:
    lengths, rng = lengths_of(text), random.Random(0)
    found = [(lengths.prompt.draw(rng), lengths.output.draw(rng)) for _ in range(200)]
    assert (min(p for p, _ in found), min(o for _, o in found)) == low
    assert (max(p for p, _ in found), max(o for _, o in found)) == high


def test_a_lognormal_has_its_median() -> None:
    rng, length = random.Random(0), lengths_of("1000~0.8:1").prompt
    found = sorted(length.draw(rng) for _ in range(2001))
    assert 950 < found[1000] < 1050
    assert found[0] < 200 < 5000 < found[-1]


@pytest.mark.parametrize(
    "text",
    ["", "1000", "1000:", ":5", "a:b", "1000:200:3", "0:5", "5:0", "9-5:1", "-5:1", "1~0:1",
     "1~9:1", "1.5:2", "1000 : 2", "999999999:1"],
)  # fmt: skip
def test_lengths_that_are_none_are_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--lengths is .*: wanted "):
        lengths_of(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("900:200", "they reach 1100 tokens in all: wanted at most 1000"),
        ("1-900:1-101", "they reach 1001 tokens"),
        ("2000~0.5:10", "the median is 2010 tokens"),
    ],
)
def test_lengths_beyond_the_context_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        drawn_workload(1.0, lengths_of(text), 1000, None)


# Drawn requests.


def test_requests_are_drawn_at_their_rate_and_fit() -> None:
    lengths = lengths_of("500~1.5:100~1")
    found = drawn(5.0, lengths, 4000, 1, 1000)
    assert found[-1].arrival_s / 4000 == pytest.approx(0.2, rel=0.05)
    assert all(one.num_prompt + one.num_output <= 1000 for one in found)
    assert found == drawn(5.0, lengths, 4000, 1, 1000) != drawn(5.0, lengths, 4000, 2, 1000)


def test_each_seed_has_its_own_requests_and_the_same_ones_again() -> None:
    workload = drawn_workload(2.0, lengths_of("10-99:5"), 1000, 30)
    assert workload.window(1) == workload.window(1) != workload.window(2)
    assert len(workload.window(0)) == 30
    assert workload.rate_rps == 2.0
    assert drawn_workload(0.1, lengths_of("10:5"), 1000, None).num_in_window == LEAST_REQUESTS
    assert drawn_workload(20.0, lengths_of("10:5"), 1000, None).num_in_window == 1200


# Windows.


def test_the_first_window_has_the_most_work_per_second_and_others_are_elsewhere(
    tmp_path: Path,
) -> None:
    calm = [TraceRequest(float(second), 100, 10) for second in range(400)]
    busy = [TraceRequest(200 + number / 10, 100, 10) for number in range(50)]
    both = sorted([*calm, *busy], key=lambda one: one.arrival_s)
    begin = busiest(both, 40)
    assert 195 <= both[begin].arrival_s <= 202
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    rows += [
        f"2023-11-16 18:{int(one.arrival_s) // 60:02}:{one.arrival_s % 60:06.3f}0000,100,10"
        for one in both
    ]
    workload = trace_workload(written(tmp_path, *rows), 1000, 40, "")
    first, *others = [workload.window(seed) for seed in range(4)]
    assert workload.is_sampled
    assert {len(one) for one in (first, *others)} == {40}
    assert all(one[0].arrival_s == 0.0 for one in (first, *others))
    assert first[-1].arrival_s < min(one[-1].arrival_s for one in others)


def test_a_short_trace_is_served_whole() -> None:
    workload = trace_workload(TRACES / "azure_conv.csv", 131_072, 1000, "")
    assert not workload.is_sampled
    assert workload.window(0) == workload.window(5) == list(workload.requests)


def test_prefixes_of_a_trace_are_kept_and_requests_that_do_not_fit_are_counted() -> None:
    path = TRACES / "mooncake_conversation.jsonl"
    workload = trace_workload(path, 20_000, 50, "")
    assert workload.num_too_long > 0
    assert len(workload.requests) + workload.num_too_long == 300
    assert any(one.hash_ids for one in workload.window(0))


def test_more_load_is_the_same_requests_in_less_time() -> None:
    slow = [TraceRequest(0.0, 1, 1), TraceRequest(3.0, 2, 2)]
    assert faster(slow, 1.5) == [slow[0], replace(slow[1], arrival_s=2.0)]


# Logs of a router.


def test_a_log_gives_arrivals_and_lengths_of_what_was_answered(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        log_line(message="the last minute", prompt_tokens=...),
        log_line(time="2026-11-27T10:00:09.000Z", duration_ms=1000.0, prompt_tokens=7),
        log_line(),
        log_line(message="request ended: invalid_request", prompt_tokens=..., output_tokens=...),
        log_line(endpoint="tokenize", output_tokens=0),
        log_line(num_choices=3, output_tokens=30, duration_ms=2000.0),
        '{"time": "2026-11-27T10:0',
    )
    workload = trace_workload(path, 1000, None, "")
    assert workload.model == "llama"
    assert [(r.arrival_s, r.num_prompt, r.num_output) for r in workload.requests] == [
        (0.0, 100, 20), *[(3.0, 100, 10)] * 3, (8.0, 7, 20)
    ]  # fmt: skip


def test_a_log_of_several_models_wants_one(tmp_path: Path) -> None:
    lines = [log_line(duration_ms=1e3 * n, model=m) for n in (1, 2) for m in ("llama", "qwen")]
    path = written(tmp_path, *lines)
    with pytest.raises(ConfigError, match="has requests for llama, qwen: wanted --model"):
        trace_workload(path, 1000, None, "")
    assert len(trace_workload(path, 1000, None, "qwen").requests) == 2
    with pytest.raises(ConfigError, match="has no request for other: wanted llama, qwen"):
        trace_workload(path, 1000, None, "other")


# What cannot be planned.

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE = "2023-11-16 18:17:03.9799600"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([""], "is empty: wanted requests"),
        (["\x01\ufffd\x1b"], "is no text: wanted"),
        (["a,b,c", "1,2,3"], "begins with 'a,b,c': wanted"),
        ([HEADER], "holds no requests"),
        ([HEADER, f"{AZURE},5"], "line 2: 2 fields: wanted 3"),
        ([HEADER, f"{AZURE},5,5"], r"has 1 request\(s\) at one moment"),
        ([HEADER, *[f"{AZURE},5,5"] * 3], r"has 3 request\(s\) at one moment"),
        ([HEADER, f"{AZURE},5000,5"], "no request fits .* 1000 tokens .* the shortest has 5005"),
        (["{}"], "line 1: there is no timestamp"),
        (["{"], "line 1: .*wanted a JSON object"),
        (
            ["2026-11-22 10:00:00,123 INFO pdserve.router.requests: request ended: ok"],
            "is a log for people, .*--log-format json",
        ),
        ([log_line(message="ready")], "no line of a request that was answered: .*--log-level info"),
        ([log_line(duration_ms="x")], "line 1: .*wanted time, duration_ms, model"),
        ([log_line(duration_ms=...)], "line 1: 'duration_ms': wanted"),
        ([log_line(duration_ms=float("nan"))], "line 1: nan is none of its values: wanted time"),
        ([log_line(duration_ms=-1)], "line 1: -1 is none of its values"),
        ([log_line(num_choices=10**9)], "line 1: 1000000000 is none of its values"),
        (["{" + '"a":[' * 100_000], "line 1: "),
        (["starting"], "begins with 'starting': wanted .*, or the log of a router with"),
        ([log_line()], r"has 1 request\(s\) at one moment"),
    ],
)
def test_traces_that_cannot_be_served_are_named(
    lines: list[str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"trace .*trace.* ?{said}"):
        trace_workload(written(tmp_path, *lines), 1000, None, "")


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            trace_workload(path, 1000, None, "")


def test_what_a_router_logs_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The line itself, made by the code that makes it, in both formats."""
    with caplog.at_level(logging.INFO, "pdserve.router.requests"):
        for number in range(3):
            watch = RequestWatch("completions", "llama", 10.0 + number)
            watch.usage = Usage((30 + number,), 1, completion_tokens=5)
            watch.on_choice("choice")
            watch.end("ok", 200, 12.0 + 2 * number)
    for number, record in enumerate(caplog.records):
        record.created = 1_000_000_000.0 + 2 * number
    json_lines, human_lines = (
        [formatter.format(record) for record in caplog.records]
        for formatter in (JsonLines("router"), HumanLines())
    )
    workload = trace_workload(written(tmp_path, *json_lines), 1000, None, "")
    assert [one.num_prompt for one in workload.requests] == [30, 31, 32]
    assert [one.num_output for one in workload.requests] == [5, 5, 5]
    assert [one.arrival_s for one in workload.requests] == pytest.approx([0.0, 1.0, 2.0], abs=0.01)
    with pytest.raises(ConfigError, match="is a log for people"):
        trace_workload(written(tmp_path, *human_lines), 1000, None, "")
