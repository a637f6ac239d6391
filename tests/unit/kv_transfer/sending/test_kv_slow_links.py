"""A transfer on a link that is much slower than the others is given up, once for a request."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Hashable

import pytest

from common.ids import AttemptId
from kv_transfer.contract import Commit, TransferEnded
from kv_transfer.sending.effects import Connect, SenderEffect, SendToPeer
from kv_transfer.sending.link import RECONNECT_AFTER_S
from kv_transfer.sending.link_rates import (
    MIN_SPAN_S,
    REMEMBERED_S,
    SLOW_FACTOR,
    SLOW_FOR_S,
    SLOW_LOOK_S,
    WINDOW_S,
    RateMeter,
    UsualRates,
    is_slow,
)
from kv_transfer.sending.machine import Sender
from kv_transfer.sending.transfer_errors import TransferSlow
from kv_transfer.shared.effects import Emit
from kv_transfer.wire import frames
from tests.support.kv.many_peers import (
    LAYOUT,
    LIMITS,
    ME,
    NUM_BLOCKS,
    PAIR_BYTES,
    connected,
    peer,
    push,
    ticket,
)

PREFILL_S = 0.1
FAST_S, SLOW_S = 0.001, 0.5
"""Between two acknowledgements."""


def moved(
    *,
    num_links: int = 2,
    attempt: int = 1,
    slow_s: float = SLOW_S,
    fast_s: float = FAST_S,
    has_committed: bool = True,
    num_others_end: int = 0,
    stands_still_s: float = 0.0,
) -> tuple[float | None, list[SenderEffect]]:
    """Return when the transfer on link 0 was given up, within its first 10 s, and the effects.

    The others send one frame each `fast_s` at first, and `num_others_end` of them commit. After two
    frames this process stands still for `stands_still_s`.
    """
    sender = Sender(ME, LAYOUT, LIMITS)
    for number in range(num_links):
        id_ = AttemptId("r", attempt)
        sender.on_open(dataclasses.replace(ticket(number, number), attempt=id_), 100.0, 0.0)
        sender.hello(peer(number), {"zmq": b""}, "off")
        to = peer(number)
        sender.on_frame(to, frames.Welcome(to.incarnation, "zmq", b"", 1 << 20, "off"), 0.0)
        for layer in range(LAYOUT.num_layers):
            push(sender, number, layer)
    num_frames = NUM_BLOCKS * LAYOUT.num_layers
    for number in range(1, num_links):
        for consumed in range(1, num_frames + 1):
            sender.on_frame(peer(number), frames.Ack(consumed), consumed * fast_s)
        if number <= num_others_end:
            sender.on_commit(number, Commit(num_tokens=NUM_BLOCKS * 4, first_token_id=1))
            sender.on_frame(peer(number), frames.Committed(number, 3), PREFILL_S)
    now_s, consumed = PREFILL_S, 0
    sender.on_tick(now_s)
    if has_committed:
        sender.on_commit(0, Commit(num_tokens=NUM_BLOCKS * 4, first_token_id=1))
    end_s = 10.0 + stands_still_s
    while now_s < end_s and consumed < num_frames:
        consumed += 1
        now_s += stands_still_s if consumed == 2 else 0.0
        sender.on_frame(peer(0), frames.Ack(consumed), now_s)
        for number in range(1, num_links):
            sender.on_frame(peer(number), frames.Pong(), now_s)
        effects = sender.on_tick(now_s)
        for effect in effects:
            match effect:
                case Emit(TransferEnded(0, error)):
                    assert isinstance(error, TransferSlow)
                    assert error.code == "handoff_failed"
                    return now_s, effects
        now_s += slow_s
    return None, []


def test_it_is_given_up_after_some_seconds_and_its_peer_is_told() -> None:
    at_s, effects = moved()
    assert at_s is not None
    assert SLOW_FOR_S + PREFILL_S <= at_s <= SLOW_FOR_S + PREFILL_S + 2 * SLOW_S
    told = [effect.frame for effect in effects if isinstance(effect, SendToPeer)]
    assert frames.Abort(0, 3) in told


def test_a_later_attempt_stays_where_it_is() -> None:
    """There may be no other node: it must end somewhere."""
    assert moved(attempt=2)[0] is None


def test_without_another_link_nothing_is_slow() -> None:
    assert moved(num_links=1)[0] is None


def test_a_link_as_fast_as_the_others_is_not_slow() -> None:
    assert moved(slow_s=FAST_S)[0] is None


def test_the_time_in_which_this_process_stood_still_does_not_count() -> None:
    assert moved(slow_s=FAST_S, stands_still_s=30.0)[0] is None
    at_s, _ = moved(stands_still_s=30.0)
    assert at_s is not None
    assert at_s >= 30.0 + SLOW_FOR_S


def test_a_link_that_is_never_busy_for_long_counts_by_its_whole_transfers() -> None:
    """The usual case: a fast link is idle again before the next layer is computed."""
    brief_s = MIN_SPAN_S / 1000
    assert moved(fast_s=brief_s)[0] is None
    at_s, _ = moved(fast_s=brief_s, num_others_end=1)
    assert at_s is not None
    assert SLOW_FOR_S + PREFILL_S <= at_s <= SLOW_FOR_S + PREFILL_S + 2 * SLOW_S


def test_a_link_whose_frames_go_one_at_a_time_is_measured_too() -> None:
    """Peer 4 has a rate of its own, and peer 5 the same, which grants one frame."""
    sender = connected(6)
    num_frames, frame_s = NUM_BLOCKS * LAYOUT.num_layers, 0.05
    for number in (4, 5):
        for layer in range(LAYOUT.num_layers):
            push(sender, number, layer)
        if number == 4:
            for consumed in range(1, num_frames + 1):
                sender.on_frame(peer(4), frames.Ack(consumed), consumed * frame_s)
            sender.on_commit(4, Commit(num_tokens=NUM_BLOCKS * 4, first_token_id=1))
            sender.on_frame(peer(4), frames.Committed(4, 3), num_frames * frame_s)
    sender.on_frame(peer(5), frames.Ack(0, PAIR_BYTES), 0.0)
    sender.on_commit(5, Commit(num_tokens=NUM_BLOCKS * 4, first_token_id=1))
    now_s, num_alone = num_frames * frame_s, 0
    for consumed in range(1, num_frames):
        now_s += frame_s
        for number in range(5):
            sender.on_frame(peer(number), frames.Pong(), now_s)
        sender.on_frame(peer(5), frames.Ack(consumed), now_s)
        if sender.in_flight_bytes[peer(5)] <= PAIR_BYTES:
            num_alone += 1
        assert not [e for e in sender.on_tick(now_s) if isinstance(e, Emit)]
    assert num_alone * frame_s > SLOW_FOR_S + SLOW_LOOK_S


def test_the_time_until_the_next_layer_is_computed_does_not_count() -> None:
    """The transfer has its turn to commit, and no frame to send."""
    sender = connected(1)
    link = sender.links.get(peer(0))
    assert link is not None
    push(sender, 0)
    for consumed in range(1, NUM_BLOCKS + 1):
        assert (link.rate.present(0.1) is None) == (consumed == 1)
        sender.on_frame(peer(0), frames.Ack(consumed), 0.1)
    assert link.rate.present(0.1) is None


def test_a_transfer_that_waits_for_its_prompt_is_not_slow() -> None:
    assert moved(has_committed=False)[0] is None


def test_a_broken_link_is_not_looked_at_before_it_can_do_anything() -> None:
    """A time that has passed keeps the connector's thread awake."""
    sender = connected(1)
    push(sender, 0)
    sender.on_commit(0, Commit(num_tokens=NUM_BLOCKS * 4, first_token_id=1))
    sender.on_tick(PREFILL_S)
    sender.on_link_lost(peer(0), PREFILL_S)
    now_s = PREFILL_S + RECONNECT_AFTER_S
    assert Connect(peer(0)) in sender.on_tick(now_s)
    now_s += SLOW_LOOK_S
    for _ in range(3):
        sender.on_tick(now_s)
    due_s = sender.next_deadline_s()
    assert due_s is not None
    assert due_s > now_s


