"""The answer in words: each verdict says what it means, with its margin."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from common.nodes import Role
from common.observing.latency import LatencyTargets
from common.settings.config import Config
from pdserve.planning.answer import Advised, Candidate, PlannedNodes, Wanted
from pdserve.planning.page import page_of
from pdserve.planning.search import Fleet
from pdserve.planning.shown import STAGES, as_json, as_text
from pdserve.planning.trial import PlanTrial
from pdserve.planning.workload import Workload
from simulator.profile import FOLDER, read_profile
from simulator.trace_file import TraceRequest

REQUESTS = tuple(TraceRequest(float(n), 100, 10, (n,)) for n in range(10))
WANTED = Wanted(
    profile=replace(read_profile(FOLDER / "8b_h100.json"), model="<b>8B</b>"),
    config=Config(role=Role.DECODE),
    workload=Workload("trace.csv", REQUESTS, 10),
    targets=LatencyTargets(ttft_s=1.0, tpot_s=0.05),
    attain=0.9,
    seeds=2,
)


def candidate(shape: Fleet, carries: float, *shares: float) -> Candidate:
    trials = tuple(
        PlanTrial(
            score=share, is_stopped=False, num_requests=10, num_failed=0, ttfts_s=(0.5, 0.7),
            tpots_s=(0.01, 0.02), causes=Counter(), busy={Role.MIXED: 0.5}, lasted_s=10.0,
        )
        for share in shares
    )  # fmt: skip
    return Candidate(shape=shape, trials=trials, carries=carries)


SPLIT = candidate(Fleet(3, 1), 1.4, 0.965, 0.955)
MIXED = candidate(Fleet(mixed=4), 1.0, 0.92, 0.9)
ANSWER = PlannedNodes(
    wanted=WANTED,
    split=SPLIT,
    mixed=MIXED,
    needed=4,
    gives_way=(("prefill queue", 30), ("decode", 10)),
    advised=Advised(gains=(("--max-num-seqs 64", 0.2),), carries=1.9, num_nodes=3),
    curve={Fleet(3, 1): [(1.0, 0.96), (1.5, 0.2)], Fleet(mixed=4): [(1.0, 0.91)]},
    num_trials=20,
)


def test_the_answer_has_its_margin_its_limit_and_its_advice() -> None:
    text = as_text(ANSWER)
    assert "3P + 1D meets the targets: 96 % of the requests are within both" in text
    assert "Disaggregated: it carries 1.40x this load within the targets, 1.40 times what" in text
    assert f"this gives way first: {STAGES['prefill queue']}. (75 % of the misses" in text
    assert "Worth changing: --max-num-seqs 64 (+20 % within); together they carry 1.90x" in text
    assert "and 3 nodes would do." in text


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mixed": candidate(Fleet(mixed=4), 2.8, 0.99, 0.99)},
         "Mixed: it carries 2.80x this load within the targets, 2.00 times what as many disagg"),
        ({"mixed": candidate(Fleet(mixed=4), 1.38, 0.95, 0.95)},
         "Disaggregated or mixed makes no difference here"),
        ({"mixed": candidate(Fleet(mixed=4), 0.0, 0.5, 0.5)},
         "as many mixed nodes do not meet the targets at any load that was tried"),
        ({"split": None}, "a single node has to prefill and decode"),
        ({"split": candidate(Fleet(3, 1), 0.0, 0.5, 0.5), "mixed": candidate(Fleet(mixed=4), 0.0,
         0.4, 0.4)}, "Neither carries this load; disaggregated comes nearer."),
        ({"split": candidate(Fleet(3, 1), 0.8, 0.6, 0.5), "mixed": candidate(Fleet(mixed=4), 0.0,
         0.4, 0.4), "needed": 6},
         "4 nodes cannot meet the targets: 55 % of the requests are within both targets"),
        ({"gives_way": ()}, "Nothing gives way"),
        ({"advised": Advised()}, "No setting that was tried makes it carry more"),
    ],
)  # fmt: skip
def test_other_answers_are_said_in_words(changed: dict[str, object], said: str) -> None:
    assert said in as_text(replace(ANSWER, **changed))  # type: ignore[arg-type]


def test_too_few_nodes_are_answered_with_how_many_would_do() -> None:
    weak = candidate(Fleet(3, 1), 0.8, 0.6, 0.5)
    answer = replace(ANSWER, split=weak, mixed=candidate(Fleet(mixed=4), 0.0, 0.4, 0.4), needed=6)
    assert "with 3P + 1D; 6 nodes would." in as_text(answer)


def test_an_interval_that_reaches_below_the_target_is_said() -> None:
    shaky = candidate(Fleet(3, 1), 1.4, 0.99, 0.85)
    assert "one node more is the safe choice" in as_text(replace(ANSWER, split=shaky))
    assert "safe choice" not in as_text(ANSWER)


def test_a_profile_with_noise_and_a_sampled_trace_are_noted() -> None:
    sampled = replace(WANTED.workload, num_in_window=5, num_too_long=3)
    text = as_text(replace(ANSWER, wanted=replace(WANTED, workload=sampled)))
    assert "Sampled: each trial serves 5 of 10 requests in a row" in text
    assert "3 requests are left out" in text
    assert "A trial has 5.0 s of arrivals" in text
    assert "Prompts have nothing in common" not in text
    assert "The profile is no measurement" in text


def test_json_has_the_same_answer() -> None:
    found = as_json(ANSWER)
    assert (found["kind"], found["margin"], found["meets"]) == ("disaggregated", 1.4, True)
    assert found["nodes"] == {"prefill": 3, "decode": 1, "mixed": 0}
    assert found["advice"] == {"--max-num-seqs 64": 0.2}


def test_the_page_escapes_what_comes_from_outside_and_needs_nothing_else() -> None:
    page = page_of(ANSWER)
    assert "<b>8B</b>" not in page
    assert "&lt;b&gt;8B&lt;/b&gt;" in page
    assert page.count("<polyline") == 2 + 1 + 2 * (2 + 1)
    assert "http" not in page
    assert page_of(replace(ANSWER, split=None, curve={})).count("<svg") == 3
