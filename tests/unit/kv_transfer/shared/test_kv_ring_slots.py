"""The slots of a ring: who gets them, in which order, and that none is lent twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.shared.block_arrays import Blocks, as_blocks
from kv_transfer.shared.ring_slots import Slots


def taken(slots: Slots, count: int) -> list[list[int]]:
    """Ask for slots; return a list that gets them."""
    found: list[list[int]] = []
    slots.ask(count, lambda lent: found.append(lent.tolist()))
    return found


def test_slots_are_lent_at_once_while_there_are_enough() -> None:
    slots = Slots(10, 5)
    assert taken(slots, 2) == [[10, 11]]
    assert taken(slots, 3) == [[12, 13, 14]]
    assert (slots.num_lent, slots.num_waiting) == (5, 0)


def test_few_slots_do_not_pass_many_that_were_asked_for_before() -> None:
    slots = Slots(0, 4)
    taken(slots, 3)
    many, few = taken(slots, 3), taken(slots, 1)
    assert (many, few, slots.num_waiting) == ([], [], 2)
    slots.give_back(as_blocks([0]))
    assert (many, few) == ([], [])
    slots.give_back(as_blocks([2]))
    assert (many, few) == ([[0, 2, 3]], [])
    slots.give_back(as_blocks([1]))
    assert few == [[1]]


def test_slots_that_are_given_back_as_soon_as_they_are_lent() -> None:
    """However many wait for them: none is served inside another."""
    slots = Slots(0, 2)
    [first] = taken(slots, 2)
    served: list[int] = []

    def refuse(number: int, lent: Blocks) -> None:
        served.append(number)
        slots.give_back(lent)

    for number in range(5000):
        slots.ask(2, lambda lent, number=number: refuse(number, lent))  # type: ignore[misc]
    slots.give_back(as_blocks(first))
    assert served == list(range(5000))
    assert slots.num_lent == 0


def test_more_slots_than_there_are() -> None:
    slots = Slots(0, 3)
    with pytest.raises(ValueError, match="4 slots: there are 3"):
        slots.ask(4, lambda _: None)
    assert slots.num_waiting == 0


@pytest.mark.parametrize("wrong", [[4], [9], [5, 4], [12]])
def test_slots_that_were_not_lent(wrong: list[int]) -> None:
    slots = Slots(5, 6)
    assert taken(slots, 3) == [[5, 6, 7]]
    with pytest.raises(ValueError, match="were not lent"):
        slots.give_back(as_blocks(wrong))
    assert slots.num_lent == 3


@given(st.lists(st.integers(1, 7), max_size=40), st.randoms())
def test_no_slot_is_lent_twice_and_all_are_served_in_order(
    counts: list[int], random: object
) -> None:
    slots = Slots(3, 7)
    lent: list[tuple[int, Blocks]] = []
    served: list[int] = []

    def on_slots(number: int, found: Blocks) -> None:
        served.append(number)
        lent.append((number, found))

    for number, count in enumerate(counts):
        slots.ask(count, lambda found, number=number: on_slots(number, found))  # type: ignore[misc]
        held = np.concatenate([as_blocks([]), *(one for _, one in lent)])
        assert len(set(held.tolist())) == held.size == slots.num_lent
        assert all(3 <= one < 10 for one in held)
        if random.random() < 0.5 and lent:  # type: ignore[attr-defined]
            _, back = lent.pop(random.randrange(len(lent)))  # type: ignore[attr-defined]
            slots.give_back(back)
    while lent:
        slots.give_back(lent.pop(0)[1])
    assert served == list(range(len(counts)))
    assert (slots.num_lent, slots.num_waiting) == (0, 0)
