"""One node on one stream, as a router asks and judges it: of few or many, idle or with requests."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from router.dispatch.liveness.node_liveness import NodeLiveness, NodeVerdict
from router.dispatch.liveness.pace import (
    ALARM_TICKS,
    IDLE,
    IDLE_TICKS,
    PHASES,
    PINGED_TICKS,
    USUAL,
    WIDE,
)
from router.dispatch.liveness.silence import BUSY_TICKS, LOSS_TICKS, TICK_S

BOUND_TICKS = round(2.0 / TICK_S)
"""How soon the loss of a node with requests is noticed."""
SETTLED_TICKS = IDLE_TICKS + 2 * IDLE.echo_every
MOMENTS = range(IDLE.echo_every)


class Watched:
    """A node and the router that watches it. What the node says arrives after the tick."""

    def __init__(
        self, phase: int = 0, *, repeats: bool = True, delay: int = 0, can_rest: bool = True
    ) -> None:
        self.liveness = NodeLiveness(phase)
        self.liveness.restart()
        self.liveness.heard()
        self.repeats = repeats
        self.delay = delay
        """The ticks that an answer takes."""
        self.is_dead = self.is_deaf = False
        self.num_asked = self.num_looks = self.num_rested = 0
        self._can_rest = can_rest
        self._now = self._said_at = self._told = self._beat_ms = 0
        self._coming: deque[tuple[int, int]] = deque()

    def tick(
        self,
        *,
        is_used: bool = False,
        is_alarm: bool = False,
        is_wide: bool = True,
        is_running: bool = False,
    ) -> NodeVerdict:
        def look() -> bool:
            self.num_looks += 1
            return is_running

        self._now += 1
        is_asked_often = is_used or is_alarm or not is_wide
        if self._can_rest and not is_asked_often and self.liveness.rest():
            self.num_rested += 1
            self._hear()
            return NodeVerdict.NONE
        number = self.liveness.tick(
            is_wide=is_wide, is_used=is_used, is_alarm=is_alarm, is_running=look
        )
        self._send(number)
        verdict = NodeVerdict.NONE if self.liveness.is_at_rest else self.liveness.judge()
        self._hear()
        return verdict

    def use(self) -> None:
        """A request leaves for the node."""
        self._send(self.liveness.use())

    def report(self) -> None:
        """The node says something, with the number that it was told last."""
        self.liveness.heard()
        self.liveness.repeated(self._told)

    def restart(self) -> None:
        """The stream is another one."""
        self.liveness.restart()

    def settle(self, num_ticks: int = SETTLED_TICKS) -> None:
        """Let the node become idle."""
        assert {self.tick() for _ in range(num_ticks)} == {NodeVerdict.NONE}
        assert self.liveness.pace is (IDLE if self.repeats else WIDE)

    def ticks_until(
        self, wanted: NodeVerdict, *, is_used: bool = False, is_alarm: bool = False
    ) -> int:
        """Return the number of the tick, from 1, that brings a verdict; what comes before is known
        to be less."""
        for number in range(1, 200):
            alarm = is_alarm and number <= ALARM_TICKS
            if self.tick(is_used=is_used, is_alarm=alarm) is wanted:
                return number
        pytest.fail(f"never {wanted}")

    def _send(self, number: int) -> None:
        if number:
            self.num_asked += 1
            if not (self.is_deaf or self.is_dead):
                self._coming.append((self._now + self.delay, number))
                self._beat_ms = self.liveness.pace.beat_ms

    def _hear(self) -> None:
        is_asked = False
        while self._coming and self._coming[0][0] <= self._now:
            _, number = self._coming.popleft()
            self._told, is_asked = number if self.repeats else 0, True
        has_beat = self._now - self._said_at >= max(1, -(-self._beat_ms // 250))
        if not self.is_dead and (has_beat or (is_asked and self._beat_ms)):
            self._said_at = self._now
            self.liveness.heard()
            self.liveness.repeated(self._told)


def test_an_idle_node_of_many_is_asked_every_ten_seconds_and_not_looked_at() -> None:
    node = Watched()
    node.settle()
    node.num_asked = 0
    node.settle(40 * IDLE.echo_every)
    assert IDLE.echo_every * TICK_S == 9.75
    assert node.num_asked == 40
    assert node.num_looks == 0


def test_an_idle_node_rests_until_it_is_asked() -> None:
    node = Watched()
    node.settle()
    node.num_rested = 0
    node.settle(40 * IDLE.echo_every)
    assert node.num_rested == 40 * (IDLE.echo_every - 2), "not when asked, nor in the tick after"


@pytest.mark.covers("F80", "F121")
@pytest.mark.parametrize("seed", range(20))
def test_a_node_that_may_rest_is_asked_and_judged_as_one_that_may_not(seed: int) -> None:
    rng = random.Random(seed)
    delay = rng.randrange(4)
    nodes = [Watched(seed % PHASES, delay=delay, can_rest=can_rest) for can_rest in (True, False)]
    is_used, alarm_ticks = False, 0
    for _ in range(4000):
        is_used = rng.random() < (0.9 if is_used else 0.002)
        alarm_ticks = ALARM_TICKS if rng.random() < 0.002 else max(0, alarm_ticks - 1)
        if rng.random() < 0.005:
            is_dead, is_deaf = rng.random() < 0.2, rng.random() < 0.2
            for node in nodes:
                node.is_dead, node.is_deaf = is_dead, is_deaf
        if rng.random() < 0.004:
            happens = rng.choice((Watched.use, Watched.report, Watched.restart))
            for node in nodes:
                happens(node)
        verdicts = {node.tick(is_used=is_used, is_alarm=alarm_ticks > 0) for node in nodes}
        assert len(verdicts) == 1
        liveness = [node.liveness for node in nodes]
        assert len({(one.latest, one.pace, one.is_reached) for one in liveness}) == 1
        assert nodes[0].num_asked == nodes[1].num_asked
    assert nodes[0].num_rested > 200


def test_idle_nodes_are_asked_in_different_ticks_although_they_become_idle_in_one() -> None:
    nodes = [Watched(phase) for phase in range(PHASES)]
    for node in nodes:
        node.use()
    numbers: Counter[int] = Counter()
    for moment in range(200):
        before = sum(node.num_asked for node in nodes)
        for node in nodes:
            assert node.tick() is NodeVerdict.NONE
        numbers[moment] = sum(node.num_asked for node in nodes) - before
    assert max(numbers.values()) <= PHASES // WIDE.echo_every + PHASES // IDLE.echo_every
    assert {numbers[moment] for moment in range(100, 200)} == {PHASES // IDLE.echo_every}


@pytest.mark.covers("F80")
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_idle_node_that_died_is_noticed_within_twelve_seconds(moment: int) -> None:
    node = Watched()
    node.settle(SETTLED_TICKS + moment)
    node.is_dead = True
    num_suspected = node.ticks_until(NodeVerdict.SUSPECTED)
    assert num_suspected * TICK_S <= 12.0
    assert (num_suspected + node.ticks_until(NodeVerdict.LOST)) * TICK_S <= 15.25


@pytest.mark.covers("F80")
@pytest.mark.parametrize("num_dead", [0, 1, 7, 20])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_request_for_an_idle_node_that_died_waits_two_seconds_at_most(
    moment: int, num_dead: int
) -> None:
    node = Watched()
    node.settle(SETTLED_TICKS + moment)
    node.is_dead = True
    for _ in range(num_dead):
        if node.tick() is not NodeVerdict.NONE:
            return  # Nothing would be placed on it.
    node.use()
    num_suspected = node.ticks_until(NodeVerdict.SUSPECTED, is_used=True)
    assert num_suspected <= BOUND_TICKS
    assert num_suspected + node.ticks_until(NodeVerdict.LOST, is_used=True) <= LOSS_TICKS


@pytest.mark.covers("F121")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_request_that_does_not_reach_an_idle_node_waits_two_seconds_at_most(moment: int) -> None:
    node = Watched()
    node.settle(SETTLED_TICKS + moment)
    node.is_deaf = True
    node.use()
    for _ in range(BOUND_TICKS):
        if node.tick(is_used=True) in (NodeVerdict.UNREACHED, NodeVerdict.SUSPECTED):
            return
    pytest.fail("never noticed")


@pytest.mark.covers("F121")
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_idle_node_that_gets_nothing_is_noticed_within_twelve_seconds(moment: int) -> None:
    node = Watched()
    node.settle(SETTLED_TICKS + moment)
    node.is_deaf = True
    seen = [node.tick() for _ in range(round(12.0 / TICK_S))]
    assert {NodeVerdict.UNREACHED, NodeVerdict.SUSPECTED} & set(seen)


@pytest.mark.covers("F121")
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_idle_node_that_gets_nothing_and_reports_blocks_is_noticed(moment: int) -> None:
    node = Watched()
    node.settle(SETTLED_TICKS + moment)
    node.is_deaf = True
    for _ in range(round(12.0 / TICK_S)):
        node.report()
        if node.tick() is NodeVerdict.UNREACHED:
            return
    pytest.fail("never noticed")


@pytest.mark.parametrize("moment", MOMENTS)
def test_when_one_node_falls_silent_the_others_are_asked_at_once(moment: int) -> None:
    node = Watched()
    node.settle(SETTLED_TICKS + moment)
    node.is_dead = True
    num_ticks = node.ticks_until(NodeVerdict.SUSPECTED, is_alarm=True)
    assert num_ticks <= WIDE.echo_every + BOUND_TICKS


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_prompt_that_is_planned_on_an_idle_node_asks_it(moment: int) -> None:
    node = Watched()
    node.settle(SETTLED_TICKS + moment)
    node.num_asked = 0
    node.tick(is_used=True)
    assert node.num_asked == 1
    assert node.liveness.pace is WIDE


def test_a_node_with_requests_is_asked_often_and_idle_two_seconds_after_the_last() -> None:
    node = Watched()
    node.settle()
    node.num_asked = 0
    node.use()
    assert node.num_asked == 1, "it is asked in the message that has the request"
    for _ in range(100):
        assert node.tick(is_used=True) is NodeVerdict.NONE
        assert node.liveness.pace is WIDE
    paces = []
    for _ in range(IDLE_TICKS + 2 * IDLE.echo_every):
        assert node.tick() is NodeVerdict.NONE
        paces.append(node.liveness.pace)
    num_ticks = paces.index(IDLE) + 1
    assert set(paces[num_ticks:]) == {IDLE}
    assert num_ticks == IDLE_TICKS


@pytest.mark.parametrize("delay", range(4))
@pytest.mark.parametrize("seed", range(20))
def test_a_node_that_answers_late_is_never_suspected_whatever_is_placed_on_it(
    seed: int, delay: int
) -> None:
    rng = random.Random(seed)
    node = Watched(rng.randrange(PHASES), delay=delay)
    is_used, is_alarm = False, 0
    for _ in range(2000):
        if rng.random() < 0.1:
            is_used = not is_used
            if is_used and rng.random() < 0.7:
                node.use()
        is_alarm = ALARM_TICKS if rng.random() < 0.02 else max(0, is_alarm - 1)
        assert node.tick(is_used=is_used, is_alarm=is_alarm > 0) is NodeVerdict.NONE


def test_an_idle_node_that_speaks_again_is_asked_often_until_it_repeats_the_latest() -> None:
    node = Watched()
    node.settle()
    node.is_dead = True
    node.ticks_until(NodeVerdict.SUSPECTED)
    assert node.liveness.pace is WIDE
    node.is_dead = False
    assert node.tick() is NodeVerdict.NONE
    node.settle()


def test_a_node_of_an_earlier_release_repeats_nothing_and_is_asked_often() -> None:
    node = Watched(repeats=False)
    for _ in range(200):
        assert node.tick() is NodeVerdict.NONE
        assert node.liveness.pace is WIDE


def test_of_few_nodes_none_is_idle_and_of_many_none_is_one_of_few_again() -> None:
    node = Watched()
    for _ in range(100):
        assert node.tick(is_wide=False, is_used=True) is NodeVerdict.NONE
        assert node.liveness.pace is USUAL
    node.settle()
    for _ in range(100):
        assert node.tick(is_wide=False, is_used=True) is NodeVerdict.NONE
    assert node.liveness.pace is WIDE


def test_a_node_is_pinged_while_it_is_used_and_for_some_time_after() -> None:
    node = Watched()
    node.settle()
    seen = [node.liveness.is_pinged]
    node.use()
    for _ in range(PINGED_TICKS + 1):
        seen.append(node.liveness.is_pinged)
        node.tick()
    assert seen == [False, *[True] * PINGED_TICKS, False]


@pytest.mark.parametrize("is_used", [False, True])
def test_a_busy_node_with_requests_is_suspected_later_and_an_idle_one_is_not_looked_at(
    is_used: bool,
) -> None:
    node = Watched()
    node.settle()
    if is_used:
        node.use()
    node.is_dead = True
    verdicts = [node.tick(is_used=is_used, is_running=True) for _ in range(LOSS_TICKS)]
    if is_used:
        assert verdicts.index(NodeVerdict.SUSPECTED) == BUSY_TICKS - 1
        assert node.liveness.reason.endswith("although its process runs")
    else:
        assert node.num_looks == 0


def test_a_new_stream_begins_as_one_of_few() -> None:
    node = Watched()
    node.settle()
    node.liveness.restart()
    assert node.liveness.pace is USUAL
    assert node.liveness.is_reached
