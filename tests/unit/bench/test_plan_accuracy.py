"""The accuracy of plans: the same requests on both sides, errors of each figure, the winner."""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import fmean

import pytest

from bench import plan_accuracy
from bench.plan_accuracy import (
    SHAPES,
    TRACE,
    chosen_requests,
    errors,
    figures,
    goal_of,
    measure,
    parser,
    planned_run,
    scaled,
    winner,
)
from bench.plan_stages import OF_TPOT, OF_TTFT, Run
from common.errors import ConfigError
from common.nodes import Role
from common.observing.latency import LatencyTargets, RequestTiming
from common.settings.config import Config
from pdserve.planning.search import Fleet
from simulator.profile import FOLDER, read_profile
from simulator.trace_file import TraceRequest, read_trace

TARGETS = LatencyTargets(ttft_s=1.0, tpot_s=0.1)
PROFILE = read_profile(FOLDER / "8b_h100.json")
CONFIG = Config(role=Role.DECODE)


def options(*flags: str) -> argparse.Namespace:
    return parser().parse_args(["--quick", *flags])


def test_a_trace_is_scaled_in_lengths_and_rate() -> None:
    found = scaled(read_trace(TRACE, 50), 0.5)
    assert found[-1].arrival_s == pytest.approx(49 / 0.5)
    assert all(16 <= one.num_prompt <= 1024 and 2 <= one.num_output <= 96 for one in found)
    assert len({one.num_prompt for one in found}) > 20


def test_every_request_is_in_the_plan_with_its_length() -> None:
    requests = chosen_requests(options())
    for shape in SHAPES.values():
        run = planned_run(PROFILE, CONFIG, shape, requests)
        assert [one.num_tokens for one in run.timings] == [one.num_output for one in requests]
        assert run.took_s >= requests[-1].arrival_s
        stages = run.stages
        ttft_s = fmean(one.ttft_s for one in run.timings)
        assert sum(stages[name] for name in OF_TTFT) == pytest.approx(ttft_s)
        assert all(0 <= stages[name] < 1 for name in (*OF_TTFT, *OF_TPOT))
        assert set(run.cpu_s) == {role.value for role in shape.num_nodes}


def test_figures_are_those_of_the_definitions() -> None:
    timings = [
        RequestTiming(arrived_at_s=0.0, chunk_at_s=(0.5, 1.0), num_tokens=11),
        RequestTiming(arrived_at_s=0.0, chunk_at_s=(2.0, 3.0), num_tokens=11),
    ]
    found = figures(timings, TARGETS, 4.0)
    assert found["goodput"] == 0.25
    assert (found["ttft_p50"], found["tpot_p50"]) == pytest.approx((1.25, 0.075))
    assert found["ttft_p99"] > 1.9


def test_errors_are_shares_of_the_real_figure() -> None:
    assert errors({"a": 2.0, "b": 0.0, "c": 0.0}, {"a": 1.5, "b": 0.0, "c": 3.0}) == {
        "a": 0.25, "b": 0.0, "c": 1.0
    }  # fmt: skip
    assert [goal_of(name) for name in ("ttft_p50", "tpot_p99", "goodput")] == [0.07, 0.2, 0.07]


def test_the_winner_has_the_most_goodput_and_then_the_least_ttft() -> None:
    results = {
        "a": {"goodput": 0.4, "ttft_p50": 0.1},
        "b": {"goodput": 0.5, "ttft_p50": 0.3},
        "c": {"goodput": 0.495, "ttft_p50": 0.2},
    }
    assert winner(results) == "c", "about the same goodput"


async def test_a_cluster_that_does_what_the_plan_says_has_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = replace(PROFILE, network_latency_s=5.0)

    async def real(shape: Fleet, requests: list[TraceRequest]) -> Run:
        return planned_run(profiles[shape], CONFIG_OF_UP, shape, requests)

    CONFIG_OF_UP = replace(  # noqa: N806
        CONFIG, engine=replace(CONFIG.engine, max_num_batched_tokens=512)
    )
    monkeypatch.setattr(plan_accuracy, "real_run", real)
    monkeypatch.setattr(plan_accuracy, "read_profile", lambda path, transport: PROFILE)
    monkeypatch.setattr(plan_accuracy, "num_cores", lambda: 3)
    profiles = dict.fromkeys(SHAPES.values(), PROFILE)
    found = await measure(options("--profile", "any.json"))
    assert set(found["worst"].values()) == {0.0}  # type: ignore[attr-defined]
    assert found["within_goals"] is True
    assert found["oversubscribed"] == ["2P1D", "1P2D"]
    references_ms = found["reference_ms"]
    assert isinstance(references_ms, list)
    assert len(references_ms) == 1 + len(SHAPES)
    assert min(references_ms) > 0
    assert "most of it in" not in capsys.readouterr().err
    profiles = dict.fromkeys(SHAPES.values(), slow)
    found = await measure(options("--profile", "any.json", "--shape", "1P1D"))
    assert found["worst"]["tpot_p50"] > 0.5  # type: ignore[index]
    assert found["within_goals"] is False
    real_s, planned_s = found["stages"]["1P1D"]["handoff"]  # type: ignore[index]
    assert real_s > planned_s + 2, "most prompts are handed off"
    assert "1P1D tpot_p50: " in (said := capsys.readouterr().err)
    assert "most of it in handoff: -" in said


@pytest.mark.parametrize("flags", [("--rate-rps", "0"), ("--duration-s", "-1")])
def test_a_load_that_is_none_is_refused(flags: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="wanted numbers above 0"):
        chosen_requests(options(*flags))
