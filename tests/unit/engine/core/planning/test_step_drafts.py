"""How many drafts a decode may verify: five bounds, and never at another sequence's expense."""

from __future__ import annotations

import pytest

from engine.core.planner_contract import Chunk, StopRule
from tests.support.engine.planner_views import (
    decoding,
    plan,
    prefilling,
    tokens,
    victims,
    waiting,
)


def drafts(**given: object) -> int:
    """Drafts granted to a lone decode that has eight proposals and room for them."""
    view = {"computed": 100, "blocks": 4, "drafts": 8, "output": 10, "most": 1000}
    limits = {name: given.pop(name) for name in list(given) if name not in view}
    step = plan(**{"running": [decoding(1, **{**view, **given})], "k": 8, **limits})  # type: ignore[arg-type]
    (chunk,) = step.chunks.values()
    assert step.num_draft_tokens == chunk.num_drafts
    assert step.num_tokens == 1 + chunk.num_drafts
    return chunk.num_drafts


@pytest.mark.covers("S04")
@pytest.mark.parametrize(("k", "granted"), [(0, 0), (1, 1), (4, 4), (8, 8), (20, 8)])
def test_no_more_than_k_and_no_more_than_were_proposed(k: int, granted: int) -> None:
    assert drafts(k=k) == granted


@pytest.mark.covers("E14", "S04")
@pytest.mark.parametrize(
    ("produced", "granted"),
    [
        pytest.param(8, 1, id="E14"),
        pytest.param(9, 0, id="only the own token is left"),
        pytest.param(5, 4, id="four and the own token"),
        pytest.param(1, 4, id="K"),
    ],
)
def test_no_more_than_the_rest_of_the_output(produced: int, granted: int) -> None:
    assert drafts(k=4, most=10, output=produced) == granted


@pytest.mark.covers("E13", "S04")
@pytest.mark.parametrize(
    ("computed", "granted"),
    [
        pytest.param(8189, 1, id="E13"),
        pytest.param(8190, 0, id="the last position is the own token's"),
        pytest.param(8188, 2, id="two"),
        pytest.param(8000, 4, id="K"),
    ],
)
def test_no_more_than_the_models_length(computed: int, granted: int) -> None:
    assert drafts(k=4, computed=computed, blocks=128, model_len=8192, most=8192) == granted


@pytest.mark.covers("S04")
@pytest.mark.parametrize(("cap", "granted"), [(1, 0), (2, 1), (8, 7), (9, 8), (50, 8)])
def test_no_more_than_the_budget(cap: int, granted: int) -> None:
    assert drafts(cap=cap) == granted


@pytest.mark.covers("S04")
@pytest.mark.parametrize(
    ("computed", "free", "granted", "new_blocks"),
    [
        (60, 0, 3, 0),
        (60, 1, 8, 1),
        (63, 0, 0, 0),
        (63, 1, 8, 1),
        (64, 1, 8, 1),
        (50, 0, 8, 0),
    ],
)
def test_no_more_than_there_are_slots(
    computed: int, free: int, granted: int, new_blocks: int
) -> None:
    step = plan(running=[decoding(1, computed, 1, drafts=8)], pool=free, k=8)
    assert step.chunks == {1: Chunk(1, new_blocks, granted)}


def test_many_drafts_may_need_several_blocks_and_take_as_many_as_there_are() -> None:
    for free, granted in ((0, 3), (1, 67), (2, 131), (3, 150)):
        step = plan(running=[decoding(1, 60, 1, drafts=150)], pool=free, k=150)
        assert step.chunks == {1: Chunk(1, min(free, 3), granted)}


@pytest.mark.covers("S04")
def test_drafts_take_no_token_that_another_decode_needs() -> None:
    running = [decoding(i, 32, drafts=4) for i in (1, 2, 3)]
    assert tokens(plan(running=running, cap=3, k=4)) == {1: 1, 2: 1, 3: 1}
    assert tokens(plan(running=running, cap=9, k=4)) == {1: 5, 2: 3, 3: 1}
    assert tokens(plan(running=running, cap=15, k=4)) == {1: 5, 2: 5, 3: 5}


