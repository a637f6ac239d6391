"""The accuracy of plans: the same requests on both sides, errors of each figure, the winner."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from bench.plan import accuracy
from bench.plan.accuracy import (
    SHAPES,
    TRACE,
    TokenClient,
    chosen_requests,
    measure,
    parser,
    planned_run,
    profile_of,
    scaled,
    shown_beside,
    warm_up,
)
from bench.plan.errors import errors, figures, goal_of, side_of, spread_of, winner
from bench.plan.machine_speed import Slowness
from bench.plan.recorded_steps import TimedStep
from bench.plan.stages import OF_TPOT, OF_TTFT, Run
from bench.running_cluster import Answer
from common.errors import ConfigError
from common.nodes import Role
from common.observing.latency import LatencyTargets, RequestTiming
from common.recording.file import RecordingFile
from common.settings.config import Config
from pdserve.planning.search import Fleet
from pdserve.profiling.profile_command import loaded_runner
from simulator.profile import FOLDER, read_profile
from simulator.profiles.beside_steps import BesideSteps
from simulator.profiles.shared_cores import Slowdowns
from simulator.trace_file import TraceRequest, read_trace

TIMEOUT_S = 20.0
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
    runs = [(shape, planned_run(PROFILE, CONFIG, shape, requests)) for shape in SHAPES.values()]
    one = Fleet(mixed=1)
    runs.append((one, planned_run(PROFILE, CONFIG, one, requests, slowness(20.0))))
    for shape, run in runs:
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


def test_a_figure_of_several_runs_is_their_median_and_a_stage_their_mean() -> None:
    def run(ttft_s: float) -> Run:
        timing = RequestTiming(arrived_at_s=0.0, chunk_at_s=(ttft_s, ttft_s + 1), num_tokens=11)
        return Run(timings=[timing], took_s=2.0, stages={"place": ttft_s}, cpu_s={})

    runs = {"1P1D": [run(0.1), run(0.6), run(0.2)]}
    found, shown = side_of(runs, TARGETS)["1P1D"]
    assert found["ttft_p50"] == pytest.approx(0.2)
    assert shown.stages == {"place": pytest.approx(0.3)}
    spread: Any = spread_of(runs, TARGETS)
    assert spread["1P1D"]["ttft_p50"] == [0.1, 0.6]


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


def slowness(*factors: float) -> Slowness:
    """Return how slow a machine was whose speed changed every 11 s."""
    return Slowness(
        [
            TimedStep(11.0 * i, 11.0 * (i + 1), 11.0 / factor, 11.0, "1 answer")
            for i, factor in enumerate(factors)
        ]
    )


def test_a_plan_becomes_slower_when_the_machine_does() -> None:
    """After 11 s, by a factor of 3: the load lasts for twice as long."""
    requests = chosen_requests(options())
    plain = planned_run(PROFILE, CONFIG, Fleet(1, 1), requests).timings
    turned = planned_run(PROFILE, CONFIG, Fleet(1, 1), requests, slowness(1.0, 3.0)).timings
    assert requests[0].arrival_s < 11 < requests[-1].arrival_s
    assert turned[0].ttft_s == pytest.approx(plain[0].ttft_s)
    assert turned[-1].ttft_s > 2 * plain[-1].ttft_s


class Cluster:
    """Stands in for real clusters and profiles: it does what a plan says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.profile, self.slowness = PROFILE, slowness(1.0)
        monkeypatch.setattr(accuracy, "real_run", self.run)
        monkeypatch.setattr(accuracy, "read_profile", lambda path, transport: PROFILE)
        monkeypatch.setattr(accuracy, "num_cores", lambda: 3)

    async def run(
        self, shape: Fleet, requests: list[TraceRequest], profile: object
    ) -> tuple[Run, Slowness]:
        up = replace(CONFIG, engine=replace(CONFIG.engine, max_num_batched_tokens=512))
        return planned_run(self.profile, up, shape, requests, self.slowness), self.slowness


def measured(*flags: str) -> dict[str, Any]:
    return measure(options("--profile", "any.json", *flags))


