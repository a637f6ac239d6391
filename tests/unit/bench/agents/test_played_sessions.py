"""Agents ask again with all that was said before; figures count what no cache held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any, cast

import pytest

from bench.agents.__main__ import REGIMES, WAYS, compared
from bench.agents.figures import computed_ratio, figures, last_turn, ratio
from bench.agents.playing import Asked, play
from bench.agents.sessions import Session, Shape, make_sessions
from bench.running_cluster import Answer, RunningCluster
from common.observing.latency import RequestTiming

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
    found = figures(asked, SHAPE.num_turns)
    assert found["num_answered"] == 12
    assert found["computed_tokens"] == 12 * 16
    assert found["prompt_tokens"] == sum(one.num_prompt_tokens for one in asked)
    assert found["ttft_ms_p50"] == found["ttft_ms_p99"] == 500.0
    assert found["ttft_ms_p50_by_turn"] == [500.0] * 4
    assert [one.turn for one in last_turn(asked)] == [3] * 3


def test_ratios_say_which_is_which() -> None:
    def turns(ttft_s: float, num_computed: int) -> list[Asked]:
        return [
            Asked(turn=n, num_prompt_tokens=500, num_cached_tokens=500 - num_computed, ttft_s=s)
            for n, s in enumerate((ttft_s, ttft_s, 3 * ttft_s))
        ]

    slow, fast = turns(2.0, 100), turns(1.0, 40)
    assert ratio(fast, slow) == 0.5
    assert computed_ratio(fast, slow) == 0.4
    both = {"before": slow, "now": fast}
    assert set(both) == set(WAYS)
    assert compared("fits", {"fits": both}) == {"ttft_p50_ratio": 0.5}
    assert compared("long", {"long": both}) == {"ttft_p50_gain": 2.0}
    quarter = {"fits": both, "quarter": {"before": turns(8.0, 300), "now": turns(1.25, 44)}}
    assert compared("quarter", quarter) == {
        "last_turn_gain": 6.4,
        "computed_ratio": 1.1,
        "ttft_p50_ratio": 1.25,
    }


def test_every_prompt_of_the_regimes_fits_the_pools_and_the_model() -> None:
    token_bytes = 30 * 2 * 3 * 64 * 4  # of the demo model: layers, keys and values, heads, float32
    for regime in REGIMES.values():
        longest = 0
        for seed in range(1, 4):
            for session in make_sessions(regime.shape, seed):
                said: list[int] = []
                for turn in session.turns:
                    before = said[turn.parent] if turn.parent >= 0 else len(session.system)
                    said.append(before + len(turn.new_tokens) + turn.num_answer_tokens)
                longest = max(longest, *said)
        assert longest < 8192
        assert longest * token_bytes < int(regime.pool.removesuffix("MiB")) << 20
