"""One trial: which stage made a request miss, when it is stopped, what settings are tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from common.nodes import Role
from common.observing.latency import LatencyTargets
from common.settings.config import Config, EngineConfig, HandoffConfig
from pdserve.planning.advice import changes, with_changes
from pdserve.planning.answer import Candidate
from pdserve.planning.search import Fleet
from pdserve.planning.trial import (
    PlanTrial,
    cause_of_miss,
    most_missed,
    run_story,
    run_trial,
    setup_of,
)
from simulator.clients import ClientRequest
from simulator.profile import FOLDER, read_profile
from simulator.served import ServedRequest
from simulator.trace_file import TraceRequest

PROFILE = read_profile(FOLDER / "8b_h100.json")
CONFIG = Config(role=Role.DECODE)
TARGETS = LatencyTargets(ttft_s=1.0, tpot_s=0.1)
PAIR = Fleet(1, 1)
EASY = LatencyTargets(ttft_s=100.0, tpot_s=10.0)


def served(**changed: float | str) -> ServedRequest:
    """A request within its targets: 11 tokens, one each 50 ms, the first after 0.5 s."""
    client = ClientRequest(TraceRequest(0.0, 100, 11), 0, 11, 0)
    good: Mapping[str, float | str] = {
        "granted_at_s": 0.1, "first_at_s": 0.5, "second_at_s": 0.55, "last_at_s": 1.0,
        "num_tokens": 11, "longest_gap_s": 0.05, "outcome": "stop", "queue_s": 0.1,
        "compute_s": 0.3,
    }  # fmt: skip
    return replace(ServedRequest(client, 0.0), **{**good, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({}, None),
        ({"outcome": "overloaded"}, "refused"),
        ({"first_at_s": 2.0, "granted_at_s": 1.5}, "place"),
        ({"first_at_s": 2.0, "queue_s": 1.2}, "prefill queue"),
        ({"first_at_s": 2.0, "compute_s": 1.2}, "prefill"),
        ({"last_at_s": 2.0}, "decode"),
        ({"last_at_s": 2.0, "second_at_s": 1.5, "longest_gap_s": 1.0}, "transfer"),
        ({"last_at_s": 2.0, "longest_gap_s": 1.0}, "pause"),
        ({"outcome": "", "last_at_s": 2.0}, None),  # it may still catch up
        ({"num_tokens": 1, "last_at_s": 0.5, "second_at_s": -1.0}, None),
    ],
)
def test_the_stage_that_made_a_request_miss(changed: dict[str, float | str], cause: str) -> None:
    assert cause_of_miss(served(**changed), TARGETS, 5.0) == cause


@pytest.mark.parametrize(
    ("now_s", "granted_at_s", "cause"),
    [(0.9, -1.0, None), (1.1, -1.0, "place"), (1.1, 0.2, "prefill queue")],
)
def test_a_request_without_a_token_misses_when_its_time_is_over(
    now_s: float, granted_at_s: float, cause: str | None
) -> None:
    waiting = served(first_at_s=-1.0, granted_at_s=granted_at_s, outcome="")
    assert cause_of_miss(waiting, TARGETS, now_s) == cause


@pytest.mark.parametrize(
    ("count", "wanted", "most"),
    [(60, 0.9, 6), (10, 0.9, 1), (250, 0.9, 25), (7, 0.9, 0), (9, 0, 9)],
)
def test_as_many_may_miss_as_the_share_allows(count: int, wanted: float, most: int) -> None:
    assert most_missed(count, wanted) == most


REQUESTS = [TraceRequest(0.05 * number, 3000, 8) for number in range(60)]


def run(targets: LatencyTargets, wanted: float, shape: Fleet = PAIR) -> PlanTrial:
    setup = setup_of(PROFILE, CONFIG, shape, seed=0)
    return run_trial(setup, REQUESTS, targets, wanted=wanted)


def test_a_trial_that_cannot_succeed_is_stopped_and_a_later_stop_is_better() -> None:
    hopeless = run(LatencyTargets(ttft_s=0.2, tpot_s=0.1), 0.9)
    better = run(LatencyTargets(ttft_s=0.2, tpot_s=0.1), 0.5)
    assert hopeless.is_stopped
    assert -1 <= hopeless.score < better.score
    assert hopeless.attained == 0.0
    assert hopeless.causes["prefill queue"] > 0


def test_a_trial_that_succeeds_ends_and_has_all_figures() -> None:
    trial = run(EASY, 0.9)
    assert (trial.score, trial.is_stopped, trial.num_failed) == (1.0, False, 0)
    assert len(trial.ttfts_s) == len(trial.tpots_s) == trial.num_requests == 60
    assert 0 < trial.ttft_s(50) <= trial.ttft_s(99)
    assert 0 < trial.tpot_s(50) <= trial.tpot_s(99)
    assert trial.busy.keys() == {Role.PREFILL, Role.DECODE}
    assert trial.busy[Role.PREFILL] > 0.5 > trial.busy[Role.DECODE] > 0


def test_stopping_a_trial_changes_nothing_of_one_that_goes_on() -> None:
    asked, unasked = run(EASY, 0.9), run(EASY, 0.0)
    assert asked == unasked


def test_more_nodes_that_prefill_bring_first_tokens_sooner() -> None:
    assert run(EASY, 0.0, Fleet(2, 1)).ttft_s(99) < run(EASY, 0.0).ttft_s(99) / 1.5


def test_a_story_is_that_of_the_request_and_has_what_happened_in_order() -> None:
    found = run_story(setup_of(PROFILE, CONFIG, PAIR, seed=0), REQUESTS, 7)
    assert found.client.index == 7
    assert found.story is not None
    times, words = zip(*found.story, strict=True)
    assert list(times) == sorted(times)
    for word, said in zip(("placed", "has a place", "token 0", "ended: stop"), words, strict=True):
        assert word in said


def test_settings_are_tried_alone_and_only_those_that_a_node_would_take() -> None:
    config = replace(CONFIG, engine=EngineConfig(max_num_seqs=64, max_num_batched_tokens=128))
    found = changes(config, Fleet(2, 2))
    flags = {one.flag for one in found}
    assert "--max-num-seqs 128" in flags
    assert "--max-num-seqs 256" not in flags, "more seats than the tokens of a step"
    assert {one.key for one in found} == {
        "local_prefill_threshold", "max_num_seqs", "reservation_policy"
    }  # fmt: skip
    assert all(one.config != config for one in found)
    assert not any(one.key == "local_prefill_threshold" for one in changes(config, Fleet(mixed=2)))


def test_chosen_changes_are_made_together() -> None:
    found = {one.flag: one for one in changes(CONFIG, Fleet(1, 1))}
    chosen = [found["--local-prefill-threshold 256"], found["--max-num-seqs 64"],
              found["--reservation-policy none"]]  # fmt: skip
    config = with_changes(CONFIG, chosen)
    assert config.handoff == HandoffConfig(local_prefill_threshold=256)
    assert config.engine.max_num_seqs == 64
    assert config.scheduling.reservation_policy == "none"


def test_the_interval_is_that_of_the_seeds() -> None:
    trial = run(EASY, 0.0)
    trials = tuple(replace(trial, score=score) for score in (0.90, 0.92, 0.94))
    low, high = Candidate(shape=Fleet(1, 1), trials=trials, carries=1.0).interval
    assert (low, high) == pytest.approx((0.92 - 2.92 * 0.02 / 3**0.5, 0.92 + 2.92 * 0.02 / 3**0.5))
    alone = Candidate(shape=Fleet(1, 1), trials=trials[:1], carries=1.0)
    assert alone.interval == (0.0, 1.0)
    level = Candidate(shape=Fleet(1, 1), trials=(trial, trial), carries=1.0)
    assert level.interval == (1.0, 1.0)