def test_a_cluster_that_does_what_the_plan_says_has_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(monkeypatch)
    found = measured()
    for plan in (found["as_profiled"], found["at_measured_speed"]):
        assert set(plan["worst"].values()) == {0.0}
        assert plan["within_goals"] is True
        assert plan["winner"] == found["winner"]
    assert found["oversubscribed"] == ["2P1D", "1P2D"]
    assert "most of it in" not in capsys.readouterr().err
    cluster.profile = replace(PROFILE, network_latency_s=5.0)
    found = measured("--shape", "1P1D")
    plan = found["as_profiled"]
    assert plan["worst"]["tpot_p50"] > 0.5
    assert plan["within_goals"] is False
    real_s, planned_s = plan["stages"]["1P1D"]["handoff"]
    assert real_s > planned_s + 2, "most prompts are handed off"
    assert "1P1D tpot_p50: " in (said := capsys.readouterr().err)
    assert "most of it in handoff: -" in said


def test_a_machine_that_became_slower_is_no_error_of_the_plan_that_follows_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Cluster(monkeypatch).slowness = slowness(1.5)
    found = measured("--shape", "1P1D")
    assert set(found["at_measured_speed"]["worst"].values()) == {0.0}
    assert found["as_profiled"]["worst"]["tpot_p50"] == pytest.approx(1 - 1 / 1.5, abs=0.02)
    assert found["as_profiled"]["within_goals"] is False
    assert found["slowness"]["1P1D"]["all"] == [1.5, 1.5, 1.5]
    said = capsys.readouterr().err
    assert ", as profiled " in said
    assert ", at the measured speed " not in said


class Router:
    """Stands in for a cluster that answers when as many requests are under way as it has nodes."""

    def __init__(self, num_nodes: int) -> None:
        self._all, self.is_asked = asyncio.Barrier(num_nodes), asyncio.Event()
        self.asked: list[dict[str, Any]] = []

    async def answer(self, body: dict[str, Any]) -> Answer:
        self.asked.append(body)
        self.is_asked.set()
        async with asyncio.timeout(TIMEOUT_S):
            await self._all.wait()
        timing = RequestTiming(arrived_at_s=0.0, chunk_at_s=(0.5,), num_tokens=1)
        return Answer(timing=timing, token_ids=(), num_prompt_tokens=1, num_cached_tokens=0)


def test_every_node_serves_before_the_first_request_and_every_token_is_asked_for() -> None:
    router: Any = Router(3)
    asyncio.run(warm_up(TokenClient(router), Fleet(2, 1)))
    assert len({tuple(body["prompt"][:1]) for body in router.asked}) == 3, "no prefix is shared"
    assert all(body["return_token_ids"] is True for body in router.asked)


def test_all_that_is_beside_steps_is_shown() -> None:
    shown = shown_beside(BesideSteps(turn_s=0.002, slowdowns=Slowdowns(1.2, 1.3, 1.4, 1.5)))
    assert shown["turn_s"] == 0.002
    assert [shown[name] for name in Slowdowns._fields] == [1.2, 1.3, 1.4, 1.5]


def test_a_profile_is_compared_with_the_steps_of_its_own_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both nodes record, and nothing else of the settings is changed."""
    one_thread = replace(CONFIG, engine=replace(CONFIG.engine, num_threads=1))

    def profile(config: Config, path: Path, load: object, serve: Any) -> None:
        assert load is loaded_runner
        folder = Path(serve(config))
        file = RecordingFile(folder, "decode-1", {"of": "steps", "node_id": "decode-1"})
        plan = {"ids": [1], "starts": [99], "tokens": [1]}
        took_s = 2 * PROFILE.step.ends_of_decodes(0.0, 1, 100, 1)[0]
        for now_s, gave in ((5.0, plan), (5.0 + took_s, {})):
            file.write({"call": "begin_step", "now_s": now_s, "gave": {"plan": gave}})
            file.write({"call": "end_step"})
        file.close()

    def served(config: Config) -> str:
        assert replace(config, tracing=one_thread.tracing) == one_thread
        return config.tracing.record

    monkeypatch.setattr(accuracy, "profiled_config", lambda: one_thread)
    monkeypatch.setattr(accuracy, "run_profile", profile)
    monkeypatch.setattr(accuracy, "served_times", served)
    monkeypatch.setattr(accuracy, "read_profile", lambda path, transport: PROFILE)
    found, shown = profile_of(None)
    assert found is PROFILE
    assert shown["all"] == [2.0, 2.0, 2.0]
    assert shown["1 answer"][0] == 2.0
    assert profile_of(Path("a.json")) == (PROFILE, {})


@pytest.mark.parametrize("flags", [("--rate-rps", "0"), ("--duration-s", "-1")])
def test_a_load_that_is_none_is_refused(flags: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="wanted numbers above 0"):
        chosen_requests(options(*flags))
