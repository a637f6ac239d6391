"""The benchmark of automatic roles: its keys, one small run, and what it refuses."""

from __future__ import annotations

import pytest

from bench import auto_roles
from bench.auto_roles import NUM_NODES, Kind, bursts, parser, run, turning
from common.errors import ConfigError


def test_all_splits_serve_the_same_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_roles, "LONG_PROMPTS", Kind(3.0, 900, 3))
    monkeypatch.setattr(auto_roles, "LONG_ANSWERS", Kind(3.0, 90, 20))
    told: list[str] = []
    found = run(parser().parse_args(["--half-s", "2"]), told.append)
    fixed = found["fixed"]
    assert isinstance(fixed, dict)
    assert len(fixed) == NUM_NODES - 1
    assert (found["auto"], found["ratio"], found["moves"]) == (fixed["4P4D"], 1.0, [])
    assert found["steady_moves"] == {"long_prompts": [], "long_answers": []}
    assert found["burst_moves"] == []
    assert len(told) == NUM_NODES


def test_a_load_turns_around_in_the_middle_and_bursts_come_in_turns() -> None:
    trace = turning(60.0, seed=0)
    assert [one.arrival_s for one in trace] == sorted(one.arrival_s for one in trace)
    assert all((one.num_prompt > 3000) == (one.arrival_s < 60) for one in trace)
    assert trace == turning(60.0, seed=0) != turning(60.0, seed=1)
    both = bursts(30.0, seed=0)
    assert [one.arrival_s for one in both] == sorted(one.arrival_s for one in both)
    for begins_s in (0, 6, 12, 18):
        part = [one for one in both if begins_s <= one.arrival_s < begins_s + 6]
        assert {one.num_prompt > 3000 for one in part} == {begins_s % 12 == 0}


def test_what_it_refuses() -> None:
    with pytest.raises(ConfigError, match="--half-s is 0: wanted above 0"):
        run(parser().parse_args(["--half-s", "0"]))
