"""Agents ask again with all that was said before; figures count what no cache held."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from bench.agents.__main__ import WAYS, compared, regimes
from bench.agents.figures import Played, computed_ratio, figures, last_turn, ratio
from bench.agents.playing import Asked, play, play_by_turns
from bench.agents.sessions import Session, Shape, make_lone_prompts, make_sessions
from bench.agents.tiers import counted
from bench.running_cluster import Answer, RunningCluster
from common.errors import ConfigError
from common.observing.latency import RequestTiming
from node.flow.pulls.pull_cost import PullCost

SHAPE = replace(Shape(), num_sessions=3, num_turns=4, think_s=1e-6, branch_share=0.5)


class FakeCluster:
    """Answers with tokens that were never said before, and caches all but the last 16 tokens."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], dict[str, str]]] = []
        self._new_ids = count(100_000)

    async def answer(self, body: Mapping[str, Any], headers: dict[str, str]) -> Answer:
        self.asked.append((body["prompt"], headers))
        assert body["ignore_eos"]
        assert body["return_token_ids"]
        assert body["temperature"] == 0
        num_tokens = body["max_tokens"]
        return Answer(
            timing=RequestTiming(arrived_at_s=1.0, chunk_at_s=(1.5,), num_tokens=num_tokens),
            token_ids=tuple(next(self._new_ids) for _ in range(num_tokens)),
            num_prompt_tokens=len(body["prompt"]),
            num_cached_tokens=len(body["prompt"]) - 16,
        )


async def played(sessions: list[Session], *, is_named: bool) -> tuple[FakeCluster, list[Asked]]:
    cluster = FakeCluster()
    return cluster, await play(cast(RunningCluster, cluster), sessions, is_named=is_named)


async def test_a_prompt_holds_what_its_parent_was_asked_and_answered() -> None:
    session = make_sessions(SHAPE, 3)[0]
    cluster, asked = await played([session], is_named=False)
    prompts = [prompt for prompt, _ in cluster.asked]
    assert [one.turn for one in asked] == list(range(SHAPE.num_turns))
    for turn, prompt in zip(session.turns, prompts, strict=True):
        parent = prompts[turn.parent] if turn.parent >= 0 else list(session.system)
        num_answered = session.turns[turn.parent].num_answer_tokens if turn.parent >= 0 else 0
        assert prompt[: len(parent)] == parent
        answered = prompt[len(parent) : len(prompt) - len(turn.new_tokens)]
        assert len(answered) == num_answered
        assert all(token >= 100_000 for token in answered)
        assert tuple(prompt[len(parent) + num_answered :]) == turn.new_tokens


@pytest.mark.parametrize("is_named", [False, True])
async def test_requests_name_their_session_where_that_is_asked_for(is_named: bool) -> None:
    sessions = make_sessions(SHAPE, 3)
    cluster, _ = await played(sessions, is_named=is_named)
    names = {headers.get("x-session-id") for _, headers in cluster.asked}
    assert names == ({session.name for session in sessions} if is_named else {None})


async def test_figures_count_tokens_and_times() -> None:
    _, asked = await played(make_sessions(SHAPE, 3), is_named=True)
    found = figures(Played(tuple(asked), 7.25, 3.0) + Played(took_s=1.0, cpu_s=2.0))
    assert found["num_answered"] == 12
    assert found["computed_tokens"] == 12 * 16
    assert found["prompt_tokens"] == sum(one.num_prompt_tokens for one in asked)
    assert found["ttft_ms_p50"] == found["ttft_ms_p99"] == 500.0
    assert found["ttft_ms_p50_by_turn"] == found["ttft_ms_p99_by_turn"] == [500.0] * 4
    assert [one.turn for one in last_turn(asked)] == [3] * 3
    assert (found["took_s"], found["cpu_s"]) == (8.2, 5.0)


def turns(ttft_s: float, num_computed: int) -> Played:
    """Three turns, the last of which takes three times as long."""
    return Played(
        tuple(
            Asked(
                turn=n,
                num_prompt_tokens=500,
                num_cached_tokens=500 - num_computed,
                ttft_s=s,
                took_s=s + 1,
            )
            for n, s in enumerate((ttft_s, ttft_s, 3 * ttft_s))
        )
    )


def test_ratios_say_which_is_which() -> None:
    slow, fast = turns(2.0, 100), turns(1.0, 40)
    assert ratio(fast.asked, slow.asked) == 0.5
    assert computed_ratio(fast.asked, slow.asked) == 0.4
    fits = {"before": slow, "now": fast}
    assert compared("fits", {"fits": fits}) == {"ttft_p50_ratio": 0.5}
    assert compared("long", {"long": fits}) == {"ttft_p50_gain": 2.0}
    quarter = {"before": turns(8.0, 300), "now": turns(1.25, 44)}
    assert compared("quarter", {"quarter": quarter}) == {"last_turn_gain": 6.4}
    assert compared("quarter", {"fits": fits, "quarter": quarter}) == {
        "last_turn_gain": 6.4,
        "computed_ratio": 1.1,
        "ttft_p50_ratio": 1.25,
    }
    change = {"now": turns(9.0, 46)}
    assert compared("change", {"fits": fits, "change": change}) == {"computed_ratio": 1.15}
    assert compared("change", {"change": change}) == {}


