"""A sender with many decode nodes: what one of them does costs nothing for the others."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from kv_transfer.sending.links import Links
from kv_transfer.sending.machine import Sender
from kv_transfer.shared.deadlines import MANY_OUTDATED, Deadlines
from kv_transfer.shared.limits import WINDOWS_PER_NODE
from kv_transfer.wire import frames
from tests.support.clocks.lines_run import lines_run
from tests.support.kv.many_peers import (
    LIMITS,
    PAIR_BYTES,
    connected,
    peer,
    push,
    sent_to,
)


def cost_of_an_acknowledgement(num_links: int, *, are_others_waiting: bool) -> int:
    sender = connected(num_links)
    push(sender, 0)
    if are_others_waiting:
        for number in range(1, num_links):
            push(sender, number)
    return lines_run(lambda: sender.on_frame(peer(0), frames.Ack(1), 0.1))


@pytest.mark.covers("F120")
@pytest.mark.parametrize("are_others_waiting", [False, True])
def test_an_acknowledgement_costs_the_same_with_many_links(are_others_waiting: bool) -> None:
    few = cost_of_an_acknowledgement(8, are_others_waiting=are_others_waiting)
    many = cost_of_an_acknowledgement(800, are_others_waiting=are_others_waiting)
    assert many <= 1.2 * few


@pytest.mark.covers("F120")
def test_a_turn_of_the_thread_without_anything_due_costs_the_same_with_many_links() -> None:
    few, many = connected(8), connected(800)

    def turn(sender: Sender) -> int:
        return lines_run(lambda: (sender.on_tick(0.1), sender.next_deadline_s()))

    turn(few), turn(many)
    assert turn(many) <= 1.2 * turn(few)


def test_links_that_wait_for_the_shared_window_are_served_in_turn() -> None:
    """Each has two frames in flight, and gets another one when it is its turn."""
    sender = connected(6)
    for number in range(6):
        push(sender, number)
    for number in range(3):
        sender.on_abort(number, 0.0)
    answers = [sent_to(sender.on_frame(peer(n), frames.Ack(4), 0.1)) for n in range(3)]
    assert answers == [[], [3, 4, 5], [3, 4, 5]]


def test_a_push_on_a_link_that_waits_takes_nobodys_turn() -> None:
    sender = connected(7, limits=dataclasses.replace(LIMITS, window_bytes=8 * PAIR_BYTES))
    for number in range(7):
        push(sender, number)
    assert [b // PAIR_BYTES for b in sender.in_flight_bytes.values()] == [8, 8, 8, 4, 2, 2, 2]
    sender.on_abort(0, 0.0)
    assert sent_to(sender.on_frame(peer(0), frames.Ack(8), 0.1)) == [3, 4, 5]
    # There is room for one more, which is the next one's that waits when somebody acknowledges.
    assert sent_to(push(sender, 3, layer=1) + push(sender, 6, layer=1)) == []
    assert sent_to(sender.on_frame(peer(1), frames.Ack(1), 0.1))[0] == 6


def test_waiting_links_get_the_same_bytes_with_small_and_with_large_frames() -> None:
    """Deficit round robin counts bytes: who has larger frames has its turn less often."""
    limits = dataclasses.replace(LIMITS, window_bytes=8 * PAIR_BYTES, max_frame_bytes=PAIR_BYTES)
    limits = dataclasses.replace(limits, max_joined=4)
    sender = Links(limits, [PAIR_BYTES])
    small, large = (sender.open(peer(number), 0.0) for number in (0, 1))
    frame_bytes = {small.peer: PAIR_BYTES, large.peer: 3 * PAIR_BYTES}
    sent_bytes = dict.fromkeys(frame_bytes, 0)
    for link in (small, large):
        link.waits_for_node = True
        sender.note_wait(link)
    for number in range(300):
        for link in sender.turns((small, large)[number % 2]):
            while link.budget_bytes >= frame_bytes[link.peer]:
                link.budget_bytes -= frame_bytes[link.peer]
                sent_bytes[link.peer] += frame_bytes[link.peer]
            link.lacks_budget = True
            sender.note_wait(link)
    assert abs(sent_bytes[small.peer] - sent_bytes[large.peer]) <= 3 * PAIR_BYTES
    assert sent_bytes[small.peer] >= 300 * PAIR_BYTES


def test_a_link_that_sent_all_it_had_keeps_no_deficit() -> None:
    links = Links(LIMITS, [PAIR_BYTES])
    first, done, busy = (links.open(peer(number), 0.0) for number in range(3))
    for link in (done, busy):
        link.waits_for_node = True
        links.note_wait(link)
    for link in links.turns(first):
        if link is done and link.waits_for_node:
            assert link.budget_bytes == PAIR_BYTES
            link.waits_for_node = False
        links.note_wait(link)
    assert first.deficit_bytes == done.deficit_bytes == 0
    assert first.budget_bytes == done.budget_bytes == busy.budget_bytes == math.inf


def test_a_link_that_is_lost_leaves_its_room_to_waiting_links() -> None:
    sender = connected(WINDOWS_PER_NODE + 1)
    for number in range(WINDOWS_PER_NODE + 1):
        push(sender, number)
    sender.on_link_lost(peer(0), 0.1)
    # The room is taken with the next answer: by the peer that it is from, then by one that waits.
    assert sent_to(sender.on_frame(peer(4), frames.Ack(1), 0.1)) == [4, 3, 4]


def test_the_shared_window_is_the_sum_whatever_happens_to_links() -> None:
    rng = random.Random("links")
    sender = connected(9)
    now_s = 0.0
    for _ in range(400):
        number = rng.randrange(9)
        sent = sender.in_flight_bytes.get(peer(number), 0) // PAIR_BYTES
        match rng.randrange(4):
            case 0:
                sender.on_push(number, rng.randrange(4), [rng.randrange(30)], [0])
            case 1:
                sender.on_frame(peer(number), frames.Pong(), now_s)
            case 2 if sent:
                link = sender.links.get(peer(number))
                assert link is not None
                channel = link.channels.main
                done = channel.num_acknowledged
                sender.on_frame(peer(number), frames.Ack(done + rng.randint(1, sent)), now_s)
            case 3 if rng.random() < 0.1:
                sender.on_link_lost(peer(number), now_s)
        in_flight = sum(sender.in_flight_bytes.values())
        assert sender.links.in_flight_bytes == in_flight


def test_times_of_what_ended_early_take_no_memory() -> None:
    """A landing that ends after a second had ten minutes."""
    deadlines: Deadlines[int] = Deadlines()
    for number in range(10_000):
        deadlines.set_no_later(number, 600.0 + number)
        deadlines.discard(number - 3)
        assert deadlines.num_entries <= 2 * 4 + MANY_OUTDATED
    assert deadlines.next_s() == 600.0 + 9_997
    assert deadlines.take_due(1e9) == [9_997, 9_998, 9_999]


def test_the_earliest_time_comes_first_and_later_ones_do_not_replace_it() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for key, at_s in (("a", 5.0), ("b", 3.0), ("a", 2.0), ("a", 9.0), ("c", 4.0)):
        deadlines.set_no_later(key, at_s)
    deadlines.discard("c")
    assert deadlines.next_s() == 2.0
    assert deadlines.take_due(1.9) == []
    assert deadlines.take_due(3.0) == ["a", "b"]
    assert deadlines.take_due(100.0) == []
    assert deadlines.next_s() is None
    deadlines.set_no_later("a", 7.0)
    assert deadlines.next_s() == 7.0
