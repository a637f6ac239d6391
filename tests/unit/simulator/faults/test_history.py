"""Histories: written and read again, drawn from seeds, and refused where they are nonsense."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from router.core.policies import POLICIES
from simulator.faults.drawing import Wishes, draw_history
from simulator.faults.history import History, read_history, to_json
from simulator.faults.kinds import BREAKING, GRAMMARS, FaultKind
from simulator.faults.shape import MOST_QUEUED, problems_of

WISHES = Wishes(kinds=tuple(FaultKind), num_requests=20)


def a_history(seed: int = 1) -> History:
    return draw_history(seed, WISHES)


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    for seed in range(20):
        path.write_text(to_json(a_history(seed)), encoding="utf-8")
        assert read_history(path) == a_history(seed)


def test_a_seed_has_one_history_and_other_seeds_have_others() -> None:
    assert a_history(3) == a_history(3)
    assert len({to_json(a_history(seed)) for seed in range(50)}) == 50


def test_every_drawn_shape_can_be_had() -> None:
    for seed in range(200):
        assert not problems_of(a_history(seed).shape)


def test_what_is_wished_for_is_drawn() -> None:
    kinds = (FaultKind.FREEZE, FaultKind.LOSS)
    wishes = Wishes(kinds=kinds, num_requests=7, num_prefill=3, num_decode=2)
    histories = [draw_history(seed, wishes) for seed in range(30)]
    assert {fault.kind for one in histories for fault in one.faults} == set(kinds)
    for one in histories:
        assert (len(one.requests), one.shape.num_prefill, one.shape.num_decode) == (7, 3, 2)
        assert [asked.at_s for asked in one.requests] == sorted(a.at_s for a in one.requests)
    calm = draw_history(1, Wishes(kinds=(), num_requests=1))
    assert calm.faults == ()


def test_every_kind_and_every_way_is_drawn() -> None:
    drawn = {(f.kind, f.how) for seed in range(300) for f in a_history(seed).faults}
    assert {kind for kind, _ in drawn} == set(FaultKind)
    assert len(drawn) == 3 + 1 + 3 + 1 + 1 + 1 + 2 + 3 + 1 + 3 + 1 + 2 + 3


def test_changes_do_not_move_what_is_broken() -> None:
    for seed in range(20):
        every = a_history(seed)
        broken = draw_history(seed, replace(WISHES, kinds=BREAKING))
        assert [f for f in every.faults if f.kind in BREAKING] == list(broken.faults)
        assert (every.shape, every.requests) == (broken.shape, broken.requests)


def test_every_place_of_a_cluster_is_drawn() -> None:
    shapes = [a_history(seed).shape for seed in range(200)]
    places = "keeps_prefixes", "is_staged", "is_on_card", "is_warmed"
    for field in (*places, "has_priorities"):
        assert len({getattr(shape, field) for shape in shapes}) == 2, field
    asked = [one for seed in range(20) for one in a_history(seed).requests]
    assert {shape.num_routers for shape in shapes} == {1, 2, 3}
    assert {shape.placement_policy for shape in shapes} == set(POLICIES)
    assert {one.router for one in asked} == {"router", "router-2", "router-3"}
    assert len({one.priority for one in asked}) > 2
    assert {one.session for one in asked} == {"", "a", "b", "c"}
    assert len({shape.session_ttl_s for shape in shapes}) == 3
    assert {1, 2, 3, 6, MOST_QUEUED} == {shape.max_queued for shape in shapes}
    assert len({shape.sheds for shape in shapes if shape.max_queued < MOST_QUEUED}) == 2
    assert not any(shape.sheds for shape in shapes if shape.max_queued == MOST_QUEUED)
    assert {shape.is_wide for shape in shapes} == {False, True}
    assert {shape.num_kv_lanes for shape in shapes} == {1, 2, 3}
    assert len({shape.reservation_policy for shape in shapes}) == 5
    pools = {len(shape.pools) for shape in shapes}
    assert pools >= {0, 1, 2, 3, 4}
    assert {one.is_cut for one in asked} == {False, True}
    assert {one.grammar for one in asked} == {"", *GRAMMARS}
    assert {one.salt for one in asked} == {"", "s", "t"}
    assert len({(one.has_logprobs, one.has_prompt_logprobs) for one in asked}) == 4


def test_a_connection_that_broke_may_break_again_soon_after() -> None:
    wishes = replace(WISHES, kinds=(FaultKind.LOSS,))
    found = [draw_history(seed, wishes) for seed in range(30)]
    breaks = [(one.seed, one.shape.kv_message_s, fault) for one in found for fault in one.faults]
    assert all(fault.kind is FaultKind.LOSS for _, _, fault in breaks)
    spans = [
        (second.at_s - first.at_s) / message_s
        for (seed, message_s, first), (other, _, second) in pairwise(breaks)
        if (seed, first.target, first.other) == (other, second.target, second.other)
    ]
    assert sum(0 < span <= 100 for span in spans) > 20


def test_a_request_and_its_leave_come_later() -> None:
    asked = replace(a_history().requests[0], at_s=1.5, leaves_at_s=2.0)
    later = asked.later(0.25)
    assert (later.at_s, later.leaves_at_s) == (1.75, 2.25)
    assert replace(asked, leaves_at_s=None).later(1.0).leaves_at_s is None


def test_a_change_is_asked_of_a_router(tmp_path: Path) -> None:
    history = draw_history(1, replace(WISHES, kinds=(FaultKind.DRAIN,)))
    path = tmp_path / "history.json"
    for change in ({"other": ""}, {"target": "router"}):
        found = json.loads(to_json(history))
        found["faults"][0].update(change)
        path.write_text(json.dumps(found), encoding="utf-8")
        with pytest.raises(ConfigError, match="a drain: wanted a node, and in other a router"):
            read_history(path)


def test_parts_are_requests_and_then_faults() -> None:
    history = a_history()
    num = len(history.requests)
    part = history.only([2, num])
    assert part.requests == history.requests[2:3]
    assert part.faults == history.faults[:1]
    assert len(part) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 99}, "format 14"),
        ({"seed": "x"}, "seed: wanted a whole number"),
        ({"requests": {}}, "wanted lists"),
        ({"shape": {}}, "shape: wanted an object with num_routers"),
        ({"requests": [{}]}, "request 0: wanted an object with at_s"),
    ],
)
def test_nonsense_is_refused_by_name(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    path = tmp_path / "history.json"
    path.write_text(json.dumps({**json.loads(to_json(a_history())), **change}), encoding="utf-8")
    with pytest.raises(ConfigError, match=says) as refused:
        read_history(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("kind", "crush", "kind is 'crush': wanted one of crash, freeze"),
        ("how", "hard", "how is 'hard': wanted one of"),
        ("at_s", -1.0, "at_s is -1.0"),
        ("at_s", float("nan"), "at_s is nan"),
        ("target", "decode-77", "nothing is called 'decode-77'"),
        ("span_s", True, "span_s is True"),
    ],
)
def test_a_fault_of_nonsense_is_refused(
    tmp_path: Path, field: str, value: object, says: str
) -> None:
    found = json.loads(to_json(a_history()))
    found["faults"][0][field] = value
    path = tmp_path / "history.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        read_history(path)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "history.json is no JSON: wanted a history or a recording$"),
        (b"{", "history.json is no JSON: wanted a history or a recording$"),
        (b"\xff\0", "history.json is no JSON: wanted a history or a recording$"),
        (b"[]", "history.json: wanted an object"),
    ],
)
def test_what_is_no_history_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "history.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=says):
        read_history(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        read_history(tmp_path / "none.json")


def test_a_shape_without_sense_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    for field, value in (("num_decode", 999), ("block_size", 0), ("placement_policy", "best")):
        found = json.loads(to_json(a_history()))
        found["shape"][field] = value
        path.write_text(json.dumps(found), encoding="utf-8")
        with pytest.raises(ConfigError, match=rf"history\.json: .*{value}|1000 nodes"):
            read_history(path)
