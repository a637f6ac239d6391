"""The figures of bench.router.wide, of small clusters."""

from __future__ import annotations

import pytest

from bench.router import wide


def test_a_choice_is_measured_for_each_policy_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "NUM_CHOICES", 20)
    figures = wide.choice_figures(1, (2, 40))
    assert set(figures) == {"round_robin", "least_loaded", "prefix_affinity"}
    assert all(set(of) == {"2", "40"} for of in figures.values())


async def test_a_registry_is_read_whole(redis_url: str) -> None:
    span_ms, stall_ms = await wide.digest(redis_url, 3, 2, is_idle=True)
    assert min(span_ms, stall_ms) > 0


async def test_a_request_calls_redis_at_most_four_times(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few calls for one that lasts, shared ones for those that come together, none for others."""
    monkeypatch.setattr(wide, "NUM_REQUESTS", 16)
    figures = await wide.redis_per_request(redis_url)
    calls, commands = figures["redis_calls"], figures["redis_commands"]
    assert calls["lasting"] <= 4
    assert calls["together"] <= 0.25
    assert commands["together"] <= 4
    assert (calls["brief"], commands["brief"]) == (0, 0)


def test_open_streams_are_measured() -> None:
    figures = wide.idle_streams(2, 1.0)
    assert set(figures) == {"share", "beats", "beat_us", "suspected"}
    assert figures["beats"] > 0


def test_the_growth_is_a_share_of_the_request_that_was_measured() -> None:
    choices_us = {
        "round_robin": {"2": 80.0, "1000": 130.0},
        "least_loaded": {"2": 9.0, "1000": 9.0},
    }
    growth = wide.request_growth(choices_us, in_all_us=1000.0)
    assert growth == {"round_robin": 0.05, "least_loaded": 0.0}
