"""Steps of recordings, and what a profile says of them: shapes, spans, kinds, others beside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.plan.recorded_steps import RecordedStep, read_steps, timed_steps
from common.recording.file import RecordingFile
from engine.core.runner_contract import ScheduledSequence
from engine.core.step.step_batch import batch_of
from simulator.profile import FOLDER, read_profile
from simulator.profiles.beside_steps import BesideSteps
from simulator.profiles.shared_cores import Slowdowns

PLAIN = read_profile(FOLDER / "8b_h100.json")
BESIDE = BesideSteps(push_s=0.5, slowdowns=Slowdowns(2.0, 3.0, 4.0, 5.0))
PROFILE = replace(PLAIN, beside=BESIDE)


def recording(folder: Path, node: str, *lines: dict[str, Any], of: str = "steps") -> None:
    file = RecordingFile(folder, node, {"of": of, "node_id": node})
    for line in lines:
        file.write(line)
    file.close()


def begin(now_s: float, *entries: tuple[int, int]) -> dict[str, Any]:
    plan: dict[str, Any] = {"stopped_by": "nothing_waits"}
    if entries:
        starts, tokens = map(list, zip(*entries, strict=True))
        plan |= {"ids": list(range(len(entries))), "starts": starts, "tokens": tokens}
    return {"call": "begin_step", "now_s": now_s, "gave": {"plan": plan}}


def end(now_s: float) -> dict[str, Any]:
    return {"call": "end_step", "now_s": now_s, "took_s": 0.1}


def test_a_step_lasts_until_the_next_one_is_planned(tmp_path: Path) -> None:
    recording(
        tmp_path,
        "prefill-1",
        {"call": "on_time", "now_s": 1.0},
        begin(1.0),
        begin(2.0, (0, 64), (7, 1)),
        {"call": "pushes", "gave": {"effects": [], "of_layers": True}},
        end(2.5),
        begin(2.6, (64, 1)),
        {"call": "pushes"},
        end(2.9),
        begin(3.0),
    )
    pushed = RecordedStep(begin_s=2.0, end_s=2.6, num_tokens=(64, 1), starts=(0, 7), is_pushed=True)
    assert read_steps(tmp_path) == [
        pushed, RecordedStep(begin_s=2.6, end_s=3.0, num_tokens=(1,), starts=(64,))
    ]  # fmt: skip


def test_steps_that_failed_or_did_not_end_are_left_out_and_so_are_routers(tmp_path: Path) -> None:
    failed = {"call": "fail_step", "now_s": 1.5}
    lines = begin(1.0, (0, 1)), failed, begin(2.0, (0, 1)), end(3.0)
    recording(tmp_path, "decode-1", *lines)
    recording(
        tmp_path, "mixed-1", begin(0.5, (9, 1)), end(0.6), {"call": "begin_step"} | begin(0.7)
    )
    recording(tmp_path, "router", {"call": "choose"}, of="placing")
    assert [one.starts for one in read_steps(tmp_path)] == [(9,)]


def step(begin_s: float, end_s: float, *counts: int, is_pushed: bool = False) -> RecordedStep:
    return RecordedStep(
        begin_s=begin_s, end_s=end_s, num_tokens=counts, starts=(100,) * len(counts),
        is_pushed=is_pushed,
    )  # fmt: skip


def alone_s(*counts: int) -> float:
    """Return what the profile says of such a step."""
    return PROFILE.step.step_s(
        batch_of([ScheduledSequence(i, [0] * n, 100, (), None) for i, n in enumerate(counts)])
    )


def test_a_step_alone_does_as_much_as_its_time() -> None:
    steps = [step(0, 1, 1), step(1, 3, 1, 1), step(3, 4, 64, is_pushed=True), step(4, 6, 64, 1)]
    found = timed_steps(steps, PROFILE, 2)
    assert [(one.begin_s, one.end_s) for one in found] == [(0, 1), (1, 3), (3, 4), (4, 6)]
    works_s = [alone_s(1), alone_s(1, 1), alone_s(64) + 0.5, alone_s(64, 1)]
    assert [one.work_s for one in found] == pytest.approx(works_s)
    assert [one.done_s for one in found] == pytest.approx([1, 2, 1, 2])
    assert [one.kind for one in found] == ["1 answer", "answers", "prompts", "prompts"]


def test_beside_others_it_does_less_by_what_the_profile_says_of_both_kinds() -> None:
    """From 1 s on an answer is beside a prompt; each of three has others of both kinds."""
    answer, prompt = timed_steps([step(0, 3, 1), step(1, 5, 64)], PROFILE, 2)
    assert (answer.done_s, prompt.done_s) == pytest.approx((1 + 2 / 3, 2 / 4 + 2))
    three = timed_steps([step(0, 3, 1), step(0, 3, 1), step(0, 3, 64)], PROFILE, 2)
    share = 2 / 3
    slowdowns = ((2 + 3) / 2, (2 + 3) / 2, 4)
    assert [one.done_s for one in three] == pytest.approx([3 * share / s for s in slowdowns])
    one_core = timed_steps([step(0, 3, 1), step(0, 3, 64)], PROFILE, 1)
    assert [one.done_s for one in one_core] == pytest.approx([1.5, 1.5])


def test_a_step_of_which_most_passed_beside_others_is_one_of_these() -> None:
    kinds = [one.kind for one in timed_steps([step(0, 3, 1), step(1, 5.5, 64)], PROFILE, 2)]
    assert kinds == ["1 answer, beside", "prompts"]
