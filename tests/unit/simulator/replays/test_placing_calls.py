"""Placement that was recorded places alike again, and a choice that differs is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from router.core import placement
from router.core.known.pair_health import PairHealth
from router.core.known.sessions import KnownSessions
from router.core.policies import POLICIES
from simulator.replays.replay import Replayed, replay_recording
from tests.support.examples import everyday
from tests.support.nodes.node_views import placing
from tests.support.nodes.recorded_placing import ROUTER_ID, RecordedPlacing
from tests.unit.tree import ROOT

NUM_EVENTS = 400
WIDE = 200
"""Nodes of which a choice looks at some, and of whose reports a call reads some."""


def recorded(folder: Path, policy: str = "prefix_affinity", num_nodes: int = 9) -> Path:
    played = RecordedPlacing(folder, placing(policy, lease_s=5.0, seed=7), num_nodes)
    played.run(NUM_EVENTS)
    return played.path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def replayed_lines(lines: list[dict[str, Any]], path: Path) -> Replayed:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return replay_recording(path)


@pytest.mark.parametrize("num_nodes", [9, WIDE])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_calls_choose_the_same_nodes(tmp_path: Path, policy: str, num_nodes: int) -> None:
    path = recorded(tmp_path, policy, num_nodes)
    replayed = replay_recording(path)
    assert replayed.difference is None
    assert (replayed.node_id, replayed.what) == (ROUTER_ID, "placements")
    placed = [line for line in lines_of(path) if line.get("call") == "choose"]
    assert replayed.num_decisions == len(placed) > NUM_EVENTS / 4


def test_another_process_whose_sets_have_another_order_chooses_them_too(tmp_path: Path) -> None:
    path = recorded(tmp_path, num_nodes=WIDE)
    for hash_seed in ("1", "2")[: everyday(1, of=2)]:
        found = subprocess.run(
            [sys.executable, "-m", "pdserve", "simulate", "--replay", str(path)],
            cwd=ROOT,
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "placements, and all are the same" in found.stdout, found


@pytest.mark.parametrize(
    ("module", "name"),
    [(KnownSessions, "on_placed"), (PairHealth, "on_failed"), (placement, "session_node")],
)
def test_a_machine_that_forgets_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> None:
    path = recorded(tmp_path)
    monkeypatch.setattr(module, name, lambda *_: None)
    assert replay_recording(path).difference is not None


def test_another_seed_is_another_choice_in_a_wide_cluster(tmp_path: Path) -> None:
    lines = lines_of(recorded(tmp_path, num_nodes=WIDE))
    lines[0]["placing"]["seed"] += 1
    difference = replayed_lines(lines, tmp_path / "changed.jsonl").difference
    assert difference is not None
    assert difference.what == "chooser.choose"


def test_of_a_request_its_length_and_names_of_its_blocks_are_recorded(tmp_path: Path) -> None:
    lines = lines_of(recorded(tmp_path))
    asked = [line["with"][1] for line in lines if line.get("call") == "choose"]
    assert set().union(*asked) == {"is", "num_prompt_tokens", "max_tokens", "session", "keys"}
    again = lines_of(recorded(tmp_path / "again"))
    for line, line_again in zip(lines, again, strict=True):
        if line.get("call") == "choose" and line["with"][1].get("session"):
            assert line["with"][1]["session"] != line_again["with"][1]["session"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"to": "membership", "call": "__init__"}, "'__init__'"),
        ({"to": "dispatcher", "call": "nodes"}, "'dispatcher'"),
        ({"call": "nodes"}, "'to'"),
        ({"to": "chooser", "call": "on_lost", "with": [{"is": "Path"}]}, "'Path' is not known"),
        ({"to": "chooser", "call": "on_lost", "with": [{"is": "Incarnation"}]}, "Incarnation: "),
        ({"to": "chooser", "call": "on_lost", "with": [{"is": "bytes", "value": "x"}]}, "hex"),
    ],
)
def test_a_line_that_is_no_call_is_named(tmp_path: Path, line: dict[str, Any], says: str) -> None:
    lines = lines_of(recorded(tmp_path))[:20]
    with pytest.raises(ConfigError, match=r"line 21: no call is made of it: ") as refused:
        replayed_lines([*lines, line], tmp_path / "changed.jsonl")
    assert says in str(refused.value)


def test_a_recording_of_nothing_that_is_known_is_named(tmp_path: Path) -> None:
    lines = lines_of(recorded(tmp_path))[:1]
    changed = tmp_path / "changed.jsonl"
    with pytest.raises(ConfigError, match=r"a recording of 'tokens': wanted placing or steps"):
        replayed_lines([{**lines[0], "of": "tokens"}], changed)
    with pytest.raises(ConfigError, match="line 1: no placement is made of it"):
        replayed_lines([{**lines[0], "placing": {"policy": "best"}}], changed)
    with pytest.raises(ConfigError, match="no recording of format 1"):
        replayed_lines([{**lines[0], "recording": 2}], changed)