@pytest.mark.covers("S04")
def test_drafts_come_before_prompts() -> None:
    running = [decoding(1, 32, drafts=4), prefilling(2, 1000, 0)]
    step = plan(running=running, queue=[waiting(3, 100)], cap=6, k=4)
    assert tokens(step) == {1: 5, 2: 1}


@pytest.mark.covers("S04")
def test_lookahead_never_takes_the_block_another_decode_needs() -> None:
    # Sequence 1 has one slot left and wants two more blocks for its drafts; 2 needs one to go on.
    running = [decoding(1, 63, 1, drafts=100), decoding(2, 64, 1)]
    step = plan(running=running, pool=1, k=100)
    assert step.chunks == {1: Chunk(1, 0, 0), 2: Chunk(1, 1, 0)}
    step = plan(running=running, pool=2, k=100)
    assert step.chunks == {1: Chunk(1, 1, 64), 2: Chunk(1, 1, 0)}


@pytest.mark.covers("S04")
def test_a_spare_block_is_for_the_drafts_of_one() -> None:
    running = [decoding(i, 63, 1, drafts=4) for i in (1, 2)]
    assert tokens(plan(running=running, pool=1, k=4)) == {1: 5, 2: 1}
    assert tokens(plan(running=running, pool=2, k=4)) == {1: 5, 2: 5}


@pytest.mark.covers("S04")
def test_drafts_are_trimmed_before_anybody_is_preempted() -> None:
    running = [
        decoding(1, 64, 1, drafts=4),
        decoding(2, 63, 1, drafts=4),
        decoding(3, 63, 1, drafts=4),
    ]
    step = plan(running=running, queue=[waiting(4, 10)], pool=1, k=4)
    assert victims(step) == []
    # The one block also has slots for its owner's drafts; the others verify none.
    assert step.chunks == {1: Chunk(1, 1, 4), 2: Chunk(1), 3: Chunk(1)}
    assert step.stopped_by is StopRule.NO_BLOCKS


@pytest.mark.covers("S04")
def test_somebody_is_preempted_for_the_own_token_and_never_for_drafts() -> None:
    running = [decoding(1, 64, 1, drafts=4), decoding(2, 64, 1, drafts=4), decoding(3, 63, 1)]
    step = plan(running=running, pool=1, k=4)
    assert victims(step) == [3]
    assert step.chunks == {1: Chunk(1, 1, 4), 2: Chunk(1, 1, 4)}


@pytest.mark.covers("S04")
def test_a_sequence_that_will_end_with_its_next_token_drafts_nothing() -> None:
    running = [decoding(1, 32, drafts=4, output=7, most=8), decoding(2, 32, drafts=4)]
    assert tokens(plan(running=running, cap=7, k=4)) == {1: 1, 2: 5}


@pytest.mark.covers("E15", "S08")
def test_landed_sequences_are_charged_their_drafts_in_their_first_step() -> None:
    # 50 land together with one draft each: KV of their prompts is here, one token is known beyond.
    landed = [decoding(i, 100, 2, drafts=1) for i in range(1, 51)]
    assert 50 * 1 == 50, "C30: charged 50, and 100 run"
    step = plan(running=landed, queue=[waiting(999, 5000)], cap=1000, k=1)
    assert step.num_decode_tokens + step.num_draft_tokens == 100
    assert step.num_chunk_tokens == 900


@pytest.mark.covers("C30")
def test_landed_sequences_fit_the_budget_with_their_drafts() -> None:
    landed = [decoding(i, 100, 2, drafts=1) for i in range(1, 51)]
    upstream_charge = len(landed) * 1
    upstream_run = sum(1 + len(s.draft_token_ids) for s in landed)
    assert (upstream_charge, upstream_run) == (50, 100)
    assert plan(running=landed, cap=100, k=1).num_tokens == 100
    assert plan(running=landed, cap=60, k=1).num_tokens == 60