@pytest.mark.parametrize(
    ("own_per_s", "others", "prefill_s", "expected"),
    [
        (100.0, [1000.0], 0.0, True),
        (1000.0 / SLOW_FACTOR + 1, [1000.0], 0.0, False),
        (1000.0 / SLOW_FACTOR - 1, [1000.0], 0.0, True),
        # Computing the prompt again would take longer than the rest of the bytes.
        (100.0, [1000.0], 30.0, False),
        (None, [1000.0], 0.0, True),
        (100.0, [], 0.0, False),
        (100.0, [0.0], 0.0, False),
        # The median: one fast link of three says little.
        (100.0, [9000.0, 90.0, 110.0], 0.0, False),
    ],
)
def test_slow_is_much_longer_than_elsewhere(
    own_per_s: float | None, others: list[float], prefill_s: float, expected: bool
) -> None:
    usual = statistics.median(others) if others else None
    assert is_slow(10_000, own_per_s, usual, prefill_s) == expected
    assert not is_slow(0, own_per_s, usual, prefill_s)


def busy(per_s: float) -> RateMeter:
    """Return the meter of a link that has carried so much for a second, until 1.0."""
    meter = RateMeter()
    meter.on_acknowledged(0, 0.0, is_idle=False)
    meter.on_acknowledged(int(per_s), 1.0, is_idle=False)
    return meter