def test_what_caching_costs_where_nothing_repeats_is_the_largest_share() -> None:
    """Each prompt is compared with itself: one that waited for something else changes nothing."""
    off = Played(turns(2.0, 500).asked, 100.0, 50.0)
    first, second, third = turns(2.02, 500).asked
    now = Played((replace(first, ttft_s=90.0, took_s=90.0), second, third), 99.0, 51.0)
    assert compared("no_reuse", {"no_reuse": {"off": off, "now": now}}) == {
        "ttft_share": 0.01,
        "time_share": 0.0086,
        "cpu_share": 0.02,
        "cost_share": 0.02,
    }


async def test_clusters_are_asked_by_turns_and_each_for_every_prompt() -> None:
    order: list[str] = []

    class Named(FakeCluster):
        def __init__(self, name: str) -> None:
            super().__init__()
            self._name = name

        async def answer(self, body: Mapping[str, Any], headers: dict[str, str]) -> Answer:
            order.append(self._name)
            return await super().answer(body, headers)

    clusters = {name: Named(name) for name in ("off", "now")}
    sessions = make_lone_prompts(2, 2, 3)
    asked = await play_by_turns(cast(dict[str, RunningCluster], clusters), sessions, named={"now"})
    assert order == ["off", "now", "now", "off", "off", "now", "now", "off"]
    prompts = [list(turn.new_tokens) for session in sessions for turn in session.turns]
    for name, cluster in clusters.items():
        assert [prompt for prompt, _ in cluster.asked] == prompts
        assert all(bool(headers) == (name == "now") for _, headers in cluster.asked)
        assert [one.num_prompt_tokens for one in asked[name]] == list(map(len, prompts))
        assert [one.took_s for one in asked[name]] == [0.5] * 4


def test_before_no_node_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = PullCost(1.0, lambda num_tokens: 1000.0 * num_tokens)
    for way in WAYS.values():
        assert cost.is_worth(1000)
        with monkeypatch.context() as patch:
            patch.setattr(PullCost, "is_worth", PullCost.is_worth)  # and back again
            exec(way.at_start)
            assert cost.is_worth(1000) is (way is not WAYS["before"])


@pytest.mark.parametrize("is_quick", [False, True])
def test_every_prompt_of_the_regimes_fits_the_pools_and_the_model(is_quick: bool) -> None:
    token_bytes = 30 * 2 * 3 * 64 * 4  # of the demo model: layers, keys and values, heads, float32
    for regime in regimes(is_quick=is_quick).values():
        assert WAYS.keys() >= set(regime.ways)
        longest = 0
        for seed in range(1, 4):
            for session in regime.sessions(seed):
                said: list[int] = []
                for turn in session.turns:
                    before = said[turn.parent] if turn.parent >= 0 else len(session.system)
                    said.append(before + len(turn.new_tokens) + turn.num_answer_tokens)
                longest = max(longest, *said)
        assert longest < 8192
        assert longest * token_bytes < regime.pool_mib << 20


async def test_half_way_through_something_else_is_done_beside() -> None:
    cluster = FakeCluster()
    num_asked = list[int]()

    async def halfway() -> None:
        num_asked.append(len(cluster.asked))

    sessions = make_sessions(replace(SHAPE, num_sessions=1, num_turns=6), 3)
    asked = await play(cast(RunningCluster, cluster), sessions, is_named=False, halfway=halfway)
    assert [one.turn for one in asked] == list(range(6))
    assert len(num_asked) == 1
    assert 3 <= num_asked[0] <= 5


async def test_what_fails_half_way_ends_the_play() -> None:
    async def halfway() -> None:
        raise RuntimeError("no node came")

    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="no node came")):
        await play(
            cast(RunningCluster, FakeCluster()),
            make_sessions(SHAPE, 3),
            is_named=False,
            halfway=halfway,
        )


def test_hits_are_divided_as_the_nodes_tell() -> None:
    asked = [
        Asked(turn=turn, num_prompt_tokens=100, num_cached_tokens=cached, ttft_s=1.0, took_s=1.0)
        for turn, cached in enumerate((0, 80))
    ]
    samples = {
        'pdserve_prefix_blocks_found_total{tier="pool"}': 3.0,
        'pdserve_prefix_blocks_found_total{tier="disk"}': 1.0,
        'pdserve_prefix_blocks_sent_total{tier="host"}': 7.0,
        "pdserve_prefix_pulled_tokens_total": 64.0,
    }
    played = Played(tuple(asked), found=counted(samples) + counted(samples))
    assert played.hit_rates() == {"pool": 0.3, "host": 0.0, "disk": 0.1}
    assert figures(played)["pulled_tokens"] == 128
    assert Played(tuple(asked)).hit_rates() == {"pool": 0.0, "host": 0.0, "disk": 0.0}
    assert Played(found=Counter({"host": 1})) + played == replace(
        played, found=Counter({"pool": 6, "disk": 2, "host": 1, "pulled_tokens": 128})
    )


def test_a_trace_is_the_only_regime() -> None:
    trace = "bench/traces/mooncake_conversation.jsonl"
    (name, regime) = next(iter(regimes(trace=trace).items()))
    assert (name, len(regimes(trace=trace)), len(regime.sessions(1))) == ("trace", 1, 60)
    assert len(next(iter(regimes(trace=trace, is_quick=True).values())).sessions(1)) == 4


def test_a_trace_of_long_prompts_alone_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    row = {"timestamp": 0, "input_length": 1 << 20, "output_length": 1, "hash_ids": [1] * 2048}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match="has no prompt that is short enough"):
        regimes(trace=str(path))
