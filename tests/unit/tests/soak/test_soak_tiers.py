"""What a soak with small pools complains of, and the order in which it asks."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.soak.clients import Client
from tests.soak.conversations import Drawn, Turn, following
from tests.soak.tiers import Moved, still_complaints, unbalanced

BUSY = Moved(
    copied_out=3,
    copied_in=2,
    pulled=1,
    pulls_failed=0,
    in_pool=4,
    in_host_memory=5,
    on_disk=0,
    in_own_files=0,
)


def test_a_way_that_no_block_has_gone_is_complained_of() -> None:
    assert still_complaints({"prefill-1": BUSY, "decode-1": replace(BUSY, pulled=0)}) == []
    assert still_complaints({"prefill-1": replace(BUSY, pulled=0, copied_in=0)}) == [
        "no node has anything copied_in",
        "no node has anything pulled",
    ]


def test_a_node_whose_books_did_not_balance_is_named(tmp_path: Path) -> None:
    (tmp_path / "soak-decode-1.log").write_text("ready\nAssertionError: a host block is lost\n")
    (tmp_path / "soak-decode-2.log").write_text("ready\n")
    (complaint,) = unbalanced(tmp_path)
    assert complaint.startswith("soak-decode-1.log: AssertionError: a host block is lost")


TURNS: Mapping[Turn, tuple[str, ...]] = {
    Turn(talk, number, (talk, number)): ("a",) for talk in range(4) for number in range(3)
}


def test_a_turn_is_followed_by_the_next_one_of_its_conversation() -> None:
    after = following(TURNS)
    assert len(after) == 8
    for one, later in after.items():
        assert (later.conversation, later.number) == (one.conversation, one.number + 1)


def test_half_of_the_conversations_are_sampled_and_each_names_itself() -> None:
    assert {turn.conversation: turn.shape for turn in TURNS} == {
        0: Drawn.GREEDY,
        1: Drawn.SAMPLED,
        2: Drawn.GREEDY,
        3: Drawn.SAMPLED,
    }
    bodies = [turn.fields(20, "") for turn in TURNS]
    assert len({body["prompt_cache_key"] for body in bodies}) == 4
    assert {body["temperature"] for body in bodies} == {0.0, 1.0}


@pytest.mark.parametrize("seed", range(3))
def test_clients_mostly_go_on(seed: int) -> None:
    client = Client(0, seed, [], dict(TURNS.items()), threading.Event(), following(TURNS))
    asked = [client.choose() for _ in range(300)]
    after = following(TURNS)
    num_on = sum(isinstance(one, Turn) and after.get(one) == two for one, two in pairwise(asked))
    assert set(asked) == set(TURNS)
    assert 90 < num_on < 200