def idle(per_s: float) -> RateMeter:
    """Return the meter of a link that carried so much once, and nothing now."""
    meter = busy(per_s)
    meter.on_idle()
    return meter


def test_links_that_share_this_nodes_network_are_not_slow_beside_idle_ones() -> None:
    """A move would be vain: the other link would have to share the network too."""
    meters: dict[Hashable, RateMeter] = {f"busy {n}": busy(1e9 / 50) for n in range(50)}
    meters |= {f"idle {n}": idle(1e9) for n in range(100)}
    usual = UsualRates().beside("busy 0", meters, 1.0)
    assert usual == pytest.approx(1e9 / 50)
    assert not is_slow(10**9, 1e9 / 50, usual, PREFILL_S)


def test_one_slow_link_is_slow_beside_idle_ones() -> None:
    meters: dict[Hashable, RateMeter] = {"slow": busy(1e6), "a": idle(1e9), "b": idle(3e9)}
    assert UsualRates().beside("slow", meters, 1.0) == pytest.approx(2e9)
    assert UsualRates().beside("new", meters, 1.0) == pytest.approx(1e9)
    assert UsualRates().beside("slow", {"slow": busy(1e6)}, 1.0) is None


def test_many_slow_links_are_slow_beside_idle_ones_that_had_much_more() -> None:
    meters: dict[Hashable, RateMeter] = {f"slow {n}": busy(1e6) for n in range(8)}
    meters |= {f"idle {n}": idle(1e9) for n in range(10)}
    usual = UsualRates().beside("slow 0", meters, 1.0)
    assert usual == pytest.approx(1e9 / 8)
    assert is_slow(10**9, 1e6, usual, PREFILL_S)


def test_the_usual_rate_is_the_median_without_the_own_one() -> None:
    rng = random.Random("usual")
    for count in range(1, 12):
        rates = [float(rng.randrange(1, 6) * 10**6) for _ in range(count)]
        meters: dict[Hashable, RateMeter] = {n: busy(rate) for n, rate in enumerate(rates)}
        for own in range(count):
            others = rates[:own] + rates[own + 1 :]
            wanted = statistics.median(others) if others else None
            assert UsualRates().beside(own, meters, 1.0) == wanted


