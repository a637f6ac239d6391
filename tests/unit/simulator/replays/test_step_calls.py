"""Steps of a recorded flow are planned again alike, and a decision that differs is found."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from engine.core.sequences.prefix_index import PrefixIndex
from simulator.replays.replay import Replayed, replay_recording
from tests.unit.simulator.replays.recorded_node import ME, RecordedNode

NUM_REQUESTS = 60


def recorded(folder: Path, seed: int = 0, **more: Any) -> Path:
    RecordedNode(folder, seed, **more).run(NUM_REQUESTS)
    return folder / f"{ME.node_id}.jsonl"


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def replayed_lines(lines: list[dict[str, Any]], path: Path) -> Replayed:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return replay_recording(path)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_calls_plan_the_same_steps(tmp_path: Path, seed: int) -> None:
    path = recorded(tmp_path, seed)
    replayed = replay_recording(path)
    assert replayed.difference is None
    lines = lines_of(path)
    calls = Counter(line.get("call") for line in lines)
    assert replayed.num_decisions == calls["begin_step"]
    # What decisions depend on was there: hits of prefixes, and answers that a token ended.
    starts = [s for one in lines for s in one.get("gave", {}).get("plan", {}).get("starts", ())]
    assert 8 in starts or 4 in starts
    assert any("ends" in line for line in lines)
    assert any("hashes" in line for line in lines)


def test_steps_of_a_pool_that_is_too_small_too(tmp_path: Path) -> None:
    path = recorded(tmp_path, num_blocks=24)
    assert replay_recording(path).difference is None
    plans = [line["gave"]["plan"] for line in lines_of(path) if line.get("call") == "begin_step"]
    assert any("preempted" in plan for plan in plans)


def test_steps_that_are_planned_and_begun_ahead_too(tmp_path: Path) -> None:
    path = recorded(tmp_path, is_ahead=True)
    lines = lines_of(path)
    assert replay_recording(path).difference is None
    begun = [line for line in lines if line.pop("has_gone_on", False)]
    assert len(begun) > 20
    assert replayed_lines(lines, tmp_path / "changed.jsonl").difference is not None


def test_of_a_step_that_was_begun_those_that_were_left_behind(tmp_path: Path) -> None:
    path = recorded(tmp_path, is_ahead=True)
    lines = lines_of(path)
    left = [line for line in lines if line.pop("left_behind", ())]
    assert len(left) > 5
    assert replayed_lines(lines, tmp_path / "changed.jsonl").difference is not None


def test_a_step_that_was_changed_is_found(tmp_path: Path) -> None:
    lines = lines_of(recorded(tmp_path))
    planned = [i for i, line in enumerate(lines) if "ids" in line.get("gave", {}).get("plan", {})]
    changed = planned[30]
    lines[changed]["gave"]["plan"]["starts"][0] += 1
    difference = replayed_lines(lines, tmp_path / "changed.jsonl").difference
    assert difference is not None
    assert (difference.line, difference.what) == (changed + 1, "begin_step")
    assert json.loads(difference.replayed) != json.loads(difference.recorded)


def test_an_input_that_was_changed_shows_in_what_is_decided(tmp_path: Path) -> None:
    lines = lines_of(recorded(tmp_path))
    (index, *_) = [i for i, line in enumerate(lines) if "ends" in line]
    del lines[index]["ends"]
    difference = replayed_lines(lines, tmp_path / "changed.jsonl").difference
    assert difference is not None
    assert difference.line > index


@pytest.mark.parametrize("method", ["match", "publish"])
def test_a_planner_that_finds_no_prefix_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    path = recorded(tmp_path)
    monkeypatch.setattr(PrefixIndex, method, lambda self, sequence: [])
    difference = replay_recording(path).difference
    assert difference is not None


def test_a_flow_that_fails_now_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = recorded(tmp_path)
    monkeypatch.setattr("engine.core.scheduler.plan_step", lambda **_: 1 / 0)
    difference = replay_recording(path).difference
    assert difference is not None
    assert difference.replayed == '{"raised": "ZeroDivisionError"}'


def test_what_the_flow_raised_is_recorded_and_raised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = RecordedNode(tmp_path, 0)
    with monkeypatch.context() as broken:
        broken.setattr("engine.core.scheduler.plan_step", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            node.run(NUM_REQUESTS)
        assert node.recording is not None
        node.recording.close()
        path = tmp_path / f"{ME.node_id}.jsonl"
        assert lines_of(path)[-1]["gave"] == {"raised": "ZeroDivisionError"}
        assert replay_recording(path).difference is None
    assert replay_recording(path).difference is not None


def test_of_a_request_its_length_and_names_of_its_blocks_are_recorded(tmp_path: Path) -> None:
    recordings = [lines_of(recorded(tmp_path / name)) for name in ("once", "again")]
    asked, asked_again = (
        [line["message"]["request"] for line in lines if "sequence_id" in line.get("message", ())]
        for lines in recordings
    )
    known = {"is", "id", "num_prompt_tokens", "max_tokens", "deadline_s", "hashes"}
    assert set().union(*asked) == known
    # The same prompts have other names in another recording, and the same ones in this one.
    hashes, hashes_again = (
        [one["value"] for request in requests for one in request.get("hashes", ())]
        for requests in (asked, asked_again)
    )
    assert not set(hashes) & set(hashes_again)
    assert [hashes.index(one) for one in hashes] == [
        hashes_again.index(one) for one in hashes_again
    ]
    assert len(set(hashes)) < len(hashes)


def test_a_lease_token_is_recorded_under_another_name(tmp_path: Path) -> None:
    node = RecordedNode(tmp_path, 0)
    assert node.recording is not None
    draw = node.recording.drawing(lambda: 123456789)
    assert draw() == draw() == 123456789
    node.recording.close()
    _, first, second = lines_of(tmp_path / f"{ME.node_id}.jsonl")
    assert first["token"] == second["token"] != 123456789


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"call": "begin_again"}, "'begin_again' is no call of a flow"),
        ({"call": "on_message", "now_s": 1.0}, "'message'"),
        ({"call": "on_message", "message": {"is": "Popen"}, "now_s": 1.0}, "'Popen' is not known"),
        ({"call": "end_step", "part": [77], "now_s": 1.0}, "77"),
    ],
)
def test_a_line_that_is_no_call_is_named(tmp_path: Path, line: dict[str, Any], says: str) -> None:
    lines = lines_of(recorded(tmp_path))[:20]
    with pytest.raises(ConfigError, match=r"line 21: no call is made of it: ") as refused:
        replayed_lines([*lines, line], tmp_path / "changed.jsonl")
    assert says in str(refused.value)
