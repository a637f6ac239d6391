"""Drafts and the handoff: token 0 lands with its drafts; wrong ones cost speed, never truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.core.sequences.sequence import Sequence
from engine.core.step.step_results import StepOutput
from kv_transfer.contract import Commit
from tests.simulation.scripted_node import NodeSize
from tests.simulation.scripted_router import Asked
from tests.simulation.world import World, assert_finished
from tests.support.engine.hash_runner import VOCAB_SIZE

LENGTHS = [1, 3, 4, 5, 8, 9]


def mtp(num_drafts: int = 3, **size: Any) -> NodeSize:
    return NodeSize(method="mtp", num_drafts=num_drafts, **size)


def commits(world: World) -> list[Commit]:
    return [f.commit for f in world.network.frames if f.kind == "commit" and f.commit is not None]


def ask_until_committed(world: World, **given: object) -> Asked:
    asked = world.ask(9, max_tokens=20, ignore_eos=True, **given)
    world.step_until(lambda: bool(commits(world)), frames=False)
    return asked


def change_commit(world: World, change: Callable[[Commit], Commit]) -> None:
    (frame,) = [f for f in world.network.frames if f.kind == "commit"]
    assert frame.commit is not None
    frame.commit = change(frame.commit)


def first_drafts(world: World) -> int:
    """How many drafts the decode node verified in its first step."""
    return world.d.runner.batches[0][0].num_drafts


@pytest.mark.covers("F102", "F105")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_handoff_with_drafts_answers_as_without(length: int, temperature: float) -> None:
    answers = []
    for size in (NodeSize(), mtp()):
        world = World(prefill=size, decode=size)
        given = {"temperature": temperature, "max_tokens": 30, "ignore_eos": True, "seed": 7}
        asked = world.ask(length, **given)
        assert_finished(world, asked)
        answers.append(asked.answer())
    assert answers[0] == answers[1]
    assert world.d.num_steps < 29, "no draft was ever accepted"


@pytest.mark.covers("F103", "S08")
def test_token_0_lands_with_its_drafts_and_they_are_verified_at_once() -> None:
    # The first step on the decode node is charged 1 + the drafts from the prefill node.
    world = World(prefill=mtp(), decode=mtp())
    asked = ask_until_committed(world)
    (commit,) = commits(world)
    assert len(commit.draft_token_ids) == 3
    world.step_until(lambda: world.d.num_steps == 1)
    (scheduled,) = world.d.runner.batches[0]
    assert list(scheduled.token_ids) == [commit.first_token_id, *commit.draft_token_ids]
    assert_finished(world, asked)


@pytest.mark.covers("E15")
def test_fifty_landed_sequences_with_one_draft_each_are_charged_100_tokens() -> None:
    size = mtp(1, seats=50, num_blocks=200, budget=400)
    world = World(prefill=size, decode=size)
    asked = [world.ask(5, seed=i, max_tokens=6, ignore_eos=True) for i in range(50)]
    world.step_until(lambda: len(commits(world)) == 50, frames=False)
    assert world.d.num_steps == 0
    world.network.deliver_all()
    world.d.turn()  # their KV is staged
    world.d.turn()
    (batch,) = world.d.runner.batches
    assert sum(len(scheduled.token_ids) for scheduled in batch) == 100
    assert_finished(world, *asked)


@pytest.mark.parametrize("wrong", [VOCAB_SIZE, -1])
def test_a_draft_that_is_no_token_fails_the_handoff(wrong: int) -> None:
    world = World(prefill=mtp(), decode=mtp())
    asked = ask_until_committed(world)
    change_commit(world, lambda c: replace(c, draft_token_ids=(*c.draft_token_ids[:2], wrong)))
    world.settle()
    assert asked.outcomes == ["failed: handoff_failed"]
    assert world.d.num_steps == 0, "nothing of it was computed"
    world.check_closed()


def test_wrong_drafts_cost_speed_alone() -> None:
    # Poisoned or stale: a draft is accepted only where the model draws the same.
    world = World(prefill=mtp(), decode=mtp())
    asked = ask_until_committed(world)
    change_commit(world, lambda c: replace(c, draft_token_ids=(1, 2, 3)))
    world.step_until(lambda: world.d.num_steps == 1)
    assert first_drafts(world) == 3
    assert_finished(world, asked)


@pytest.mark.covers("F101", "F104", "S57")
@pytest.mark.parametrize(
    ("prefill", "decode", "num_sent", "num_verified"),
    [
        pytest.param(mtp(5), mtp(2), 5, 2, id="more than this node verifies"),
        pytest.param(mtp(2), mtp(5), 2, 2, id="fewer"),
        pytest.param(NodeSize(), mtp(3), 0, 0, id="none from prefill"),
        pytest.param(mtp(3), NodeSize(), 3, 0, id="decode does not speculate"),
        pytest.param(NodeSize(), NodeSize(method="ngram"), 0, 0, id="ngram on decode alone"),
    ],
)
def test_each_side_drafts_as_it_is_set(
    prefill: NodeSize, decode: NodeSize, num_sent: int, num_verified: int
) -> None:
    # Ngram and suffix need nothing from the prefill node.
    world = World(prefill=prefill, decode=decode)
    asked = ask_until_committed(world)
    (commit,) = commits(world)
    assert len(commit.draft_token_ids) == num_sent
    land, landed = world.d.scheduler.land, []

    def note(sequence: Sequence, first: int, draft_token_ids: tuple[int, ...]) -> StepOutput:
        landed.append(len(draft_token_ids))
        return land(sequence, first, draft_token_ids)

    world.d.scheduler.land = note  # type: ignore[method-assign, assignment]
    world.step_until(lambda: world.d.num_steps == 1)
    assert landed == [num_verified]
    assert first_drafts(world) == num_verified
    assert_finished(world, asked)


@pytest.mark.covers("F103", "F104", "S57")
def test_a_pair_with_other_caches_is_refused_with_both_sides_values() -> None:
    world = World()
    world.router.change_ticket = lambda ticket: replace(
        ticket, fingerprint="other", kv_description="31 layers, with mtp"
    )
    asked = world.ask(9)
    world.settle()
    assert asked.outcomes == ["refused: layout_mismatch"]
    text = str(asked.error)
    assert f"here {world.p.runner.layout.description} (" in text
    assert "on d#1 31 layers, with mtp (other)" in text
    world.check_closed()


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_looked_up_drafts_on_a_mixed_node(method: str) -> None:
    world = World(threshold=None, decode=NodeSize(method=method, num_blocks=40))
    prompt = (5, 6, 7, 8) * 4
    asked = [world.ask(prompt, seed=i, max_tokens=12, ignore_eos=True) for i in range(3)]
    assert_finished(world, *asked)
    statistics = world.d.scheduler.statistics()
    assert statistics.method == method
    assert statistics.counters.num_steps > 0


@pytest.mark.covers("S04")
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_drafts_never_lead_past_the_end(max_tokens: int) -> None:
    # Drafts <= remaining output - 1.
    world = World(prefill=mtp(), decode=mtp())
    asked = world.ask(9, max_tokens=max_tokens, ignore_eos=True)
    assert_finished(world, asked)
    assert len(asked.answer()) == max_tokens
    drafts = [s.num_drafts for batch in world.d.runner.batches for s in batch]
    assert all(count <= max_tokens - 2 for count in drafts)


def test_the_output_says_how_many_drafts_were_verified_and_accepted() -> None:
    world = World(prefill=mtp(), decode=mtp())
    asked = world.ask(9, max_tokens=30, ignore_eos=True)
    assert_finished(world, asked)
    drafts = sum(s.num_drafts for batch in world.d.runner.batches for s in batch)
    assert asked.num_drafted == drafts
    # Token 0 came from the prefill node; every step here drew one token of the model's own.
    assert asked.num_accepted == 29 - world.d.num_steps
    assert 0 < asked.num_accepted < drafts