def test_rates_are_looked_at_once_for_all_links() -> None:
    looks = []

    class Counted(RateMeter):
        def latest(self, now_s: float) -> float | None:
            looks.append(now_s)
            return super().latest(now_s)

    meters: dict[Hashable, RateMeter] = {number: Counted() for number in range(100)}
    usual = UsualRates()
    for number in range(100):
        usual.beside(number, meters, 1.0 + number * SLOW_LOOK_S / 101)
    assert len(looks) == 100
    usual.beside(0, meters, 1.0 + SLOW_LOOK_S)
    assert len(looks) == 200


def test_the_rate_counts_from_the_first_acknowledgement_on() -> None:
    meter = RateMeter()
    assert meter.present(1.0) is None
    meter.on_acknowledged(10**9, 1.0, is_idle=False)
    meter.on_acknowledged(500, 1.5, is_idle=False)
    assert meter.present(1.5) == meter.latest(1.5) == 1000
    assert meter.present(2.0) == 500


def test_idle_time_does_not_count() -> None:
    meter = RateMeter()
    meter.on_acknowledged(1, 1.0, is_idle=False)
    meter.on_acknowledged(1000, 2.0, is_idle=True)
    assert meter.present(50.0) is None
    assert meter.latest(50.0) == 1000
    assert meter.latest(2.0 + REMEMBERED_S + 1) is None
    meter.on_acknowledged(1, 60.0, is_idle=False)
    meter.on_acknowledged(10, 60.0 + 2 * MIN_SPAN_S, is_idle=False)
    assert meter.latest(60.1) == pytest.approx(10 / (2 * MIN_SPAN_S))


def test_a_whole_transfer_is_the_least_that_a_link_does() -> None:
    meter = RateMeter()
    meter.on_committed(1000, 2.0, 5.0)
    assert meter.latest(5.0) == 500
    assert meter.latest(5.0 + REMEMBERED_S + 1) is None
    assert meter.present(5.0) is None, "nothing is in flight"
    meter.on_committed(1000, 4.0, 9.0)
    assert meter.latest(5.0 + REMEMBERED_S + 1) is None, "less says nothing"
    meter.on_acknowledged(1, 10.0, is_idle=False)
    meter.on_acknowledged(10, 11.0, is_idle=False)
    assert meter.latest(11.0) == 10, "a measured rate counts more"
    meter.on_committed(1000, 0.0, 12.0)
    assert meter.latest(12.0) == pytest.approx(1000 / MIN_SPAN_S)


def test_a_link_that_becomes_slow_is_measured_so_soon() -> None:
    meter = RateMeter()
    now_s = 0.0
    while now_s < 10 * WINDOW_S:
        meter.on_acknowledged(1000, now_s, is_idle=False)
        now_s += 0.01
    while now_s < 14 * WINDOW_S:
        meter.on_acknowledged(10, now_s, is_idle=False)
        now_s += 0.01
    per_s = meter.latest(now_s)
    assert per_s is not None
    assert 1000 <= per_s < 20_000
    assert LIMITS.window_bytes == 4 * PAIR_BYTES


def test_the_time_in_which_the_process_stood_still_is_no_time_of_the_link() -> None:
    meter = RateMeter()
    meter.on_acknowledged(1, 1.0, is_idle=False)
    meter.on_suspended(10.0, 11.5)
    meter.on_acknowledged(500, 11.5, is_idle=False)
    assert meter.latest(11.5) == 1000
    meter.on_suspended(100.0, 12.0)
    assert meter.measured(12.0) is None, "it begins now and not later"
    meter.on_idle()
    meter.on_suspended(1.0, 13.0)
    assert meter.present(13.0) is None
